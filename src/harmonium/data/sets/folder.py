"""Images in a folder, as they come from a camera or another program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harmonium.core.errors import ConfigError, DataError, Key
from harmonium.data.cache import Writer
from harmonium.data.datasets import UnsplitSpec, datasets
from harmonium.data.decoding.image_files import (
    ENDINGS,
    File,
    ImageFileSpec,
    class_folders,
    is_image_file,
    listing_digest,
    numbered,
    unread,
    write_images,
)

PARTS = {"train": "train", "validation": "val", "test": "test"}  # and what their folders are called


class _Found(NamedTuple):
    path: Path
    class_name: str | None
    style: str | None


class _Listing(NamedTuple):
    files: dict[str, list[File]]
    classes: tuple[str, ...]
    styles: tuple[str, ...]


@datasets("folder")
@dataclass(frozen=True)
class Folder(ImageFileSpec, UnsplitSpec):
    """A folder of image files.

    Subfolders are classes; images lying directly in the folder have no labels. With `styles` the
    first subfolder is a style and the second, if there is one, the class. With `train/` and `test/`
    inside, each is such a folder; `val/` is the validation part and then replaces the share
    `validation`, and where there is no `test/` it is the test part. Transparent pixels are laid on
    white, 16-bit grey is brought to 8 bits, the camera's rotation is applied, and only the first
    frame of a film is read.
    """

    path: str = ""  # the folder
    styles: bool = False  # the first level of folders is a style, the second the class
    channels: int = 3  # 3: colour, 1: grey

    def check(self) -> None:
        """Refuse a path where no folder is."""
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
        """Every file with its size and time of change, and what is done to it."""
        files = listing_digest(self._listing().files)
        return {"path": str(self._root()), "files": files, **self.handling()}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Read every file once."""
        listing = self._listing()
        if self.styles:
            writer.names["style"] = listing.styles
        write_images(writer, listing.files, self)
        if others := unread(self._root()):
            writer.notes.append(f"{self.path} also has files that are not read as images: {others}")
        return listing.classes

    def _listing(self) -> _Listing:
        found = self._parts()
        everything = [one for some in found.values() for one in some]
        if not found.get("train"):
            others = unread(self._root())
            beside = f", but {others}, which are not read: convert them first" if others else ""
            raise DataError(f"{self.path} holds no images ({' '.join(ENDINGS)}){beside}")
        classes, class_number = numbered(one.class_name for one in everything)
        styles, style_number = numbered(one.style for one in everything)
        root = self._root()
        files = {
            part: [
                File(
                    one.path,
                    str(one.path.relative_to(root)),
                    class_number[one.class_name],
                    {"style": style_number[one.style]} if self.styles else {},
                )
                for one in some
            ]
            for part, some in found.items()
        }
        return _Listing(files, classes, styles)

    def _parts(self) -> dict[str, list[_Found]]:
        root = self._root()
        if not (root / "train").is_dir():
            return {"train": self._list(root)}
        found = {
            part: self._list(root / name) for part, name in PARTS.items() if (root / name).is_dir()
        }
        found = {part: some for part, some in found.items() if some}
        if "test" not in found and "validation" in found:
            found["test"] = found.pop("validation")
        return found

    def _list(self, root: Path) -> list[_Found]:
        if not self.styles:
            return [_Found(path, name, None) for path, name in class_folders(root)]
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
            _Found(path, name, entry.name)
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".")
            for path, name in class_folders(entry)
        ]
