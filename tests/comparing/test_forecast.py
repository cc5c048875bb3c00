"""What a comparison or a sweep would do, without doing it."""

import json
from pathlib import Path

import pytest

from harmonium.comparing.cells import plan
from harmonium.comparing.forecast import forecast, forecast_sweep
from harmonium.comparing.study import cell
from harmonium.errors import ConfigError
from harmonium.recipe import Recipe

WORDS = ("fedavg", "fedprox", "data=shapes", "rounds=4", "compare.references=none", "seeds=2")


def begun(folder: Path, recipe: Recipe, seconds: list[float], complete: bool) -> None:
    """A run's folder as far as a forecast looks at it."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.yaml())
    rows = [{"round": number, "seconds": taken} for number, taken in enumerate(seconds)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "timings.jsonl").write_text(text + '{"round": 9, "sec')  # torn by a kill
    if complete:
        (folder / "result.json").write_text("{}")


def test_it_says_what_is_done_and_how_long_the_rest_takes(tmp_path: Path, home: Path):
    recipes = {(label, seed): recipe for label, seed, recipe in plan(WORDS).cells()}
    full, half = ("fedavg", 0), ("fedprox", 0)
    begun(cell(tmp_path, *full), recipes[full], [99.0, 10.0, 10.0, 10.0, 10.0], complete=True)
    begun(cell(tmp_path, *half), recipes[half], [99.0, 30.0], complete=False)
    found = forecast(WORDS, tmp_path)
    assert [(one.encoder, one.seed, one.done, one.complete) for one in found.cells] == [
        ("fedavg", 0, 4, True), ("fedprox", 0, 1, False),
        ("fedavg", 1, 0, False), ("fedprox", 1, 0, False),
    ]  # fmt: skip
    assert found.seconds == 3 * 30 + 4 * 10 + 4 * 30
    assert found.lines() == [
        "4 runs of 4 rounds on shapes: fedavg, fedprox; seeds 0, 1",
        "fair     all methods have the same budget",
        "done     1 of 4 runs complete, 1 begun; 11 rounds left, about 4:10 of training",
    ]
    other = forecast([*WORDS, "local.lr=0.5"], tmp_path)
    assert [one.other for one in other.cells] == [True, True, False, False]
    assert other.lines()[-1].startswith(f"in use   {cell(tmp_path, *full)} holds another run")


def test_sets_that_are_not_here_are_named_with_their_command(home: Path):
    words = ("fedavg", "data=styles", "data.sets=[mnist, usps]", "public=cifar10", "rounds=1")
    found = forecast(words)
    assert found.missing == tuple(
        f"{name} is not here yet: run `harmonium data fetch {name}`"
        for name in ("mnist", "usps", "cifar10")
    )
    assert found.seconds is None and "missing  mnist is not here yet" in "\n".join(found.lines())
    asked = forecast(["fedavg", "data=office-home", "rounds=1"])
    assert "data fetch office-home --from PATH` with a copy from" in asked.missing[0]


def test_unequal_budgets_are_refused_or_named(home: Path):
    words = ["fedavg", "fedprox,rounds=7", "data=digits", "compare.references=none"]
    with pytest.raises(ConfigError, match="differ in rounds"):
        forecast(words)
    found = forecast(words, allow_unfair=True)
    assert found.lines()[1] == "unfair   fedavg and fedprox rounds=7 differ in rounds (20; 7)"
    assert sum(one.rounds for one in found.cells) == 27


def test_a_sweep_has_the_runs_of_all_its_values(tmp_path: Path, home: Path):
    words = (*WORDS, "sweep.local.epochs=1,2")
    found = forecast_sweep(words, tmp_path)
    assert len(found.cells) == 8
    assert found.cells[-1].folder == str(tmp_path / "local.epochs=2" / "fedprox" / "seed-1")
    assert found.said.startswith("local.epochs is 1, 2; at each 4 runs of 4 rounds on shapes")
    assert not any(tmp_path.iterdir())
    papers = forecast_sweep(["heterogeneity@cpu"])
    assert papers.unfair and all(one.folder is None for one in papers.cells)
