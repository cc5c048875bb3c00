"""Office-Home and Adaptiope: the same classes in several styles, a folder for each style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, UnsplitSpec, datasets
from harmonium.data.decoding.image_files import (
    ImageFile,
    PublishedImageFiles,
    class_folders,
    numbered,
    write_images,
)
from harmonium.data.published_datasets import Source


@dataclass(frozen=True)
class Domains(PublishedImageFiles, UnsplitSpec):
    """The base of these data sets; 224 pixels and a 70/30 split are FedStyle's."""

    size: int | None = 224  # shorter side scaled to this, centre cut out as a square
    test: float = 0.3  # share held out for testing

    styles: ClassVar[tuple[tuple[str, ...], ...]]  # for each style all spellings of its folder

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Write all styles one after another; the factor `style` is their number."""
        images = [
            (path, name, row)
            for row, spellings in enumerate(self.styles)
            for path, name in class_folders(_style(folder, spellings))
        ]
        if strays := [path for path, name, _ in images if name is None]:
            raise DataError(f"{strays[0]} is not in a class folder")
        classes, number = numbered(name for _, name, _ in images)
        files = [
            ImageFile(path, str(path.relative_to(folder)), number[name], {"style": row})
            for path, name, row in images
        ]
        writer.names["style"] = tuple(spellings[0] for spellings in self.styles)
        write_images(writer, {"train": files}, self)
        return classes


def _style(folder: Path, spellings: Sequence[str]) -> Path:
    for name in spellings:
        if (folder / name).is_dir():
            return folder / name
    raise DataError(f"{folder} lacks the folder '{spellings[0]}'")


@datasets("office-home")
@dataclass(frozen=True)
class OfficeHome(Domains):
    """Office-Home (Venkateswara et al., 2017): 15,588 images, 65 classes, 4 styles."""

    styles: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("Art",),
        ("Clipart",),
        ("Product",),
        ("Real World", "RealWorld", "Real_World", "Real"),
    )
    about: ClassVar[About] = About(
        *(None, 65, 15_588, 0), "fair use notice: research and education, nothing commercial"
    )
    source: ClassVar[Source] = Source(
        page="https://www.hemanthdv.org/officeHomeDataset.html",
        tree=("Art", "Clipart", "Product", "Real World|RealWorld|Real_World|Real"),
        most_bytes=4 << 30,
    )


@datasets("adaptiope")
@dataclass(frozen=True)
class Adaptiope(Domains):
    """Adaptiope (Ringwald and Stiefelhagen, 2021): 36,900 images, 123 classes, 3 styles."""

    styles: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("product_images",),
        ("real_life",),
        ("synthetic",),
    )
    about: ClassVar[About] = About(*(None, 123, 36_900, 0), "none stated")
    source: ClassVar[Source] = Source(
        page="https://gitlab.com/tringwald/adaptiope",
        tree=("product_images", "real_life", "synthetic"),
        most_bytes=16 << 30,
    )
