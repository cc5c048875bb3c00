"""Pictures in a folder, as they come from a camera or another program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from harmonium.data.datasets import UnsplitSpec, check_at_least, datasets
from harmonium.data.images import UNKNOWN, Pixels
from harmonium.data.store import Writer, digest_of
from harmonium.errors import ConfigError, DataError

ENDINGS = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm"),
    *(".png", ".ppm", ".tif", ".tiff", ".webp"),
)
CHUNK = 256  # pictures decoded at once
NAMED = 5  # unreadable files that a message names; the others it counts

_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # grey with 16 bits; `I` is how some arrive


class _File(NamedTuple):
    path: Path
    class_name: str | None


class _Bad(NamedTuple):
    path: Path
    reason: str


@datasets("folder")
@dataclass(frozen=True)
class Folder(UnsplitSpec):
    """A folder of picture files.

    Subfolders are classes; pictures lying directly in the folder have no labels. With `train/`
    and `test/` inside, each is such a folder; `val/` is the validation part and then replaces the
    share `validation`, and where there is no `test/` it is the test part. Transparent pixels are
    laid on white, 16-bit grey is brought to 8 bits, the camera's rotation is applied, and only the
    first frame of a film is read.
    """

    path: str = ""  # the folder
    size: int | None = None  # shorter side scaled to this, then the centre cut out as a square
    channels: int = 3  # 3: colour, 1: grey
    corrupt: Literal["refuse", "skip"] = "refuse"  # what to do about files that cannot be read

    def check(self) -> None:
        """Refuse a path where no folder is."""
        super().check()
        if not self.path:
            raise ConfigError("data set 'folder' needs data.path=FOLDER")
        if self.size is not None:
            check_at_least("size", self.size, 1)
        if self.channels not in (1, 3):
            raise ConfigError(f"data.channels={self.channels}: use 1 (grey) or 3 (colour)")
        if self.corrupt not in ("refuse", "skip"):
            raise ConfigError(f"data.corrupt={self.corrupt}: use refuse or skip")
        if self._root().is_file():
            raise DataError(f"data.path={self.path} is a file: for an .npz archive use data=npz")
        if not self._root().is_dir():
            raise DataError(f"data.path={self.path}: there is no such folder")

    def _root(self) -> Path:
        return Path(self.path).expanduser().resolve()

    def identity(self) -> dict[str, Any]:
        """Every file with its size and time of change, and what is done to it."""
        root, parts = self._root(), self._parts()
        if not parts.get("train"):
            raise DataError(f"{self.path} holds no pictures ({' '.join(ENDINGS)})")
        listing = []
        for part, file in ((part, file) for part, files in parts.items() for file in files):
            try:
                about = file.path.stat()
            except OSError as error:
                raise DataError(f"{file.path} cannot be read: {error.strerror}") from error
            name = file.path.relative_to(root).as_posix()
            listing.append([part, name, about.st_size, about.st_mtime_ns])
        treatment = {"size": self.size, "channels": self.channels, "corrupt": self.corrupt}
        return {"path": str(root), "files": digest_of(listing), **treatment}

    def _parts(self) -> dict[str, list[_File]]:
        root = self._root()
        try:
            if not (root / "train").is_dir():
                return {"train": _list(root)}
            names = {"train": "train", "validation": "val", "test": "test"}
            found = {part: _list(root / name) for part, name in names.items()}
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        found = {part: files for part, files in found.items() if files}
        if "test" not in found and "validation" in found:
            found["test"] = found.pop("validation")
        return found

    def decode(self, writer: Writer) -> Sequence[str]:
        """Read every file once; nothing is kept in memory but the piece being written."""
        parts = self._parts()
        known = sorted(
            {file.class_name for files in parts.values() for file in files} - {None}, key=str
        )
        number = {None: UNKNOWN, **{name: row for row, name in enumerate(known)}}
        bad: list[_Bad] = []
        first: tuple[Path, Pixels] | None = None
        for part, files in parts.items():
            for chunk in self._read(files):
                good = []
                for file, picture in chunk:
                    if isinstance(picture, _Bad):
                        bad.append(picture)
                        continue
                    first = first or (file.path, picture)
                    self._same_size(first, (file.path, picture))
                    good.append((file, picture))
                if good:
                    labels = np.array([number[file.class_name] for file, _ in good], np.int64)
                    writer.append(part, np.stack([picture for _, picture in good]), labels)
        self._report(bad, sum(map(len, parts.values())), writer)
        return tuple(str(name) for name in known)

    def _read(self, files: list[_File]) -> Iterator[list[tuple[_File, Pixels | _Bad]]]:
        """The files in order, piece by piece; decoding runs outside Python's lock."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(files), CHUNK):
                chunk = files[start : start + CHUNK]
                pictures = pool.map(self._picture, [file.path for file in chunk])
                yield list(zip(chunk, pictures, strict=True))

    def _picture(self, path: Path) -> Pixels | _Bad:
        try:
            with Image.open(path) as image:
                image.load()
                return read_picture(image, self.size, self.channels)
        except Exception as error:  # noqa: BLE001  (damaged files make decoders raise anything)
            return _Bad(path, str(error) or type(error).__name__)

    def _same_size(self, one: tuple[Path, Pixels], other: tuple[Path, Pixels]) -> None:
        if one[1].shape == other[1].shape:
            return
        root = self._root()
        sizes = " and ".join(
            f"{path.relative_to(root)} {p.shape[1]}x{p.shape[0]}" for path, p in (one, other)
        )
        shorter = min(*one[1].shape[:2], *other[1].shape[:2])
        raise DataError(
            f"the pictures of {self.path} differ in size ({sizes}): set data.size={shorter}"
        )

    def _report(self, bad: list[_Bad], count: int, writer: Writer) -> None:
        """Refuse unreadable files, or note that they were left out."""
        if not bad:
            return
        root = self._root()
        named = ", ".join(f"{b.path.relative_to(root)} ({_short(b.reason)})" for b in bad[:NAMED])
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        what = f"{len(bad)} of {count} pictures cannot be read: {named}{more}"
        if self.corrupt == "refuse":
            raise DataError(
                f"{what}. Mend or remove them, or leave them out with data.corrupt=skip"
            )
        if len(bad) == count:
            raise DataError(what)
        writer.notes.append(f"left out: {what}")


