"""The grid of a study: words to settings, each with its recipe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harmonium.core.errors import ConfigError, UnknownSetting
from harmonium.core.settings import unknown
from harmonium.recipe.overrides import Change, as_words
from harmonium.recipe.schema import Recipe, known_keys

ROUNDS = 20  # of every setting, as published
FIXED = {  # what a grid cannot hold, and why
    "rounds": "all settings must run equally long: give rounds=N once",
    "data": "scores on different images cannot be compared: tune each data set by itself",
    "evaluate": "that would change the score and not what is scored",
    "engine": "where clients run never changes a result",
}


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    values: Mapping[str, str]  # key -> value, as written
    recipe: Recipe | None  # none: refused
    why: str = ""  # why it was refused

    @property
    def words(self) -> list[str]:
        """The setting as words of a command."""
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def label(self) -> str:
        """What readers see of the setting."""
        return " ".join(self.words)


def points(what: str, changes: Sequence[Change], words: Sequence[str]) -> list[Setting]:
    """Every setting of the grid with its recipe; mistakes are refused before anything runs."""
    grid = _read_grid(changes, words)
    if not grid:
        raise _no_grid(changes)
    given = {change.key for change in changes}
    study = [] if "rounds" in given else [f"rounds={ROUNDS}"]
    study += [] if "evaluate.tuning" in given else ["evaluate.tuning=simclr"]
    settings = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        try:
            recipe = Recipe.of(what, *changes, *(f"{k}={v}" for k, v in chosen.items()))
            settings.append(Setting(chosen, Recipe.of(recipe, *study)))
        except UnknownSetting:
            raise
        except ConfigError as error:  # values that do not go together: other settings may
            settings.append(Setting(chosen, None, str(error)))
    _check_recipes(settings)
    return settings


def _read_grid(changes: Sequence[Change], words: Sequence[str]) -> dict[str, list[str]]:
    """The values of every `grid.KEY=V1,V2`, by key."""
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.removeprefix("grid.").partition("=")
        if not key or not equals:
            raise ConfigError(f"'{word}' is not a grid: write grid.key=value,value")
        if key in grid:
            raise ConfigError(f"grid.{key} is given twice: leave one out")
        if any(change.key == key for change in changes):
            raise ConfigError(f"{key} is both in the grid and set to one value: leave one out")
        section = key.partition(".")[0]
        if section in FIXED:
            raise ConfigError(f"grid.{key}: {FIXED[section]}")
        if section not in Recipe.model_fields:
            raise UnknownSetting(unknown(key, known_keys()))
        grid[key] = split_values(key, text)
    return grid


def _no_grid(changes: Sequence[Change]) -> ConfigError:
    """The error of a study without a grid; it suggests a setting that was given several values."""
    listed = [change for change in changes if "," in str(change.value)]
    for change in listed:
        if change.section not in Recipe.model_fields:
            keys = known_keys()
            return UnknownSetting(unknown(change.key, [*keys, *(f"grid.{key}" for key in keys)]))
    example = [*as_words(listed), "local.lr=0.03,0.01,0.003"][0]
    return ConfigError(f"there is no grid: name settings to try, e.g. grid.{example}")


def _check_recipes(settings: Sequence[Setting]) -> None:
    """Refuse a grid without a recipe that can run and be scored, or with one of them twice."""
    recipes = [setting.recipe for setting in settings if setting.recipe is not None]
    if not recipes:
        raise ConfigError(settings[0].why)
    if recipes[0].evaluate.tuning is None:
        raise ConfigError("evaluate.tuning is none, so nothing would be scored: leave it out")
    digests = [recipe.digest for recipe in recipes]
    if len(set(digests)) < len(digests):
        raise ConfigError("two settings of this grid are the same: leave one out")
    recipes[0].check()


def split_values(key: str, text: str, prefix: str = "grid.") -> list[str]:
    """The values of a grid: separated by commas, except inside brackets and quotes.

    >>> split_values("local.milestones", "[0.5, 0.8],[0.6]")
    ['[0.5, 0.8]', '[0.6]']
    """
    values, depth, quote, start = list[str](), 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth == 0:
            values.append(text[start:place].strip())
            start = place + 1
    values.append(text[start:].strip())
    if not all(values):
        raise ConfigError(
            f"{prefix}{key}={text} has an empty value: write {prefix}{key}=value,value"
        )
    if twice := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{prefix}{key} names {twice[0]} twice: leave one out")
    return values
