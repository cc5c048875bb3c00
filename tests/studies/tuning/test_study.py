"""Studies: grids in short runs, ranked without labels, stopped early, continued after a kill."""

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr

import harmonium
from harmonium.cli.main import main
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError
from harmonium.evaluation.evaluator import Evaluator
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.tuning.grid import points, split_values
from harmonium.studies.tuning.study import spearman, tune

SMALL = [
    "data=shapes",
    "data.count=40",
    "data.test_count=4",
    "data.size=10",
    "clients=3",
    "encoder.width=4",
    "encoder.out=16",
    "local.batch=8",
    "local.epochs=1",
    "evaluate.k=5",
    "engine.workers=0",
]
FILES = ("tune.csv", "tune.json", "tune.md", "tune.png")


@pytest.fixture
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a small study's time."""
    monkeypatch.setattr("harmonium.studies.tuning.study.plot_study", lambda *given: False)


@pytest.fixture(autouse=True)
def _no_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """No study may evaluate an encoder on test images."""

    def refused(evaluator: Evaluator, *given: Any) -> Any:
        raise AssertionError("test images were used")

    monkeypatch.setattr(Evaluator, "test", refused)
    monkeypatch.setattr(Evaluator, "answers", refused)


def study(out: Path, *words: str, **rest: Any) -> Any:
    return tune("fedsimclr", *SMALL, *words, out=out, **rest)


GRID = ("grid.local.lr=0,0.01,0.02", "local.optimiser=adam", "rounds=3", "evaluate.every=2")


@pytest.mark.usefixtures("_no_plots")
def test_the_best_score_wins_and_a_hopeless_setting_stops(tmp_path: Path) -> None:
    found = study(tmp_path / "s", *GRID, keep=0.5, margin=0, check=[2])
    states = {row["setting"]["local.lr"]: row["state"] for row in found.rows}
    scores = [row["score"] for row in found.rows if row["state"] == "complete"]
    assert states["0"] == "stopped" and list(states.values()).count("complete") == 2
    assert found.rows[-1]["round"] == 2 and {row["round"] for row in found.rows[:2]} == {3}
    assert scores == sorted(scores, reverse=True)
    healthy = [row["setting"] for row in found.rows[:2] if not row["warnings"]]
    assert found.best == next(iter(healthy), found.rows[0]["setting"])
    assert bool(found.rows[0]["warnings"]) == any("not to be trusted" in n for n in found.notes)
    for row in found.rows:
        assert row["score"] == pytest.approx(row["align"] + 0.2 * row["unif"], abs=1e-12)
    (stopped,) = (tmp_path / "s" / "runs").glob("000-local.lr=0")
    assert RunFolder(stopped).read_log("metrics.jsonl")[-1]["round"] == 2
    whole = study(tmp_path / "s", *GRID, keep_all=True)  # the same study, played to its end
    assert [row["round"] for row in whole.rows] == [3, 3, 3]
    kept = [row for row in whole.rows if row["setting"]["local.lr"] != "0"]
    assert kept == list(found.rows[:2])
    near = study(tmp_path / "s", *GRID, keep=0.5, margin=1, check=[2])  # all are within
    assert near.rows == whole.rows
    again = study(tmp_path / "s", *GRID, keep=0.5, margin=0, check=[2])  # later rounds do not count
    assert again.rows == found.rows
    _warn(tmp_path / "s", found.rows[0]["setting"]["local.lr"])
    other = study(tmp_path / "s", *GRID, keep=0.5, margin=0, check=[2])
    assert other.best == found.rows[1]["setting"] and other.rows[0]["warnings"] == ["collapsed"]
    assert f"local.lr={other.best['local.lr']}" in other.command
    assert any("not to be trusted: collapsed" in note for note in other.notes)


def _warn(folder: Path, rate: str) -> None:
    """Put a warning into the log of a setting, and take it from all others."""
    for path in folder.glob("runs/*/metrics.jsonl"):
        held, (commit, _) = RunFolder(path.parent), RunFolder(path.parent).newest_readable()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        mine = path.parent.name.endswith(f"={rate}")
        for row in rows:
            row.get("health", {})["warnings"] = ["collapsed"] if mine else []
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert commit is not None
        held.commit(commit.round, commit.server, commit.clients)  # as if it had been so at first


@pytest.mark.usefixtures("_no_plots")
def test_the_command_runs_the_best_setting_in_full(tmp_path: Path) -> None:
    found = study(tmp_path / "s", "grid.local.milestones=[0.5, 0.8],[0.6]", "rounds=1")
    words = shlex.split(found.command)
    assert words[:3] == ["harmonium", "run", "fedsimclr"]
    recipe = Recipe.of(words[2], *words[3:])
    assert list(recipe.local.milestones) == json.loads(found.best["local.milestones"])
    assert recipe.rounds == 20 and recipe.evaluate.tuning is None and recipe.clients == 3


