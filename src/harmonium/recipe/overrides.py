"""Changes to a recipe: `key=value` words and Python keywords, read in one way by every command.

`split=dirichlet split.alpha=0.5` on the command line, `split="dirichlet"` with
`**{"split.alpha": 0.5}`, and `split={"name": "dirichlet", "alpha": 0.5}` are the same two changes.
A mapping changes only the keys that it names. Two sources that give different values to one key
are refused; nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from harmonium.core.errors import ConfigError, Key, UnknownSetting
from harmonium.core.registry import recipe_name
from harmonium.core.settings import plain, unknown

DEFAULTS = {  # the default choice of each section
    "method": "fedavg",
    "objective": "simclr",
    "encoder": "cnn-small",
    "data": "digits",
    "split": "iid",
    "aggregation": "mean",
    "server": "average",
}
_BARE = {"init": "file", "engine": "kind"}  # what a bare value of these sections sets
_NAMED = (*DEFAULTS, "public", "views")  # sections that choose something by name
_NONE = ("none", "null", "")
_EITHER = {"fraction": "number", "number": "fraction"}  # of participation: one replaces the other


@dataclass(frozen=True)
class Change:
    """One setting, wherever it was given."""

    path: tuple[str, ...]  # ("split", "alpha")
    value: Any  # a plain value, or from Python a settings object or a class
    word: bool = True  # a `key=value` word, not a keyword

    @property
    def key(self) -> str:
        """The key as it is written in a word: `split.alpha`."""
        return ".".join(self.path)

    @property
    def section(self) -> str:
        """The first part of the key."""
        return self.path[0]


def changes_of(words: Iterable[str | Change], settings: Mapping[str, Any] = {}) -> list[Change]:
    """All changes, each key once; sources that disagree are refused with both values.

    >>> [(one.key, one.value) for one in changes_of(["split.alpha=0.5"], {"split": "dirichlet"})]
    [('split.alpha', 0.5), ('split', 'dirichlet')]
    """
    given: dict[tuple[str, ...], Change] = {}
    for change in (*(c for word in words for c in _read(word)), *_keywords(settings)):
        before = given.get(change.path)
        if before is None:
            given[change.path] = change
        elif before.word and change.word:
            both = "" if _same(before.value, change.value) else _both(before.value, change.value)
            raise ConfigError(f"{change.key} is given twice{both}: leave one out")
        elif not _same(before.value, change.value):
            raise ConfigError(
                f"{change.key} is given twice{_both(before.value, change.value)}: leave one out"
            )
    _check_participation({path[1]: one.value for path, one in given.items() if _is_either(path)})
    return [one for one in given.values() if not _within_object(one, given)]


def _is_either(path: tuple[str, ...]) -> bool:
    return len(path) == 2 and path[0] == "participation" and path[1] in _EITHER


def _check_participation(given: Mapping[str, Any]) -> None:
    """Refuse a fraction together with a number of clients."""
    fraction, number = given.get("fraction"), given.get("number")
    if _normal(fraction) is not None and _normal(number) is not None:
        raise ConfigError(
            Key("participation", "fraction"),
            f"={shown(fraction)} and ",
            Key("participation", "number"),
            f"={shown(number)} exclude each other: leave out participation.number to sample a "
            "fraction of the clients in a round, or participation.fraction for a fixed number",
        )


def _read(word: str | Change) -> list[Change]:
    """The changes of one `key=value` word."""
    if isinstance(word, Change):
        return [word]
    if not isinstance(word, str):
        raise ConfigError(
            f"{shown(word)} is not a setting: write 'key=value', or give it as a keyword, key=value"
        )
    key, equals, text = word.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"'{word}' is not a setting: write key=value, e.g. rounds=10")
    if key == "init" and not text:  # an empty shell variable must not mean a random initialisation
        raise ConfigError(
            "init= names no weights: write init=FILE, a run's folder or module:function, or "
            "init=none for a random initialisation"
        )
    value = deepcopy(_parsed(text))
    return _flat(tuple(key.split(".")), text if isinstance(value, bytes) else value, word=True)


@lru_cache(maxsize=4096)  # recipes of tables share most of their words
def _parsed(text: str) -> Any:
    """The value in YAML, or the text where it is none; a copy of it may be changed."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _keywords(settings: Mapping[str, Any]) -> list[Change]:
    return [
        change
        for key, value in settings.items()
        for change in _flat(tuple(key.split(".")), _plainly(key, value), word=False)
    ]


