"""From names and files to a recipe's tree of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harmonium.core.errors import ConfigError, suggest
from harmonium.recipe import paper_tables

if TYPE_CHECKING:
    from harmonium.recipe.overrides import Change

LONGEST, LARGEST, DEEPEST = 1 << 20, 100_000, 50  # characters, values and levels of a YAML file


def changed_tree(
    base: str | type,
    words: Iterable[str | Change],
    settings: Mapping[str, Any] = {},
    defaults: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Plain values of a method, recipe or file with changes, on top of the caller's `defaults`.

    The name or class of a method is a source of `method` like any other: a second one that
    disagrees is refused. The method of a recipe or a file may be changed.
    """
    from harmonium.methods import methods  # with both comes more than lists need
    from harmonium.recipe.overrides import Change, apply_changes, changes_of

    tree = {} if isinstance(base, type) else load_tree(base)
    if isinstance(base, type) or tree == {"method": base} or base in methods.table():
        words = [Change(("method",), base, word=False), *words]
    return apply_changes({**defaults, **tree}, changes_of(words, settings))


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
        from harmonium.recipe.overrides import apply_changes  # pydantic comes with it

        tree: dict[str, Any] = {}
        for words in paper_tables.layers(name, table, _rows(table)):
            tree = apply_changes(tree, words)
        return tree
    if (path / "recipe.yaml").is_file():
        raise ConfigError(
            f"{name} is a run: continue it with `harmonium resume {name}`, or run its recipe anew, "
            f"{path / 'recipe.yaml'}"
        )
    if path.suffix == ".safetensors":
        raise ConfigError(f"{name} holds weights: name a method or recipe first, then init={name}")
    if path.is_dir():
        raise ConfigError(
            f"{name} is a folder: name a method, a recipe or a YAML file; for a folder of images: "
            f"harmonium start {name}"
        )
    known = {*shipped, *methods.table()}
    raise ConfigError(f"unknown method or recipe '{name}': {suggest(name, known)}")


def shipped_recipes() -> dict[str, Any]:
    """The recipes inside the package, by name."""
    return {**_yaml_files(), **baselines()}


def baselines() -> dict[str, Any]:
    """Recipes of papers' baseline methods, by name."""
    return _yaml_files("baselines")


def tables() -> dict[str, Any]:
    """The files of recipes that make up the tables of a paper, by name."""
    return _yaml_files("tables")


def sweeps() -> dict[str, Any]:
    """The sweeps of the papers, by name."""
    return _yaml_files("sweeps")


def studies() -> dict[str, Any]:
    """The studies of the papers' claims, by name."""
    return _yaml_files("studies")


def table(name: str) -> list[paper_tables.TableRecipe]:
    """The recipes of a paper's tables."""
    if name not in tables():
        raise ConfigError(f"there are no tables called '{name}': {suggest(name, tables())}")
    return list(_rows(name).values())


def entry(name: str) -> paper_tables.TableRecipe | None:
    """The row of a paper's table behind a name such as `fedsc/c10-full/fedu@cpu`, if it is one."""
    row = name.partition(",")[0].partition("@")[0]
    place = row.partition("/")[0]
    if "/" not in row or place not in tables():
        return None
    rows = table(place)
    row += f"/{rows[0].name.rpartition('/')[2]}" if row.count("/") == 1 else ""
    return next((one for one in rows if one.name == row), None)


def row_note(name: str) -> str:
    """How the paper's code differs from this row's recipe; empty where it does not."""
    row = entry(name)
    return row.note if row else ""


@cache
def _rows(name: str) -> Mapping[str, paper_tables.TableRecipe]:
    """The recipes of a paper's tables by name, in order."""
    file = tables()[name]
    source = read_yaml(file.read_text(encoding="utf-8"), file.name)
    return {one.name: one for one in paper_tables.entries(name, source)}


def about(file: Any) -> tuple[str, str]:
    """The two comments that a shipped recipe begins with: what it is, and its paper."""
    first, second, *_ = file.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# "), second.removeprefix("# ") if second[:1] == "#" else ""


def _yaml_files(*path: str) -> dict[str, Any]:
    folder = resources.files("harmonium.recipe").joinpath("library", *path)
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {file.name[: -len(".yaml")]: file for file in sorted(files, key=lambda f: f.name)}


def read_yaml(text: str, name: str, kind: str = "recipe") -> dict[str, Any]:
    """The settings in a recipe's text, or another `kind`; `name` is what messages call it."""
    try:
        tree = deepcopy(_parsed(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{kind} {name}{line} cannot be read: {problem}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{kind} {name} holds no settings: write lines such as `rounds: 20`")
    return tree


@lru_cache(maxsize=64)  # the recipe of a run is read several times
def _parsed(text: str) -> Any:
    return load_yaml(text)


def load_yaml(text: str) -> Any:
    """Plain values in YAML; whatever is wrong with it is a `yaml.YAMLError`.

    The number of values is counted before any is constructed, because a few lines of aliases can
    expand to more than fits into memory.

    >>> load_yaml("{rounds: 5, views: [a, b]}")
    {'rounds': 5, 'views': ['a', 'b']}
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it is longer than {LONGEST:,} characters")
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # noqa: BLE001  (dates and numbers that are none)
        raise yaml.YAMLError(str(error)) from None


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number and the depth of a node's values, with aliases expanded."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST, 0  # meanwhile: a node that contains itself has no end
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inside = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    sizes = [_measure(part, known) for part in inside]
    count = 1 + sum(size for size, _ in sizes)
    depth = 1 + max((depth for _, depth in sizes), default=0)
    if count > LARGEST or depth > DEEPEST:
        problem = (
            f"nested deeper than {DEEPEST}"
            if depth > DEEPEST
            else (f"with its aliases expanded it has more than {LARGEST:,} values")
        )
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    known[id(node)] = count, depth
    return count, depth


class _StrictLoader(yaml.SafeLoader):
    """Loads plain values with text keys; duplicate keys, which YAML overwrites, are refused."""

    depth = 0  # of the value that is being read

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {DEEPEST}", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                word = key.value if isinstance(key, yaml.ScalarNode) else "a list or a table"
                raise yaml.constructor.ConstructorError(
                    None, None, f"{word} is not a valid key: keys are text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
