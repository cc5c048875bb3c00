"""Sweeps: what they go over, and one that runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, DataError, HarmoniumError
from harmonium.recipe.presets import sweeps
from harmonium.runs.loop import RunLoop
from harmonium.studies.comparison import study
from harmonium.studies.comparison.cells import plan
from harmonium.studies.comparison.outcomes import Outcomes
from harmonium.studies.comparison.summary import write_comparison
from harmonium.studies.comparison.sweep import Sweep, read, write_sweep


@pytest.mark.parametrize("name", sweeps())
def test_sweeps_of_the_papers_can_be_run(name: str):
    for size in ("", "@cpu"):
        asked = read([f"{name}{size}", "seeds=2"])
        made = plan(asked.words_at(asked.values[0]), allow_unfair=True)
        assert made.seeds == (0, 1) and not made.references and len(asked.values) > 2
        last = plan(asked.words_at(asked.values[-1]), allow_unfair=True)
        first = next(iter(made.methods.values())), next(iter(last.methods.values()))
        assert first[0].digest != first[1].digest


def test_every_paper_sweep_is_there():
    assert set(sweeps()) == {
        "heterogeneity", "clients", "participation", "local-epochs", "clusters", "labels", "lambda",
        "label-skew", "covariate-shift", "synchronisation", "style-epochs",
    }  # fmt: skip


@pytest.mark.parametrize("size", ["", "@cpu"])
def test_more_local_training_means_fewer_rounds(size: str):
    asked = read([f"synchronisation{size}"])
    runs = [plan(asked.words_at(value)).methods["local-simclr"] for value in asked.values]
    assert len({run.rounds * run.local.epochs for run in runs}) == 1
    assert len({run.rounds for run in runs}) == len(asked.values)


def test_one_of_two_shifts_is_swept():
    asked = read(["covariate-shift@cpu"])
    splits = [plan(asked.words_at(value)).methods["local-simclr"].split for value in asked.values]
    assert {one.alpha for one in splits} == {0.1} and len({one.angle_alpha for one in splits}) == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["heterogenity"], "did you mean 'heterogeneity'"),
        (["heterogeneity@gpu"], "there is no sweep called 'heterogeneity@gpu'"),
        (["fedavg"], "there is no sweep called 'fedavg'.*sweep.local.epochs=1,5"),
        (["clusters@cpu", "sweep.clients=1,2"], "clusters@cpu has a setting of its own"),
        ([], "name a sweep"),
        (["fedavg", "fedprox"], "name a sweep"),
        (["fedavg", "sweep.local.lr=1,2", "sweep.rounds=1,2"], "one setting"),
        (["fedavg", "sweep.local.lr=1,,2"], "sweep.local.lr=1,,2 has an empty value"),
        (["fedavg", "sweep.local.lr=1,1"], "sweep.local.lr names 1 twice"),
        (["fedavg", "sweep.local.lr=1,2", "local.lr=3"], "both swept and set"),
        (["fedavg", "sweep.seeds=1,2"], "seeds cannot be swept"),
        (["heterogeneity", "split.alpha=3"], "split.alpha is both swept and set"),
        (["synchronisation", "rounds=3"], "rounds is both swept and set"),
    ],
)
def test_slips_are_refused(words: list[str], why: str):
    with pytest.raises(ConfigError, match=why):
        read(words)


def test_a_sweep_is_a_table_and_an_image(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, unrendered: None, unprobed: None
):
    """What is drawn is looked at where the sweep is written once more, as SVG."""
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    words = (
        "data=shapes", "data.count=48", "data.test_count=24", "data.size=10", "encoder.width=4",
        "encoder.out=16", "clients=2", "rounds=1", "local.batch=12", "evaluate.k=5",
        "evaluate.labels_per_class=[]", "engine.workers=0",
    )  # fmt: skip
    go = ("fedavg", "fedprox", "sweep.local.epochs=1,2", "label.fedprox=Prox (ours)", *words)
    with pytest.raises(ConfigError, match="local.epochs is 0"):
        harmonium.sweep("fedavg", "sweep.local.epochs=1,0", *words, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()  # slips are found before anything runs
    told: list[str] = []
    found = harmonium.sweep(
        *go, out=tmp_path / "s", callbacks=lambda label: told.append(label) or Callback()
    )
    assert told[0].startswith("local.epochs=1, fedavg") and "Prox (ours)" in told[1]
    rows = {row["encoder"]: row for row in found.shown()}
    assert list(rows) == [
        "commonest class",
        "untrained",
        "raw pixels",
        "whitened pixels",
        "fedavg",
        "Prox (ours)",
    ]
    assert rows["untrained"]["1"] == rows["untrained"]["2"]
    assert found.tabled[:2] == ["knn", "balanced_knn"]
    balanced = {row["encoder"]: row for row in found.shown("balanced_knn")}
    assert balanced["commonest class"]["1"] == pytest.approx(12.5)  # one of eight classes
    held = json.loads((tmp_path / "s" / "local.epochs=2" / "compare.json").read_text())
    knn = next(row["knn"] for row in held["rows"] if row["encoder"] == "fedavg")
    assert rows["fedavg"]["2"] == pytest.approx(100 * knn)
    for name in ("sweep.json", "sweep.csv", "sweep.md", "sweep.tex"):
        assert (tmp_path / "s" / name).stat().st_size > 50
    assert [path.name for path in found.plots] == ["sweep.png", "sweep-linear.png"]
    for name in ("sweep.md", "sweep.tex"):
        text = (tmp_path / "s" / name).read_text()
        assert "Prox (ours)" in text and "linear in percent" in text and "bold" in text
    lines = (tmp_path / "s" / "sweep.csv").read_text().splitlines()
    assert any(one.startswith("linear,fedprox,") and "Prox (ours)" in one for one in lines)
    with pytest.raises(ConfigError, match=r"label\.fedporx.*'fedprox'"):
        harmonium.sweep(*go, "label.fedporx=x", out=tmp_path / "s")
    monkeypatch.setattr(study, "run", without(study.run, epochs=2))
    some = harmonium.sweep(*go, out=tmp_path / "s")
    assert [row["encoder"] for row in some.shown()] == list(rows)
    assert all("1" in row and "2" not in row for row in some.shown())
    lost = {"local.epochs": "2", "encoder": "fedavg", "seed": 0}
    assert [{k: one[k] for k in lost} for one in some.failed] == [
        lost,
        {**lost, "encoder": "fedprox"},
    ]
    assert "left out: local.epochs=2: no run of any method finished: gone" in some.notes
    with pytest.raises(HarmoniumError, match="no run"):
        harmonium.sweep("fedavg", "sweep.local.epochs=2,3", *words, out=tmp_path / "t")
    monkeypatch.undo()
    monkeypatch.setattr(RunLoop, "run", None)
    monkeypatch.setattr("harmonium.report.figure.BY_DEFAULT", ("svg",))
    again = harmonium.sweep(*go, out=tmp_path / "s")
    assert again.shown() == found.shown()
    assert [path.name for path in again.plots] == ["sweep.svg", "sweep-linear.svg"]
    assert all("Prox (ours)" in path.read_text() for path in again.plots)
    # each value has the formats of the whole sweep
    assert (tmp_path / "s" / "local.epochs=1" / "compare.svg").stat().st_size > 1000


@pytest.mark.parametrize("size", ["", "@cpu"])
def test_figure_3c_has_its_split_its_supervised_line_and_its_labelled_part(size: str):
    """Louizos et al., 2024, section 4: joint shift, a fixed labelled holdout, all labels once."""
    asked = read([f"labels{size}"])
    assert asked.probe == "linear_labelled"
    once = asked.at_every_value().methods
    assert set(once) == {"supervised"} and once["supervised"].split.labels == 1.0
    assert once["supervised"].objective.name == "supervised"
    for value in asked.values:
        made = asked.at_value(value).methods
        assert set(made) == {"semi-federated-simclr", "semi-local-simclr"}
        for recipe in (*made.values(), *once.values()):
            assert recipe.split.name == "joint" and recipe.split.alpha == 0.1
            assert recipe.data.labelled == 0.1 and recipe.data.seed == 0
            assert recipe.views.name == "fedsimclr"
        assert {recipe.split.labels for recipe in made.values()} == {float(value)}


@pytest.mark.usefixtures("unprobed")
def test_what_a_sweep_runs_once_is_a_level_beside_all_values(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "harmonium.studies.comparison.sweep.curves",
        lambda path, series, *words, **more: drawn.update({path.name: (series, *words[3:])}),
    )
    words = (
        "data=shapes", "data.count=90", "data.test_count=24", "data.size=10", "data.limit=none",
        "encoder.width=4", "encoder.out=16", "clients=2", "participation.number=2", "rounds=1",
        "local.batch=12", "evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0",
    )  # fmt: skip
    some = {"values": ("0.5",), "names": ("fsimclr/c10-joint/semi-local-simclr@cpu",)}
    monkeypatch.setattr(
        "harmonium.studies.comparison.sweep.read",
        lambda words, settings=None: replace(read(words, settings), **some),
    )
    found = harmonium.sweep("labels@cpu", *words, out=tmp_path / "s")
    rows = {row["encoder"]: row for row in found.shown()}
    held = json.loads((tmp_path / "s" / "lines" / "compare.json").read_text())
    figure = held["details"]["rows"]["supervised"]["figures"]["linear_labelled"]["mean"]
    assert found.probe == "linear_labelled"
    assert rows["supervised"]["0.5"] == pytest.approx(100 * figure)
    series, levels = drawn["sweep.png"]
    assert levels["supervised"] == pytest.approx(100 * figure)
    assert set(series) == {"semi-local-simclr"} and found.failed == []


def without(run: Any, epochs: int) -> Any:
    def some(recipe: Any, **rest: Any) -> Any:
        if recipe.local.epochs >= epochs:
            raise DataError("gone")
        return run(recipe, **rest)

    return some


@pytest.mark.usefixtures("unrendered")
def test_every_form_of_a_sweep_carries_what_was_unfair(tmp_path: Path):
    words = ("data=shapes", "data.count=48", "encoder.width=4", "rounds=1")
    asked = plan(["fedavg", "fedprox,local.batch=6", *words], allow_unfair=True)
    health = {"spread": 0.5, "uniformity": -1.0, "effective_rank": 3.0, "warnings": []}
    figures = {(k, 0): {"knn": 0.5, "health": health} for k in ("untrained", *asked.methods)}
    made = write_comparison(tmp_path, Outcomes(asked, figures, unfair=list(asked.unfair)))
    write_sweep(Sweep(tmp_path, "local.lr", ("1",), {"1": made}, None))
    for name in ("sweep.csv", "sweep.md", "sweep.tex", "sweep.json"):
        assert "differ in local.batch (64; 6)" in (tmp_path / name).read_text(), name
