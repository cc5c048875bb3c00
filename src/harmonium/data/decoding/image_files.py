"""Data sets made of image files: one listing, decoded once, with one way to treat odd files.

Every such set lists its files; `write_pictures` does the rest. Heads are read first where sizes or
modes have to agree, so that everything that is wrong with the files is said in one line before any
run begins. Transparent pixels are laid on white, 16-bit grey is brought to 8 bits, the camera's
rotation is applied, and only the first frame of a film is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from harmonium.core.errors import ConfigError, DataError, Key
from harmonium.data.cache import Writer, digest_of, printable
from harmonium.data.datasets import DataSpec
from harmonium.data.decoding.pool import Decoders
from harmonium.data.decoding.worker import Answer, Order
from harmonium.data.images import UNKNOWN
from harmonium.data.published import Published

ENDINGS = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pgm"),
    *(".png", ".ppm", ".tif", ".tiff", ".webp"),
)
NAMED = 5  # files that a message names; the others it counts
BROKEN = 20  # the same of files that cannot be read
HEADS = 256  # files whose heads are read at once
CHUNK, CHUNK_BYTES = 16, 8 << 20  # images decoded at once, at most so many of either


class File(NamedTuple):
    """One image of a data set."""

    path: Path
    name: str  # what messages call it
    label: int = UNKNOWN
    factors: Mapping[str, int] = {}  # the same columns for all images


@dataclass(frozen=True)
class ImageFileSpec(DataSpec):
    """Settings of data that are image files."""

    corrupt: Literal["refuse", "skip"] = "refuse"  # files that cannot be read
    mixed: Literal["convert", "refuse", "skip"] = "convert"  # size or mode unlike most others
    depth: int = 16  # bits that 16-bit grey files use, e.g. 12 for most scanners

    def check(self) -> None:
        """Refuse what means nothing."""
        super().check()
        if self.corrupt not in ("refuse", "skip"):
            raise ConfigError(Key("data", "corrupt"), f"={self.corrupt}: use refuse or skip")
        if self.mixed not in ("convert", "refuse", "skip"):
            raise ConfigError(Key("data", "mixed"), f"={self.mixed}: use convert, refuse or skip")
        if not 8 <= self.depth <= 16:
            raise ConfigError(
                Key("data", "depth"), f"={self.depth}: between 8 and 16 bits, e.g. 12"
            )

    def handling(self) -> dict[str, str | int]:
        """How files are read: part of the identity of the content."""
        return {"corrupt": self.corrupt, "mixed": self.mixed, "depth": self.depth}


@dataclass(frozen=True)
class PublishedImageFiles(ImageFileSpec, Published):
    """A published set of image files."""

    def identity(self) -> dict[str, Any]:
        """The sums of the fetched files, and what is done about odd ones."""
        return {**super().identity(), **self.handling()}


# ---- listing files -------------------------------------------------------------------------------


def class_folders(root: Path) -> list[tuple[Path, str | None]]:
    """The images below a folder, sorted, each with its class: the first subfolder on the way.

    Images that lie directly in the folder have no class.
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
    hidden = path.name.startswith(".")
    return not hidden and path.suffix.lower() in ENDINGS and path.is_file()


def unread(root: Path) -> str:
    """The files below a folder that are no images by their endings, counted; empty: none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a.png", "b.dcm", "c.DCM", "notes"):
    ...         _ = Path(folder, name).write_text("")
    ...     unread(Path(folder))
    '2 .dcm, 1 without an ending'
    """
    found = Counter[str]()
    for _, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            ending = Path(name).suffix.lower()
            if not name.startswith(".") and ending not in ENDINGS:
                found[printable(ending) or "without an ending"] += 1
    kinds = [f"{count} {ending}" for ending, count in found.most_common(NAMED)]
    more = sum(found.values()) - sum(count for _, count in found.most_common(NAMED))
    return ", ".join([*kinds, *([f"{more} others"] if more else [])])


