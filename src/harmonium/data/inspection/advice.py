"""What to train with, given what was found: size, channels, clients, views, and the command.

Every choice is one rule over counted or measured numbers; `docs/your-images.md` lists them.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import yaml

from harmonium.core.errors import DataError, counted
from harmonium.core.settings import choose
from harmonium.data.cache import Stored
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.decoding.image_files import numbered
from harmonium.data.images import GROUP, Images, Integers
from harmonium.data.inspection.kinds import VIEWS, Kind, Removal
from harmonium.data.inspection.measures import Measures
from harmonium.data.inspection.structure import Structure

SMALL = 32  # images with a shorter side up to this keep their size
MOST = 128  # the largest size that is suggested: the cost of training grows with its square
KEEPS = 0.9  # share of the variation that a size must keep
A_CLIENT = 200  # images of each client where nothing says who holds what
CLIENTS = (2, 10)  # the fewest and the most of these
CUT = 0.2  # share of a typical image that a square may cut off before it is said
FEW = 2000  # training images below which fewer neighbours vote in the probe
SMALL_CLIENT = 20  # images below which a client is named as small


@dataclass(frozen=True)
class Clients:
    """Who holds the images, or how many clients would stand for that."""

    by: Literal["column", "folder", "number"]
    count: int  # with training images, once test and validation images are held out
    column: str | None = None  # that names them
    sizes: Mapping[str, int] | None = None  # images of each, all parts together
    why: str = ""


@dataclass(frozen=True)
class Suggestion:
    """The settings of a run on these images, and why."""

    size: int
    channels: int
    views: str
    settings: Mapping[str, Any]  # of a recipe, by key
    reasons: Mapping[str, str]  # why, by what was chosen

    def words(self) -> list[str]:
        """The settings as words of the command line."""
        return [word(key, value) for key, value in self.settings.items()]


def word(key: str, value: Any) -> str:
    """A setting as a word that is read back as the same value.

    >>> word("clients", 3), word("data.path", "a: b"), word("data.styles", True)
    ('clients=3', 'data.path="a: b"', 'data.styles=true')
    """
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    try:
        plain = yaml.safe_load(value) == value
    except yaml.YAMLError:
        plain = False
    return f"{key}={value if plain else json.dumps(value)}"


def command(words: Sequence[str]) -> str:
    """A command that a shell reads back as these words.

    >>> command(["harmonium", "start", "my photos"])
    "harmonium start 'my photos'"
    """
    return shlex.join(words)


# ---- size and channels ---------------------------------------------------------------------------


def size_for(sizes: Sequence[tuple[int, int]], measures: Measures) -> tuple[int, str]:
    """The side to train at, and why."""
    shorter = int(np.median([min(size) for size in sizes]))
    if shorter <= SMALL:
        return shorter, f"images are as small as {shorter} pixels"
    for side, kept in measures.sizes.items():
        if kept >= KEEPS and side <= MOST:
            return side, f"the smallest that keeps {KEEPS:.0%} of what varies ({kept:.0%})"
    side = min(shorter, MOST)
    kept = measures.sizes.get(side, 1.0)
    return side, f"no smaller one keeps {KEEPS:.0%} of what varies; {side} keeps {kept:.0%}"


def channels_for(measures: Measures) -> tuple[int, str]:
    """1 where images are grey, whatever their files say, else 3; and why."""
    share = f"{measures.grey:.0%} of the images are grey"
    return (1, share) if measures.grey >= KEEPS else (3, share)


def shape_notes(sizes: Sequence[tuple[int, int]], side: int) -> list[str]:
    """Notes on images that lose much of their area, or are enlarged."""
    notes = []
    array = np.array(sizes)
    cut = float(np.median(1 - array.min(1) / array.max(1)))
    if cut >= CUT:
        notes.append(
            f"training sees the middle square of an image: {cut:.0%} of a typical one is cut off; "
            "data.fit=resize stretches images instead, data.fit=pad adds black"
        )
    if smaller := int((array.min(1) < side).sum()):
        notes.append(f"{counted(smaller, 'image')} smaller than {side} pixels would be enlarged")
    return notes


# ---- clients -------------------------------------------------------------------------------------


def clients_for(
    structure: Structure,
    values: Sequence[str],
    parts: Counter[str],
    spec: DataSpec | None,
    groups: Sequence[str] = (),
) -> Clients:
    """Who holds the images: a column or a level of folders, or else a number.

    Args:
        structure: what the columns mean.
        values: the client of each image, in the order of the parts.
        parts: the number of images of each part.
        spec: how a run would hold images out; none: nothing is held out.
        groups: what each image is kept together with, if anything.
    """
    column = structure.column(structure.client)
    if column is None or column.values < 2:
        count = parts["train"] // A_CLIENT
        count = max(CLIENTS[0], min(CLIENTS[1], count))
        why = f"{count} equal shares stand for sites, one for every {A_CLIENT} images, as "
        why += "nothing says who holds what" if column is None else f"'{column.name}' is one only"
        return Clients("number", count, why=why)
    sizes = Counter(value for value in values if value)
    count = len(sizes) if spec is None else _training_clients(spec, values, parts, groups)
    by: Literal["column", "folder"] = "folder" if column.name.startswith("level ") else "column"
    return Clients(by, count, column.name, dict(sizes.most_common()), column.why)


def _training_clients(
    spec: DataSpec, values: Sequence[str], parts: Counter[str], groups: Sequence[str]
) -> int:
    """How many clients are left with training images when others are held out.

    A client with few images may lose all of them, and `split=column` must be told the number of
    those that remain. The parts are drawn as in a run, from images of one pixel.
    """
    columns = {"client": _numbers(values), **({GROUP: _numbers(groups)} if groups else {})}
    stored, start = {}, 0
    for part in ("train", "validation", "test"):
        if not (count := parts[part]):
            continue
        pixels = np.zeros((count, 1, 1, 1), np.uint8)
        own = {name: rows[start : start + count] for name, rows in columns.items()}
        stored[part] = Images(pixels, np.full(count, -1), own)
        start += count
    plain = replace(spec, size=None, channels=None, labelled=0.0)
    # The protected method, because there are no images of its own to load yet.
    train = plain._select(Stored(stored, (), (), {}, "", "")).train
    held = train.factors["client"]
    return len(np.unique(held[held >= 0]))


def _numbers(values: Sequence[str]) -> Integers:
    """The number of each value, -1 where it is empty."""
    _, numbers = numbered([value or None for value in values])
    return np.array([numbers[value or None] for value in values], np.int64)


# ---- all of it -----------------------------------------------------------------------------------


def spec_of(settings: Mapping[str, Any]) -> DataSpec:
    """The data set that settings of a recipe name."""
    own = {key.removeprefix("data."): v for key, v in settings.items() if key.startswith("data.")}
    return choose("data", datasets, {"name": settings["data"], **own})


def problem_with(settings: Mapping[str, Any]) -> str:
    """Why a run could not read the images as they are; empty if it can."""
    try:
        spec = spec_of(settings)
        spec.check()
        spec.identity()
    except DataError as error:
        return str(error)
    return ""


def views_for(kind: Kind, removed: Sequence[Removal]) -> dict[str, Any]:
    """The preset of views of a kind, with the changes that measurements ask for."""
    settings: dict[str, Any] = {"views": VIEWS[kind]}
    for setting in (setting for removal in removed for setting in removal.settings):
        key, _, value = setting.partition("=")
        settings[key] = yaml.safe_load(value)
    return settings
