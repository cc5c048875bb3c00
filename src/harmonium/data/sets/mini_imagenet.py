"""mini-ImageNet (Vinyals et al., 2016): 100 classes of ImageNet with 600 images each.

It has no official archive. Two layouts are in use and both are read: `images/` beside the
`train.csv`, `val.csv` and `test.csv` of Ravi and Larochelle (2017), or folders `train/`, `val/` and
`test/` of class folders. These parts hold different classes, which suits few-shot learning only:
here all 100 classes are joined and a share of the images is held out for testing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harmonium.data.cache import Writer
from harmonium.data.datasets import About, UnsplitSpec, datasets
from harmonium.data.decoding.image_files import (
    ImageFile,
    PublishedImageFiles,
    class_folders,
    inside,
    numbered,
    write_images,
)
from harmonium.data.published_datasets import Source
from harmonium.data.sets.table import read_table

PARTS = ("train", "val", "test")


@datasets("mini-imagenet")
@dataclass(frozen=True)
class MiniImagenet(PublishedImageFiles, UnsplitSpec):
    """mini-ImageNet: 60,000 images of 100 classes, in colour, usually scaled to 84x84."""

    size: int | None = 84  # shorter side scaled to this, centre cut out as a square
    test: float = 1 / 6  # share held out for testing

    about: ClassVar[About] = About(
        *((84, 84, 3), 100, 60_000, 0),
        "none stated; ImageNet's terms: research and education, nothing commercial",
    )
    source: ClassVar[Source] = Source(
        page="https://github.com/twitter/meta-learning-lstm",
        tree=("train.csv|train", "val.csv|val", "test.csv|test"),
        pickled=tuple(f"mini-imagenet-cache-{part}.pkl" for part in (*PARTS, "validation")),
        most_bytes=8 << 30,
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Join the three parts, whichever layout they have."""
        images = [image for part in PARTS for image in _part(folder, part)]
        classes, number = numbered(name for _, name in images)
        files = [
            ImageFile(path, str(path.relative_to(folder)), number[name]) for path, name in images
        ]
        write_images(writer, {"train": files}, self)
        return classes


def _part(root: Path, part: str) -> list[tuple[Path, str | None]]:
    """The images of one part with their classes."""
    if (table := root / f"{part}.csv").is_file():
        rows = [row.values for row in read_table(table, "filename")]
        return [(inside(root, "images", row["filename"]), row.get("label")) for row in rows]
    return class_folders(root / part)
