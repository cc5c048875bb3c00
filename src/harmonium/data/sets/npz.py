"""Images in a NumPy archive (`.npz`), the format of many published benchmarks."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import UnsplitSpec, changed, check_is_file, datasets, no_labels
from harmonium.data.decoding.in_memory import image_set
from harmonium.data.images import GROUP, UNKNOWN, Integers, Pixels

CHUNK = 4096  # images handed on at once

_KEYS = (("x", "y"), ("images", "labels"))  # names of the pixels and the labels
_PREFIXES = {"train": "train_", "validation": "val_", "test": "test_"}
_CLASS_NAMES = ("classes", "class_names")
_FAULTS = (
    *(OSError, ValueError, KeyError, EOFError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),
)


class _Columns(NamedTuple):
    """The names of the arrays that make up one part."""

    pixels: str
    labels: str | None
    factors: dict[str, str]  # factor -> name of the array


@datasets("npz")
@dataclass(frozen=True)
class Npz(UnsplitSpec):
    """A NumPy archive of uint8 images.

    Understood are `train_x`, `train_y`, `test_x`, `test_y`; MedMNIST's `train_images`,
    `train_labels` and so on; and plain `x`, `y` (or `images`, `labels`) without a test part. Labels
    may be missing. `val_…` is the validation part and then replaces the share `validation`; where
    there is no `test_…`, it is the test part. `classes` names the labels. Any other integer array
    or text with one value for each image becomes a column for `split.column`. Images of one value
    of `group`, such as a patient, are kept together; the names of groups are not kept.
    """

    path: str = ""  # the .npz file
    group_column: str | None = GROUP  # whose images are kept together; None: no column's

    def check(self) -> None:
        """Check that the path is a file too."""
        super().check()
        check_is_file("npz", self.path)

    def _file(self) -> Path:
        return Path(self.path).expanduser().resolve()

    @classmethod
    def column_way(cls, column: str) -> str:
        """Columns are further arrays of the archive."""
        return (
            f"add an array `{column}` (`train_{column}` beside train_x) with one value for each "
            "image to the archive"
        )

    def identity(self) -> dict[str, Any]:
        """The path, size and modification time of the file."""
        about = self._file().stat()
        file = {"path": str(self._file()), "bytes": about.st_size, "changed": about.st_mtime_ns}
        return file | changed(self, "group_column")

    def decode(self, writer: Writer) -> Sequence[str]:
        """Read the archive in any of the layouts above."""
        return read_archive(self._file(), writer, groups=self.group_column)


def read_archive(
    path: Path, writer: Writer, known: int | None = None, groups: str | None = None
) -> tuple[str, ...]:
    """Write all parts of an archive, in any of the layouts of `Npz`, and return the classes.

    Args:
        path: the archive.
        writer: receives the images.
        known: number of classes if known; labels are not renumbered if all are below it.
        groups: the column of groups, if the archive has it.
    """
    with open_archive(path) as archive:
        return _Reader(str(path), archive, dict(_headers(archive)), known, groups).write(writer)


def read_arrays(name: str, arrays: Mapping[str, npt.NDArray[Any]], writer: Writer) -> Sequence[str]:
    """Like `read_archive`, for arrays in memory that messages call `name`."""
    shapes = {key: (array.shape, array.dtype.kind) for key, array in arrays.items()}
    return _Reader(name, arrays, shapes, None, GROUP).write(writer)


@contextmanager
def open_archive(path: Path) -> Iterator[Any]:
    """The arrays of an archive by name; a damaged archive raises DataError."""
    try:
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} is not an .npz archive")
        with np.load(path, allow_pickle=False) as archive:
            yield archive
    except _FAULTS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, e.g. full, not of the archive
        raise DataError(f"{path} cannot be read: {error}") from error


class _Reader:
    """Reads the arrays of one archive one at a time, as all may not fit in memory."""

    def __init__(
        self,
        path: str,
        archive: Mapping[str, npt.NDArray[Any]],
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        known: int | None,
        groups: str | None,
    ) -> None:
        self.path = path
        self.groups = groups
        self.archive = archive
        self.known = known
        self.shapes = shapes

    def write(self, writer: Writer) -> tuple[str, ...]:
        parts = self._parts()
        labels = {part: self._labels(columns) for part, columns in parts.items()}
        for part, column in labels.items():
            if 0 < (missing := int((column == UNKNOWN).sum())) < len(column):
                writer.notes.append(
                    f"{missing} of {len(column)} {part} images are labelled -1, which means that "
                    "their class is unknown"
                )
        names = self._class_names(parts, labels)
        writer.notes += self._unused(parts)
        texts = self._texts(parts)
        writer.names |= {name: values for name, values in texts.items() if name != self.groups}
        for part, columns in parts.items():
            pixels = self._pixels(columns.pixels, writer.notes)
            factors = {
                name: self._factor(key, texts.get(name)) for name, key in columns.factors.items()
            }
            if self.groups in factors:
                del factors[self.groups]
                factors[GROUP] = self._group_numbers(parts)[part]
            for start in range(0, len(pixels), CHUNK):
                rows = slice(start, start + CHUNK)
                piece = {name: column[rows] for name, column in factors.items()}
                writer.append(part, pixels[rows], labels[part][rows], piece)
        return names

    def _texts(self, parts: Mapping[str, _Columns]) -> dict[str, tuple[str, ...]]:
        """The distinct values of every column that holds text in some part, sorted."""
        texts: dict[str, set[str]] = {}
        for columns in parts.values():
            for name, key in columns.factors.items():
                if self.shapes[key][1] == "U":
                    texts.setdefault(name, set()).update(self.archive[key].reshape(-1).tolist())
        return {name: tuple(sorted(values - {""})) for name, values in texts.items()}

    def _factor(self, key: str, names: tuple[str, ...] | None) -> Integers:
        """A column as numbers; text becomes its position in `names`, or -1 if empty."""
        column: npt.NDArray[Any] = self.archive[key].reshape(-1)
        if names is None:
            return column.astype(np.int64)
        places = {"": UNKNOWN, **{name: place for place, name in enumerate(names)}}
        return np.array([places.get(str(value), UNKNOWN) for value in column], np.int64)

    def _group_numbers(self, parts: Mapping[str, _Columns]) -> dict[str, Integers]:
        """The group of each image by part, numbered from 0: its own name or number is not kept."""
        named = {
            part: c.factors[self.groups] for part, c in parts.items() if self.groups in c.factors
        }
        columns = {part: self.archive[key].reshape(-1).astype(str) for part, key in named.items()}
        known = np.setdiff1d(np.concatenate(list(columns.values())), ["", str(UNKNOWN)])
        return {
            part: np.where(np.isin(column, known), np.searchsorted(known, column), UNKNOWN)
            for part, column in columns.items()
        }

    def _parts(self) -> dict[str, _Columns]:
        """The arrays of each part; raises DataError if there is no training part."""
        for pixels, labels in _KEYS:
            parts = {
                part: self._columns(prefix, pixels, labels)
                for part, prefix in _PREFIXES.items()
                if prefix + pixels in self.shapes
            }
            if "train" in parts:
                if "test" not in parts and "validation" in parts:
                    parts["test"] = parts.pop("validation")
                return parts
            if pixels in self.shapes:
                return {"train": self._columns("", pixels, labels)}
        raise DataError(
            f"{self.path} holds {', '.join(self.shapes) or 'nothing'}; expected train_x (train_y, "
            "test_x, test_y), train_images (train_labels, …), x (y) or images (labels)"
        )

    def _columns(self, prefix: str, pixels: str, labels: str) -> _Columns:
        count = self.shapes[prefix + pixels][0][0]
        factors = {
            key.removeprefix(prefix): key
            for key, (shape, kind) in self.shapes.items()
            if key.startswith(prefix)
            and key not in (prefix + pixels, prefix + labels, *_CLASS_NAMES)
            and key.removeprefix(prefix) not in ({GROUP} - {self.groups})
            and kind in "iuU"
            and shape in ((count,), (count, 1))
        }
        has_labels = prefix + labels in self.shapes
        return _Columns(prefix + pixels, prefix + labels if has_labels else None, factors)

    def _pixels(self, key: str, notes: list[str]) -> Pixels:
        """The images (n, height, width, channels), from any unambiguous order of the axes."""
        what = f"the images '{key}' of {self.path}"
        fix = "save them turned, e.g. x.transpose(0, 2, 3, 1)"
        pixels: Pixels = image_set(self.archive[key], what, fix, notes.append)
        return pixels

    def _labels(self, columns: _Columns) -> Integers:
        count = self.shapes[columns.pixels][0][0]
        if columns.labels is None:
            return no_labels(count)
        shape, kind = self.shapes[columns.labels]
        if shape not in ((count,), (count, 1)) or kind not in "iuU":
            fits = kind in "iuU"
            what = f"have shape {shape}" if fits else "are neither whole numbers nor text"
            raise DataError(
                f"the labels '{columns.labels}' of {self.path} {what}; expected one whole number "
                f"or text for each of the {count} images"
            )
        if kind == "U":
            return self._factor(columns.labels, self._label_texts)
        return np.asarray(self.archive[columns.labels], np.int64).reshape(count)

    @cached_property
    def _label_texts(self) -> tuple[str, ...]:
        """The distinct labels of all parts that are text; empty text means unknown."""
        keys = [p + y for p in ("", *_PREFIXES.values()) for _, y in _KEYS]
        textual = [key for key in keys if self.shapes.get(key, ((), ""))[1] == "U"]
        texts = {str(text) for key in textual for text in self.archive[key].reshape(-1)}
        return tuple(sorted(texts - {""}))

    def _unused(self, parts: Mapping[str, _Columns]) -> list[str]:
        """Notes on arrays that are not used, with the reason."""
        used = {key for c in parts.values() for key in (c.pixels, c.labels, *c.factors.values())}
        notes = []
        for key, (shape, kind) in self.shapes.items():
            if key in used or key in _CLASS_NAMES:
                continue
            why = f"its shape {shape} is not one value for each image of a part"
            if kind == "O":
                why = "it holds Python objects; save it as text, e.g. with .astype(str)"
            elif kind not in "iuU":
                why = "it is neither whole numbers nor text"
            elif key.endswith(GROUP) and self.groups != GROUP:
                why = "it is not the column of groups"
            notes.append(f"'{key}' is left out: {why}")
        return notes

    def _class_names(
        self, parts: Mapping[str, _Columns], labels: Mapping[str, Integers]
    ) -> tuple[str, ...]:
        """Names of the classes; changes labels in place to 0, 1, 2, … unless they are named."""
        if any(c.labels and self.shapes[c.labels][1] == "U" for c in parts.values()):
            return self._label_texts
        columns = list(labels.values())
        values = np.unique(np.concatenate(columns))
        values = values[values != UNKNOWN]
        key = next((key for key in _CLASS_NAMES if key in self.shapes), None)
        if key is not None and len(values):
            return self._stored_names(key, values)
        if self.known and len(values) and values[0] >= 0 and values[-1] < self.known:
            return tuple(str(label) for label in range(self.known))
        for column in columns:
            known = column != UNKNOWN
            column[known] = np.searchsorted(values, column[known])
        return tuple(str(value) for value in values)

    def _stored_names(self, key: str, values: Integers) -> tuple[str, ...]:
        """The names in array `key`; raises DataError unless each of the sorted values has one."""
        names = tuple(str(name) for name in self.archive[key].reshape(-1))
        if values[0] < 0 or values[-1] >= len(names):
            raise DataError(
                f"the labels of {self.path} run from {values[0]} to {values[-1]}, but "
                f"'{key}' names {len(names)} classes"
            )
        return names


def _headers(archive: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Name, shape and kind of every array, without reading its content."""
    for key in sorted(archive.files):
        with archive.zip.open(f"{key}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize > archive.zip.getinfo(f"{key}.npy").file_size:
            raise ValueError(f"'{key}' is too short for the shape {shape} in its header")
        if len(shape):
            yield key, (shape, dtype.kind)
