"""Data sets of image files: listing the files, and decoding them with one policy for bad files.

Every such data set lists its files; `write_images` decodes them. Where sizes or modes must agree,
all headers are read first, so that one error names every file with a problem before a run begins.
Transparent pixels become white, 16-bit grey becomes 8-bit, the EXIF orientation is applied, and
only the first frame of an animation is read. Every frame of a DICOM file is an image.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from harmonium.core.errors import ConfigError, DataError, Key, counted, shown
from harmonium.data.cache import Writer, digest_of, printable
from harmonium.data.datasets import DataSpec, UnsplitSpec, changed
from harmonium.data.decoding import dicom
from harmonium.data.decoding.pool import HEADS, Decoders
from harmonium.data.decoding.worker import Answer, Frames, Order, Source
from harmonium.data.images import GROUP, UNKNOWN
from harmonium.data.published_datasets import Published

ENDINGS = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm"),
    *(".png", ".ppm", ".tif", ".tiff", ".webp"),
    *dicom.ENDINGS,
)
NAMED = 5  # files that a message names; the others are counted
BROKEN = 20  # the same for files that cannot be read
CHUNK, CHUNK_BYTES = 16, 8 << 20  # images and bytes decoded at once, at most


class ImageFile(NamedTuple):
    """One image of a data set."""

    path: Path
    name: str  # what messages call it
    label: int = UNKNOWN
    factors: Mapping[str, int] = {}  # the same columns for all images
    frame: int | None = None  # of a DICOM file with several

    @property
    def source(self) -> Source:
        """What decoders read."""
        return str(self.path) if self.frame is None else (str(self.path), self.frame)


@dataclass(frozen=True)
class ImageFileSpec(DataSpec):
    """Settings of data that are image files."""

    corrupt: Literal["refuse", "skip"] = "refuse"  # files that cannot be read
    mixed: Literal["convert", "refuse", "skip"] = "convert"  # size or mode unlike most others
    depth: int = 16  # bits that 16-bit grey files use, e.g. 12 for most scanners

    def check(self) -> None:
        """Check how to treat bad files too."""
        super().check()
        if self.corrupt not in ("refuse", "skip"):
            raise ConfigError(Key("data", "corrupt"), f"={self.corrupt}: use refuse or skip")
        if self.mixed not in ("convert", "refuse", "skip"):
            raise ConfigError(Key("data", "mixed"), f"={self.mixed}: use convert, refuse or skip")
        if not 8 <= self.depth <= 16:
            raise ConfigError(
                Key("data", "depth"), f"={self.depth}: between 8 and 16 bits, e.g. 12"
            )

    def handling(self) -> dict[str, Any]:
        """The settings that say how files are read, which are part of `identity`."""
        return {"corrupt": self.corrupt, "mixed": self.mixed, "depth": self.depth}

    def order(self, channels: int) -> Order:
        """How the files are decoded."""
        return Order(size=self.size, channels=channels, depth=self.depth, fit=self.fit)


@dataclass(frozen=True)
class OwnFilesSpec(ImageFileSpec, UnsplitSpec):
    """Settings of image files of the user's own, which may be DICOM."""

    window: tuple[float, float] | None = None  # centre and width, of DICOM and 16-bit grey
    percentiles: tuple[float, float] | None = None  # instead: of each image, e.g. [1, 99]
    frames: Frames = "all"  # of DICOM files with several: every frame an image, or one of them
    group: Literal["folder", "patient"] | None = None  # images kept together: see docs/data.md

    def check(self) -> None:
        """Check the window and the percentiles too."""
        super().check()
        check_levels(self.window, self.percentiles)
        if self.frames not in get_args(Frames):
            raise ConfigError(Key("data", "frames"), f"={self.frames}: use all, first or middle")
        if self.group not in (None, "folder", "patient"):
            raise ConfigError(Key("data", "group"), f"={self.group}: use folder or patient")

    def handling(self) -> dict[str, Any]:
        """The settings that say how files are read."""
        return super().handling() | changed(self, "window", "percentiles", "frames", "group")

    def order(self, channels: int) -> Order:
        """How the files are decoded; patients are told apart by a key that is never stored."""
        how = super().order(channels)._replace(window=self.window, percentiles=self.percentiles)
        key = secrets.token_hex(32) if self.group == "patient" else ""
        return how._replace(frames=self.frames, key=key)


def check_levels(window: Any, percentiles: Any) -> None:
    """Refuse a window without width, percentiles out of order, and both at once."""
    if window is not None and not window[1] >= 1:
        raise ConfigError(
            Key("data", "window"), f"={shown(window)}: give centre and width, e.g. [40, 400]"
        )
    if percentiles is not None and not 0 <= percentiles[0] < percentiles[1] <= 100:
        raise ConfigError(
            Key("data", "percentiles"),
            f"={shown(percentiles)}: give two numbers from 0 to 100, e.g. [1, 99]",
        )
    if window is not None and percentiles is not None:
        raise ConfigError(
            *(Key("data", "window"), " and ", Key("data", "percentiles")),
            " exclude each other: leave one out",
        )