def _plainly(key: str, value: Any) -> Any:
    """Arrays, networks and functions as settings that a recipe can name; the rest as it is."""
    if _is_plain_throughout(value):
        return value
    from harmonium.recipe.objects import as_settings  # with it comes torch, which words do not need

    return as_settings(key, value)


def _is_plain_throughout(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain_throughout, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain_throughout, value))
    return value is None or isinstance(value, str | int | float)


def _flat(path: tuple[str, ...], value: Any, *, word: bool) -> list[Change]:
    """A value as changes of single keys: a mapping changes the keys that it names.

    An empty mapping changes nothing, but for terms: `terms={}` is none, `terms.uv={}` is one.
    """
    path = _full_path(path, value)
    if not isinstance(value, Mapping):
        return [Change(path, value, word)]
    if not value:
        if path == ("init",):  # weights were meant, so do not start from random ones
            raise ConfigError(Key("init"), " is empty: give a state dict, a file, a run, or none")
        return [Change(path, {}, word)] if path[0] == "terms" else []
    if odd := [key for key in value if not isinstance(key, str) or not key]:
        raise ConfigError(f"{'.'.join(path)} has the key {odd[0]!r}; keys are text")
    return [
        change
        for key, one in value.items()
        for change in _flat((*path, *key.split(".")), one, word=word)
    ]


