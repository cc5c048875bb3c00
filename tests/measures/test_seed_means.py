"""Runs that differ in their seed only, and folders that hold runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.measures import Shown
from harmonium.measures.seed_means import over_seeds, repeats
from harmonium.recipe.schema import Recipe

DATA = {"name": "shapes", "count": 64, "test_count": 40, "size": 10}


@pytest.fixture
def study(made: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder as comparisons leave it: two seeds of one method, one of another, one not begun."""
    folder = tmp_path / "study"
    for name, seed in (("fedavg", 0), ("fedavg", 1), ("fedprox", 0)):
        shutil.copytree(made(name, seed=seed, data=DATA), folder / name / f"seed-{seed}")
    begun = folder / "fedprox" / "seed-1"
    begun.mkdir()
    shutil.copy(folder / "fedprox" / "seed-0" / "recipe.yaml", begun)
    return folder


def test_a_folder_of_runs_is_measured_and_repeats_are_averaged(study: Path, tmp_path: Path) -> None:
    found = harmonium.evaluate_run(study, "knn", "angles", "angles.clients=2", out=tmp_path / "out")
    assert list(found.runs) == ["fedavg/seed-0", "fedavg/seed-1", "fedprox/seed-0"]
    each = [
        100 * found.figures["knn"][f"fedavg/seed-{n}"]["sets"]["own"]["accuracy"] for n in (0, 1)
    ]
    # Pairs of clients have no means: with another seed they are others.
    knn, beside, angles = found.over_seeds
    assert [row["reference"] for row in beside.rows][3:5] == ["commonest class", "untrained"]
    assert [row["run"] for row in knn.rows] == ["fedavg", "fedprox"] and "seeds" in knn.title
    row = knn.rows[0]
    assert row["seeds"] == 2 and row["images"] == 40
    assert row["accuracy"] == pytest.approx((np.mean(each), np.std(each, ddof=1) / 2**0.5))
    assert knn.rows[1]["accuracy"][1] is None and len(angles.rows) == 2
    kept = json.loads((tmp_path / "out" / "eval.json").read_text())["over_seeds"]
    assert kept[0]["rows"][0]["accuracy"] == pytest.approx(row["accuracy"])
    left = f"{study / 'fedprox' / 'seed-1'} is left out: it is not complete"
    assert left in found.notes
    assert "means over seeds" in (tmp_path / "out" / "eval.md").read_text()


def test_what_no_run_or_no_set_can_give_is_left_out(
    made: Callable[..., Path], study: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="fedstyle"):  # asked of none that it is for
        harmonium.evaluate_run(study, "knn", "styles", out=tmp_path / "out")
    bare = made("fedavg")  # without labels
    words = ("knn", "geometry", "geometry.clients=0")
    found = harmonium.evaluate_run(bare, *words, out=tmp_path / "out", **{"knn.k": 3})
    assert list(found.figures) == ["geometry"] and "run: knn is left out: shapes" in found.notes[0]
    found = harmonium.evaluate_run(
        bare, "knn", "on=own,digits", "on.digits.limit=60", out=tmp_path / "bare"
    )
    assert list(found.figures["knn"]["run"]["sets"]) == ["digits"]
    assert any("knn is left out: shapes" in note for note in found.notes)
    with pytest.raises(DataError, match="shapes"):
        harmonium.evaluate_run(bare, "knn", "retrieval", out=tmp_path / "none")


def test_a_folder_without_a_complete_run_is_refused(study: Path) -> None:
    for path in study.rglob("result.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="holds no complete run"):
        harmonium.evaluate_run(study, "knn")


def test_single_runs_have_no_means_over_seeds(study: Path, tmp_path: Path) -> None:
    words = (study / "fedavg" / "seed-0", study / "fedprox" / "seed-0", "knn")
    assert harmonium.evaluate_run(*words, out=tmp_path / "out").over_seeds == []


def test_repeats_have_the_same_recipe() -> None:
    one, other = Recipe.of("fedavg"), Recipe.of("fedavg", "local.lr=0.5")
    runs = {"a/seed-0": (one, 5), "a/seed-1": (one.changed(seed=1), 5), "b": (other, 5)}
    assert repeats(runs) == {"a": ["a/seed-0", "a/seed-1"], "b": ["b"]}
    assert repeats({"a": (one, 5), "b": (other, 5)}) == {}
    assert repeats({"a": (one, 5), "b": (one.changed(seed=1), 4)}) == {}  # stopped a round before
    two, another = one.changed(seed=1), other.changed(seed=1)
    others = {"a1": (one, 5), "a2": (two, 5), "a3": (other, 5), "a4": (another, 5)}
    assert list(repeats(others)) == ["a1, a2", "a3, a4"]


def test_a_run_that_could_not_be_measured_is_left_out_of_the_mean() -> None:
    rows = [{"run": "a0", "accuracy": 50.0}, {"run": "a2", "accuracy": 52.0}]
    made = over_seeds(Shown("some", rows, 1), {"a": ["a0", "a1", "a2"]})
    assert made is not None and made.rows == [{"run": "a", "seeds": 2, "accuracy": (51.0, 1.0)}]


def test_what_diverged_has_no_mean() -> None:
    rows = [{"run": "a0", "accuracy": (50.0, 1.0)}, {"run": "a1", "accuracy": None}]
    made = over_seeds(Shown("some", rows, 1), {"a": ["a0", "a1"]})
    assert made is not None and made.rows == [{"run": "a", "seeds": 2, "accuracy": None}]
