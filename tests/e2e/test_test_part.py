"""The test part is for reporting: it touches no model, no log and no choice, to the bit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harmonium
from harmonium.data.sets.shapes import Shapes
from harmonium.evaluation import evaluator
from harmonium.runs.loop import RunLoop
from harmonium.studies.tuning import study

SMALL: dict[str, Any] = {
    "encoder": {"name": "cnn-small", "width": 4, "out": 16},
    "local": {"epochs": 1, "batch": 8},
    "evaluate": {"k": 5, "labels_per_class": [2], "every": 1, "draws": 1, "tuning": "simclr"},
    "engine": {"workers": 0},
    "clients": 3,
    "rounds": 2,
}
MAY_DIFFER = {
    "about.json",  # digests of the data
    "split.npz",  # the same
    "timings.jsonl",
    "result.json",  # the report
    ".lock",
}


def archive(path: Path, *, wrong: bool) -> None:
    """The same training images with one test part or another."""
    data = Shapes(count=45, test_count=64, size=10, classes=3).load()
    pixels, labels = np.array(data.test.pixels), data.test.labels
    if wrong:
        pixels, labels = np.ascontiguousarray(255 - pixels[::-1]), (labels + 1) % 3
    train = data.train
    np.savez(path, train_x=train.pixels, train_y=train.labels, test_x=pixels, test_y=labels)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in found if path.name not in MAY_DIFFER}
    # A commit's index holds the sizes of logs, that of times among them.
    return {n: p.read_bytes() for n, p in names.items() if not re.search(r"commits/\d+\.json", n)}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ditto", {}),
        ("supervised", {"split": {"name": "iid", "labels": 0.5}}),
    ],
)
def test_a_run_is_the_same_whatever_its_test_part(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Any] = []
    probe = evaluator.linear_probe

    def spied(*given: Any, **how: Any) -> Any:
        probes.append(probe(*given, **how))
        return probes[-1]

    monkeypatch.setattr(evaluator, "linear_probe", spied)
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)  # it is of metrics.jsonl
    data = {"name": "npz", "path": str(tmp_path / "data.npz")}
    results = []
    for wrong in (False, True):
        archive(tmp_path / "data.npz", wrong=wrong)
        out = tmp_path / f"run-{wrong}"
        results.append(harmonium.run(name, data=data, out=out, **{**SMALL, **more}))
    held, other = (files(result.folder) for result in results)
    assert set(held) == set(other) and {"metrics.jsonl", "ledger.jsonl"} <= set(held)
    assert [path for path in held if held[path] != other[path]] == []
    assert sum(path.startswith("commits") for path in held) > 1, sorted(held)
    rows = [result.rounds for result in results]
    assert rows[0] == rows[1] and "align" in rows[0][-1]["reported"]
    half = len(probes) // 2
    for first, second in zip(probes[:half], probes[half:], strict=True):
        assert first.strength == second.strength
        assert first.validation_accuracy == second.validation_accuracy
    assert results[0].figures["knn"] != results[1].figures["knn"]  # the report is of the test part


def test_a_study_is_the_same_whatever_the_test_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "plot_study", lambda *given: False)
    words = ["data=npz", f"data.path={tmp_path / 'data.npz'}", "clients=3", "rounds=1"]
    words += ["encoder.width=4", "encoder.out=16", "local.batch=8", "local.epochs=1"]
    words += ["evaluate.k=5", "engine.workers=0", "grid.local.lr=0.1,0.001"]
    found = []
    for wrong in (False, True):
        archive(tmp_path / "data.npz", wrong=wrong)
        found.append(harmonium.tune("fedsimclr", *words, out=tmp_path / f"study-{wrong}"))
    assert found[0].rows == found[1].rows and found[0].best == found[1].best
    assert files(found[0].folder / "runs") == files(found[1].folder / "runs")
    assert all(row["score"] is not None for row in found[0].rows)
