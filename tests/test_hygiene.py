"""What must never be in the source: loaders that can execute data, and unfinished marks."""

import ast
import gc
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import harmonium

SOURCE = Path(harmonium.__file__).parent
ROOT = SOURCE.parent.parent
FORBIDDEN_IMPORTS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torchvision"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load"}


LOOKED_AT = (
    ast.Import,
    ast.ImportFrom,
    ast.Call,
    ast.Constant,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
)


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every node that some rule is about, with its file's path inside the package."""
    return [
        (path.relative_to(SOURCE), node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in walked(path)
        if isinstance(node, LOOKED_AT)
    ]


def walked(path: Path) -> list[ast.AST]:
    """Every node of a file; they are so many that collecting garbage meanwhile takes as long."""
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    finally:
        gc.enable()


def imports() -> Iterator[tuple[Path, int, set[str]]]:
    """Path, line and top-level package names of every import."""
    for path, node in nodes():
        if isinstance(node, ast.Import):
            yield path, node.lineno, {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            yield path, node.lineno, {name.partition(".")[0] for name in names}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_safe(call: ast.Call) -> bool:
    """Whether a call is none of the forbidden ones; `np.load` is safe with allow_pickle=False."""
    name = dotted(call.func)
    if name == "np.load":
        return any(
            word.arg == "allow_pickle"
            and isinstance(word.value, ast.Constant)
            and word.value.value is False
            for word in call.keywords
        )
    return name not in FORBIDDEN_CALLS


def assert_none(offending: list[str], rule: str) -> None:
    """Fail with every offending `path:line` at once."""
    assert not offending, "\n".join([f"{rule}:", *offending])


def test_no_module_imports_a_loader_that_can_execute_data() -> None:
    offending = [
        f"{path}:{line} {', '.join(sorted(packages & FORBIDDEN_IMPORTS))}"
        for path, line, packages in imports()
        if packages & FORBIDDEN_IMPORTS
    ]
    assert_none(offending, "forbidden imports")


def test_only_the_flower_engine_imports_flower() -> None:
    offending = [
        f"{path}:{line}"
        for path, line, packages in imports()
        if "flwr" in packages and path.parts[:-1] != ("engines", "flower")
    ]
    assert_none(offending, "imports of flwr outside engines/flower")


def test_no_call_can_execute_what_it_reads() -> None:
    offending = [
        f"{path}:{node.lineno} {dotted(node.func)}"
        for path, node in nodes()
        if isinstance(node, ast.Call) and not is_safe(node)
    ]
    assert_none(offending, "forbidden calls")


def test_numbers_have_their_words_in_full() -> None:
    """`counted` writes "1 seed" and "2 seeds"; nothing says "seed(s)"."""
    offending = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"[a-z]\(s\)", node.value)
    ]
    assert_none(offending, 'texts with "(s)"')


def test_every_shipped_recipe_is_in_the_package() -> None:
    """A pattern that is missing breaks installed packages only, never a checkout."""
    settings = ROOT / "pyproject.toml"
    if not settings.is_file():
        pytest.skip("not a checkout")
    setuptools = tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = setuptools["package-data"]["harmonium"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    missing = sorted(set(SOURCE.rglob("*.yaml")) - packed)
    assert_none([str(path) for path in missing], "recipes that package-data leaves out")


def test_the_version_is_the_same_everywhere() -> None:
    settings, citation = ROOT / "pyproject.toml", ROOT / "CITATION.cff"
    if not settings.is_file():
        pytest.skip("not a checkout")
    version = tomllib.loads(settings.read_text(encoding="utf-8"))["project"]["version"]
    assert harmonium.__version__ == version
    assert f"\nversion: {version}\n" in citation.read_text(encoding="utf-8")
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_function_has_more_than_fifty_lines() -> None:
    """Its signature and docstring are not counted."""
    long = []
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            if lines > 50:
                long.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_the_tests_that_make_names_exist() -> None:
    makefile = ROOT / "Makefile"
    if not makefile.is_file():
        pytest.skip("not a checkout")
    named = re.findall(r"\btests/[\w/.]+", makefile.read_text(encoding="utf-8"))
    assert named
    assert_none([path for path in named if not (ROOT / path).exists()], "Makefile: missing paths")


def test_no_error_test_matches_a_sentence() -> None:
    """`match=` names settings, files and numbers; more than four plain words in a row are prose."""
    tests = ROOT / "tests"
    if not tests.is_dir():
        pytest.skip("not a checkout")
    prose = re.compile(r"(?<![\w.`'=/-])(?:[a-z]+[,;:]? ){4}[a-z]+(?![\w.`'=/-])")
    offending = [
        f"{path.relative_to(ROOT)}:{node.value.lineno} {text.value}"
        for path in sorted(tests.rglob("*.py"))
        for node in walked(path)
        if isinstance(node, ast.keyword) and node.arg == "match"
        for text in ast.walk(node.value)
        if isinstance(text, ast.Constant)
        and isinstance(text.value, str)
        and prose.search(text.value)
        and "ZeroDivisionError" not in text.value  # raised by the test itself
    ]
    assert_none(offending, "errors matched by their wording")
