"""The cache of decoded data sets on disk, and the folder of fetched ones.

A decoded data set is a folder of `.npy` files that are memory-mapped, so that a large data set
needs no memory until it is read. The folder gets its name only when it is complete: a killed
process leaves nothing that could be mistaken for data, and if two processes decode the same data
set, the first one wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError, StoreError
from harmonium.core.paths import home, make_folder
from harmonium.core.progress import emit
from harmonium.data.decoding.conversion import Fit, shaped
from harmonium.data.images import Images, Integers, Pixels, check_pixels

FORMAT = 2
"""Part of every cache key: raise it when the layout below changes."""

PIECE_BYTES = 1 << 25  # bytes of images converted and written at once
_LEFTOVER_SECONDS = 24 * 3600


def fetched_folder(name: str | None = None) -> Path:
    """The folder of all fetched data sets, or of the one called `name`."""
    return home() / "data" / name if name else home() / "data"


def printable(name: str) -> str:
    """A name with every unprintable character replaced by `?`, so that it is one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def digest_of(value: Any) -> str:
    """The sha256 of JSON values, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def building(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that is renamed to `final` when the block ends without an error.

    With `replace` an existing `final` is replaced; otherwise it stays and the new one is removed.
    """
    parent = make_folder(final.parent)
    _sweep(parent)
    temporary = parent / f".{final.name}.building-{secrets.token_hex(6)}"
    try:
        temporary.mkdir(mode=0o700)  # images may be confidential
        yield temporary
        if replace and final.exists():
            final.rename(temporary.with_name(temporary.name + ".old"))
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    except OSError as error:
        raise StoreError(f"cannot write {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(temporary.name + ".old"), ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove incomplete folders of processes that were killed long ago."""
    for entry in parent.glob(".*.building-*"):
        with suppress(OSError):
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)


@dataclass(frozen=True)
class Stored:
    """A decoded data set on disk, before parts are held out or limited."""

    parts: Mapping[str, Images]  # "train", and "test" and "validation" if the data have them
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]  # names of a factor's values, by factor
    digest: str  # of the content, independent of where the files are
    key: str = ""  # of the cache


