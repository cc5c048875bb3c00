"""Comparisons that run: nothing twice, failures left out, other splits refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, DataError, HarmoniumError
from harmonium.data.partition import Split, make_split
from harmonium.runs.loop import Result, RunLoop
from harmonium.runs.open_run import read_recipe
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.comparison import study

TINY = (
    "data=shapes", "data.count=48", "data.test_count=24", "data.size=10", "encoder.width=4",
    "encoder.out=16", "clients=2", "rounds=1", "local.epochs=1", "local.batch=12", "evaluate.k=5",
    "evaluate.labels_per_class=[]", "engine.workers=0",
)  # fmt: skip


BELOW = ["commonest class", "untrained", "raw pixels", "whitened pixels"]


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, unprobed: None, all_unrendered: None
) -> Path:
    folder = tmp_path_factory.mktemp("compared") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARMONIUM_HOME", str(folder.parent / "home"))
        patch.setattr(RunLoop, "_plot", lambda loop: None)
        found = harmonium.compare("fedavg", "fedprox", *TINY, "seeds=2", out=folder)
    assert [row["encoder"] for row in found.rows] == [
        *BELOW, "alone", "fedavg", "fedprox", "centralised", "supervised",
    ]  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def home(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARMONIUM_HOME", str(compared.parent / "home"))


def test_what_is_complete_is_not_run_again(compared: Path, monkeypatch: pytest.MonkeyPatch):
    before = (compared / "compare.json").read_bytes()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a complete run was played again")

    monkeypatch.setattr(RunLoop, "run", never)
    harmonium.compare("fedavg", "fedprox", *TINY, "seeds=2", out=compared)
    assert (compared / "compare.json").read_bytes() == before


def test_a_cell_that_fails_is_left_out_and_tried_again(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, notes = study.run, []

    def sometimes(recipe: Any, **rest: Any) -> Any:
        if recipe.method.name == "fedprox":
            raise DataError("the disk is gone")
        if recipe.method.name == "centralised" and recipe.objective.name == "simclr":
            raise ZeroDivisionError("a fault of ours")
        return real(recipe, **{**rest, "out": compared / rest["out"].relative_to(tmp_path / "o")})

    class Telling(Callback):
        def note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr(study, "run", sometimes)
    words = ("fedavg", "fedprox", *TINY)
    found = harmonium.compare(*words, out=tmp_path / "o", callbacks=lambda label: Telling())
    assert [row["encoder"] for row in found.rows] == [
        *BELOW, "alone", "fedavg", "supervised",
    ]  # fmt: skip
    assert {one["encoder"]: one["why"] for one in found.details["failed"]} == {
        "fedprox": "the disk is gone",
        "centralised": "ZeroDivisionError: a fault of ours",
    }
    assert "it failed and is left out: the disk is gone" in notes
    assert "ZeroDivisionError" in (tmp_path / "o" / "failed.txt").read_text()
    monkeypatch.setattr(study, "run", nothing)
    with pytest.raises(HarmoniumError, match="no run .*nothing works"):
        harmonium.compare(*words, out=tmp_path / "p")


def test_other_settings_and_folders_of_runs_are_refused_before_anything_runs(
    compared: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(study, "run", nothing)
    words = ("fedavg", "fedprox", *TINY, "seeds=2")
    longer = [word for word in words if word != "rounds=1"]
    with pytest.raises(ConfigError, match=r"another run \(rounds=1, not 2\).*--out"):
        harmonium.compare(*longer, out=compared, rounds=2)
    run, before = compared / "fedavg" / "seed-0", sorted(compared.rglob("*"))
    with pytest.raises(ConfigError, match="belongs to a run.*--out"):
        harmonium.compare(*words, out=run)
    assert sorted(compared.rglob("*")) == before


def test_settings_may_be_given_by_name(compared: Path):
    named = {key: value for key, _, value in (word.partition("=") for word in TINY)}
    found = harmonium.compare("fedavg", "fedprox", out=compared, seeds=2, **named)
    assert found.failed == [] and len(found.rows) == 9


def test_resuming_a_comparison_shows_its_command(compared: Path, tmp_path: Path):
    harmonium.compare("fedavg", "fedprox", *TINY, "seeds=2", out=compared)
    with pytest.raises(ConfigError) as refused:
        harmonium.resume(compared)
    words = shlex.join(["fedavg", "fedprox", *TINY, "seeds=2"])
    assert str(refused.value).endswith(f"harmonium compare {words} --out {compared}")
    with pytest.raises(ConfigError, match=r"holds several runs: .* harmonium resume .*seed-0"):
        harmonium.resume(compared / "fedavg")


def nothing(*_: Any, **__: Any) -> None:
    raise DataError("nothing works")


def test_runs_with_another_split_are_refused(compared: Path, tmp_path: Path):
    run = compared / "fedprox" / "seed-1"
    about, split = (run / name for name in ("about.json", "split.npz"))
    kept = about.read_bytes(), split.read_bytes()
    try:
        recipe = read_recipe(run)
        make_split(recipe.split, recipe.data.load(), None, recipe.clients, 99).save(split)
        told = {**RunFolder(run).about(), "split": Split.load(split).digest}
        told["files"] = {**told["files"], "split.npz": files.digest_of(split.read_bytes())}
        RunFolder(run).write_about(told)
        words = ("fedavg", "fedprox", *TINY, "seeds=2")
        with pytest.raises(DataError, match=r"alone and fedprox.*splits \(seed"):
            harmonium.compare(*words, out=compared)
        found = harmonium.compare(*words, out=compared, allow_unfair=True)
        assert any("different splits" in note for note in found.notes)
        assert "different splits" in (compared / "compare.md").read_text()
    finally:
        about.write_bytes(kept[0])
        split.write_bytes(kept[1])


def test_a_run_that_ended_early_is_named(compared: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(result: Result) -> str:
        return "the budget is spent" if result.recipe.method.name == "fedprox" else ""

    monkeypatch.setattr(Result, "stopped", property(stopped))
    found = harmonium.compare("fedavg", "fedprox", *TINY, "seeds=2", out=compared)
    why = "after 0 of 1 rounds: the budget is spent"
    assert [note for note in found.notes if "early" in note] == [
        f"ended early: fedprox, seed {seed}: {why}" for seed in (0, 1)
    ]


def test_seeds_on_other_images_are_refused(compared: Path):
    abouts = list(compared.glob("*/seed-1/about.json"))
    kept = {path: path.read_bytes() for path in abouts}
    try:
        for path in kept:
            RunFolder(path.parent).write_about({**RunFolder(path.parent).about(), "data": "other"})
        with pytest.raises(DataError, match="seeds .*different images"):
            harmonium.compare("fedavg", "fedprox", *TINY, "seeds=2", out=compared)
    finally:
        for path, text in kept.items():
            path.write_bytes(text)


def test_methods_under_other_budgets_run_only_when_told(compared: Path, tmp_path: Path):
    (tmp_path / "longer.yaml").write_text("method: fedprox\nrounds: 2\n")
    words = ("fedavg", str(tmp_path / "longer.yaml"), *(w for w in TINY if "rounds" not in w))
    with pytest.raises(HarmoniumError, match=r"fedavg and longer.*rounds \(20; 2\)"):
        harmonium.compare(*words, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_pixels_are_judged_anew_where_images_or_probes_are_others(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    monkeypatch.setattr("harmonium.studies.comparison.plots.draw", lambda *_: [])

    def pixels(label: str, *words: str) -> Any:
        keys = {word.partition("=")[0] for word in words}
        others = [word for word in TINY if word.partition("=")[0] not in keys]
        (tmp_path / f"{label}.yaml").write_text("method: fedavg\n")
        own = (str(tmp_path / f"{label}.yaml"), "compare.references=none", *others, *words)
        rows = harmonium.compare(*own, out=tmp_path / "o").rows
        return next(row["knn"] for row in rows if row["encoder"] == "raw pixels")

    first = pixels("a")
    assert pixels("b", "evaluate.k=40") != first
    assert pixels("c", "data.count=96") != first
    assert pixels("a") == first
