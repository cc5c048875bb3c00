"""The code in the documents is run as it is printed."""

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
import yaml

import harmonium
from harmonium.cli.main import app
from harmonium.data.datasets import datasets
from harmonium.data.partition import splits
from harmonium.data.published_datasets import Published
from harmonium.learning.encoders import encoders
from harmonium.learning.objectives import objectives
from harmonium.learning.terms import terms
from harmonium.measures.eval_data import sets_of
from harmonium.measures.evaluation import _needed, _with_settings
from harmonium.methods import methods
from harmonium.recipe.overrides import apply_changes, changes_of
from harmonium.recipe.schema import Recipe, known_keys
from harmonium.sites.plan import federated
from harmonium.studies.comparison.cells import plan
from harmonium.studies.comparison.sweep import read

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)


def blocks(document: str | Path, language: str = "") -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language]


def module_of(code: str) -> str:
    """The module that a block is saved as: `in_order` for `class InOrder`, for tests `test_...`."""
    if found := re.search(r"^def (test_\w+)", code, re.MULTILINE):
        return found[1]
    found = re.search(r"^@\w+\(.*\n(?:@.*\n)*class (\w+)\(", code, re.MULTILINE)
    return re.sub(r"(?<=.)(?=[A-Z])", "_", found[1]).lower() if found else ""


REGISTRIES = (datasets, splits, encoders, objectives, terms, methods)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the modules of CONTRIBUTING.md; what they register is forgotten."""
    names = [name for code in blocks("CONTRIBUTING.md", "python") if (name := module_of(code))]
    for code in blocks("CONTRIBUTING.md", "python"):
        if name := module_of(code):
            (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_table", registry.table())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def commands_of(page: Path) -> list[list[str]]:
    """The words after `harmonium` of every command that a page's blocks show."""
    text = "\n".join(blocks(page)).replace("\\\n", " ")
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["harmonium"]]


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parsed(command: list[str]) -> dict[str, Any]:
    """What the command line makes of the words; unknown commands and options fail."""
    group: Any = command_line()
    while hasattr(group, "commands"):
        name, *command = command
        assert name in group.commands, f"there is no command {name}"
        group = group.commands[name]
    return dict(group.make_context(name, command).params)


def shell(words: str, where: Path) -> str:
    command = words.replace("\\\n", " ").replace("harmonium ", f"{sys.executable} -m harmonium ", 1)
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=where, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tests_in_the_documents_pass(workshop: Path, request: pytest.FixtureRequest) -> None:
    for path in workshop.glob("test_*.py"):
        tests = {n: one for n, one in runpy.run_path(str(path)).items() if n.startswith("test_")}
        assert tests
        for test in tests.values():
            test(*map(request.getfixturevalue, inspect.signature(test).parameters))


def test_python_in_commands_works(workshop: Path) -> None:
    lines = "\n".join(blocks("CONTRIBUTING.md")).splitlines()
    for line in lines:
        if line.startswith("python -c "):
            exec(shlex.split(line)[2], {})


def test_pieces_of_ones_own_run_from_the_current_folder(workshop: Path) -> None:
    """Runs are of fewer rounds and images; the pieces are found here and in a worker's process."""
    modules = {path.stem for path in workshop.glob("*.py")}
    for number, command in enumerate(commands_of(ROOT / "CONTRIBUTING.md")):
        if modules & set(re.findall(r"(\w+):[A-Z]", " ".join(command))):
            if command[0] != "run":
                shell(f"harmonium {' '.join(command)}", workshop)
                continue
            words = [re.sub(r"^rounds=\d+", "rounds=1", word) for word in command]
            small = ["data.limit=200", "engine.workers=1", "evaluate.labels_per_class=[]"]
            app([*words, *small, "--out", str(number)], standalone_mode=False)
            assert (workshop / str(number) / "result.json").is_file()


