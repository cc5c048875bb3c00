"""What a comparison or a sweep would do, without doing it."""

import json
from pathlib import Path

import pytest

import harmonium
from harmonium.core.errors import ConfigError, StoreError
from harmonium.recipe.schema import Recipe
from harmonium.studies.comparison.cells import plan
from harmonium.studies.comparison.forecast import forecast, forecast_sweep
from harmonium.studies.comparison.study import cell

pytestmark = pytest.mark.usefixtures("all_unrendered")

WORDS = ("fedavg", "fedprox", "data=shapes", "rounds=4", "compare.references=none", "seeds=2")


def begun(folder: Path, recipe: Recipe, seconds: list[float], complete: bool) -> None:
    """A run's folder as far as a forecast looks at it."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.yaml())
    facts = dict.fromkeys(("data", "public", "split", "cache", "notes", "batch_norm"))
    (folder / "about.json").write_text(json.dumps({**facts, "recipe": recipe.digest}))
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
    assert [bool(one.refused) for one in other.cells] == [True, True, False, False]
    assert other.lines()[-1].startswith(f"in use   {cell(tmp_path, *full)} holds another run")


def test_runs_of_an_older_meaning_are_refused_as_the_command_refuses_them(
    tmp_path: Path, home: Path
):
    """A recipe that lacks settings which have come since: their defaults need not be the same."""
    label, seed, recipe = next(plan(WORDS).cells())
    place = cell(tmp_path, label, seed)
    begun(place, recipe, [9.0] * 5, complete=True)
    tree = recipe.tree()
    del tree["local"]["joint_views"], tree["local"]["drop_last"]
    (place / "recipe.yaml").write_text(json.dumps(tree))
    about = json.loads((place / "about.json").read_text())
    (place / "about.json").write_text(json.dumps({**about, "recipe": "0" * 64}))
    found = forecast(WORDS, tmp_path)
    with pytest.raises(StoreError, match="local.drop_last, local.joint_views") as refused:
        harmonium.compare(*WORDS, out=tmp_path)
    assert not any(one.complete for one in found.cells)
    assert [one.refused for one in found.cells if one.refused] == [str(refused.value)]
    assert found.lines()[-1] == f"in use   {refused.value}"
    assert "0 of 4 runs complete" in "\n".join(found.lines())


def test_a_folder_with_something_else_in_it_is_refused_as_well(tmp_path: Path, home: Path):
    place = cell(tmp_path, "fedavg", 0)
    place.mkdir(parents=True)
    (place / "split.npz.part").touch()  # of a run that was killed when it began
    assert not any(one.refused for one in forecast(WORDS, tmp_path).cells)
    (place / "thesis.txt").touch()
    first, *others = forecast(WORDS, tmp_path).cells
    assert "not empty (thesis.txt)" in first.refused and not any(one.refused for one in others)


def test_the_folder_of_a_run_is_refused_as_the_command_refuses_it(tmp_path: Path, home: Path):
    begun(tmp_path / "run", next(plan(WORDS).cells())[2], [], complete=False)
    for call in (forecast, lambda words, out: harmonium.compare(*words, out=out)):
        with pytest.raises(ConfigError, match="belongs to a run"):
            call(WORDS, tmp_path / "run")


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
