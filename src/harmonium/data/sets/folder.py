"""The data set of image files in a folder, with subfolders as classes or styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harmonium.core.errors import ConfigError, DataError, Key
from harmonium.data.cache import Writer
from harmonium.data.datasets import datasets
from harmonium.data.decoding.image_files import (
    ENDINGS,
    ImageFile,
    OwnFilesSpec,
    class_folders,
    is_image_file,
    listing_digest,
    numbered,
    unread,
    write_images,
)
from harmonium.data.images import GROUP

PARTS = {"train": "train", "validation": "val", "test": "test"}  # and the names of their folders


class _Image(NamedTuple):
    path: Path
    class_name: str | None
    style: str | None
    group: str | None = None


class _FolderListing(NamedTuple):
    files: dict[str, list[ImageFile]]
    classes: tuple[str, ...]
    styles: tuple[str, ...]


@datasets("folder")
@dataclass(frozen=True)
class Folder(OwnFilesSpec):
    """A folder of image files.

    Subfolders are classes; images lying directly in the folder have no labels. With `styles` the
    first subfolder is a style and the second, if there is one, the class. With `train/` and `test/`
    inside, each is such a folder; `val/` is the validation part and then replaces the share
    `validation`, and where there is no `test/` it is the test part. With `group=folder` the lowest
    folders are groups, such as patients, and not classes. Transparent pixels are laid on white,
    16-bit grey is brought to 8 bits, the camera's rotation is applied, and only the first frame of
    a film is read, but every frame of a DICOM file.
    """

    path: str = ""  # the folder
    styles: bool = False  # the first level of folders is a style, the second the class
    channels: int = 3  # 3: colour, 1: grey, 4: RGBA or CMYK as stored, 2: grey and transparency

    def check(self) -> None:
        """Check that the path is a folder too."""
        super().check()
        if not self.path:
            raise ConfigError("data set 'folder' needs ", Key("data", "path"), "=FOLDER")
        if self._root().is_file():
            raise DataError(
                Key("data", "path"),
                f"={self.path} is a file: for an .npz archive use ",
                Key("data"),
                "=npz, for a table of images ",
                Key("data"),
                "=csv",
            )
        if not self._root().is_dir():
            raise DataError(Key("data", "path"), f"={self.path}: there is no such folder")

    def _root(self) -> Path:
        return Path(self.path).expanduser().resolve()

    def identity(self) -> dict[str, Any]:
        """The digest of all files' names, sizes and modification times, and how they are read."""
        files = listing_digest(self._listing().files)
        return {"path": str(self._root()), "files": files, **self.handling()}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Decode all files."""
        listing = self._listing()
        if self.styles:
            writer.names["style"] = listing.styles
        write_images(writer, listing.files, self)
        if others := unread(self._root()):
            writer.notes.append(f"{self.path} also has files that are not read as images: {others}")
        return listing.classes

    def _listing(self) -> _FolderListing:
        parts = self._parts()
        everything = [image for images in parts.values() for image in images]
        if not parts.get("train"):
            others = unread(self._root())
            beside = f", but {others}, which are not read: convert them first" if others else ""
            raise DataError(f"{self.path} holds no images ({' '.join(ENDINGS)}){beside}")
        classes, class_number = numbered(image.class_name for image in everything)
        styles, style_number = numbered(image.style for image in everything)
        _, group_number = numbered(image.group for image in everything)
        root = self._root()
        files = {
            part: [
                ImageFile(
                    image.path,
                    str(image.path.relative_to(root)),
                    class_number[image.class_name],
                    {
                        **({"style": style_number[image.style]} if self.styles else {}),
                        **({GROUP: group_number[image.group]} if self.group == "folder" else {}),
                    },
                )
                for image in images
            ]
            for part, images in parts.items()
        }
        return _FolderListing(files, classes, styles)

    def _parts(self) -> dict[str, list[_Image]]:
        root = self._root()
        if not (root / "train").is_dir():
            return {"train": self._list(root)}
        parts = {
            part: self._list(root / name) for part, name in PARTS.items() if (root / name).is_dir()
        }
        parts = {part: images for part, images in parts.items() if images}
        if "test" not in parts and "validation" in parts:
            parts["test"] = parts.pop("validation")
        return parts

    def _list(self, root: Path) -> list[_Image]:
        images = self._named(root)
        return [_grouped(image, root) for image in images] if self.group == "folder" else images

    def _named(self, root: Path) -> list[_Image]:
        if not self.styles:
            return [_Image(path, name, None) for path, name in class_folders(root)]
        try:
            entries = sorted(root.iterdir(), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        if stray := [entry.name for entry in entries if is_image_file(entry)]:
            raise DataError(
                f"{root} has images directly in it ({stray[0]}), but with ",
                Key("data", "styles"),
                "=true its folders are styles: put every image into one of them",
            )
        return [
            _Image(path, name, entry.name)
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".")
            for path, name in class_folders(entry)
        ]


def _grouped(image: _Image, root: Path) -> _Image:
    """An image with its parent folder as its group, which is then no class."""
    folder = image.path.parent.relative_to(root)
    above = 2 if image.style is None else 3  # levels of an image that has a class besides
    named = len(folder.parts) >= above
    group = str(folder) if folder.parts else None
    return image._replace(class_name=image.class_name if named else None, group=group)