@dataclass(frozen=True)
class PublishedImageFiles(ImageFileSpec, Published):
    """A published set of image files."""

    def identity(self) -> dict[str, Any]:
        """The digest of the fetched files, and how bad files are treated."""
        return {**super().identity(), **self.handling()}


# ---- listing files -------------------------------------------------------------------------------


def class_folders(root: Path) -> list[tuple[Path, str | None]]:
    """The image files below a folder, sorted, each with its class: its top-level subfolder.

    Images directly in the folder have no class (None).
    """
    try:
        entries = sorted(root.iterdir(), key=lambda entry: entry.name)
        flat = [(entry, None) for entry in entries if is_image_file(entry)]
        below = [
            (file, entry.name)
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".")
            for file in _walk(entry)
        ]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    if flat and below:
        raise DataError(
            f"{root} has images both directly in it ({flat[0][0].name}) and in subfolders "
            f"({below[0][1]}): put all of them into class folders, or none"
        )
    return [*flat, *below]


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (path for name in sorted(files) if is_image_file(path := Path(folder, name)))


def is_image_file(path: Path) -> bool:
    """Whether a path looks like an image file; pipes and hidden files do not."""
    if path.name.startswith(".") or not path.is_file():
        return False
    return path.suffix.lower() in ENDINGS or dicom.is_dicom(path)


def unread(root: Path) -> str:
    """Counts of the files below a folder that are not images by their extension, as text.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a.png", "b.dcm", "c.nii", "d.NII", "notes"):
    ...         _ = Path(folder, name).write_text("")
    ...     unread(Path(folder))
    '2 .nii, 1 without an ending'
    """
    endings = Counter[str]()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            ending = Path(name).suffix.lower()
            if not name.startswith(".") and not is_image_file(Path(folder, name)):
                endings[printable(ending) or "without an ending"] += 1
    commonest = endings.most_common(NAMED)
    kinds = [f"{count} {ending}" for ending, count in commonest]
    more = endings.total() - sum(count for _, count in commonest)
    return ", ".join([*kinds, *([f"{more} others"] if more else [])])


def inside(root: Path, *names: str) -> Path:
    """The path `root/names`; raises DataError if the last name, which is untrusted, leaves it."""
    path = root.joinpath(*names)
    unsafe = "\0" in names[-1] or Path(names[-1]).is_absolute()
    if unsafe or not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{root} lists {names[-1]!r}, which lies outside of this folder")
    return path


def numbered(names: Iterable[str | None]) -> tuple[tuple[str, ...], dict[str | None, int]]:
    """The distinct names, sorted, and the number of each; None has the number -1.

    Names are sorted as numbers if all of them are whole numbers.

    >>> numbered(["10", "9", None, "9"])
    (('9', '10'), {None: -1, '9': 0, '10': 1})
    """
    known = {name for name in names if name is not None}
    order = sorted(known)
    if all(is_whole(name) for name in known):
        order.sort(key=int)
    return tuple(order), {None: UNKNOWN, **{name: row for row, name in enumerate(order)}}


def is_whole(text: str) -> bool:
    """Whether a text is a whole number of at most 18 digits, which fits into int64."""
    digits = text.removeprefix("-")
    return text.isascii() and digits.isdigit() and len(digits) <= 18


def listing_digest(files: Mapping[str, Sequence[ImageFile]]) -> str:
    """The sha256 over every file's part, name, label, factors, size and modification time."""
    rows = []
    for part, file in ((part, file) for part, some in files.items() for file in some):
        try:
            about = file.path.stat()
            content = [about.st_size, about.st_mtime_ns]
        except (OSError, ValueError):  # decoding will report that it cannot be read
            content = []
        rows.append([part, file.name, file.label, dict(file.factors), content])
    return digest_of(rows)


# ---- decoding them -------------------------------------------------------------------------------


def write_images(
    writer: Writer,
    files: Mapping[str, Sequence[ImageFile]],
    spec: ImageFileSpec,
    workers: int | None = None,
) -> None:
    """Decode the files of every part into the writer; raises one DataError for all bad files.

    Args:
        writer: receives the images in the order of the listing, and notes about bad files.
        files: the listing, by part.
        spec: size, channels, and how bad files are treated.
        workers: number of decoding processes, by default one per core; the result is the same.
    """
    writer.expected = sum(map(len, files.values()))
    _Task(writer, spec, writer.expected).run(files, workers)


_Headed = tuple[tuple[str, ImageFile], Answer]  # a file of a part, and what its header says