def read_picture(image: Image.Image, size: int | None, channels: int) -> Pixels:
    """An image of any mode as (height, width, channels) bytes, scaled and cropped if asked."""
    image = ImageOps.exif_transpose(image)
    if image.mode in _WIDE:
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode == "F":
        raise DataError("its values are floating point, whose range is not known")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    image = image.convert("L" if channels == 1 else "RGB")
    if size is not None:
        image = _square(image, size)
    pixels = np.asarray(image)
    return pixels[..., None] if channels == 1 else pixels


def _square(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to `size`, then the middle; one resampling for both."""
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    box = (left, top, left + shorter, top + shorter)
    if image.size == (size, size):
        return image
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _list(root: Path) -> list[_File]:
    """The pictures below a folder, sorted; the first subfolder on the way is the class."""
    if not root.is_dir():
        return []
    entries = sorted(root.iterdir(), key=lambda entry: entry.name)
    flat = [_File(entry, None) for entry in entries if _is_picture(entry)]
    below = [
        _File(file, entry.name)
        for entry in entries
        if entry.is_dir() and not entry.name.startswith(".")
        for file in _walk(entry)
    ]
    if flat and below:
        raise DataError(
            f"{root} has pictures both directly in it ({flat[0].path.name}) and in subfolders "
            f"({below[0].class_name}): put all of them into class folders, or none"
        )
    return flat or below


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (path for name in sorted(files) if _is_picture(path := Path(folder, name)))


def _is_picture(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return not hidden and path.suffix.lower() in ENDINGS and path.is_file()


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= 80 else line[:77] + "..."
