"""What must never be in the source: loaders that can execute data, and unfinished marks."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import harmonium

SOURCE = Path(harmonium.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_IMPORTS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torchvision"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_is_read_can_execute(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            roots = {name.partition(".")[0] for name in [*names, getattr(node, "module", "") or ""]}
            assert not roots & FORBIDDEN_IMPORTS, f"line {node.lineno}"
            assert "flwr" not in roots or path.parts[-3:-1] == ("engines", "flower")
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            safe = [k for k in node.keywords if k.arg == "allow_pickle"]
            assert safe and dotted(node.func) == "np.load", f"line {node.lineno}"
            assert ast.literal_eval(safe[0].value) is False


def test_numbers_have_their_words_in_full() -> None:
    """`counted` writes "1 seed" and "2 seeds"; nothing says "seed(s)"."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"[a-z]\(s\)", node.value), f"{path}, line {node.lineno}"


def test_every_shipped_recipe_is_in_the_package() -> None:
    """A pattern that is missing breaks installed packages only, never a checkout."""
    settings = SOURCE.parent.parent / "pyproject.toml"
    if not settings.is_file():
        pytest.skip("not a checkout")
    told = tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["setuptools"]
    packed = {path for one in told["package-data"]["harmonium"] for path in SOURCE.glob(one)}
    assert set(SOURCE.rglob("*.yaml")) <= packed
