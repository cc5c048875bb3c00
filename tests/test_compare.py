"""What a comparison shows of its encoders."""

from pathlib import Path

import numpy as np
import pytest

from harmonium.compare import Comparison, _with_references, compare, references
from harmonium.data.partition import make_split
from harmonium.errors import ConfigError
from harmonium.recipe import Recipe


def test_encoders_with_a_warning_are_marked():
    rows = ({"encoder": "alone", "knn": 0.5}, {"encoder": "fedavg", "knn": 0.75})
    shown = Comparison(Path(), rows, None, {"alone": "collapsed"}).shown()
    assert shown == [{"encoder": "alone (!)", "kNN": 50.0}, {"encoder": "fedavg", "kNN": 75.0}]


def test_figures_that_are_not_finite_stay_empty():
    rows = ({"encoder": "fedavg", "spread": None, "uniformity": -1.5},)
    shown = Comparison(Path(), rows, None, {}).shown()
    assert shown == [{"encoder": "fedavg", "spread": None, "uniformity": -1.5}]


@pytest.mark.parametrize("rule", ["dirichlet", "rotation", "by_class"])
def test_the_centralised_reference_holds_what_all_clients_hold_together(rule, home):
    recipe = Recipe.of("fedavg", "clients=10", f"split={rule}", "split.labels=0.2", "seed=3")
    reference = references(recipe)["centralised"]
    data = recipe.data.load()
    apart = make_split(recipe.split, data, None, 10, 3)
    together = make_split(reference.split, data, None, reference.clients, 3)
    assert len(together) == reference.clients == 1
    order = np.argsort(np.concatenate(apart.indices))
    np.testing.assert_array_equal(together.indices[0], np.concatenate(apart.indices)[order])
    if rule == "rotation":
        np.testing.assert_array_equal(together.angles[0], np.concatenate(apart.angles)[order])
    np.testing.assert_array_equal(together.seen(data.train).labels, apart.seen(data.train).labels)


@pytest.mark.parametrize("name", ["alone", "centralised"])
def test_references_are_not_asked_for(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} is in every comparison already"):
        compare([name, "fedavg"], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_objective_has_references_of_its_own():
    cells = {name: Recipe.of(name) for name in ("fedsimclr", "fedprox", "fedbyol")}
    found = _with_references(cells)
    assert list(found) == [
        "alone (fedsimclr)",
        "alone (fedbyol)",
        *cells,
        "centralised (fedsimclr)",
        "centralised (fedbyol)",
    ]
    assert found["alone (fedbyol)"].objective.name == "byol"
    same = _with_references({name: Recipe.of(name) for name in ("fedsimclr", "fedprox")})
    assert list(same) == ["alone", "fedsimclr", "fedprox", "centralised"]


def test_references_do_not_stumble_over_what_many_clients_need():
    words = ("aggregation=trimmed", "participation.number=5", "participation.over=0.2")
    found = references(Recipe.of("fedavg", *words, "aggregation.trim=0.2", "clients=10"))
    assert found["centralised"].clients == 1 and found["centralised"].aggregation.name == "mean"
    assert found["alone"].clients == 10


def test_an_objective_that_only_its_method_can_train_has_no_references():
    words = ["data=digits", "clients=2", "views=digits"]
    cells = {name: Recipe.of(name, *words) for name in ("orchestra", "fedsimclr")}
    assert list(_with_references(cells)) == ["alone", "orchestra", "fedsimclr", "centralised"]
    assert references(cells["fedsimclr"])["alone"] == _with_references(cells)["alone"]
    assert list(_with_references({"orchestra": cells["orchestra"]})) == ["orchestra"]
