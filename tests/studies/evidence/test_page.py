"""Maps over settings, figures over costs, and failed runs on the page; nothing is run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harmonium.studies.evidence import page
from harmonium.studies.evidence.study import StudyCell, StudyResult
from harmonium.studies.evidence.study_file import read_study

TEXT = """\
claim: FedProx leads.
regime: data=shapes rounds=2
arms: {FedAvg: fedavg, FedProx: fedprox method.mu=0.1, Ditto: ditto}
references: [centralised]
vary: {clients: [2, 4], local.lr: [0.1, 0.2]}
seeds: {deciding: [1]}
"""
FAILED, DIVERGED = "clients=4, local.lr=0.2", "clients=4, local.lr=0.1"


class Done:
    """The result of a run, as far as pages use it."""

    untrained: dict[str, Any] = {}
    references: dict[str, Any] = {}
    global_objective: dict[str, Any] = {}

    def __init__(self, value: float, loss: float) -> None:
        self.figures = {"knn": value, "health": {"effective_rank": 3.0}}
        self.rounds = [{"round": 1, "loss": loss, "bytes_up": 5_000_000, "bytes_down": 0}]


@pytest.fixture
def found(tmp_path: Path) -> StudyResult:
    (tmp_path / "s.yaml").write_text(TEXT, encoding="utf-8")
    study = read_study(str(tmp_path / "s.yaml"))
    result = StudyResult(tmp_path, study, finished=True)
    for condition in study.conditions:
        for row in study.rows:
            recipe = study.recipe(condition, row, (), 1)
            cell = StudyCell("deciding", condition, row, (), 1, recipe)
            if (condition, row) == (FAILED, "FedProx"):
                result.failed[cell] = "no reply has finite numbers"
                continue
            loss = float("nan") if (condition, row) == (DIVERGED, "FedProx") else 1.0
            result.results[cell] = Done(0.5, loss)  # type: ignore[assignment]
            result.costs[cell.path.as_posix()] = 2.0
    return result


def test_a_map_shows_what_failed_or_diverged(
    found: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        page, "value_maps", lambda path, cells, *rest: drawn.update({path.name: cells})
    )
    list(page._maps(found))
    assert set(drawn) == {f"map-{row}.png" for row in found.study.rows}
    assert set(drawn["map-FedAvg.png"].values()) == {50.0}
    cells = drawn["map-FedProx.png"]
    assert cells["4", "0.2", ""] == "failed" and cells["4", "0.1", ""] == "diverged"
    assert cells["2", "0.1", ""] == 50.0


def test_a_row_of_which_every_run_failed_is_in_its_table(found: StudyResult) -> None:
    (table,) = [one for one in page.tables(found) if one.title == f"Test figures: {FAILED}"]
    rows = {row["encoder"]: row for row in table.rows}
    assert rows["FedProx"]["failed"] == "1" and rows["FedAvg"]["failed"] == ""


def test_figures_are_drawn_over_bytes_and_cpu_seconds(
    found: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}

    def draw(path: Path, points: Any, xlabel: str, ylabel: str, title: str, levels: Any) -> None:
        drawn[path.name] = points, levels

    monkeypatch.setattr(page, "cost_points", draw)
    list(page._over_costs(found))
    points, levels = drawn["cost-bytes-clients=2--local.lr=0.1.png"]
    assert points["FedAvg"] == (5.0, 50.0, 0.0) and levels == {"centralised": 50.0}
    points, levels = drawn["cost-cpu-clients=2--local.lr=0.1.png"]
    assert points["centralised"] == (2.0, 50.0, 0.0) and not levels
    assert "FedProx" not in drawn[f"cost-cpu-{FAILED.replace(', ', '--')}.png"][0]
    few = replace(found.study, references={})
    assert not list(page._over_costs(replace(found, study=few)))


def test_both_plots_are_written(found: StudyResult, unrendered: None) -> None:
    written = {path.name for path in (*page._maps(found), *page._over_costs(found))}
    assert "map-FedAvg.png" in written and len(written) == 12
    assert all((found.folder / name).exists() for name in written)
