"""The data set of image files listed in a CSV table, with clients, labels and domains."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harmonium.core.errors import ConfigError, DataError, Key
from harmonium.data.cache import Writer
from harmonium.data.datasets import check_is_file, datasets
from harmonium.data.decoding.image_files import (
    ImageFile,
    OwnFilesSpec,
    is_whole,
    listing_digest,
    numbered,
    write_images,
)
from harmonium.data.images import GROUP, UNKNOWN

DELIMITERS = ",;\t"
PARTS = {"": "train", "train": "train", "test": "test"}
PARTS |= dict.fromkeys(("val", "valid", "validation"), "validation")


class TableRow(NamedTuple):
    """One line of a table, with stripped values."""

    line: int
    values: dict[str, str]  # by column; "" where the line is too short


class _TableListing(NamedTuple):
    files: dict[str, list[ImageFile]]
    classes: tuple[str, ...]
    names: dict[str, tuple[str, ...]]
    notes: list[str]
    grouped: bool  # by a column


@datasets("csv")
@dataclass(frozen=True)
class Table(OwnFilesSpec):
    """A CSV file that lists image files, with their clients, labels and domains.

    Only the column of paths must be there; a value that is left empty is not known. Clients and
    domains become the factors `client` and `style`, other columns of whole numbers factors of
    their own. A column `part` says train, validation or test; where it names no test images,
    the validation part is the test part. Images of one `group`, such as a patient, are kept
    together; the names of groups are not kept. Commas, semicolons and tabs are understood.
    """

    path: str = ""  # the CSV file
    root: str = ""  # the folder that paths in it start from; its own folder if left out
    path_column: str = "path"  # the image file
    client_column: str = "client"  # who holds it
    label_column: str = "label"  # its class
    domain_column: str = "domain"  # its style
    part_column: str = "part"  # train, validation or test
    channels: int = 3  # 3: colour, 1: grey, 4: RGBA or CMYK as stored, 2: grey and transparency
    group_column: str | None = "group"  # whose images are kept together; None: no column's

    def check(self) -> None:
        """Check that the table and the folder exist too."""
        super().check()
        check_is_file("csv", self.path)
        if not self._root().is_dir():
            raise DataError(Key("data", "root"), f"={self.root}: there is no such folder")

    def _columns(self) -> list[str]:
        named = [self.path_column, self.client_column, self.label_column]
        return [*named, self.domain_column, self.part_column]

    def _file(self) -> Path:
        return Path(self.path).expanduser().resolve()

    def _root(self) -> Path:
        return Path(self.root).expanduser().resolve() if self.root else self._file().parent

    def identity(self) -> dict[str, Any]:
        """The digests of the table and of all files' sizes and modification times."""
        listing = self._listing()
        table = hashlib.sha256(self._file().read_bytes()).hexdigest()
        files = listing_digest(listing.files)
        where = {"table": table, "columns": self._columns(), "root": str(self._root())}
        groups = {"group_column": self.group_column} if listing.grouped else {}
        return {**where, **groups, "files": files, **self.handling()}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Decode all files that the table lists."""
        listing = self._listing()
        writer.names |= listing.names
        writer.notes += listing.notes
        write_images(writer, listing.files, self)
        return listing.classes

    # ---- from rows to files ----

    def _listing(self) -> _TableListing:
        advice = (": name the column of paths with ", Key("data", "path_column"), "=NAME")
        rows = read_table(self._file(), self.path_column, advice)
        self._check_columns(rows)
        self._check_rows(rows)
        columns = {name for row in rows for name, value in row.values.items() if value}
        classes, labels, notes = _number(rows, self.label_column)
        names: dict[str, tuple[str, ...]] = {}
        factors: dict[str, list[int]] = {}
        for factor, column in (("client", self.client_column), ("style", self.domain_column)):
            if column in columns:
                names[factor], factors[factor], missing = _number(rows, column)
                notes += missing
        grouped = self.group is None and self.group_column in columns
        if grouped:
            _, factors[GROUP], missing = _number(rows, str(self.group_column))
            notes += missing
        elif self.group == "folder":
            paths = (Path(row.values[self.path_column]) for row in rows)
            factors[GROUP] = _numbers(str(path.parent) for path in paths)
        used = {*self._columns(), *([self.group_column] if grouped else [])}
        if GROUP in columns - used:  # the name is that of groups alone
            notes.append(f"the column '{GROUP}' is left out: it is not the one of groups")
        for column in sorted(columns.difference({*used, GROUP})):
            values = [row.values[column] for row in rows]
            if all(is_whole(value) for value in values if value):
                if column in factors:
                    raise DataError(
                        f"{self.path}: column '{column}' and another one would both be the factor "
                        f"'{column}': rename it"
                    )
                factors[column] = [int(value) if value else UNKNOWN for value in values]
                notes += _missing(values, column)
        files = self._files(rows, labels, factors)
        return _TableListing(files, classes, names, notes, grouped)

    def _files(
        self, rows: list[TableRow], labels: list[int], factors: dict[str, list[int]]
    ) -> dict[str, list[ImageFile]]:
        root = self._root()
        files: dict[str, list[ImageFile]] = {"train": [], "validation": [], "test": []}
        for at, row in enumerate(rows):
            path = row.values[self.path_column]
            part = PARTS[row.values.get(self.part_column, "").lower()]
            columns = {factor: column[at] for factor, column in factors.items()}
            name = f"line {row.line}: {path}"
            files[part].append(ImageFile(root / path, name, labels[at], columns))
        files = {part: some for part, some in files.items() if some}
        if "test" not in files and "validation" in files:
            files["test"] = files.pop("validation")
        return files

    # ---- checks of the table ----

    def _check_columns(self, rows: list[TableRow]) -> None:
        """Raise an error if a column that the settings name is missing."""
        for setting in ("path", "client", "label", "domain", "part", "group"):
            column, usual = getattr(self, f"{setting}_column"), setting
            if column is not None and column not in rows[0].values and column != usual:
                raise ConfigError(
                    Key("data", f"{setting}_column"),
                    f"={column}: {self.path} has no such column, only {', '.join(rows[0].values)}",
                )

    def _check_rows(self, rows: list[TableRow]) -> None:
        """Raise an error for lines without a path, with a repeated path, or of an unknown part."""
        root, first = self._root(), dict[str, int]()
        empty, again, strange = [], [], []
        for row in rows:
            path = row.values[self.path_column]
            absolute = os.path.normpath(os.path.join(root, path))
            if not path:
                empty.append(str(row.line))
            elif absolute in first:
                again.append(f"{row.line} as {first[absolute]} ({path})")
            first.setdefault(absolute, row.line)
            part = row.values.get(self.part_column, "")
            if part.lower() not in PARTS:
                strange.append(f"{row.line} ({part})")
        problems = [
            f"{what} {_some(lines)}"
            for what, lines in (
                ("no path in line", empty),
                ("the same image twice, in line", again),
                ("neither train, validation nor test in line", strange),
            )
            if lines
        ]
        if problems:
            raise DataError(f"{self.path}: {'; '.join(problems)}")


def read_table(
    path: Path, needed: str | None = None, advice: Sequence[str | Key] = ()
) -> list[TableRow]:
    """The lines of a table with a header, which must name the column `needed`, if one is."""
    lines = _read_lines(path)
    if not lines:
        raise DataError(f"{path} is empty: its first line should name the columns")
    (_, header), *lines = lines
    _check_header(path, header, needed, advice)
    if long := [f"{line} ({len(v)})" for line, v in lines if len(v) > len(header)]:
        raise DataError(f"{path} has {len(header)} columns, but more values in line {_some(long)}")
    if not lines:
        raise DataError(f"{path} lists no images: it has only a line of column names")
    return [
        TableRow(
            line, {n: v for n, v in zip(header, _filled(values, len(header)), strict=True) if n}
        )
        for line, values in lines
    ]


def _read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and stripped values of every line that is not empty, whatever the delimiter."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path} is not UTF-8 text (line {line}): save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    header = text.lstrip().partition("\n")[0]
    delimiter = max(DELIMITERS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        return [(reader.line_num, [v.strip() for v in values]) for values in reader if any(values)]
    except csv.Error as error:
        raise DataError(f"{path} is not a table: line {reader.line_num}: {error}") from None


def _check_header(
    path: Path, header: Sequence[str], needed: str | None, advice: Sequence[str | Key]
) -> None:
    """Raise an error unless the header names the column `needed` and no column twice."""
    named = [name for name in header if name]
    if needed is not None and needed not in named:
        raise DataError(f"{path} has no column '{needed}', only {', '.join(named)}", *advice)
    if len(set(named)) < len(named):
        raise DataError(f"{path} names a column twice: {', '.join(header)}")


def _filled(values: list[str], count: int) -> list[str]:
    return values + [""] * (count - len(values))


def _number(rows: list[TableRow], column: str) -> tuple[tuple[str, ...], list[int], list[str]]:
    """The sorted names in a column, the number of each row, and a note if values are missing."""
    values = [row.values.get(column, "") for row in rows]
    names, number = numbered(value or None for value in values)
    return names, [number[value or None] for value in values], _missing(values, column)


def _numbers(names: Iterable[str]) -> list[int]:
    """The number of each name, in their sorted order."""
    listed = list(names)
    _, number = numbered(listed)
    return [number[name] for name in listed]


def _missing(values: Iterable[str], column: str) -> list[str]:
    present = [bool(value) for value in values]
    if all(present) or not any(present):
        return []
    count = len(present) - sum(present)
    return [f"{count} of {len(present)} images have no {column}, which is then -1"]


def _some(lines: list[str], most: int = 5) -> str:
    """The first `most` lines, and how many more there are."""
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more
