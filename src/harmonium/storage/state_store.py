"""Client states on disk: one file per version, and each large tensor stored once beside them.

    clients/7/000003-1-train.safetensors   a version: the state, and which tensors are separate
    clients/7/apart-SHA256.safetensors     a large tensor, for all versions that refer to it
    clients/shared/SHA256.safetensors      a second name of the same file, for other clients

A large tensor has a separate file until it changes. From then on it is written with the state,
because a tensor that has changed once changes in most rounds. So a constant tensor is written once,
and one that many clients have in common, such as targets from the server, takes the space of one
(by hard links; where a file system has none, every client has its own copy). A version names the
digests of its separate tensors, so that its own digest covers all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from harmonium.core import codec, files
from harmonium.core.errors import StoreError, WireError

LARGE = 1 << 14  # bytes from which a tensor gets a file of its own
APART, SHARED = "apart-", "shared"
Keys = tuple[str | int, ...]  # the path to a tensor in a state


@dataclass(frozen=True)
class Version:
    """A client's state, and how its large tensors were written."""

    state: dict[str, Any] = field(default_factory=dict)
    separate: Mapping[Keys, str] = field(default_factory=dict)  # digests of tensors with own files
    inline: frozenset[Keys] = frozenset()  # tensors in the version's file, because they change


def read(file: Path, digest: str) -> Version:
    """A version as it was written; a damaged file is refused by name."""
    tree = files.read_tree(file, digest)
    inline = frozenset(keys for keys, _ in _large(tree["state"]))
    separate = {tuple(keys): tensor_digest for keys, tensor_digest in tree["apart"]}
    for keys, tensor_digest in separate.items():
        place = tree["state"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = files.read_tree(_tensor_file(file.parent, tensor_digest), tensor_digest)
    return Version(tree["state"], separate, inline)


def write(file: Path, state: Mapping[str, Any], before: Version) -> str:
    """Write the version after `before`, readable by the owner only; return its digest."""
    separate: dict[Keys, str] = {}
    for keys, tensor in _large(state):
        if keys in before.inline:
            continue
        frame = codec.encode(tensor)
        digest = files.digest_of(frame)
        if before.separate.get(keys, digest) == digest:
            _write_tensor(file.parent, digest, frame)
            separate[keys] = digest
    tree = {
        "state": _without(state, separate),
        "apart": [[list(keys), digest] for keys, digest in separate.items()],
    }
    return files.write_tree(file, tree, private=True)


def check(file: Path, digest: str, verified: set[tuple[int, str]]) -> None:
    """Refuse a damaged version; tensor files in `verified` are not read again."""
    files.read_checked(file, digest)
    for tensor_digest in _separate_digests(file):
        path = _tensor_file(file.parent, tensor_digest)
        mark = (path.stat().st_ino if path.exists() else -1, tensor_digest)
        if mark not in verified:
            files.read_checked(path, tensor_digest)
            verified.add(mark)


def remove_unused_tensors(folder: Path) -> None:
    """Delete large tensors that no version in a client's folder refers to."""
    versions = folder.glob("[0-9]*.safetensors")
    needed = {digest for file in versions for digest in _separate_digests(file)}
    for path in folder.glob(f"{APART}*"):
        digest = path.name.removeprefix(APART).partition(".")[0]
        if path != _tensor_file(folder, digest) or digest not in needed:
            files.remove(path)
            shared = _shared(folder, digest)
            with suppress(FileNotFoundError):
                if shared.stat().st_nlink == 1:  # no other client has it
                    shared.unlink()


def _write_tensor(folder: Path, digest: str, frame: bytes) -> None:
    """Write a large tensor to a client's folder, or link it to the same one of another client."""
    own, shared = _tensor_file(folder, digest), _shared(folder, digest)
    if own.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError, StoreError):  # it is new, damaged, or being deleted
        files.read_checked(shared, digest)
        os.link(shared, own)
        files.sync_folder(folder)
        return
    files.write_atomic(own, frame, private=True)
    with suppress(OSError):  # another client was first, or the file system has no links
        shared.parent.mkdir(exist_ok=True)
        os.link(own, shared)


def _separate_digests(file: Path) -> list[str]:
    """Digests of a version's separate tensors; empty if the version cannot be read."""
    try:
        return [digest for _, digest in codec.outline(file)["apart"]]
    except (OSError, WireError, LookupError, TypeError, ValueError):
        return []


def _large(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    if isinstance(tree, Tensor) and tree.numel() * tree.element_size() >= LARGE:
        yield keys, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _large(value, (*keys, key))


def _without(tree: Any, separate: Mapping[Keys, str], keys: Keys = ()) -> Any:
    """A tree with None for each separate tensor, which keeps the order of names."""
    if not isinstance(tree, Mapping):
        return None if keys in separate else tree
    return {key: _without(value, separate, (*keys, key)) for key, value in tree.items()}


def _tensor_file(folder: Path, digest: str) -> Path:
    return folder / f"{APART}{digest}.safetensors"


def _shared(folder: Path, digest: str) -> Path:
    return folder.parent / SHARED / f"{digest}.safetensors"