def _full_path(path: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """The path that is meant: `data.name` stands for `data`, a bare `init` for `init.file`."""
    if len(path) == 2 and path[1] == "name" and path[0] in _NAMED:
        return path[:1]
    if len(path) == 1 and path[0] in _BARE and isinstance(value, str) and value not in _NONE:
        return (*path, _BARE[path[0]])  # so that its other settings stay
    return path


def _within_object(change: Change, given: Mapping[tuple[str, ...], Change]) -> bool:
    """Whether a settings object already has this value; one with another value is refused."""
    for length in range(1, len(change.path)):
        above = given.get(change.path[:length])
        if above is None or _is_plain(above.value) or isinstance(above.value, type):
            continue
        settings, name = above.value, change.path[length]
        if not dataclasses.is_dataclass(settings):
            raise ConfigError(
                f"{above.key} is {shown(settings)}, so {change.key}={shown(change.value)} cannot "
                "be set beside it: leave one out"
            )
        names = [field.name for field in dataclasses.fields(settings) if field.init]
        if name not in names:
            raise UnknownSetting(unknown(change.key, [f"{above.key}.{one}" for one in names]))
        value: Any = getattr(settings, name)
        if len(change.path) > length + 1 or not _same(value, change.value):
            raise ConfigError(
                f"{change.key} is given twice{_both(value, change.value)}: {above.key} is given as "
                f"{shown(settings)}, so leave one out"
            )
        return True
    return False


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | list | tuple | Mapping)


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a key mean the same: 1e-3 and 0.001, none and null do."""
    if one is other:
        return True
    if isinstance(one, type) or isinstance(other, type):
        names = [recipe_name(v) if isinstance(v, type) else v for v in (one, other)]
        return bool(names[0] == names[1])
    left, right = (_normal(value) for value in (one, other))
    if not (_is_plain(left) and _is_plain(right)):
        return False
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return bool(left == right)


def _normal(value: Any) -> Any:
    if dataclasses.is_dataclass(value) or isinstance(value, list | tuple):
        value = plain(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in _NONE:
        return None
    try:
        return float(value)
    except ValueError:
        return value


def _both(one: Any, other: Any) -> str:
    return f", as {shown(one)} and as {shown(other)}"


def shown(value: Any) -> str:
    """A value in a message: plain ones as written, others by their kind, in a few words.

    >>> shown(None), shown([1, 2]), shown(True), shown(dict)
    ('none', '[1, 2]', 'true', 'the class dict')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if _is_plain(value):
        text = str(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def apply_changes(tree: Mapping[str, Any], changes: Sequence[str | Change]) -> dict[str, Any]:
    """The tree with changes; a new choice drops the settings of the old one.

    >>> apply_changes({"data": {"name": "npz", "path": "a"}}, ["data.limit=5", "data=digits"])
    {'data': {'name': 'digits', 'limit': 5}}
    """
    changed = {key: dict(v) if isinstance(v, Mapping) else v for key, v in tree.items()}
    for change in sorted(changes_of(changes), key=lambda one: len(one.path)):  # choices first
        _apply(change, changed)
    if isinstance(participation := changed.get("participation"), Mapping):
        _check_participation(_without_whole(participation))
    for key, value in changed.items():  # `split.alpha=1` alone changes the default's settings
        if isinstance(value, dict) and "name" not in value and key in DEFAULTS:
            changed[key] = {"name": DEFAULTS[key], **value}
    return changed


def _apply(change: Change, tree: dict[str, Any]) -> None:
    """Make one change to a tree."""
    section, path, value = tree, change.path, change.value
    for step in path[:-1]:
        section[step] = _settings_of(section.get(step), step, path)
        section = section[step]
    name, before = path[-1], section.get(path[-1])
    if _is_either(path) and _normal(value) is not None:
        section.pop(_EITHER[path[1]], None)  # a share in place of a number, or the reverse
    if change.key == "init.file" and before != value:
        section.pop("digest", None)  # it is of the other file
    if isinstance(before, Mapping):
        if len(path) > 1 and isinstance(value, Mapping) and not value:
            return  # terms.uv={} while there is such a term
        if "name" in before and value is not None and _same(before["name"], value):
            section[name] = {**before, "name": value}  # the same choice keeps its settings
            return
    section[name] = value
    if path == ("participation",) and dataclasses.is_dataclass(value):
        _check_participation(_without_whole(plain(value)))


def _without_whole(participation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a fraction of 1, which a resolved recipe has beside a number."""
    return {k: v for k, v in participation.items() if k != "fraction" or _normal(v) != 1}


def _settings_of(value: Any, step: str, path: Sequence[str]) -> dict[str, Any]:
    """The value at a step on the path to a setting, as a mapping that can take the setting."""
    if path[0] == "terms" and step == "terms" and (terms := _terms_by_name(value)) is not None:
        return terms
    if isinstance(value, str | type):  # a bare choice
        return {"name": value}
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{step} is {shown(value)}, which has no setting '{'.'.join(path[1:])}'")
    return dict(value or {})


def _terms_by_name(value: Any) -> dict[str, Any] | None:
    """Terms that were given as text or as a list, as a mapping from name to settings."""
    if not isinstance(value, str | list | tuple):
        return None
    terms: Sequence[Any] = value.split(",") if isinstance(value, str) else value
    if all(isinstance(term, str) for term in terms):
        return {name: {} for name in terms if name}
    if all(isinstance(term, Mapping) and "name" in term for term in terms):
        return {term["name"]: {k: v for k, v in term.items() if k != "name"} for term in terms}
    return None


def as_words(changes: Iterable[Change]) -> list[str]:
    """Changes as words of a command; an object that no word can name is shown in <brackets>.

    >>> as_words(changes_of([], {"seeds": 3, "local.lr": None, "compare": {"up": 5}}))
    ['seeds=3', 'local.lr=null', 'compare.up=5']
    >>> as_words(changes_of(["objective=simclr"], {"objective.temperature": 0.5}))
    ['objective=simclr', 'objective.temperature=0.5']
    """
    words = []
    for change in changes:
        value = change.value
        if isinstance(value, type):
            value = recipe_name(value) or f"<{value.__name__}>"
        elif dataclasses.is_dataclass(value):
            words += as_words(_flat(change.path, plain(value), word=False))
            continue
        elif not _is_plain(value):
            value = f"<{type(value).__name__}>"
        text = value if isinstance(value, str) else json.dumps(plain(value), default=shown)
        words.append(f"{change.key}={text}")
    return words
