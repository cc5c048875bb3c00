"""SVHN, digits cut out of Street View (Netzer et al., 2011): two MATLAB files of version 5.

This module has its own reader for such files, which supports only what these two need: SciPy's
reader crashes on damaged files and holds a whole file in memory.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets
from harmonium.data.decoding.byte_arrays import DIGITS, PIECE, check_labels, size_of
from harmonium.data.images import Integers, Pixels
from harmonium.data.published_datasets import Published, Remote, Source

SIDE, CHANNELS = 32, 3
IMAGE = SIDE * SIDE * CHANNELS  # bytes

_PLACE = "http://ufldl.stanford.edu/housenumbers/"
_FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

_HEADER = 128  # bytes before the first variable
_BYTES, _PACKED = 2, 15  # kinds of element
_NUMBERS = range(6, 16)  # kinds of array, from double to uint64


@datasets("svhn")
@dataclass(frozen=True)
class Svhn(Published):
    """SVHN: 73,257 training and 26,032 test images of house numbers' digits, 32x32 in colour."""

    about: ClassVar[About] = About(
        (SIDE, SIDE, CHANNELS), 10, 73_257, 26_032, "for non-commercial use only"
    )
    source: ClassVar[Source] = Source(
        page=_PLACE,
        layouts=(_MD5,),
        remotes=tuple(Remote(name, (f"{_PLACE}{name}",), md5) for name, md5 in _MD5.items()),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Read the labels of each file, then its images piece by piece."""
        for part, name in _FILES.items():
            path = folder / name
            try:
                labels = _labels(path)
                start = 0
                for pixels in _images(path, len(labels)):
                    writer.append(part, pixels, labels[start : start + len(pixels)])
                    start += len(pixels)
            except (zlib.error, struct.error) as error:
                raise DataError(f"{path} is damaged: {error}") from error
        return DIGITS


def _labels(path: Path) -> Integers:
    """The digits (n,); in the file the digit 0 has the label 10."""
    with _open(path) as file:
        variable = _find(path, file, "y")
        if len(variable.shape) != 2 or variable.shape[1] != 1 or not variable.shape[0]:
            raise DataError(f"{path}: 'y' has shape {variable.shape}; expected (n, 1)")
        labels = np.frombuffer(variable.read(variable.shape[0]), np.uint8)
        variable.finish()
    check_labels(labels, 1, 10, path)
    return labels.astype(np.int64) % 10


def _images(path: Path, count: int) -> Iterator[Pixels]:
    """All images, in pieces; on disk each is three planes in column-major order."""
    with _open(path) as file:
        variable = _find(path, file, "X")
        expected = (SIDE, SIDE, CHANNELS, count)
        if variable.shape != expected:
            raise DataError(f"{path}: 'X' has shape {variable.shape}; expected {expected}")
        step = PIECE // IMAGE
        for start in range(0, count, step):
            length = min(step, count - start)
            planes = np.frombuffer(variable.read(length * IMAGE), np.uint8)
            yield planes.reshape(length, CHANNELS, SIDE, SIDE).transpose(0, 3, 2, 1)
        variable.finish()


# ---- MATLAB files of version 5: a header, then one element for each variable ---------------------


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _find(path: Path, file: BinaryIO, name: str) -> _Variable:
    """The compressed variable of this name; others are skipped."""
    header, size = file.read(_HEADER), size_of(path)
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(header[-4:], "")
    if len(header) < _HEADER or not order:
        raise DataError(f"{path} is not a MATLAB file of version 5")
    start = _HEADER
    while start < size:
        file.seek(start)
        tag = file.read(8)
        kind, length = struct.unpack(f"{order}2I", tag.ljust(8, b"\0"))
        start += 8 + length
        if len(tag) < 8 or start > size:
            raise DataError(f"{path} is cut off: it has {size} bytes; expected {start} or more")
        if kind == _PACKED:
            variable = _Variable(path, file, length, order)
            if variable.name == name:
                return variable
    raise DataError(f"{path} has no compressed variable '{name}'")


class _Variable:
    """A compressed array of bytes, decompressed as it is read."""

    def __init__(self, path: Path, file: BinaryIO, length: int, order: str) -> None:
        self._path, self._file, self._order = path, file, order
        self._left = length  # compressed bytes not yet read
        self._unpacker = zlib.decompressobj()
        self._take(8)  # tag of the whole
        flags = self._element(8)
        axes = self._element(32)
        self.shape = struct.unpack(f"{order}{len(axes) // 4}i", axes)
        self.name = self._element(64).decode("latin-1")
        kind, size, self._small = self._tag()
        real = struct.unpack(f"{order}2I", flags)[0] & 0x8FF in _NUMBERS  # and not complex
        self._fits = real and kind == _BYTES and size == math.prod(self.shape)

    def read(self, count: int) -> bytes:
        """The next bytes of the array."""
        if not self._fits:
            raise DataError(f"{self._path}: '{self.name}' is not an array of bytes")
        return self._small or self._take(count)

    def finish(self) -> None:
        """Read to the end, which verifies the checksum of the compressed data."""
        rest = self._unpacker.unconsumed_tail + self._file.read(self._left)
        self._unpacker.decompress(rest, 64)
        if not self._unpacker.eof:
            raise DataError(f"{self._path} is damaged: '{self.name}' does not end where it should")

    def _tag(self) -> tuple[int, int, bytes]:
        """Kind and size of the next element, and its content if it is within the tag (4 bytes)."""
        kind, size = struct.unpack(f"{self._order}2I", tag := self._take(8))
        if kind >> 16:
            return kind & 0xFFFF, kind >> 16, tag[4:][: kind >> 16]
        return kind, size, b""

    def _element(self, most: int) -> bytes:
        """The content of a small element, which is padded to eight bytes."""
        _, size, small = self._tag()
        if size > most:
            raise DataError(f"{self._path} is damaged: it has a name or shape of {size} bytes")
        return small or self._take(size + -size % 8)[:size]

    def _take(self, count: int) -> bytes:
        """The next `count` decompressed bytes."""
        content = bytearray()
        while len(content) < count:
            packed = self._unpacker.unconsumed_tail
            if not packed:
                packed = self._file.read(min(self._left, 1 << 16))
                self._left -= len(packed)
            piece = self._unpacker.decompress(packed, count - len(content))
            if not piece and not packed:
                raise DataError(f"{self._path} is damaged: {len(content)} bytes instead of {count}")
            content += piece
        return bytes(content)
