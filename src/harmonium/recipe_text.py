"""From names, files and `key=value` words to a recipe's tree of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from harmonium import recipe_tables
from harmonium.errors import ConfigError, suggest


def load_tree(name: str) -> dict[str, Any]:
    """Plain values of a YAML file, a shipped recipe, or a bare method's name."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            return read_yaml(path.read_text(encoding="utf-8"), name)
        except OSError as error:
            raise ConfigError(f"cannot read recipe {name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"recipe {name} is not text in UTF-8") from None
    shipped = shipped_recipes()
    if name in shipped:
        return read_yaml(shipped[name].read_text(encoding="utf-8"), name)
    from harmonium.methods import methods  # here, for torch comes with it, and lists need none

    if ":" in name or name in methods.table():  # a name, or the way to import a class
        return {"method": name}
    table, slash, _ = name.partition("/")
    if slash and table in tables():
        tree: dict[str, Any] = {}
        for words in recipe_tables.layers(name, table, _source(tables()[table])):
            tree = apply_changes(tree, words)
        return tree
    known = {*shipped, *methods.table()}
    raise ConfigError(f"unknown method or recipe '{name}': {suggest(name, known)}")


def shipped_recipes() -> dict[str, Any]:
    """The recipes inside the package, by name."""
    return {**_yaml_files("recipes"), **baselines()}


def baselines() -> dict[str, Any]:
    """Short cuts: the recipes that stand for a method of some paper, by name."""
    return _yaml_files("recipes", "baselines")


def tables() -> dict[str, Any]:
    """The files of recipes that make up the tables of a paper, by name."""
    return _yaml_files("recipes", "tables")


def sweeps() -> dict[str, Any]:
    """The sweeps of the papers, by name."""
    return _yaml_files("recipes", "sweeps")


def table(name: str) -> list[recipe_tables.Entry]:
    """The recipes of a paper's tables."""
    if name not in tables():
        raise ConfigError(f"there are no tables called '{name}': {suggest(name, tables())}")
    return list(recipe_tables.entries(name, _source(tables()[name])))


@cache
def _source(file: Any) -> dict[str, Any]:
    return read_yaml(file.read_text(encoding="utf-8"), file.name)


def about(file: Any) -> tuple[str, str]:
    """The two comments that a shipped recipe begins with: what it is, and its paper."""
    first, second, *_ = file.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# "), second.removeprefix("# ") if second[:1] == "#" else ""


def _yaml_files(*path: str) -> dict[str, Any]:
    folder = resources.files("harmonium").joinpath(*path)
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {file.name[: -len(".yaml")]: file for file in sorted(files, key=lambda f: f.name)}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a command line has them.

    >>> as_words({"seeds": 3, "data": "digits", "local.lr": None, "compare": {"up": 5}})
    ['seeds=3', 'data=digits', 'local.lr=null', 'compare.up=5']
    >>> as_words({"sweep.local.lr": [0.05, 0.1]})
    ['sweep.local.lr=0.05,0.1']
    """
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and "name" not in value:
            words += as_words({f"{key}.{one}": its for one, its in value.items()})
        elif key.startswith("sweep.") and isinstance(value, list | tuple):
            words.append(f"{key}={','.join(map(str, value))}")
        else:
            words.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def apply_changes(tree: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The tree with `key=value` changes; a new choice drops the settings of the old one.

    >>> apply_changes({"data": {"name": "npz", "path": "a"}}, ["data.limit=5", "data=digits"])
    {'data': {'name': 'digits', 'limit': 5}}
    """
    changed = {key: dict(v) if isinstance(v, Mapping) else v for key, v in tree.items()}
    pairs: list[tuple[list[str], Any]] = []
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{change}' is no setting: write key=value, e.g. rounds=10")
        if key in (".".join(path) for path, _ in pairs):
            raise ConfigError(f"{key} is given twice: leave one out")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        pairs.append((key.split("."), text if isinstance(value, bytes) else value))
    for path, value in sorted(pairs, key=lambda pair: len(pair[0])):  # choices before settings
        spot = changed
        for step in path[:-1]:
            held = spot.get(step)
            if isinstance(held, str):  # a bare name: of a choice, or of a term
                held = {held: {}} if path[0] == "terms" else {"name": held}
            if not isinstance(held, Mapping | None):
                raise ConfigError(
                    f"{step} is {held!r}, which has no setting '{'.'.join(path[1:])}'"
                )
            spot[step] = dict(held or {})
            spot = spot[step]
        held = spot.get(path[-1])
        same = isinstance(held, Mapping) and "name" in held and held["name"] == value
        if not same:
            spot[path[-1]] = value
    for key, value in changed.items():  # `split.alpha=1` alone changes the default's settings
        if isinstance(value, dict) and "name" not in value and key in _CHOICES:
            changed[key] = {"name": _CHOICES[key], **value}
    return changed


_CHOICES = {  # the recipe's defaults, by name: their classes would bring torch into every list
    "method": "fedavg",
    "objective": "simclr",
    "encoder": "cnn-small",
    "data": "digits",
    "split": "iid",
    "aggregation": "mean",
    "server": "average",
}


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """The settings in a recipe's text; `name` is what messages call it."""
    try:
        tree = _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise ConfigError(f"recipe {name}{line} cannot be read: {problem}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds no settings: write lines such as `rounds: 20`")
    return tree


class _StrictLoader(yaml.SafeLoader):
    """Plain values only, and no key twice: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
