"""Packages form layers: a module imports from its own package and from layers below, never above.

Imports inside functions count like all others, for they run as well; imports for type checkers do
not. `harmonium.testing` and the package's own `__init__` and `__main__` stand above all layers.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import harmonium

SOURCE = Path(harmonium.__file__).parent
LAYERS = (
    ("core",),
    ("storage", "data", "privacy"),
    ("learning",),
    ("evaluation",),
    ("report",),
    ("federation",),
    ("methods", "engines"),
    ("recipe",),
    ("runs",),
    ("use",),
    ("sites",),
    ("measures", "handover"),
    ("studies",),
    ("cli",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
TOP = {"__init__.py", "__main__.py", "sklearn.py", "testing.py", "py.typed"}


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The packages of Harmonium that are imported at run time, and the lines that do it."""
    left = [node]
    while left:
        child = left.pop()
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        left.extend(one for one in ast.iter_child_nodes(child) if not isinstance(one, ast.expr))
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module == "harmonium":
            names = [f"harmonium.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = [child.module or ""]
        for name in names:
            if name.startswith("harmonium.") and name != "harmonium.__version__":
                yield name.split(".")[1], child.lineno


def upward(package: str, text: str) -> Iterator[tuple[str, int]]:
    """The imports of a module that do not point down."""
    for other, line in imports(ast.parse(text)):
        if other != package and LAYER_OF.get(other, len(LAYERS)) >= LAYER_OF[package]:
            yield other, line


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {other}"
        for package in LAYER_OF
        for path in sorted((SOURCE / package).rglob("*.py"))
        for other, line in upward(package, path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_layer() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(LAYER_OF)
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == TOP


def test_an_upward_import_is_found_wherever_it_is() -> None:
    text = "def late():\n    from harmonium.runs import loop\n"
    assert list(upward("core", text)) == [("runs", 2)]
    assert list(upward("methods", "from harmonium import engines")) == [("engines", 1)]
    assert not list(upward("cli", text))
    typed = "if TYPE_CHECKING:\n    from harmonium.runs.loop import Result\n"
    assert not list(upward("core", typed))
