"""Where the images come from that an encoder is used on: a folder, files, a table or an archive.

Every image has a name that is relative, so that results can be passed on without saying where the
images lie. The images of a folder are sorted; those of a table or an archive keep their order.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from harmonium.core.errors import DataError, HarmoniumError, counted
from harmonium.data.cache import digest_of, printable
from harmonium.data.decoding.conversion import shaped
from harmonium.data.decoding.image_files import ImageFile, listing_digest
from harmonium.data.decoding.pool import Decoders
from harmonium.data.decoding.worker import Frames, Order, Source
from harmonium.data.images import UNKNOWN, Images, Pixels
from harmonium.data.inspection.listing import file_column
from harmonium.data.sets.npz import Npz
from harmonium.data.sets.table import TableRow, read_table
from harmonium.report.figure import displayed
from harmonium.runs.export import DECODED, LoadedEncoder, image_files

TABLES = (".csv", ".tsv")
ARCHIVE = ".npz"
PATH = "path"  # the column of a table that names the files


class Piece(NamedTuple):
    """Consecutive images of a source."""

    start: int  # the row of the first
    pixels: Pixels  # (n, height, width, channels); black where an image cannot be read
    errors: dict[int, str]  # why images cannot be read, by their row


@dataclass(frozen=True, eq=False)
class ImageSource(ABC):
    """Images in a fixed order, which are decoded when they are needed.

    Attributes:
        names: what the images are called, all different.
        digest: SHA-256 of what identifies the images, such as the files' sizes and times.
        classes: the class of each image as far as the source names it; "" where it does not.
        notes: what users should know.
    """

    names: tuple[str, ...]
    digest: str = ""
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of images."""
        return len(self.names)

    @property
    def files(self) -> tuple[str, ...]:
        """The name of the file of each image, which is the image's own unless it has frames."""
        return self.names

    @abstractmethod
    def pieces(self, encoder: LoadedEncoder, start: int, size: int) -> Iterator[Piece]:
        """The images from row `start` on as an encoder takes them, `size` at a time."""

    @abstractmethod
    def thumbnails(self, rows: Sequence[int], side: int) -> list[Pixels | None]:
        """Some images in colour, scaled to cover a square; None where one cannot be read."""

    @abstractmethod
    def subset(self, rows: Sequence[int]) -> ImageSource:
        """Some of the images, in this order."""

    def _named(self, rows: Sequence[int]) -> Self:
        """The same source with the names and classes of some of its images."""
        names = [self.names[row] for row in rows]
        classes = tuple(self.classes[row] for row in rows) if self.classes else ()
        digest = digest_of([self.digest, names])
        return replace(self, names=tuple(names), classes=classes, digest=digest, notes=())


@dataclass(frozen=True, eq=False)
class FileSource(ImageSource):
    """Image files, each of which is an image, but for DICOM files with several frames."""

    paths: tuple[Source, ...] = field(default=(), repr=False)
    root: Path = Path()  # the folder from which names start
    frames: Frames = "all"

    @property
    def files(self) -> tuple[str, ...]:
        """See `ImageSource`."""
        return tuple(_name(Path(file_of(path)), self.root) for path in self.paths)

    def pieces(self, encoder: LoadedEncoder, start: int, size: int) -> Iterator[Piece]:
        """See `ImageSource`."""
        shape, paths = (*encoder.size, encoder.channels), self.paths[start:]
        pixels, errors = _blank(min(size, len(paths)), shape), dict[int, str]()
        filled = 0
        with Decoders() as decoders:
            for answers in decoders.run(paths, encoder.order(), DECODED):
                for answer in answers:
                    if answer.error or answer.pixels is None:
                        errors[start + filled] = answer.error or "no pixels"
                    else:
                        pixels[filled] = answer.pixels
                    filled += 1
                    if filled == len(pixels):
                        yield Piece(start, pixels, errors)
                        start, filled = start + filled, 0
                        left = len(self.paths) - start
                        pixels, errors = _blank(min(size, left), shape), {}

    def thumbnails(self, rows: Sequence[int], side: int) -> list[Pixels | None]:
        """See `ImageSource`."""
        paths = [self.paths[row] for row in rows]
        with Decoders(0 if len(paths) < DECODED else None) as decoders:
            order = Order(size=side, channels=3, frames=self.frames)
            answers = decoders.run(paths, order, DECODED)
            return [None if one.error else one.pixels for some in answers for one in some]

    def subset(self, rows: Sequence[int]) -> ImageSource:
        """See `ImageSource`."""
        return replace(self._named(rows), paths=tuple(self.paths[row] for row in rows))


