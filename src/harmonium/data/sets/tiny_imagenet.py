"""Tiny ImageNet (Le and Yang, 2015): 200 classes of ImageNet at 64x64, as distributed by Stanford.

The images of its folder `test` have no published labels and are not used: its validation images
are the test part, as in most papers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets
from harmonium.data.decoding.image_files import (
    ImageFile,
    PublishedImageFiles,
    inside,
    is_image_file,
    write_images,
)
from harmonium.data.published_datasets import Remote, Source


@datasets("tiny-imagenet")
@dataclass(frozen=True)
class TinyImagenet(PublishedImageFiles):
    """Tiny ImageNet: 100,000 training and 10,000 test images, 64x64 in colour, 200 classes."""

    about: ClassVar[About] = About(
        *((64, 64, 3), 200, 100_000, 10_000),
        "none stated; ImageNet's terms: research and education, nothing commercial",
    )
    source: ClassVar[Source] = Source(
        page="https://www.kaggle.com/c/tiny-imagenet",
        tree=("wnids.txt", "words.txt", "train", "val"),
        remotes=(
            Remote(
                "tiny-imagenet-200.zip",
                ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                "90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Training images by their folders, validation images by their list."""
        synsets = sorted(_lines(folder / "wnids.txt"))
        number = {synset: row for row, synset in enumerate(synsets)}
        train = [file for synset in synsets for file in _of_class(folder, synset, number[synset])]
        write_images(writer, {"train": train, "test": _annotated(folder, number)}, self)
        return _names(folder / "words.txt", synsets)


def _of_class(root: Path, synset: str, label: int) -> list[ImageFile]:
    """The training images of a class, which are in the subfolder `images` of its folder."""
    folder = inside(root, "train", synset) / "images"
    if not folder.is_dir():
        raise DataError(f"{folder} is missing, but wnids.txt names {synset}")
    paths = sorted(path for path in folder.iterdir() if is_image_file(path))
    return [ImageFile(path, str(path.relative_to(root)), label) for path in paths]


def _annotated(root: Path, number: dict[str, int]) -> list[ImageFile]:
    """The validation images listed in `val_annotations.txt`: file, class and box, tab-separated."""
    listed = root / "val" / "val_annotations.txt"
    files = []
    for row, line in enumerate(_lines(listed), 1):
        name, _, rest = line.partition("\t")
        synset = rest.partition("\t")[0]
        if synset not in number:
            raise DataError(f"{listed}, line {row}: '{synset}' is not a class of wnids.txt")
        path = inside(root, "val", "images", name)
        files.append(ImageFile(path, str(path.relative_to(root)), number[synset]))
    return files


def _names(words: Path, synsets: list[str]) -> tuple[str, ...]:
    """Names of the classes: the first word of each, or its synset if two classes share it."""
    called = dict(line.split("\t", 1) for line in _lines(words) if "\t" in line)
    short = [called.get(synset, synset).partition(",")[0] for synset in synsets]
    often = Counter(short)
    pairs = zip(short, synsets, strict=True)
    return tuple(synset if often[name] > 1 else name for name, synset in pairs)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
