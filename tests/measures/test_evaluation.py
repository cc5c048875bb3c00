"""`harmonium eval` as a user meets it, and the function that reads like it."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import harmonium
from harmonium.cli.main import main
from harmonium.core.errors import DataError
from harmonium.measures import measures
from harmonium.measures.run_reader import Run

from .conftest import FEDCA

Said = Callable[..., tuple[int, str, str]]
BOTH = {"data": FEDCA["data"], "split": FEDCA["split"]}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Exit code, output and errors of a command, in this process."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harmonium", "eval", *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def test_two_runs_stand_side_by_side(
    fedca: Path, made: Callable[..., Path], said: Said, tmp_path: Path
) -> None:
    other = made("fedavg")
    words = [fedca, other, "angles", "angles.clients=2", "angles.pictures=20", "tsne"]
    code, text, told = said(*words, "--out", tmp_path / "figures")
    assert code == 0 and "training once more, as in round 3, " in told
    assert "ratio" in text and "silhouette" in text and "different images" in text
    assert "chance: the purity of features" in text
    labels = [f"{folder.parent.name}/run" for folder in (fedca, other)]  # both are called `run`
    assert all(label in text for label in labels)
    for name in ("angles.png", "tsne.png"):
        assert Image.open(tmp_path / "figures" / name).width > 500
    kept = json.loads((tmp_path / "figures" / "eval.json").read_text())
    assert set(kept["measures"]["angles"]) == set(labels)
    assert kept["settings"]["angles"]["clients"] == 2 and kept["settings"]["tsne"]["client"] == 0


def test_a_run_that_is_not_complete_says_so(
    fedca: Path, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, _ = said(fedca, "retrieval", "--out", tmp_path / "whole")
    assert code == 0 and "of 2" not in text
    monkeypatch.setattr(Run, "early", property(lambda run: "measured after round 1 of 2"))
    code, text, _ = said(fedca, "retrieval", "--out", tmp_path / "early")
    assert code == 0 and "run: measured after round 1 of 2" in text


def test_the_round_that_is_measured_is_known(
    made: Callable[..., Path], opened: Callable[..., Run]
) -> None:
    run = opened(made("fedavg"))
    assert run.early == ""
    run = replace(run, commit=replace(run.commit, round=1))
    assert run.early == "measured after round 1 of 2"


def test_a_run_that_diverged_does_not_spoil_the_others(
    fedca: Path, made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = made("fedavg", **BOTH), Run.cached_features

    def broken(run: Run, *rest: Any) -> Any:
        if run.path == other:
            raise DataError("features are not finite")
        return real(run, *rest)

    monkeypatch.setattr(Run, "cached_features", broken)
    found = harmonium.evaluate_run(fedca, other, "knn", "knn.k=3", out=tmp_path / "out")
    left, lost = (f"{folder.parent.name}/run" for folder in (fedca, other))
    assert list(found.figures["knn"]) == [left] and len(found.tables[0].rows) == 1
    assert f"{lost}: knn is left out: features are not finite" in found.notes
    with pytest.raises(DataError, match="not finite"):
        harmonium.evaluate_run(other, "knn", out=tmp_path / "alone")


def test_json_is_one_document_and_the_function_says_the_same(
    fedca: Path, said: Said, home: Path
) -> None:
    words = ["angles", "angles.clients=2", "angles.pictures=20"]
    code, text, told = said(fedca, *words, "--json")
    document = json.loads(text)
    assert code == 0 and told == ""
    assert Path(document["folder"]).is_relative_to(home / "evaluations")
    found = harmonium.evaluate_run(fedca, *words, out=home / "again")
    assert found.plain()["measures"] == document["measures"]
    assert document["runs"]["run"]["method"] == "fedca" and document["runs"]["run"]["round"] == 2
    assert (
        found.main_plots["angles"].read_bytes() == Path(document["pictures"]["angles"]).read_bytes()
    )


def test_mistakes_are_one_line_and_exit_code_2(
    fedca: Path, said: Said, tmp_path: Path, home: Path
) -> None:
    for words, message in (
        (["nowhere", "angles"], "there is no folder nowhere"),
        ([tmp_path, "angles"], "holds no run"),
        ([fedca, "angels"], "neither a run's folder nor a measure: did you mean 'angles'?"),
        ([fedca], "name what to measure of"),
        (["angles.pictures=3"], "name a run's folder first"),
        (["angles", "tsne"], "name a run's folder first"),
        ([fedca, fedca, "angles"], "named twice"),
        ([fedca, "angles", "angles"], "angles is named twice"),
        ([fedca, "angles", "angles.picturs=3"], "did you mean 'angles.pictures'?"),
        ([fedca, "angles", "pictures=3"], "did you mean 'angles.pictures'?"),
        ([fedca, "angles", "angles.pictures=few"], "should be a whole number"),
        ([fedca, "angles", "angles.clients=1"], "must be at least 2"),
        ([fedca, "angles", "tsne.client=1"], "tsne is set but not"),
        ([fedca, "angles", "engine.workers=-1"], "engine.workers is -1"),
        ([fedca, "angles", "--out", fedca / "figures"], "belongs to a run"),
        ([fedca, "harmonium.nowhere:X"], "cannot import measure"),
        ([fedca, "tsne", "tsne.client=9"], "clients 0 to 3"),
    ):
        code, text, told = said(*words)
        assert (code, text) == (2, ""), words
        assert message in told and len(told.strip().splitlines()) == 1, told
    assert not (home / "evaluations").exists()


def test_the_measure_of_the_page_works(
    fedca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    code = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "norms.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(measures, "_table", dict(measures.table()))  # it files itself there
    found = harmonium.evaluate_run(fedca, "norms:Norms", "Norms.images=9", out=tmp_path / "out")
    assert found.figures["Norms"]["run"]["norm"] > 0 and not found.main_plots
    assert found.tables[0].rows == [{"run": "run", **found.figures["Norms"]["run"]}]
    sys.modules.pop("norms")
