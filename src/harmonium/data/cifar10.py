"""CIFAR-10 (Krizhevsky, 2009): the official binary files, or the same bytes from elsewhere.

What is kept on disk is always the official layout: six files of 10,000 records, each one label byte
and then 32x32 red, green and blue bytes. Whichever way they came, their content is compared with
known sums before a single picture is used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.images import Pixels
from harmonium.data.store import Writer, fetched_folder
from harmonium.errors import DataError

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
FOLDER = "cifar-10-batches-bin"
SIDE, CHANNELS = 32, 3
RECORD = 1 + SIDE * SIDE * CHANNELS

_STEMS = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)}
# The package spells them so.
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}


@dataclass(frozen=True)
class Content:
    """What the files must hold: sha256 over (n, 32, 32, 3) pixels and over label bytes."""

    per_file: int = 10_000
    sums: Mapping[str, str] = field(
        default_factory=lambda: {
            "train pixels": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test pixels": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        }
    )


OFFICIAL = Content()
OFFICIAL_MEMBERS = tuple(f"{FOLDER}/{stem}.bin" for stems in _STEMS.values() for stem in stems)
PACKAGE_MEMBERS = tuple(
    f"package/{name}"
    for part, stems in _STEMS.items()
    for name in (*(f"{stem}.png" for stem in stems), _LABELS[part])
)


@datasets("cifar10")
@dataclass(frozen=True)
class Cifar10(DataSpec):
    """CIFAR-10: 50,000 training and 10,000 test pictures, 32x32 in colour, 10 classes."""

    def identity(self) -> dict[str, Any]:
        """The sums say all: the cache serves even when the fetched files are gone."""
        return {"sums": dict(OFFICIAL.sums)}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Bring the records into pictures, checked as they pass."""
        folder = fetched_folder(self.name)
        if not (folder / OFFICIAL_MEMBERS[0]).is_file():
            raise DataError("cifar10 is not here yet: run `harmonium data fetch cifar10`")
        for part, pixels, labels in read(folder, OFFICIAL):
            writer.append(part, pixels, labels)
        return CLASSES


def read(folder: Path, content: Content) -> Iterator[tuple[str, Pixels, npt.NDArray[np.uint8]]]:
    """Each file as (part, pixels, labels); at the end of a part, an error if its sums are wrong."""
    for part, stems in _STEMS.items():
        sums = {f"{part} pixels": hashlib.sha256(), f"{part} labels": hashlib.sha256()}
        for stem in stems:
            pixels, labels = _read_file(folder / FOLDER / f"{stem}.bin", content.per_file)
            sums[f"{part} pixels"].update(pixels.data)
            sums[f"{part} labels"].update(labels.data)
            yield part, pixels, labels
        for what, found in sums.items():
            if found.hexdigest() != content.sums[what]:
                raise DataError(
                    f"the {what} of CIFAR-10 in {folder} are not the official ones (sha256 "
                    f"{found.hexdigest()[:12]}…, expected {content.sums[what][:12]}…): "
                    "run `harmonium data fetch cifar10` again"
                )


def _read_file(path: Path, count: int) -> tuple[Pixels, npt.NDArray[np.uint8]]:
    try:
        flat = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if flat.size != count * RECORD:
        raise DataError(f"{path} has {flat.size} bytes; expected {count * RECORD}")
    records = flat.reshape(count, RECORD)
    planes = records[:, 1:].reshape(count, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].copy()


def check(folder: Path, content: Content = OFFICIAL) -> None:
    """Refuse a folder whose content is not CIFAR-10, byte for byte."""
    for _ in read(folder, content):
        pass


def adopt(found: Path, folder: Path, content: Content = OFFICIAL) -> None:
    """Lay the official files into `folder` from whatever layout `found` has, and check them."""
    for place in (found, found / FOLDER):
        if all((place / Path(name).name).is_file() for name in OFFICIAL_MEMBERS):
            (folder / FOLDER).mkdir()
            for name in OFFICIAL_MEMBERS:
                shutil.copyfile(place / Path(name).name, folder / name)
            return check(folder, content)
    for place in (found, found / "package"):
        if all((place / Path(name).name).is_file() for name in PACKAGE_MEMBERS):
            _rebuild(place, folder, content)
            return check(folder, content)
    raise DataError(
        f"{found} holds neither {FOLDER}/data_batch_1.bin … test_batch.bin "
        "nor data_batch_1.png … test_batch.png with their labels"
    )


def _rebuild(package: Path, folder: Path, content: Content) -> None:
    """The official files from PNGs of one picture a row, pixels in reading order."""
    (folder / FOLDER).mkdir()
    for part, stems in _STEMS.items():
        labels = _read_labels(package / _LABELS[part], content.per_file * len(stems))
        for number, stem in enumerate(stems):
            start = number * content.per_file
            records = np.empty((content.per_file, RECORD), np.uint8)
            records[:, 0] = labels[start : start + content.per_file]
            pixels = _read_png(package / f"{stem}.png", content.per_file)
            records[:, 1:] = pixels.transpose(0, 3, 1, 2).reshape(content.per_file, -1)
            records.tofile(folder / FOLDER / f"{stem}.bin")


def _read_labels(path: Path, count: int) -> list[int]:
    try:
        labels = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path.name} is not JSON: {error}") from error
    fits = isinstance(labels, list) and len(labels) == count
    if not fits or not all(isinstance(label, int) and 0 <= label < 10 for label in labels):
        raise DataError(f"{path.name} should hold {count} labels from 0 to 9")
    return list(labels)


def _read_png(path: Path, count: int) -> Pixels:
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if (image.size, image.mode) != ((SIDE * SIDE, count), "RGB"):
                raise DataError(f"{path.name} is {image.mode} {image.size}, not RGB 1024x{count}")
            return np.asarray(image).reshape(count, SIDE, SIDE, CHANNELS)
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path.name} cannot be read: {error}") from error
