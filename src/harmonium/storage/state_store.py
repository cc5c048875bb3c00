"""What a client keeps, on disk: a file for every version, and large tensors beside them, once.

    clients/7/000003-1-train.safetensors   a version: the state, and which tensors lie apart
    clients/7/apart-SHA256.safetensors     a large tensor, for all versions that refer to it
    clients/shared/SHA256.safetensors      a second name of the same file, for other clients

A large tensor lies apart from the day it is kept until it changes. From then on it is written with
the state, for what has changed once changes in most rounds. So what never changes is written once,
and what many clients keep alike, such as targets that a server has sent to all, takes the room of
one (by hard links; where a file system has none, every client has its own). A version names the
digests of what lies apart, so that its own digest stands for all of it.
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

LARGE = 1 << 14  # bytes from which a tensor is worth a file of its own
APART, SHARED = "apart-", "shared"
Keys = tuple[str | int, ...]  # where in a state a tensor is


@dataclass(frozen=True)
class Version:
    """A client's state, and how its large tensors were written."""

    state: dict[str, Any] = field(default_factory=dict)
    apart: Mapping[Keys, str] = field(default_factory=dict)  # digests
    within: frozenset[Keys] = frozenset()  # in the version's own file, because they change


def read(file: Path, digest: str) -> Version:
    """A version as it was written, refusing a damaged file by name."""
    tree = files.read_tree(file, digest)
    within = frozenset(keys for keys, _ in _large(tree["state"]))
    apart = {tuple(keys): held for keys, held in tree["apart"]}
    for keys, held in apart.items():
        place = tree["state"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = files.read_tree(_own(file.parent, held), held)
    return Version(tree["state"], apart, within)


def write(file: Path, state: Mapping[str, Any], before: Version) -> str:
    """Write what has become of a version, readable by the owner only; return its digest."""
    apart: dict[Keys, str] = {}
    for keys, tensor in _large(state):
        if keys in before.within:
            continue
        frame = codec.encode(tensor)
        digest = files.digest_of(frame)
        if before.apart.get(keys, digest) == digest:
            _set_apart(file.parent, digest, frame)
            apart[keys] = digest
    named = [[list(keys), digest] for keys, digest in apart.items()]
    return files.write_tree(file, {"state": _without(state, apart), "apart": named}, private=True)


def check(file: Path, digest: str, sound: set[tuple[int, str]]) -> None:
    """Refuse a version that is not as it was written; `sound` files need no second look."""
    files.read_checked(file, digest)
    for held in _referred(file):
        own = _own(file.parent, held)
        mark = (own.stat().st_ino if own.exists() else -1, held)
        if mark not in sound:
            files.read_checked(own, held)
            sound.add(mark)


def tidy(folder: Path) -> None:
    """Delete large tensors that no version in a client's folder refers to."""
    needed = {digest for file in folder.glob("[0-9]*.safetensors") for digest in _referred(file)}
    for path in folder.glob(f"{APART}*"):
        digest = path.name.removeprefix(APART).partition(".")[0]
        if path != _own(folder, digest) or digest not in needed:
            files.remove(path)
            shared = _shared(folder, digest)
            with suppress(FileNotFoundError):
                if shared.stat().st_nlink == 1:  # nobody else has it
                    shared.unlink()


def _set_apart(folder: Path, digest: str, frame: bytes) -> None:
    """Have a large tensor in a client's folder, as another name of one that is here already."""
    own, shared = _own(folder, digest), _shared(folder, digest)
    if own.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError, StoreError):  # it is new, damaged, or being deleted
        files.read_checked(shared, digest)
        os.link(shared, own)
        files.sync_folder(folder)
        return
    files.write_atomic(own, frame, private=True)
    with suppress(OSError):  # another client was first, or there are no links here
        shared.parent.mkdir(exist_ok=True)
        os.link(own, shared)


def _referred(file: Path) -> list[str]:
    """Digests of what a version has apart; none if it cannot be read, for then it is lost."""
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


def _without(tree: Any, apart: Mapping[Keys, str], keys: Keys = ()) -> Any:
    """A tree with None for what lies apart, so that the order of names stays."""
    if not isinstance(tree, Mapping):
        return None if keys in apart else tree
    return {key: _without(value, apart, (*keys, key)) for key, value in tree.items()}


def _own(folder: Path, digest: str) -> Path:
    return folder / f"{APART}{digest}.safetensors"


def _shared(folder: Path, digest: str) -> Path:
    return folder.parent / SHARED / f"{digest}.safetensors"
