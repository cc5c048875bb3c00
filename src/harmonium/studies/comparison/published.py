"""Published figures beside those of a run here, and why they cannot be the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from harmonium.recipe.presets import entry
from harmonium.recipe.schema import Recipe

SCALE = ("encoder", "data", "clients", "rounds", "views")
LOCAL = ("epochs", "batch")
FREE = ("seed", "engine", "evaluate")  # not in these: a paper's figure is of no one seed
CLASSIFIERS = {  # how a paper's figures were judged, by its table
    "fedca": "lp_fedca",
    "fedema": "lp_easyfl",
    "fedsc": "lp_fedsc",
    "fedstyle": "lp_style, one for each style",
    "fedu": "lp_easyfl",
    "fedx": "lp_fedx",
    "fsimclr": "lp_000",
    "orchestra": "lp_orch",
}


class PublishedFigure(NamedTuple):
    """A paper's figure, and in what this recipe is another one."""

    figure: float  # test accuracy of a linear classifier in percent
    gap: tuple[str, ...]  # e.g. `rounds=9, not 20`
    probe: str = "linear"  # the figure of a run that it stands beside
    deviation: float | None = None  # over seeds, as the paper has it


def published(name: str, recipe: Recipe) -> PublishedFigure | None:
    """The figure of a row of a paper's table; none where a recipe is no such row, or has none."""
    row = entry(name)
    if row is None or row.published is None:
        return None
    place = row.name.partition("/")[0]
    full = Recipe.of(row.name)
    gap = [*gaps(recipe, full), f"classifier=fast, not {CLASSIFIERS[place]}"]
    # Where clients see a share of the labels, the paper's classifier sees no others either.
    probe = "linear" if full.split.labels == 1 else "linear_labelled"
    gap += [row.note] if row.note else []
    return PublishedFigure(row.published, tuple(gap), probe, row.deviation)


def gaps(here: Recipe, full: Recipe) -> Iterator[str]:
    """In what a recipe is smaller or other than the one of the paper."""
    mine, theirs = (_scale(recipe) for recipe in (here, full))
    for key in dict.fromkeys((*theirs, *mine)):
        if mine.get(key) != theirs.get(key):
            yield f"{key}={_said(mine.get(key))}, not {_said(theirs.get(key))}"
    if more := list(_others(here, full, {*mine, *theirs})):
        yield f"also other: {', '.join(more)}"


def _others(here: Recipe, full: Recipe, told: Collection[str]) -> Iterator[str]:
    """Keys that differ beside those that are told already."""
    mine, theirs = here.tree(), full.tree()
    for section, value in theirs.items():
        own, keys = mine[section], [section]
        if section in FREE or own == value:
            continue
        if isinstance(value, dict) and isinstance(own, dict) and _named(own) == _named(value):
            keys = [f"{section}.{k}" for k in {**value, **own} if own.get(k) != value.get(k)]
        yield from (key for key in keys if key not in told)


def _named(section: Mapping[str, Any]) -> Any:
    return section.get("name")


def _scale(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.tree()
    found: dict[str, Any] = {}
    for key in SCALE:
        value = tree[key]
        if isinstance(value, dict):
            found[key] = value["name"]
            if key == "data":  # settings of another set or network mean other things
                found |= {f"{key}.{one}": value.get(one) for one in ("limit", "size")}
            elif key == "views":
                found["views.size"] = value.get("size")
        else:
            found[key] = value
    return found | {f"local.{key}": tree["local"][key] for key in LOCAL}


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