def inside(root: Path, *names: str) -> Path:
    """A path below `root` whose last part comes from a list that anybody may have written."""
    path = root.joinpath(*names)
    unsafe = "\0" in names[-1] or Path(names[-1]).is_absolute()
    if unsafe or not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{root} lists {names[-1]!r}, which lies outside of it: refused")
    return path


def numbered(names: Iterable[str | None]) -> tuple[tuple[str, ...], dict[str | None, int]]:
    """The different names, sorted, and the number of each; None has the number -1.

    Names that are all whole numbers are sorted as numbers.

    >>> numbered(["10", "9", None, "9"])
    (('9', '10'), {None: -1, '9': 0, '10': 1})
    """
    known = {name for name in names if name is not None}
    order = sorted(known)
    if all(is_whole(name) for name in known):
        order.sort(key=int)
    return tuple(order), {None: UNKNOWN, **{name: row for row, name in enumerate(order)}}


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, and one that fits a column."""
    digits = text.removeprefix("-")
    return text.isascii() and digits.isdigit() and len(digits) <= 18


def listing_digest(files: Mapping[str, Sequence[File]]) -> str:
    """The sha256 over every file's part, name, columns, size and time of change."""
    rows = []
    for part, file in ((part, file) for part, some in files.items() for file in some):
        try:
            about = file.path.stat()
            content = [about.st_size, about.st_mtime_ns]
        except (OSError, ValueError):  # it will count as a file that cannot be read
            content = []
        rows.append([part, file.name, file.label, dict(file.factors), content])
    return digest_of(rows)


# ---- decoding them -------------------------------------------------------------------------------


def write_images(
    writer: Writer,
    files: Mapping[str, Sequence[File]],
    spec: ImageFileSpec,
    workers: int | None = None,
) -> None:
    """Decode all files of every part into the writer, or say in one line what is wrong with them.

    Args:
        writer: receives the images in the order of the listing, and notes about odd ones.
        files: the listing, by part.
        spec: size, channels, and what is done about odd files.
        workers: how many processes decode; as many as there are cores unless told. Changes nothing.
    """
    writer.expected = sum(map(len, files.values()))
    _Task(writer, spec, writer.expected).run(files, workers)