@dataclass
class _Task:
    """The decoding of one data set, and what is known about its files so far."""

    writer: Writer
    spec: ImageFileSpec
    count: int
    bad: list[tuple[ImageFile, str]] = field(default_factory=list)  # unreadable, with the reason
    kinds: dict[str, list[ImageFile]] = field(default_factory=dict)  # files written, by image kind
    groups: dict[str, int] = field(default_factory=dict)  # number of each patient, by hash
    alone: int = 0  # images of no known patient, where patients are kept together

    def run(self, files: Mapping[str, Sequence[ImageFile]], workers: int | None) -> None:
        rows = [(part, file) for part, some in files.items() for file in some]
        with Decoders(workers) as decoders:
            rows = self._framed(rows, decoders)
            shape = None
            if self.spec.size is None or self.spec.mixed != "convert":
                rows, shape = self._sift(rows, decoders)
            self._decode(rows, shape, decoders)
        self._report()

    def _framed(
        self, rows: list[tuple[str, ImageFile]], decoders: Decoders
    ) -> list[tuple[str, ImageFile]]:
        """A row for each image: a file may have several frames."""
        frames: Frames = getattr(self.spec, "frames", "first")
        sources = decoders.sources([str(file.path) for _, file in rows], frames)
        framed = [
            (part, file if isinstance(source, str) else _frame_of(file, source[1]))
            for (part, file), some in zip(rows, sources, strict=True)
            for source in some
        ]
        self.count = self.writer.expected = len(framed)
        return framed

    @property
    def channels(self) -> int:
        about = self.spec.about
        usual = about.shape[2] if about and about.shape else 3
        return self.spec.channels or usual

    # ---- before decoding: checks on the files' headers ----

    def _sift(
        self, rows: list[tuple[str, ImageFile]], decoders: Decoders
    ) -> tuple[list[tuple[str, ImageFile]], tuple[int, int] | None]:
        """The files with readable headers that are alike, and their size unless it is scaled.

        Files of another size or mode than most raise an error or are left out with a note.
        """
        readable = self._read_heads(rows, decoders)
        if not readable:
            return [], None
        problems: list[list[str | Key]] = []
        shape = None
        if self.spec.size is None:
            shape = _most_common(head.size for _, head in readable)
            readable = self._alike(readable, "size", shape, problems)
        if self.spec.mixed != "convert":
            kind = _most_common(head.kind for _, head in readable)
            readable = self._alike(readable, "kind", kind, problems)
        if problems:
            if self.bad:
                problems.append([self._unreadable()])
            first, *others = problems
            raise DataError(*first, *(part for other in others for part in (". ", *other)))
        return [row for row, _ in readable], shape

    def _read_heads(self, rows: list[tuple[str, ImageFile]], decoders: Decoders) -> list[_Headed]:
        """The files whose headers can be read, with them; the others are added to `bad`."""
        paths = list(dict.fromkeys(str(file.path) for _, file in rows))
        heads = [head for some in decoders.run(paths, Order(head=True), HEADS) for head in some]
        of = dict(zip(paths, heads, strict=True))
        pairs = [((part, file), of[str(file.path)]) for part, file in rows]
        self.bad += [(file, head.error) for (_, file), head in pairs if head.error]
        return [(row, head) for row, head in pairs if not head.error]

    def _alike(
        self,
        files: list[_Headed],
        what: Literal["size", "kind"],
        usual: Any,
        problems: list[list[str | Key]],
    ) -> list[_Headed]:
        """The files with the usual size or kind; the others become a problem or a note."""
        odd = [(file, head) for (_, file), head in files if getattr(head, what) != usual]
        if not odd:
            return files
        named = _named([(file, _words(getattr(head, what))) for file, head in odd])
        note = f"{len(odd)} of {self.count} images differ in {_SAID[what]} from most, which are "
        note += f"{_words(usual)}: {named}"
        if self.spec.mixed == "skip":
            self.writer.notes.append(f"left out: {note}")
        elif what == "size":
            problems.append(
                [
                    f"{note}. Set ",
                    Key("data", "size"),
                    f"={min(usual)} to scale all to one size, or leave the odd ones out with ",
                    Key("data", "mixed"),
                    "=skip",
                ]
            )
        else:
            problems.append(
                [
                    f"{note}. Bring them to one mode with ",
                    Key("data", "mixed"),
                    "=convert, or leave the odd ones out with ",
                    Key("data", "mixed"),
                    "=skip",
                ]
            )
        return [(row, head) for row, head in files if getattr(head, what) == usual]

    # ---- decoding ----

    def _decode(
        self, rows: list[tuple[str, ImageFile]], shape: tuple[int, int] | None, decoders: Decoders
    ) -> None:
        """Decode and write all images, a chunk at a time."""
        side = self.spec.size
        area = side * side if side else shape[0] * shape[1] if shape else 1
        chunk = max(1, min(CHUNK, CHUNK_BYTES // (area * self.channels)))
        order, start = self.spec.order(self.channels), 0
        for answers in decoders.run([file.source for _, file in rows], order, chunk):
            self._write(rows[start : start + len(answers)], answers, shape)
            start += len(answers)

    def _write(
        self,
        rows: list[tuple[str, ImageFile]],
        answers: list[Answer],
        shape: tuple[int, int] | None,
    ) -> None:
        pieces: dict[str, list[tuple[ImageFile, Answer]]] = {}
        for (part, file), answer in zip(rows, answers, strict=True):
            if answer.error:
                self.bad.append((file, answer.error))
            elif shape and answer.size != shape:
                self.bad.append((file, f"changed to {_words(answer.size)} while it was read"))
            else:
                self.kinds.setdefault(answer.kind, []).append(file)
                pieces.setdefault(part, []).append((file, answer))
        for part, pairs in pieces.items():
            pixels = np.stack([answer.pixels for _, answer in pairs])  # type: ignore[misc]
            labels = np.array([file.label for file, _ in pairs], np.int64)
            factors = {
                name: np.array([file.factors[name] for file, _ in pairs], np.int64)
                for name in pairs[0][0].factors
            }
            if getattr(self.spec, "group", None) == "patient":
                factors[GROUP] = np.array([self._number(answer.group) for _, answer in pairs])
            self.writer.append(part, pixels, labels, factors)

    def _number(self, group: str) -> int:
        """The number of a patient, in the order in which files are read; -1: not known."""
        self.alone += not group
        return self.groups.setdefault(group, len(self.groups)) if group else UNKNOWN

    # ---- afterwards ----

    def _report(self) -> None:
        """Raise an error for unreadable files or note them; note which images were converted."""
        if others := [row for row in self.bad if row[1] == dicom.NO_IMAGE]:
            self.bad = [row for row in self.bad if row[1] != dicom.NO_IMAGE]
            self.count -= len(others)
            self.writer.notes.append(
                f"{counted(len(others), 'DICOM file')} without an image, such as reports, left out"
            )
        if self.bad:
            if self.spec.corrupt == "refuse":
                raise DataError(
                    f"{self._unreadable()}. Repair or remove them, or leave them out with ",
                    Key("data", "corrupt"),
                    "=skip",
                )
            if len(self.bad) == self.count:
                raise DataError(self._unreadable())
            self.writer.notes.append(f"left out: {self._unreadable()}")
        if self.alone:
            self.writer.notes.append(
                f"{self.alone} of {self.count} images have no PatientID: each is a group of its own"
            )
        order = self.spec.order(self.channels)
        ranged = order.window is not None or order.percentiles is not None
        if (wide := len(self.kinds.get("16-bit grey", ()))) and not ranged:
            self.writer.notes.append(
                f"{wide} of {self.count} images have 16-bit grey, read as data.depth="
                f"{self.spec.depth} bits: set it lower if they use fewer bits, e.g. 12"
            )
        if "CMYK" in self.kinds and self.channels == 4 and len(self.kinds) > 1:
            raise DataError(
                f"{len(self.kinds['CMYK'])} of {self.count} images are CMYK and the others are "
                "not, so that their four channels differ in meaning: use ",
                *(Key("data", "channels"), "=3, or ", Key("data", "mixed"), "=skip"),
            )
        native = {1: "grey", 3: "colour"}.get(self.channels, "with transparency")
        odd = {kind: some for kind, some in self.kinds.items() if kind != native}
        if odd and len(self.kinds) > 1:
            counts = ", ".join(f"{len(some)} {kind}" for kind, some in odd.items())
            named = _named([(file, kind) for kind, some in odd.items() for file in some])
            self.writer.notes.append(
                f"converted to {native}: {counts} among {self.count} images: {named}"
            )

    def _unreadable(self) -> str:
        return f"{len(self.bad)} of {self.count} images cannot be read: {_named(self.bad, BROKEN)}"


_SAID = {"size": "size", "kind": "mode"}


def _frame_of(file: ImageFile, number: int) -> ImageFile:
    return file._replace(name=f"{file.name}, frame {number + 1}", frame=number)


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _words(value: str | tuple[int, int]) -> str:
    return value if isinstance(value, str) else f"{value[0]}x{value[1]}"


def _named(files: Sequence[tuple[ImageFile, str]], most: int = NAMED) -> str:
    """The first `most` files by name, each with its remark, and how many more there are."""
    named = ", ".join(f"{printable(file.name)} ({what})" for file, what in files[:most])
    return f"{named} and {len(files) - most} more" if len(files) > most else named
