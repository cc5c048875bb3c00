"""Runs trained further: the same bits as if they had begun so, after any kill, within budgets."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.cli.main import main
from harmonium.core import files
from harmonium.core.errors import ConfigError
from harmonium.runs import extend
from harmonium.runs.loop import Callback
from harmonium.runs.open_run import read_about, read_recipe
from harmonium.runs.privacy_report import report

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

COMPARED = ("metrics.jsonl", "ledger.jsonl", "encoder.safetensors", "result.json", "split.npz")
SMALL = [
    *("data=shapes", "data.count=80", "data.test_count=30", "data.size=12", "clients=3"),
    *("encoder.width=4", "encoder.out=8", "local.batch=8", "local.epochs=1", "evaluate.every=1"),
    *("evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0"),
]
CONSTANT = [*SMALL, "local.schedule=constant"]


class Stop(Callback):
    """Ends a run after a round, as a kill would."""

    def __init__(self, last: int) -> None:
        self.last = last

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        if row["round"] == self.last:
            raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in COMPARED}


def stopped(call: Any, last: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        call(callbacks=Stop(last))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, undrawn: None, unprobed: None) -> Path:
    """A run that began with four rounds; its server has moments, and clients keep a state."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    harmonium.run("scaffold", *CONSTANT, "rounds=4", out=folder)
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, undrawn: None, unprobed: None) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    harmonium.run("scaffold", *CONSTANT, "rounds=2", out=folder)
    return folder


@pytest.fixture
def copied(short: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short, tmp_path / "run"))


def test_a_complete_run_trained_further_equals_one_that_began_so(copied: Path, whole: Path) -> None:
    before = {name: (copied / name).read_bytes() for name in ("result.json", "encoder.safetensors")}
    found = harmonium.resume(copied, rounds=4)
    assert contents(copied) == contents(whole)
    assert len(found.rounds) == 5 and found.recipe.rounds == 4
    assert found.recipe.digest == read_recipe(whole).digest
    (part,) = read_about(copied)["history"]
    assert part["round"] == 2 and part["rounds"] == [2, 4]
    assert part["recipe"][1] == found.recipe.digest != part["recipe"][0]
    assert any("after round 2" in note for note in found.notes)
    for name, held in before.items():
        assert (copied / "earlier" / "000002" / name).read_bytes() == held
    again = harmonium.resume(copied)  # complete: nothing more happens
    assert again.figures == found.figures and len(read_about(copied)["history"]) == 1


def test_a_run_can_be_trained_further_twice_and_before_it_is_complete(
    tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "run"
    stopped(
        lambda **more: harmonium.run("scaffold", *CONSTANT, "rounds=2", out=folder, **more), last=1
    )
    stopped(lambda **more: harmonium.resume(folder, "rounds=3", **more), last=3)
    harmonium.resume(folder, rounds=4)
    assert contents(folder) == contents(whole)
    assert [part["round"] for part in read_about(folder)["history"]] == [1, 3]


def test_killed_while_it_is_trained_further(copied: Path, whole: Path) -> None:
    stopped(lambda **more: harmonium.resume(copied, rounds=4, **more), last=3)
    assert not (copied / "result.json").exists()
    with pytest.raises(ConfigError, match="rounds"):
        harmonium.resume(copied, rounds=4)  # it has them already
    harmonium.resume(copied)
    assert contents(copied) == contents(whole)


@pytest.mark.parametrize("after", [2, 3, 4])
def test_killed_at_any_instant_of_the_change_itself(
    copied: Path, whole: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run is the old one or the new one, and both go on."""
    steps = [0]

    def counting(inner: Any) -> Any:
        def step(*args: Any, **more: Any) -> Any:
            if steps[0] == after:
                raise KeyboardInterrupt
            steps[0] += 1
            return inner(*args, **more)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(extend.files, "write_atomic", counting(files.write_atomic))
        patch.setattr(extend.os, "replace", counting(os.replace))
        with pytest.raises(KeyboardInterrupt):
            harmonium.resume(copied, rounds=4)
    if after < 3:  # to another number of rounds than at first
        harmonium.resume(copied)
        assert read_recipe(copied).rounds == 2 and (copied / "encoder.safetensors").exists()
        harmonium.resume(copied, rounds=3)
    assert read_recipe(copied).rounds < 4
    harmonium.resume(copied, rounds=4)
    assert contents(copied) == contents(whole)
    rounds = [part["rounds"] for part in read_about(copied)["history"]]
    assert rounds == ([[2, 3], [3, 4]] if after < 3 else [[2, 4]])


def test_schedules_run_over_the_new_rounds(tmp_path: Path) -> None:
    words = [*SMALL, "local.schedule=cosine"]
    harmonium.run("fedavg", *words, "rounds=1", out=tmp_path / "run")
    harmonium.resume(tmp_path / "run", rounds=2)
    harmonium.run("fedavg", *words, "rounds=2", out=tmp_path / "whole")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")  # round 1 has the whole rate
    harmonium.resume(tmp_path / "run", rounds=3)
    harmonium.run("fedavg", *words, "rounds=3", out=tmp_path / "other")
    assert contents(tmp_path / "run") != contents(tmp_path / "other")  # its round 2 was slower


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_are_not_taken_back(
    short: Path, rounds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["harmonium", "resume", str(short), f"rounds={rounds}"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and f"rounds={rounds}" in said and "Traceback" not in said
    assert contents(short) and read_recipe(short).rounds == 2


def test_nothing_else_may_change_with_the_rounds(short: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.\* and rounds"):
        harmonium.resume(short, "rounds=4", "local.lr=0.5")
    with pytest.raises(ConfigError, match="rounds"):
        harmonium.evaluate_run(short, "knn", "rounds=4")


SPECTRAL = ("objective=spectral", "objective.form=fedsc", "privacy.noise=simulated")


def test_noise_that_was_calibrated_for_fewer_rounds_is_not_drawn_again(tmp_path: Path) -> None:
    words = [*SMALL, *SPECTRAL, "method.epsilon=8", "rounds=2"]
    harmonium.run("fedsc", *words, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"rounds=3.*calibrated"):
        harmonium.resume(tmp_path / "run", rounds=3)


def test_a_privacy_budget_holds_for_the_further_rounds(tmp_path: Path) -> None:
    """Noise as given, and a budget that allows of two releases: the others are not asked for."""
    words = [*SMALL, *SPECTRAL, "method.sigma=0.5", "privacy.epsilon=2", "privacy.delta=1e-3"]
    harmonium.run("fedsc", *words, "rounds=2", out=tmp_path / "run")
    found = harmonium.resume(tmp_path / "run", rounds=5)
    harmonium.run("fedsc", *words, "rounds=5", out=tmp_path / "whole")
    ledgers = [contents(tmp_path / name)["ledger.jsonl"] for name in ("run", "whole")]
    assert ledgers[0] == ledgers[1]
    assert any(row.get("refused") for row in found.rounds)
    spent = report(tmp_path / "run").clients
    assert spent and all(0 < one.epsilon <= 2 for one in spent)