@dataclass(frozen=True, eq=False)
class ArraySource(ImageSource):
    """The images of an archive, mapped from the cache of decoded data."""

    parts: tuple[Images, ...] = field(default=(), repr=False)
    rows: tuple[int, ...] = field(default=(), repr=False)  # among all images of the parts

    def pieces(self, encoder: LoadedEncoder, start: int, size: int) -> Iterator[Piece]:
        """See `ImageSource`; the encoder itself resizes these."""
        for begin in range(start, len(self), size):
            yield Piece(begin, self._pixels(self.rows[begin : begin + size]), {})

    def thumbnails(self, rows: Sequence[int], side: int) -> list[Pixels | None]:
        """See `ImageSource`."""
        return list(shaped(displayed(self._pixels([self.rows[row] for row in rows])), side, 3))

    def subset(self, rows: Sequence[int]) -> ImageSource:
        """See `ImageSource`."""
        return replace(self._named(rows), rows=tuple(self.rows[row] for row in rows))

    def _pixels(self, rows: Sequence[int]) -> Pixels:
        ends = np.cumsum([len(part) for part in self.parts])
        place = np.searchsorted(ends, rows, side="right")
        pixels = np.empty((len(rows), *self.parts[0].shape), np.uint8)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(place == number)
            pixels[mine] = part.batch(np.asarray(rows, np.int64)[mine] - ends[number] + len(part))
        return pixels


def open_images(
    *places: str | Path | ImageSource, column: str = PATH, frames: Frames = "all"
) -> ImageSource:
    """The images at a place, or at several.

    Args:
        places: a folder, with its subfolders; image files and folders; a table (`.csv`, `.tsv`)
            with a column of paths; or an archive (`.npz`).
        column: of a table, the column that names the files; relative paths start at its folder.
        frames: which frames of a DICOM file are images; an encoder's `order` says which.
    """
    if len(places) == 1 and isinstance(places[0], ImageSource):
        return places[0]
    paths = [Path(str(place)).expanduser() for place in places]
    if not paths:
        raise DataError("name the images: a folder, files, a .csv table or an .npz archive")
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        if len(paths) > 1 and path.suffix.lower() in (*TABLES, ARCHIVE) and path.is_file():
            raise DataError(f"{path} must be given alone, not with other images")
    first = paths[0]
    if first.is_file() and first.suffix.lower() == ARCHIVE:
        return _archive(first)
    if first.is_file() and first.suffix.lower() in TABLES:
        return _table(first, column, frames)
    found = [one.absolute() for path in paths for one in image_files(path)]
    root = first.absolute() if len(paths) == 1 and first.is_dir() else _common(paths)
    return _files(root, sorted(set(found)), frames)


def _common(paths: Sequence[Path]) -> Path:
    """The deepest folder that holds files and folders; itself never one of the folders."""
    return Path(os.path.commonpath([path.absolute().parent for path in paths]))


def file_source(paths: Sequence[Path], frames: Frames = "all") -> FileSource:
    """Files in the order in which they are given, one of them perhaps several times."""
    if not paths:
        raise DataError("there are no images")
    absolute = [path.absolute() for path in paths]
    source = _files(_common(absolute), absolute, frames)
    if len(source) > len(paths):
        several = next(name for name in source.names if name not in source.files)
        raise DataError(f"{several}: the file has several frames, but an image a file is needed")
    return source


