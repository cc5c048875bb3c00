"""The code in the documents is run as it is printed."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from harmonium.cli.main import app
from harmonium.data.datasets import datasets
from harmonium.data.published import Published
from harmonium.measures.eval_data import sets_of
from harmonium.measures.evaluation import _asked, _needed
from harmonium.recipe.overrides import apply_changes, changes_of
from harmonium.recipe.schema import Recipe, known_keys
from harmonium.sites.plan import federated
from harmonium.studies.comparison.cells import plan
from harmonium.studies.comparison.sweep import read

ROOT = Path(__file__).parents[1]
FILES = {  # a word of the block -> the file that the text calls it
    "class Choosy(": "choosy.py",
    "def test_only_the_client": "test_choosy.py",
    "class AlignUniform(": "align_uniform.py",
    "class Decorrelate(": "decorrelate.py",
    "class Linear(": "linear.py",
    "class Stripes(": "stripes.py",
    "class InOrder(": "in_order.py",
}


def blocks(document: str, language: str = "") -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of CONTRIBUTING.md."""
    for word, name in FILES.items():
        (code,) = [block for block in blocks("CONTRIBUTING.md", "python") if word in block]
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(words: str, where: Path) -> str:
    command = words.replace("\\\n", " ").replace("harmonium ", f"{sys.executable} -m harmonium ", 1)
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=where, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_worked_example_passes_its_test_and_the_contract(workshop: Path) -> None:
    (words,) = [block for block in blocks("CONTRIBUTING.md") if "check_method(" in block]
    check = next(line for line in words.splitlines() if "check_method(" in line)
    test = "import pathlib, test_choosy as t; t.test_only_the_client_with_the_higher_loss_trains"
    both = f"{shlex.split(check)[2]}; {test}(pathlib.Path()); print('passed')"
    said = shell(f"{sys.executable} -c {shlex.quote(both)}", workshop)
    assert "resume is exact" in said and said.endswith("passed\n")


def test_pieces_of_ones_own_run_from_the_current_folder(workshop: Path) -> None:
    (words,) = [block for block in blocks("CONTRIBUTING.md") if "stripes:Stripes" in block]
    assert "linear" in shell(f"{words.strip()} engine.workers=1 --out run", workshop)


def test_the_readmes_recipe_and_python_work(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # a worker a core; more change no bit
    for text in blocks("README.md", "yaml"):
        Recipe.from_tree(yaml.safe_load(text))
    for code in blocks("README.md", "python"):
        (workshop / "example.py").write_text(code)
        runpy.run_path(str(workshop / "example.py"))


def test_the_recipe_page_names_every_key_and_only_those() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", text, re.MULTILINE))
    keys = {key for key in known_keys() if "." in key}
    assert keys <= named, sorted(keys - named)
    assert {key for key in named if "." in key and not key.startswith("terms.")} <= keys


def test_the_tables_of_data_sets_and_splits_are_fresh() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for page in ("recipes.md", "data.md", "evaluation.md", "comparing.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert "from docs/tables.py" in text
        assert made["filled"](text) == text, f"{page}: run `python docs/tables.py`"


def test_the_commands_of_the_data_page_are_known() -> None:
    """Each names settings that exist; what it takes to run them is not here."""
    lines = [line for block in blocks("docs/data.md") for line in block.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("harmonium ")]
    assert len(commands) > 15
    for command in commands:
        if command[0] == "run":
            Recipe.of(command[1], *command[2:])
        elif command[:2] in (["data", "split"], ["data", "show"]):
            Recipe.from_tree(apply_changes({"data": command[2]}, command[3:]))
        elif command[:2] == ["data", "fetch"]:
            assert issubclass(datasets[command[2]], Published)
        else:
            assert command[0] in ("datasets", "splits")


def test_the_commands_of_the_page_on_measuring_are_known() -> None:
    """Each names settings that exist; they are run, smaller, in tests/measures."""
    words = "".join(blocks("docs/evaluation.md")).replace("\\\n", "")
    commands = [line.split()[1:] for line in words.splitlines() if line]
    asked: set[str] = set()
    assert {command[0] for command in commands} == {"run", "eval", "measures"}
    for kind, *rest in commands:
        changes = [word for word in rest if "=" in word]
        if kind == "run":
            assert Recipe.of(rest[0], *changes).clients == 5 and rest[-2] == "--out"
        elif kind == "eval":
            bare = [
                word for word in rest if "=" not in word and not word.startswith(("runs/", "--"))
            ]
            names = [word for word in bare if word != "figures"]
            sets, settings = sets_of(changes_of(changes))
            made, _ = _asked(names, settings)
            _needed(sets, made)
            asked |= set(made)
    assert {"knn", "linear", "semi", "transfer", "retrieval", "geometry"} <= asked


def test_the_commands_of_the_page_on_comparing_are_known() -> None:
    text = "\n".join(blocks("docs/comparing.md")).replace("\\\n", "")
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("harmonium ")]
    assert [command[0] for command in commands] == ["compare", "sweep", "sweep"]
    plan([word for word in commands[0][1:] if word != "--out" and not word.startswith("runs/")])
    for command in commands[1:]:
        asked = read(command[1:])
        plan(asked.at(asked.values[0]), allow_unfair=asked.own_views)


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
    assert len(commands) > 15
    for group, name, *rest in commands:
        command = typer.main.get_command(app).commands[group].commands[name]
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


def test_the_page_of_federations_says_how_proxies_and_clocks_matter() -> None:
    text = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8")
    assert "HTTPS_PROXY=" in text and re.search(r"\*\*Clocks\.\*\*.*305 s behind", text, re.DOTALL)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/results").glob("*.md")))
def test_a_page_of_results_says_of_which_commit_its_figures_are(page: str) -> None:
    text = (ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
    assert re.search(r"^Figures of commit `[0-9a-f]{7,}(-dirty)?`", text, re.MULTILINE)
