"""The demonstration: two recipes that differ in one thing, and what is said of their figures."""

import re
from pathlib import Path
from typing import Any

import pytest

from harmonium.recipe.schema import Recipe
from harmonium.studies.comparison import demonstration
from harmonium.studies.comparison.cells import plan
from harmonium.studies.comparison.table import Comparison

FIGURES = {  # kNN, linear, linear with 5 labels a class
    "untrained": (0.28, 0.22, 0.15),
    "raw pixels": (0.48, 0.34, 0.20),
    "whitened pixels": (0.50, 0.27, 0.19),
    "alone": (0.34, 0.36, 0.21),
    "demo-fedavg": (0.33, 0.40, 0.21),
    "demo": (0.60, 0.64, 0.48),
    "centralised": (0.65, 0.70, 0.50),
}


def made(folder: Path, **changed: tuple[Any, ...]) -> Comparison:
    figures = {**FIGURES, **changed}
    rows = [
        {"encoder": name, "knn": knn, "linear": linear, "linear_5": few}
        for name, (knn, linear, few) in figures.items()
    ]
    return Comparison(
        folder, tuple(rows), {"rows": {}, "seeds": [0], "names": demonstration.NAMES}, None, {}
    )


def test_its_two_recipes_differ_in_user_verification_and_rates_alone() -> None:
    fedavg, system = Recipe.of("demo-fedavg").tree(), Recipe.of("demo").tree()
    assert not fedavg.pop("terms") and list(system.pop("terms")) == ["uv"]
    for tree in (fedavg, system):
        assert tree["server"]["weighting"] == "uniform"
        del tree["server"], tree["local"]["lr"]
    assert fedavg == system


def test_its_references_have_rates_of_their_own_unless_the_user_gives_some() -> None:
    own = plan(demonstration.words([])).references
    assert {f"local.lr={own[row].local.lr:g}" for row in own} == {
        rate for rates in demonstration.RATES.values() for rate in rates
    }
    given = plan(demonstration.words(["local.lr=0.7"])).rows
    assert {recipe.local.lr for recipe in given.values()} == {0.7}


def test_all_rows_have_the_rates_that_the_grid_chose() -> None:
    page = Path(__file__).parents[3] / "docs" / "results" / "demo.md"
    lines = re.findall(r"^- (.+): (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    chosen = {name: Recipe.of("digits", *text.split()) for name, text in lines}
    made = plan(demonstration.words([]))
    assert list(chosen) == [demonstration.NAMES[row] for row in made.rows]
    for row, recipe in made.rows.items():
        found = chosen[demonstration.NAMES[row]]
        assert (recipe.local.lr, recipe.server.name) == (found.local.lr, found.server.name)
        if row in made.methods:  # references are given no server
            assert recipe.server == found.server


def test_it_compares_them_with_the_references_that_need_no_labels() -> None:
    rows = plan(demonstration.words(["rounds=3"])).rows
    assert list(rows) == ["alone", "demo-fedavg", "demo", "centralised"]
    assert {recipe.rounds for recipe in rows.values()} == {3}
    assert not rows["alone"].terms and not rows["centralised"].terms


def test_it_says_how_much_of_the_gap_is_closed(tmp_path: Path) -> None:
    few, gap, cause = demonstration.sentences(made(tmp_path))
    assert "5 labels a class" in few and "48.0 %" in few and "20.0 %" in few
    assert "80 % of the gap" in gap and "40.0 %" in gap and "70.0 %" in gap
    assert "few classes" in cause and "grid" in cause
    above = demonstration.sentences(made(tmp_path, centralised=(0.5, 0.5, 0.4)))
    assert "all of the gap" in above[1]


def test_it_claims_nothing_that_did_not_come_out(tmp_path: Path) -> None:
    worse = demonstration.sentences(made(tmp_path, demo=(0.3, 0.37, 0.2)))
    assert "none of the gap" in worse[1] and len(worse) == 2
    level = demonstration.sentences(made(tmp_path, centralised=(0.3, 0.4, 0.2)))
    assert "no gap" in level[1] and len(level) == 2
    assert demonstration.sentences(made(tmp_path, alone=(None, None, None))) == []


@pytest.mark.parametrize("labelled", [True, False])
def test_it_draws_a_bar_for_every_row(tmp_path: Path, labelled: bool) -> None:
    found = made(tmp_path)
    if not labelled:
        rows = tuple({"encoder": row["encoder"], "spread": 0.5} for row in found.rows)
        found = Comparison(tmp_path, rows, found.details, None, {})
    path = demonstration.plot(found)
    assert path == (tmp_path / "demo.png" if labelled else None)
    assert (tmp_path / "demo.png").exists() == labelled
