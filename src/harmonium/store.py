"""Files that survive a kill at any instant: written beside, synced, renamed; read with a digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from harmonium.errors import StoreError, WireError

if TYPE_CHECKING:
    from harmonium import codec


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> str:
    """Write a file that is either wholly there or not there at all; return its SHA-256.

    `private` files are readable by their owner only: they hold what a client keeps to itself.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o600 if private else 0o666
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path}: {error.strerror}. Make room and try again."
        ) from None
    return digest_of(data)


def sync_folder(folder: Path) -> None:
    """Make a rename durable; systems that cannot open folders do not need it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def sync_file(path: Path) -> None:
    """Make a file's content durable, if it exists."""
    if path.exists():
        _sync(path, os.O_RDWR)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checked(path: Path, digest: str) -> bytes:
    """The bytes of a file, provided they are the ones that were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    if digest_of(data) != digest:
        raise StoreError(f"{path} is damaged: its SHA-256 is not the one recorded for it")
    return data


def write_tree(path: Path, tree: codec.Tree, *, private: bool = False) -> str:
    """Write a tree of tensors and plain values; return the digest that reads it back."""
    from harmonium import codec  # with it comes torch, which keys and certificates do not need

    return write_atomic(path, codec.encode(tree), private=private)


def read_tree(path: Path, digest: str) -> codec.Tree:
    """Read a tree back, refusing a damaged file by name."""
    from harmonium import codec

    data = read_checked(path, digest)
    try:
        return codec.decode(data)
    except WireError as error:
        raise StoreError(f"{path}: {error}") from None


def digest_of(data: bytes) -> str:
    """SHA-256 as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()