KILLED = """
import os, sys
from harmonium import Callback, tune
class Killed(Callback):
    left = 3
    def round(self, row, seconds):
        Killed.left -= 1
        if not Killed.left:
            os._exit(9)
tune("fedsimclr", *sys.argv[2:], out=sys.argv[1], callbacks=lambda label: Killed(), check=[2])
"""


def test_a_killed_study_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    words = (*GRID, "data.unlabelled=true")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), *SMALL, *words]
    assert subprocess.run(command).returncode == 9
    assert not (tmp_path / "killed" / "tune.csv").exists()
    seen: list[str] = []

    def watcher(label: str) -> Callback:
        seen.append(label)
        return Callback()

    again = study(tmp_path / "killed", *words, callbacks=watcher, check=[2])
    assert [label[:3] for label in seen[:2]] == ["2/3", "3/3"]  # the first was done with
    assert len(seen) == 2 + sum(row["round"] > 2 for row in again.rows)
    whole = study(tmp_path / "killed2", *words, check=[2])
    for name in FILES:
        text = (tmp_path / "killed2" / name).read_bytes()
        text = text.replace(b"killed2", b"killed")  # the folder is named in JSON
        assert (tmp_path / "killed" / name).read_bytes() == text
    assert whole.ranked is None and all(row["knn"] is None for row in whole.rows)  # no labels
    seen.clear()
    study(tmp_path / "killed", *words, callbacks=watcher, check=[2])
    assert not seen  # nothing was left to run


@pytest.mark.usefixtures("_no_plots")
def test_settings_that_fail_or_are_refused_are_in_the_table(tmp_path: Path) -> None:
    words = ("grid.local.momentum=0,1.5", "grid.local.lr=0.01,1e30", "local.clip=none", "rounds=2")
    told: list[str] = []

    def go() -> Any:
        return tune("fedsimclr", *SMALL, *words, out=tmp_path / "s", note=told.append, margin=1)

    found = go()
    states = {tuple(row["setting"].values()): row["state"] for row in found.rows}
    assert states == {
        ("0", "0.01"): "complete",
        ("0", "1e30"): "failed",
        ("1.5", "0.01"): "refused",
        ("1.5", "1e30"): "refused",
    }
    assert found.best == {"local.momentum": "0", "local.lr": "0.01"}
    assert any("momentum" in row["why"] for row in found.rows if row["state"] == "refused")
    assert len(told) == 1 and "failed" in told[0]
    with (tmp_path / "s" / "tune.csv").open() as file:
        assert [row["state"] for row in csv.DictReader(file)] == [r["state"] for r in found.rows]
    told.clear()
    assert go().rows == found.rows and not any("failed" in text for text in told)


