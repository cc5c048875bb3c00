"""What there is to inspect: the images of a folder or a table, each with what its place says of it.

The listing is as wide as possible. A run reads a table by the names of its columns and a folder by
the meaning of its levels; here all columns and levels are kept, because which of them mean what is
what `structure` finds out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from harmonium.core.errors import DataError
from harmonium.data.decoding.image_files import ENDINGS, is_image_file, unread
from harmonium.data.sets.folder import PARTS as PART_FOLDERS
from harmonium.data.sets.table import PARTS as PART_NAMES
from harmonium.data.sets.table import TableRow, read_table

Form = Literal["folder", "csv", "npz"]

LEVELS = ("level 1", "level 2")
"""The columns of a folder's listing: the names of its subfolders."""

TABLES = (".csv", ".tsv", ".txt")


class Listed(NamedTuple):
    """One image of a folder or a table."""

    path: Path
    name: str  # what messages call it: its place below the folder, or its line and path
    part: str  # train, validation or test


@dataclass(frozen=True)
class Listing:
    """The images of a source, with everything that is said of each of them."""

    form: Form
    path: Path
    images: Sequence[Listed]  # none of an archive, whose images have no files
    columns: Mapping[str, Sequence[str]]  # what is said of each image; "" where nothing is
    settings: Mapping[str, str]  # of `data`, to read the same images
    unread: str = ""  # files that are no images by their ending


def form_of(path: Path) -> Form:
    """What a path holds; raises DataError if it is nothing that can be inspected."""
    if path.is_dir():
        return "folder"
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.suffix.lower() == ".npz":
        return "npz"
    if path.suffix.lower() in TABLES:
        return "csv"
    if is_image_file(path):
        raise DataError(f"{path} is one image: name its folder, {path.parent}")
    raise DataError(
        f"{path} is neither a folder of images, nor a table (.csv), nor an archive of arrays (.npz)"
    )


# ---- a folder ------------------------------------------------------------------------------------


def list_folder(root: Path) -> Listing:
    """All image files below a folder, with the names of the first two levels of subfolders."""
    places = {"train": root}
    if (root / "train").is_dir():
        folders = {part: root / name for part, name in PART_FOLDERS.items()}
        places = {part: folder for part, folder in folders.items() if folder.is_dir()}
    images: list[Listed] = []
    columns: dict[str, list[str]] = {level: [] for level in LEVELS}
    for part, place in places.items():
        for path in _image_files(place):
            images.append(Listed(path, str(path.relative_to(root)), part))
            folders_above = path.relative_to(place).parts[:-1]
            for level, names in enumerate(columns.values()):
                names.append(folders_above[level] if level < len(folders_above) else "")
    others = unread(root)
    if not images:
        beside = f", but {others}, which are not read" if others else ""
        raise DataError(f"{root} holds no images ({' '.join(ENDINGS)}){beside}")
    return Listing("folder", root, images, columns, {"path": str(root)}, others)


def _image_files(root: Path) -> list[Path]:
    """The image files below a folder, in the order in which a run reads them."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        files += [path for name in sorted(names) if is_image_file(path := Path(folder, name))]
    return files


# ---- a table -------------------------------------------------------------------------------------


def list_table(table: Path, given: Mapping[str, str]) -> Listing:
    """The images that a table lists; `given` may name its columns and the folder of its paths."""
    rows = read_table(table, given.get("path_column"))
    settings = {"path": str(table), **given}
    column = given.get("path_column") or _path_column(table, rows)
    if column != "path":
        settings["path_column"] = column
    root = Path(given["root"]).expanduser().resolve() if "root" in given else table.parent
    part_column = given.get("part_column", "part")
    images = [_listed(row, column, root, part_column) for row in rows]
    names = [name for name in rows[0].values if name not in (column, part_column)]
    columns = {name: [row.values.get(name, "") for row in rows] for name in names}
    return Listing("csv", table, images, columns, settings)


def _listed(row: TableRow, column: str, root: Path, part_column: str) -> Listed:
    path = row.values[column]
    part = PART_NAMES.get(row.values.get(part_column, "").lower(), "train")
    return Listed(root / path, f"line {row.line}: {path}", part)


def _path_column(table: Path, rows: Sequence[TableRow]) -> str:
    """The column of image files: `path`, or the one whose values look most like image files."""
    names = list(rows[0].values)
    if (column := file_column(rows)) is None:
        raise DataError(
            f"{table} has no column of image files ({', '.join(names)}): name it, e.g. "
            "data.path_column=file"
        )
    return column


def file_column(rows: Sequence[TableRow]) -> str | None:
    """The column of image files: `path`, or the one whose values look most like them; None: none.

    >>> file_column([TableRow(2, {"label": "x", "file": "north/a.png"})])
    'file'
    """

    def share(name: str) -> float:
        values = [row.values.get(name, "") for row in rows]
        return sum(Path(value).suffix.lower() in ENDINGS for value in values) / len(values)

    if "path" in rows[0].values:
        return "path"
    best = max(rows[0].values, key=share)
    return best if share(best) >= 0.5 else None
