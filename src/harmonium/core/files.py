"""Files that survive a kill at any instant: written to a temporary name, synced, then renamed.

They are read back with a digest. `reading` and `writing` turn every problem with a file into an
error of one line with its path and what to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from harmonium.core.errors import HarmoniumError, StoreError

if TYPE_CHECKING:
    from harmonium.core import codec

RESTORE = "restore it from a copy, or start a new run"
SEAL = "sha256"  # key of the digest of everything else in a JSON file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def reading(path: Path, remedy: str = RESTORE) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one line with its path and a remedy.

    A damaged file can make a parser raise anything, so every exception counts; errors that are
    meant for users already stay as they are.
    """
    try:
        yield
    except HarmoniumError:
        raise
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: {remedy}") from None
    except Exception as error:  # noqa: BLE001
        raise StoreError(f"{path} cannot be read ({_reason(error)}): {remedy}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, and whatever else the system refuses, into one line with the path."""
    try:
        yield
    except OSError as error:
        advice = "Free some space" if error.errno in _FULL else "Correct that"
        raise StoreError(
            f"cannot write {path}: {_reason(error)}. {advice} and try again."
        ) from None


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    bare = isinstance(error, LookupError) or not text  # a bare key explains nothing
    return f"{type(error).__name__} {text}".strip() if bare else str(text)


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> str:
    """Write a file that is either wholly there or not there at all; return its SHA-256.

    `private` files are readable by their owner only: they hold what a client keeps to itself.
    """
    with atomic_file(path, private=private) as file:
        file.write(data)
    return digest_of(data)


@contextmanager
def atomic_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends without an error.

    Until then whatever was there stays, so that large files can be written piece by piece.
    """
    beside = path.with_name(path.name + ".part")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if private else 0o666
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete what is there, if anything is: a file, or a folder that took a file's place."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename durable; systems that cannot open folders do not need it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def sync_file(path: Path) -> None:
    """Make a file's content durable, if it exists."""
    if path.exists():
        _sync(path, os.O_RDWR)


def _sync(path: Path, flags: int) -> None:
    with writing(path):
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_checked(path: Path, digest: str, remedy: str = RESTORE) -> bytes:
    """The bytes of a file, provided they are the ones that were written."""
    with reading(path, remedy):
        data = path.read_bytes()
    if digest_of(data) != digest:
        raise StoreError(f"{path} is damaged, its SHA-256 is not the one recorded for it: {remedy}")
    return data


def sealed(content: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file with a digest of its content, for `read_sealed`."""
    return json.dumps({**content, SEAL: digest_of(json.dumps(content).encode())}, indent=1).encode()


def read_sealed(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """The content of a sealed JSON file; one without a seal is of an earlier version."""
    with reading(path, remedy):
        content: dict[str, Any] = dict(json.loads(path.read_bytes()))
        seal = content.pop(SEAL, None)
        if seal is not None and seal != digest_of(json.dumps(content).encode()):
            raise ValueError("its content has changed since it was written")
    return content


def write_tree(path: Path, tree: codec.Tree, *, private: bool = False) -> str:
    """Write a tree of tensors and plain values; return the digest that reads it back."""
    from harmonium.core import codec  # with it comes torch, which keys and certificates do not need

    return write_atomic(path, codec.encode(tree), private=private)


def read_tree(path: Path, digest: str) -> codec.Tree:
    """Read a tree back, refusing a damaged file by name."""
    from harmonium.core import codec  # here for the same reason

    data = read_checked(path, digest)
    with reading(path):
        try:
            return codec.decode(data)
        except HarmoniumError as error:
            raise ValueError(str(error)) from None


def digest_of(data: bytes) -> str:
    """SHA-256 as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()
