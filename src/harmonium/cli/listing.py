"""The registered classes, read from the source without importing it, so that lists need no torch.

Filling a table imports every module of its package, and with them torch, which takes seconds. A
list shows only names, first lines of docstrings and papers, and these are literals in the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Listed:
    """A registered class as a list shows it."""

    what: str  # the first line of its docstring
    module: str  # the first line of its module's docstring
    paper: str  # authors and year; empty where its kind has none


def listed(kind: str) -> dict[str, Listed]:
    """Every class that a decorator called `kind` registers by name, e.g. `@encoders("resnet18")`.

    >>> listed("splits")["iid"].what
    'Every client the same number of images, drawn at random; the remainder goes to nobody.'
    """
    classes = {
        name: Listed(_first_line(node), _first_line(module), _text(module, node, "paper"))
        for module in _modules(f"@{kind}(")
        for node in module.body
        if isinstance(node, ast.ClassDef)
        for name in _names(node, kind)
    }
    return dict(sorted(classes.items()))


def _modules(marked: str) -> Iterator[ast.Module]:
    """The modules of the package whose text has this mark; the others are not parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if marked in path.read_text(encoding="utf-8"):
            yield _parsed(path)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _names(node: ast.ClassDef, kind: str) -> Iterator[str]:
    """The names that decorators called `kind` give to a class."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == kind:
            yield str(ast.literal_eval(call.args[0]))


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _text(module: ast.Module, node: ast.ClassDef, attribute: str) -> str:
    """A class attribute that is text, given or inherited; empty where no class has it."""
    for one in node.body:
        target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", None)
        if isinstance(target, ast.Name) and target.id == attribute:
            value = getattr(one, "value", None)
            if isinstance(value, ast.Name):  # a constant of its module
                value = _constant(module, value.id)
            return str(ast.literal_eval(value)) if value is not None else ""
    above = [_class(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
    return next((text for one in above if one and (text := _text(*one, attribute))), "")


def _constant(module: ast.Module, name: str) -> ast.expr | None:
    for one in module.body:
        target = one.targets[0] if isinstance(one, ast.Assign) else None
        if isinstance(one, ast.Assign) and isinstance(target, ast.Name) and target.id == name:
            return one.value
    return None


def _class(module: ast.Module, name: str) -> tuple[ast.Module, ast.ClassDef] | None:
    """A class by its name in a module, with the module that has it; none if it is not ours."""
    for one in module.body:
        if isinstance(one, ast.ClassDef) and one.name == name:
            return module, one
        if isinstance(one, ast.ImportFrom) and not one.level:
            for alias in one.names:
                if (alias.asname or alias.name) == name and (path := _path(one.module or "")):
                    return _class(_parsed(path), alias.name)
    return None


def _path(module: str) -> Path | None:
    """The file of a module of this package."""
    first, *rest = module.split(".")
    inside = PACKAGE.joinpath(*rest)
    files = [inside / "__init__.py", inside.with_suffix(".py")] if first == "harmonium" else []
    return next((path for path in files if path.is_file()), None)
