"""Published figures, and how the recipe here differs from the paper's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from harmonium.recipe.presets import entry
from harmonium.recipe.schema import Recipe

SCALE = ("encoder", "data", "clients", "rounds", "views")
LOCAL = ("epochs", "batch")
FREE = ("seed", "engine", "evaluate")  # differences in these do not count
CLASSIFIERS = {  # the protocol of a paper's figures, by its table
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
    """A paper's figure, and how this recipe differs from the paper's."""

    figure: float  # test accuracy of a linear classifier in percent
    gap: tuple[str, ...]  # e.g. `rounds=9, not 20`
    probe: str = "linear"  # the probe of a run that it is compared with
    deviation: float | None = None  # over seeds, as published


def published(name: str, recipe: Recipe) -> PublishedFigure | None:
    """The published figure of a recipe; none if it is not a row of a table or has no figure."""
    row = entry(name)
    if row is None or row.published is None:
        return None
    place = row.name.partition("/")[0]
    full = Recipe.of(row.name)
    gap = [*gaps(recipe, full), f"classifier=fast, not {CLASSIFIERS[place]}"]
    # Where clients see a share of the labels, the paper's classifier sees only these, too.
    probe = "linear" if full.split.labels == 1 else "linear_labelled"
    gap += [row.note] if row.note else []
    return PublishedFigure(row.published, tuple(gap), probe, row.deviation)


def gaps(here: Recipe, full: Recipe) -> Iterator[str]:
    """The differences between a recipe and the paper's."""
    mine, theirs = (_scale(recipe) for recipe in (here, full))
    for key in dict.fromkeys((*theirs, *mine)):
        if mine.get(key) != theirs.get(key):
            yield f"{key}={_text(mine.get(key))}, not {_text(theirs.get(key))}"
    if more := list(_others(here, full, {*mine, *theirs})):
        yield f"also different: {', '.join(more)}"


def _others(here: Recipe, full: Recipe, listed: Collection[str]) -> Iterator[str]:
    """Further keys that differ, besides those `listed`."""
    mine, theirs = here.tree(), full.tree()
    for section, value in theirs.items():
        own, keys = mine[section], [section]
        if section in FREE or own == value:
            continue
        if isinstance(value, dict) and isinstance(own, dict) and _named(own) == _named(value):
            keys = [f"{section}.{k}" for k in {**value, **own} if own.get(k) != value.get(k)]
        yield from (key for key in keys if key not in listed)


def _named(section: Mapping[str, Any]) -> Any:
    return section.get("name")


def _scale(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.tree()
    settings: dict[str, Any] = {}
    for key in SCALE:
        value = tree[key]
        if isinstance(value, dict):
            settings[key] = value["name"]
            if key == "data":  # settings of another set or network mean other things
                settings |= {f"{key}.{one}": value.get(one) for one in ("limit", "size")}
            elif key == "views":
                settings["views.size"] = value.get("size")
        else:
            settings[key] = value
    return settings | {f"local.{key}": tree["local"][key] for key in LOCAL}


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
