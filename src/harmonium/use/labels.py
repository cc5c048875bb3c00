"""Labels from a table, matched with the images that they are of.

A label names its image by the image's name, by a path, or by its file's name, with or without the
ending. What names several images, or labels one image in two ways, is an error that lists it. A
label of a file with several frames is that of all its frames, which then stay together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from harmonium.core.errors import DataError, counted
from harmonium.use.sources import FileSource, ImageSource, file_of, rows_of

NAMED = 5  # entries that a message names


class Columns(NamedTuple):
    """The columns of a table of labels."""

    path: str = "path"  # which image
    label: str = "label"
    group: str = "group"  # images that must stay together, such as a patient's; may be missing


class Label(NamedTuple):
    """A line of a table of labels."""

    image: str
    label: str
    group: str = ""


class Labelled(NamedTuple):
    """Images with labels."""

    rows: list[int]  # in the source, ascending
    labels: list[str]
    groups: list[str] | None  # None: no image has one


def read_labels(path: Path, columns: Columns) -> list[Label]:
    """The lines of a table that have a label."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such table of labels")
    rows, image = rows_of(path, columns.path)
    known = rows[0].values
    for option, name, usual in (
        ("--label-column", columns.label, "label"),
        ("--group-column", columns.group, "group"),
    ):
        if name not in known and (option == "--label-column" or name != usual):
            raise DataError(f"{path} has no column '{name}', only {', '.join(known)}: use {option}")
    return [
        Label(row.values[image], row.values[columns.label], row.values.get(columns.group, ""))
        for row in rows
        if row.values[image] and row.values[columns.label]
    ]


def match(
    labels: Sequence[Label], source: ImageSource, where: Path, note: Callable[[str], None]
) -> Labelled:
    """The labelled images of a source.

    Args:
        labels: in any order.
        source: the images.
        where: the folder from which relative paths may start, that of the table.
        note: is told of labels that are of none of the images.
    """
    finders, files = _finders(source, where), source.files
    labelled: dict[int, list[Label]] = {}
    missing, ambiguous = list[str](), list[str]()
    for one in labels:
        found = next((rows for find in finders if (rows := find(one.image))), [])
        if len({files[row] for row in found}) == 1:
            for row in found:
                labelled.setdefault(row, []).append(one)
        elif found:
            names = ", ".join(source.names[row] for row in found[:2])
            ambiguous.append(f"{one.image} ({names}{', …' if len(found) > 2 else ''})")
        else:
            missing.append(one.image)
    twice = [
        f"{source.names[row]} ({', '.join(sorted({one.label for one in some}))})"
        for row, some in labelled.items()
        if len({(one.label, one.group) for one in some}) > 1
    ]
    problems = []
    if twice:
        problems.append(f"labelled in two ways: {_listed(twice)}")
    if ambiguous:
        whole = "write whole names, as in brackets"
        problems.append(f"several images match {_listed(ambiguous)}: {whole}")
    if problems:
        raise DataError("; ".join(problems))
    if not labelled:
        seen = f"labels are of {_listed(missing)}" if missing else "the table holds no labels"
        raise DataError(f"no image is labelled: {seen}, images are {_listed(source.names)}")
    if missing:
        of = counted(len(missing), "label")
        note(f"{of} of {len(labels):,} are of no image here: {_listed(missing)}")
    rows = sorted(labelled)
    groups = [labelled[row][0].group or _frames_of(source, row) for row in rows]
    return Labelled(rows, [labelled[row][0].label for row in rows], groups if any(groups) else None)


def _frames_of(source: ImageSource, row: int) -> str:
    """The group of a frame without another one: its file; "" for an image that is no frame."""
    file = source.files[row]
    return "" if file == source.names[row] else f"\0{file}"


def from_classes(source: ImageSource, note: Callable[[str], None]) -> Labelled:
    """The labels that the images bring: an archive's, or the folders that they lie in.

    `note` is told which these are, because folders may as well be sites.
    """
    rows = [row for row, name in enumerate(source.classes) if name]
    if not rows:
        raise DataError("the images have no labels: give a table of them with --labels")
    groups = [_frames_of(source, row) for row in rows]
    classes = [source.classes[row] for row in rows]
    names = sorted(set(classes))
    what = "the folders" if isinstance(source, FileSource) else "the archive's own,"
    note(f"labels: {what} {_listed(names)} ({len(names):,} in all)")
    return Labelled(rows, classes, groups if any(groups) else None)


Finder = Callable[[str], Sequence[int]]


def _finders(source: ImageSource, where: Path) -> list[Finder]:
    """The ways to find images by what a label calls them, the strictest first."""
    exact, whole = _index(source.names), _index(source.files)
    base = _index(PurePosixPath(name).name for name in source.files)
    stem = _index(PurePosixPath(name).stem for name in source.files)
    paths: Mapping[str, Sequence[int]] = {}
    if isinstance(source, FileSource):
        paths = _index(file_of(path) for path in source.paths)
    folder = where.absolute()
    return [
        lambda name: exact.get(_plain(name), ()),
        lambda name: whole.get(_plain(name), ()),
        lambda name: paths.get(os.path.normpath(folder / name), ()),
        lambda name: base.get(name, ()),
        lambda name: stem.get(name, ()),
    ]


def _plain(name: str) -> str:
    return name.replace("\\", "/").removeprefix("./")


def _index(names: Iterable[str]) -> dict[str, list[int]]:
    """The rows of every name."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return rows


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