def test_the_command_prints_json_and_a_table(tmp_path, monkeypatch, capsys) -> None:
    words = ["tune", "fedsimclr", *SMALL, "grid.local.lr=0.05,0.1,0.2", "rounds=1"]
    words += ["--out", str(tmp_path / "s"), "--keep-all"]
    for extra in (["--json"], ["--formats", "png,svg"]):
        monkeypatch.setattr(sys, "argv", ["harmonium", *words, *extra])
        monkeypatch.setattr(sys, "path", list(sys.path))
        main()
        said, told = capsys.readouterr()
        if "--json" in extra:
            found = json.loads(said)
            assert told == "" and json.loads((tmp_path / "s" / "tune.json").read_text()) == found
    assert found["best"] in [row["setting"] for row in found["rows"]] and found["rounds"] == 1
    knn = [row["knn"] for row in found["rows"]]
    assert found["spearman"] is None or found["spearman"]["settings"] == len(knn)
    assert "Align" in said and "validation kNN" in said and found["command"] in said
    assert (tmp_path / "s" / "tune.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "s" / "tune.svg").exists() and "tune.png, .svg" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedsimclr"], "there is no grid"),
        (["fedsimclr", "local.lr=0.1,0.2"], "e.g. grid.local.lr=0.1,0.2"),
        (["fedsimclr", "gird.local.lr=0.1,0.2"], "grid.local.lr"),
        (["fedsimclr", "grid.local.lr="], "empty value"),
        (["fedsimclr", "grid.local.lr=0.1,,0.2"], "empty value"),
        (["fedsimclr", "grid.local.lr=0.1,0.1"], "names 0.1 twice"),
        (["fedsimclr", "grid.local.lr=0.1,O.2"], "local.lr=O.2"),
        (["fedsimclr", "grid.local.lrr=0.1"], "unknown key 'local.lrr'"),
        (["fedsimclr", "grid.loca.lr=0.1"], "did you mean 'local.lr'"),
        (["fedsimclr", "grid.objective.momentum=0.9"], "objective=simclr does not have it"),
        (["fedsimclr", "grid.objective=simclr,boyl"], "did you mean 'byol'"),
        (["fedsimclr", "grid.local.lr=0.1", "local.lr=1"], "both in the grid and set"),
        (["fedsimclr", "grid.local.lr=0.1", "grid.local.lr=1"], "given twice"),
        (["fedsimclr", "grid.local.lr=0.1,0.10"], "are the same"),
        (["fedsimclr", "grid.rounds=1,2"], "equally long"),
        (["fedsimclr", "grid.evaluate.tuning=simclr,digits"], "grid.evaluate.tuning"),
        (["fedsimclr", "grid.local.lr=0.1", "evaluate.tuning=none"], "nothing would be scored"),
        (["fedsimclr", "grid.local.lr=0.1", "evaluate.tuning=simclear"], "did you mean 'simclr'"),
        (["fedsimclr", "grid.local.momentum=1.5,2"], "local.momentum is 1.5"),
        (["fedsimclr", "fedbyol", "grid.local.lr=0.1"], "name one method"),
        (["nosuch", "grid.local.lr=0.1"], "unknown method"),
        (["fedsimclr", "grid.local.lr=0.1", "--check", "7"], "no score is taken after round 7"),
        (["fedsimclr", "grid.local.lr=0.1", "--check", "a"], "write rounds"),
        (["fedsimclr", "grid.local.lr=0.1", "--keep", "0"], "above 0"),
    ],
)
def test_slips_are_refused_before_anything_runs(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["harmonium", "tune", *words, "--out", str(tmp_path / "s")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main()
    said, told = capsys.readouterr()
    assert end.value.code == 2 and said == "" and len(told.strip().splitlines()) == 1
    assert message in told
    assert not (tmp_path / "s").exists()


def test_another_study_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds no study"):
        study(tmp_path / "full", "grid.local.lr=0.1", "rounds=1")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.json").write_text("{}")
    with pytest.raises(ConfigError, match="another study"):
        study(tmp_path / "s", "grid.local.lr=0.1", "rounds=1")


@pytest.mark.usefixtures("_no_plots")
def test_python_reads_like_the_command(tmp_path: Path) -> None:
    found = harmonium.tune(
        "fedsimclr",
        *(word for word in SMALL if not word.startswith("encoder.out")),
        grid={"encoder.out": [8, 16]},
        rounds=1,
        out=tmp_path / "s",
        **{"data.unlabelled": True},
    )
    assert {row["setting"]["encoder.out"] for row in found.rows} == {"8", "16"}
    assert any("hard to compare" in note for note in found.notes)


def test_rank_correlation_is_spearmans() -> None:
    pairs = [(0.1, 3.0), (0.4, 3.0), (0.2, 5.0), (0.2, 1.0), (0.9, 4.0)]
    assert spearman(pairs) == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert spearman(pairs[:2]) is None and spearman([(1, 2), (1, 3), (1, 4)]) is None


def test_values_are_parted_outside_of_brackets_and_quotes() -> None:
    assert split_values("k", "[1, 2], 'a,b',{x: [1, 2], y: 1}") == [
        "[1, 2]",
        "'a,b'",
        "{x: [1, 2], y: 1}",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/tuning.md"])
def test_the_commands_of_the_documents_are_known(page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [
        shlex.split(line) for line in text.splitlines() if line.startswith("harmonium tune")
    ]
    assert commands
    for _, _, what, *rest in commands:
        words = [word for word in rest if "=" in word]
        grid = [word for word in words if word.startswith("grid.")]
        found = points(what, changes_of([word for word in words if word not in grid]), grid)
        assert len(found) > 1 and all(point.recipe for point in found)


def test_a_study_of_which_nothing_came_through_says_why(tmp_path, monkeypatch, capsys) -> None:
    words = ["tune", "fedsimclr", *SMALL, "data.unlabelled=true", "rounds=1"]
    words += ["grid.split=dirichlet,by_class", "--out", str(tmp_path / "s"), "--json"]
    monkeypatch.setattr(sys, "argv", ["harmonium", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main()
    said, told = capsys.readouterr()
    assert end.value.code == 2 and "needs labels" in told
    assert [row["state"] for row in json.loads(said)["rows"]] == ["failed", "failed"]
    assert not (tmp_path / "s" / "failed").exists()  # other images may do