class Writer:
    """Writes the decoded images of a data set, piece by piece."""

    def __init__(
        self,
        folder: Path,
        size: int | None = None,
        channels: int | None = None,
        name: str = "",
        fit: Fit = "cut",
    ) -> None:
        """Write into the empty `folder`; images are converted to `size` and `channels` if given."""
        self._folder, self._name = folder, name
        self.size, self.channels, self.fit = size, channels, fit
        self.count = 0
        self.expected: int | None = None  # total images, if known beforehand; for the progress bar
        self._parts: dict[str, _Part] = {}
        self.classes: tuple[str, ...] = ()
        self.names: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []

    def append(
        self,
        part: str,
        pixels: Pixels,
        labels: npt.NDArray[Any],
        factors: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        """Add images to a part; all images of a data set have one size.

        They are scaled and converted to grey or colour if the settings say so.
        """
        check_pixels(pixels, f"the {part} images")
        Images(pixels, labels, factors or {})  # raises DataError if columns do not fit
        side = self.size or max(pixels.shape[1:3])
        step = max(1, PIECE_BYTES // (3 * side * side))  # by the size after conversion
        for start in range(0, max(1, len(pixels)), step):
            rows = slice(start, start + step)
            piece = {name: column[rows] for name, column in (factors or {}).items()}
            converted = shaped(pixels[rows], self.size, self.channels, self.fit)
            self._append(part, converted, labels[rows], piece)

    def _append(
        self,
        part: str,
        pixels: Pixels,
        labels: npt.NDArray[Any],
        factors: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        if part not in self._parts:
            self._parts[part] = _Part(self._folder / f"{part}-pixels.npy", pixels.shape[1:])
        self._parts[part].append(pixels, labels, factors)
        self.count += len(pixels)
        emit(f"decoding {self._name}", self.count, self.expected)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the columns and `meta.json`, which completes the folder."""
        shapes = {part.shape for part in self._parts.values()}
        if "train" not in self._parts:
            raise DataError("there are no training images")
        if len(shapes) > 1:
            raise DataError(f"the parts hold images of different shapes: {sorted(shapes)}")
        parts = {name: part.finish(self._folder, name) for name, part in self._parts.items()}
        meta = {"classes": self.classes, "notes": self.notes, "parts": parts, **about}
        named = [self.names] if self.names else []
        meta |= {"names": self.names, "digest": digest_of([self.classes, parts, *named])}
        with open(self._folder / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _flush(file)

    def close(self) -> None:
        """Close all files, whether finished or not."""
        for part in self._parts.values():
            part.file.close()


class _Part:
    """One part being written: pixels go to disk at once, columns are collected in memory."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.count = 0
        self.columns: dict[str, list[npt.NDArray[Any]]] = {}
        self.sum = hashlib.sha256()
        self.file: BufferedWriter = open(path, "wb")  # noqa: SIM115  (closed by Writer.close)
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads this header so that the first axis can grow without moving the data.
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(
        self, pixels: Pixels, labels: npt.NDArray[Any], factors: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        if pixels.shape[1:] != self.shape:
            raise DataError(f"images of shape {pixels.shape[1:]} among images of {self.shape}")
        block = np.ascontiguousarray(pixels).data.cast("B") if pixels.size else b""
        self.file.write(block)
        self.sum.update(block)
        self.count += len(pixels)
        for name, values in {"": labels, **factors}.items():
            self.columns.setdefault(name, []).append(np.asarray(values, np.int64))

    def finish(self, folder: Path, part: str) -> dict[str, Any]:
        self._write_header()
        _flush(self.file)
        sums = [self.sum.hexdigest()]
        names = sorted(self.columns)  # "" sorts first: the labels are column 0
        for number, name in enumerate(names):
            # Files are numbered because the name of a factor may not be a valid file name.
            with open(folder / f"{part}-column-{number}.npy", "wb") as file:
                column = np.concatenate(self.columns[name])
                np.lib.format.write_array(file, column, allow_pickle=False)
                _flush(file)
            sums.append(hashlib.sha256(column.astype("<i8").tobytes()).hexdigest())
        return {"shape": [self.count, *self.shape], "factors": names[1:], "sha256": sums}


def _flush(file: Any) -> None:
    """Flush a file to disk, which must happen before the folder gets its name."""
    file.flush()
    os.fsync(file.fileno())


def decoded(
    name: str,
    identity: Mapping[str, Any],
    decode: Callable[[Writer], Sequence[str]],
    *,
    size: int | None = None,
    channels: int | None = None,
    fit: Fit = "cut",
) -> Stored:
    """The data set with this identity, from the cache or decoded now.

    Args:
        name: the data set's name, part of the folder's name.
        identity: JSON values that determine the content.
        decode: writes all parts and returns the class names.
        size: side that every image is scaled to; None keeps the size.
        channels: 1 to 4, to convert images to; None keeps them.
        fit: how images of another shape come to `size`.
    """
    key = _key(name, identity)
    stored = reopened(name, key)
    if stored is not None:
        return stored
    folder = _folder(name, key)
    with building(folder, replace=folder.exists()) as temporary:
        writer = Writer(temporary, size, channels, name, fit)
        try:
            writer.classes = tuple(printable(name) for name in decode(writer))
            writer.names = {k: tuple(map(printable, v)) for k, v in writer.names.items()}
            writer.finish({"name": name, "key": key, "identity": identity})
        finally:
            writer.close()
            emit(f"decoding {name}", writer.count, writer.count)
    stored = stored_in(folder, key)
    if stored is None:
        raise StoreError(f"{folder} was written but cannot be read back: check the disk")
    return stored


def is_decoded(name: str, identity: Mapping[str, Any]) -> bool:
    """Whether the data set with this identity is in the cache."""
    return (_folder(name, _key(name, identity)) / "meta.json").is_file()


def _key(name: str, identity: Mapping[str, Any]) -> str:
    return digest_of([FORMAT, name, identity])


def reopened(name: str, key: str) -> Stored | None:
    """The decoded data set with this key, or None if it is not in the cache."""
    return stored_in(_folder(name, key), key)


def _folder(name: str, key: str) -> Path:
    return home() / "cache" / f"{name}-{key[:16]}"


def stored_in(folder: Path, key: str) -> Stored | None:
    """The data set in a folder, or None if it is missing, damaged or has another key."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["key"] != key:
            return None
        parts = {part: _open_part(folder, part, about) for part, about in meta["parts"].items()}
        names = {factor: tuple(values) for factor, values in meta["names"].items()}
        classes, notes = tuple(meta["classes"]), tuple(meta["notes"])
        return Stored(parts, classes, notes, names, meta["digest"], key)
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def _open_part(folder: Path, part: str, about: Mapping[str, Any]) -> Images:
    pixels = np.load(folder / f"{part}-pixels.npy", mmap_mode="r", allow_pickle=False)
    columns: list[Integers] = []
    for number in range(1 + len(about["factors"])):
        column = np.load(folder / f"{part}-column-{number}.npy", allow_pickle=False)
        column.flags.writeable = False
        columns.append(column)
    if list(pixels.shape) != about["shape"]:
        raise DataError(f"{folder} is damaged")
    return Images(pixels, columns[0], dict(zip(about["factors"], columns[1:], strict=True)))
