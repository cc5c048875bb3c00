"""What a finished run says of itself."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harmonium.core.errors import ConfigError
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Result

HEALTH = {"spread": 0.6, "effective_rank": 40.0, "uniformity": -1.7, "alignment": 0.4}
ROUNDS: tuple[dict[str, Any], ...] = (
    {"round": 0, "loss": None, "knn": 0.4, "health": {**HEALTH, "warnings": []}},
    {"round": 1, "loss": 3.5, "bytes_up": 10, "refused": {"train": [1, 2]}},
    {"round": 2, "loss": 2.5, "bytes_up": 20, "knn": 0.6, "health": {**HEALTH, "warnings": ["w"]}},
)


def result(**changes: Any) -> Result:
    held: dict[str, Any] = {
        "folder": Path("runs/one"),
        "recipe": Recipe.of("fedavg", "rounds=2"),
        "figures": {"health": {**HEALTH, "warnings": ["collapse <b>"]}, "knn": 0.6, "linear": None},
        "untrained": {"health": {**HEALTH, "warnings": []}, "knn": 0.4, "linear": 0.5},
        "rounds": ROUNDS,
        "notes": ("left out: <script>.png",),
    }
    return Result(**{**held, **changes})


def test_the_repr_is_one_short_line_with_the_figures() -> None:
    said = repr(result())
    assert "\n" not in said and len(said) < 200
    for word in ("fedavg", "digits", "2 rounds", "kNN 60.0", "40.0", "runs/one"):
        assert word in said
    assert "kNN" not in repr(result(figures={}, untrained={}, rounds=()))


def test_the_summary_has_figures_warnings_notes_and_place() -> None:
    said = result(batch_norm="averaged").summary()
    row = next(line for line in said.splitlines() if line.startswith("kNN"))
    assert row.split()[1:] == ["60.0", "40.0"]
    assert next(line for line in said.splitlines() if line.startswith("linear")).split()[1] == "–"
    for word in ("collapse", "left out", "averaged", "runs/one", "effective rank 40.00"):
        assert word in said
    assert "runs/one" in result(figures={}, untrained={}, rounds=()).summary()


def test_notebooks_get_a_table_in_which_nothing_is_markup() -> None:
    said = result()._repr_html_()
    cells = re.findall(r"<td>(.*?)</td>", said)
    assert cells == ["60.0", "40.0", "–", "50.0"]
    assert "<script>" not in said and "<b>.png" not in said and "&lt;script&gt;" in said
    assert "<table>" not in result(figures={}, untrained={})._repr_html_()


def test_references_balanced_figures_and_a_verdict_are_shown_where_there_are_any() -> None:
    figures = {"knn": 0.6, "linear": None, "balanced": {"knn": 0.55}, "auroc": {"knn": 0.81}}
    judged = result(
        figures=figures,
        references={"raw pixels": {"knn": 0.7, "balanced": {"knn": 0.66}}},
        against={"text": "no better than raw pixels", "reasons": ["too few steps"]},
    )
    for said in (judged.summary(), judged._repr_html_()):
        for word in ("70.0", "raw pixels", "55.0", "66.0", "81.0", "no better than", "too few"):
            assert word in said


def test_metrics_are_flat_rows() -> None:
    rows = result().metrics
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert rows[2]["health.spread"] == 0.6 and rows[1]["loss"] == 3.5
    values = [value for row in rows for value in row.values()]
    assert all(value is None or isinstance(value, int | float | str) for value in values)


def test_pandas_is_used_only_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        result().to_pandas()
    fake = ModuleType("pandas")
    fake.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert result().to_pandas() == result().metrics


def test_a_run_is_drawn_where_it_is_asked_for(tmp_path: Path) -> None:
    place = result().plot(tmp_path / "drawn.svg")
    assert place == tmp_path / "drawn.svg" and b"<svg" in place.read_bytes()