@pytest.mark.usefixtures("unrendered")
def test_the_readmes_recipe_and_python_work(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, but with fewer images."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # a worker a core; more change no bit
    small = ("data.limit=300", "evaluate.labels_per_class=[]")
    monkeypatch.setitem(vars(harmonium), "run", partial(fewer, harmonium.run, small))
    judged = partial(fewer, harmonium.diagnose, small[:1])
    monkeypatch.setitem(vars(harmonium), "diagnose", judged)
    for text in blocks("README.md", "yaml"):
        Recipe.from_tree(yaml.safe_load(text))
    for code in blocks("README.md", "python"):
        (workshop / "example.py").write_text(code)
        runpy.run_path(str(workshop / "example.py"))


def fewer(function: Any, small: tuple[str, ...], *words: str, **settings: Any) -> Any:
    return function(*words, *small, **settings)


def test_the_recipe_page_names_every_key_and_only_those() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", text, re.MULTILINE))
    keys = {key for key in known_keys() if "." in key}
    assert keys <= named, sorted(keys - named)
    assert {key for key in named if "." in key and not key.startswith("terms.")} <= keys


def test_generated_tables_are_fresh() -> None:
    filled = runpy.run_path(str(ROOT / "docs" / "tables.py"))["filled"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if "from docs/tables.py" in text:
            assert filled(text) == text, f"{page.name}: run `python docs/tables.py`"


def test_the_commands_of_the_documents_are_known() -> None:
    """Commands and options exist."""
    wrong = []
    for page in PAGES:
        for command in commands_of(page):
            try:
                parsed([word for word in command if not word.startswith("[")])
            except (AssertionError, click.UsageError) as error:
                wrong.append(f"{page.name}: harmonium {' '.join(command)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_commands_of_the_data_page_are_known() -> None:
    """Each names settings that exist; what it takes to run them is not here."""
    for command in commands_of(ROOT / "docs" / "data.md"):
        if command[0] == "run":
            Recipe.of(command[1], *command[2:])
        elif command[:2] in (["data", "split"], ["data", "show"]):
            Recipe.from_tree(apply_changes({"data": command[2]}, command[3:]))
        elif command[:2] == ["data", "fetch"]:
            assert issubclass(datasets[command[2]], Published)


def test_the_commands_of_the_page_on_measuring_are_known() -> None:
    """Each names settings that exist; they are run, smaller, in tests/measures."""
    for kind, *rest in commands_of(ROOT / "docs" / "evaluation.md"):
        given = parsed([kind, *rest])
        if kind == "run":
            Recipe.of(given["what"], *(given["changes"] or ()))
        elif kind == "eval":
            changes = [word for word in given["words"] if "=" in word]
            others = [word for word in given["words"] if "=" not in word]
            names = [word for word in others if not word.startswith("runs/")]
            sets, settings = sets_of(changes_of(changes))
            measures, _ = _with_settings(names, settings)
            _needed(sets, measures)


def test_the_commands_of_the_page_on_comparing_are_known() -> None:
    for kind, *rest in commands_of(ROOT / "docs" / "comparing.md"):
        words = parsed([kind, *rest]).get("words") or []
        if kind == "compare":
            plan(words)
        elif kind == "sweep":
            asked = read(words)
            plan(asked.words_at(asked.values[0]), allow_unfair=asked.own_views)


def test_the_commands_of_a_federation_are_known() -> None:
    """Pages, units and the compose file name commands, options and settings that exist."""
    pages = [ROOT / "docs" / "federation.md", *sorted((ROOT / "examples").rglob("*"))]
    words = [
        line.partition("#")[0].replace("…", "").split()
        for page in pages
        if page.is_file()
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    ]
    commands = [some[n:] for some in words for n in range(len(some)) if _begins(some, n)]
    for group, name, *rest in commands:
        command = command_line().commands[group].commands[name]
        context = command.make_context(name, rest)
        if name in ("start", "check") and "what" in context.params:
            changes = list(context.params["changes"] or [])
            if not str(context.params["what"]).endswith(".yaml"):
                federated(context.params["what"], changes)


def _begins(words: list[str], place: int) -> bool:
    """Whether a command of a federation begins here, at the start of a line or after `command:`."""
    before = words[place - 1] if place else ""
    starts = before.rpartition("/")[2] in ("harmonium", "command:") and len(words) > place + 1
    return starts and words[place] in ("server", "client") and words[place + 1].isalpha()


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as repository hosts make them."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(
            r"\]\(([^()\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        ):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" in link:
                continue
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
            elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
                broken.append(f"{page.relative_to(ROOT)}: {link} names no heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/results").glob("*.md")))
def test_a_page_of_results_says_of_which_commit_its_figures_are(page: str) -> None:
    text = (ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
    assert re.search(r"^Figures of commit `[0-9a-f]{7,}(-dirty)?`", text, re.MULTILINE)