def file_of(source: Source) -> str:
    """The file of an image."""
    return source if isinstance(source, str) else source[0]


def _name(path: Path, root: Path) -> str:
    return printable(Path(os.path.relpath(path, root)).as_posix())


def _files(
    root: Path, paths: Sequence[Path], frames: Frames, notes: Sequence[str] = ()
) -> FileSource:
    """Files as a source, named from a folder on."""
    with Decoders() as decoders:
        sources = decoders.sources([str(path) for path in paths], frames)
    names, files = list[str](), list[ImageFile]()
    for path, some in zip(paths, sources, strict=True):
        name = _name(path, root)
        for one in some:
            names.append(name if isinstance(one, str) else f"{name}, frame {one[1] + 1}")
            files.append(ImageFile(path, names[-1]))
    return FileSource(
        names=tuple(names),
        digest=listing_digest({"": files}),
        classes=tuple(name.partition("/")[0] if "/" in name else "" for name in names),
        notes=tuple(notes),
        paths=tuple(one for some in sources for one in some),
        root=root,
        frames=frames,
    )


def _table(path: Path, column: str, frames: Frames) -> FileSource:
    """The files that a table lists, each once, in its order."""
    folder = path.absolute().parent
    rows, column = rows_of(path, column)
    if empty := [str(row.line) for row in rows if not row.values[column]]:
        raise DataError(f"{path}: no path in {counted(len(empty), 'line')}, e.g. line {empty[0]}")
    listed = [Path(os.path.normpath(folder / row.values[column])) for row in rows]
    paths = list(dict.fromkeys(listed))
    again = len(listed) - len(paths)
    repeated = f"{counted(again, 'line')} of {path} name an image again, which is taken once"
    notes = [repeated] if again else []
    gone = [one for one in paths if not os.path.exists(one)]
    if 2 * len(gone) > len(paths):
        text = (
            f"{len(gone):,} of {counted(len(paths), 'image')} of {path} are not there, e.g. "
            f"{gone[0]}: relative paths in a table start at the table's folder"
        )
        if len(gone) == len(paths):
            raise DataError(text)
        notes.append(text)
    root = folder if all(one.is_relative_to(folder) for one in paths) else _common(paths)
    return _files(root, paths, frames, notes)


def rows_of(path: Path, column: str) -> tuple[list[TableRow], str]:
    """The lines of a table, and its column of files.

    That is the one asked for; in a table without the usual one, the one that `inspect` finds.
    """
    advice = [": name the column of image files with --path-column"]
    rows = read_table(path, None if column == PATH else column, advice)
    found = column if column != PATH else file_column(rows)
    if found is None:
        raise DataError(f"{path} has no column '{PATH}', only {', '.join(rows[0].values)}", *advice)
    return rows, found


def _archive(path: Path) -> ArraySource:
    """The images of an archive, part by part."""
    try:
        stored = Npz(path=str(path)).stored()
    except HarmoniumError as error:
        raise DataError(str(error)) from None
    names, classes = list[str](), list[str]()
    for part, images in stored.parts.items():
        before = f"{part}/" if len(stored.parts) > 1 else ""
        width = len(str(len(images) - 1))
        names += [f"{before}{row:0{width}d}" for row in range(len(images))]
        labels = images.labels.tolist()
        classes += ["" if one == UNKNOWN else stored.classes[one] for one in labels]
    return ArraySource(
        names=tuple(names),
        digest=stored.digest,
        classes=tuple(classes),
        notes=stored.notes,
        parts=tuple(stored.parts.values()),
        rows=tuple(range(len(names))),
    )


def _blank(count: int, shape: tuple[int, ...]) -> Pixels:
    return np.zeros((count, *shape), np.uint8)