@dataclass
class _Task:
    """The decoding of one data set: what was found out about its files so far."""

    writer: Writer
    spec: ImageFileSpec
    count: int
    bad: list[tuple[File, str]] = field(default_factory=list)  # unreadable, with the reason
    kinds: dict[str, list[File]] = field(default_factory=dict)  # of the images written

    def run(self, files: Mapping[str, Sequence[File]], workers: int | None) -> None:
        rows = [(part, file) for part, some in files.items() for file in some]
        with Decoders(workers) as decoders:
            shape = None
            if self.spec.size is None or self.spec.mixed != "convert":
                rows, shape = self._sift(rows, decoders)
            self._decode(rows, shape, decoders)
        self._report()

    @property
    def channels(self) -> int:
        about = self.spec.about
        usual = about.shape[2] if about and about.shape else 3
        return self.spec.channels or usual

    # ---- before decoding: what the heads of the files say ----

    def _sift(
        self, rows: list[tuple[str, File]], decoders: Decoders
    ) -> tuple[list[tuple[str, File]], tuple[int, int] | None]:
        """Leave out or refuse files whose heads cannot be read or that are unlike most others."""
        paths = [str(file.path) for _, file in rows]
        heads = [head for some in decoders.run(paths, Order(head=True), HEADS) for head in some]
        self.bad += [
            (file, head.error) for (_, file), head in zip(rows, heads, strict=True) if head.error
        ]
        found = [pair for pair in zip(rows, heads, strict=True) if not pair[1].error]
        if not found:
            return [], None
        problems: list[list[str | Key]] = []
        shape = None
        if self.spec.size is None:
            shape = Counter(head.size for _, head in found).most_common(1)[0][0]
            found = self._alike(found, "size", shape, problems)
        if self.spec.mixed != "convert":
            kind = Counter(head.kind for _, head in found).most_common(1)[0][0]
            found = self._alike(found, "kind", kind, problems)
        if problems:
            if self.bad:
                problems.append([self._unreadable()])
            first, *others = problems
            raise DataError(*first, *(part for other in others for part in (". ", *other)))
        return [row for row, _ in found], shape

    def _alike(
        self,
        found: list[tuple[tuple[str, File], Answer]],
        what: Literal["size", "kind"],
        usual: Any,
        problems: list[list[str | Key]],
    ) -> list[tuple[tuple[str, File], Answer]]:
        """Those that are as most are; the others become a problem or a note."""
        odd = [(file, head) for (_, file), head in found if getattr(head, what) != usual]
        if not odd:
            return found
        named = _named([(file, _words(getattr(head, what))) for file, head in odd])
        said = f"{len(odd)} of {self.count} images differ in {_SAID[what]} from most, which are "
        said += f"{_words(usual)}: {named}"
        if self.spec.mixed == "skip":
            self.writer.notes.append(f"left out: {said}")
        elif what == "size":
            problems.append(
                [
                    f"{said}. Set ",
                    Key("data", "size"),
                    f"={min(usual)} to scale all to one size, or leave the odd ones out with ",
                    Key("data", "mixed"),
                    "=skip",
                ]
            )
        else:
            problems.append(
                [
                    f"{said}. Bring them to one mode with ",
                    Key("data", "mixed"),
                    "=convert, or leave the odd ones out with ",
                    Key("data", "mixed"),
                    "=skip",
                ]
            )
        return [pair for pair in found if getattr(pair[1], what) == usual]

    # ---- decoding ----

    def _decode(
        self, rows: list[tuple[str, File]], shape: tuple[int, int] | None, decoders: Decoders
    ) -> None:
        """Write every image; nothing is kept in memory but a few chunks."""
        side = self.spec.size
        area = side * side if side else shape[0] * shape[1] if shape else 1
        chunk = max(1, min(CHUNK, CHUNK_BYTES // (area * self.channels)))
        order = Order(size=side, channels=self.channels, depth=self.spec.depth)
        start = 0
        for answers in decoders.run([str(file.path) for _, file in rows], order, chunk):
            self._write(rows[start : start + len(answers)], answers, shape)
            start += len(answers)

    def _write(
        self,
        rows: list[tuple[str, File]],
        answers: list[Answer],
        shape: tuple[int, int] | None,
    ) -> None:
        pieces: dict[str, list[tuple[File, Answer]]] = {}
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
            self.writer.append(part, pixels, labels, factors)

    # ---- afterwards ----

    def _report(self) -> None:
        """Refuse unreadable files or note that they were left out; note what was converted."""
        if self.bad:
            if self.spec.corrupt == "refuse":
                raise DataError(
                    f"{self._unreadable()}. Mend or remove them, or leave them out with ",
                    Key("data", "corrupt"),
                    "=skip",
                )
            if len(self.bad) == self.count:
                raise DataError(self._unreadable())
            self.writer.notes.append(f"left out: {self._unreadable()}")
        if wide := len(self.kinds.get("16-bit grey", ())):
            self.writer.notes.append(
                f"{wide} of {self.count} images have 16-bit grey, read as data.depth="
                f"{self.spec.depth} bits: where they use fewer, e.g. 12, say so"
            )
        native = "grey" if self.channels == 1 else "colour"
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


def _words(value: str | tuple[int, int]) -> str:
    return value if isinstance(value, str) else f"{value[0]}x{value[1]}"


def _named(files: Sequence[tuple[File, str]], most: int = NAMED) -> str:
    """Some of the files by name, each with what is to be said of it, and how many more."""
    named = ", ".join(f"{printable(file.name)} ({what})" for file, what in files[:most])
    return f"{named} and {len(files) - most} more" if len(files) > most else named
