"""Published figures beside those of a run here, and why they cannot be the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from harmonium.recipe import Recipe
from harmonium.recipe_text import table, tables

SCALE = ("encoder", "data", "clients", "rounds", "views")
LOCAL = ("epochs", "batch")


class Published(NamedTuple):
    """A paper's figure, and in what this recipe is another one."""

    figure: float  # test accuracy of a linear classifier in percent
    gap: tuple[str, ...]  # e.g. `rounds=9, not 20`


def published(name: str, recipe: Recipe) -> Published | None:
    """The figure of a row of a paper's table; none where a recipe is no such row, or has none."""
    row = name.partition(",")[0].partition("@")[0]
    place = row.partition("/")[0]
    if "/" not in row or place not in tables():
        return None
    row += f"/{table(place)[0].name.rpartition('/')[2]}" if row.count("/") == 1 else ""
    entry = next((one for one in table(place) if one.name == row), None)
    if entry is None or entry.published is None:
        return None
    return Published(entry.published, tuple(gaps(recipe, Recipe.of(row))))


def gaps(here: Recipe, full: Recipe) -> Iterator[str]:
    """In what a recipe is smaller or other than the one of the paper."""
    mine, theirs = (_scale(recipe) for recipe in (here, full))
    for key in dict.fromkeys((*theirs, *mine)):
        if mine.get(key) != theirs.get(key):
            yield f"{key}={_said(mine.get(key))}, not {_said(theirs.get(key))}"


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
