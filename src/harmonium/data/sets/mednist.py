"""MedNIST: six kinds of medical images, collected by B. Erickson and handed out by MONAI."""

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
    write_images,
)
from harmonium.data.published_datasets import Remote, Source

CLASSES = ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")


@datasets("mednist")
@dataclass(frozen=True)
class Mednist(PublishedImageFiles, UnsplitSpec):
    """MedNIST: 58,954 medical images of 6 kinds, 64x64 in grey."""

    about: ClassVar[About] = About((64, 64, 1), 6, 58_954, 0, "CC BY-SA 4.0")
    source: ClassVar[Source] = Source(
        page="https://github.com/Project-MONAI/tutorials/blob/main/2d_classification/mednist_tutorial.ipynb",
        tree=CLASSES,
        remotes=(
            Remote(
                "MedNIST.tar.gz",
                (
                    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/MedNIST.tar.gz",
                    "https://www.dropbox.com/s/5wwskxctvcxiuea/MedNIST.tar.gz?dl=1",
                ),
                "0bc7306e7427e00ad1c5526a6677552d",
            ),
        ),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """One folder for each class."""
        files = [
            ImageFile(path, str(path.relative_to(folder)), label)
            for label, name in enumerate(CLASSES)
            for path, _ in class_folders(folder / name)
        ]
        write_images(writer, {"train": files}, self)
        return CLASSES
