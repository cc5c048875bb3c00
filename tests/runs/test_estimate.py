"""What a run would take, from a few measured steps."""

import json

import pytest
import torch

from harmonium.engines.local import LocalEngine
from harmonium.federation.server_training import public_client
from harmonium.learning.client import abridged
from harmonium.recipe.schema import Recipe
from harmonium.runs import estimate, start
from harmonium.runs.estimate import Estimate, _Meter, estimated
from harmonium.studies.comparison.forecast import forecast

SMALL = ("clients=4", "rounds=3", "encoder.width=4", "data.limit=160", "engine.workers=0")
QUICK = ("local.epochs=1", "evaluate.labels_per_class=[]", "evaluate.every=3")


@pytest.fixture
def at(monkeypatch):
    """Set the clock that measuring reads."""
    now = [0.0]
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])

    def set_to(seconds):
        now[0] = seconds

    return set_to


def test_the_rest_of_a_pass_is_counted_at_the_pace_after_its_first_batch(at):
    meter = _Meter()
    meter.event("client 1", 0, 100, "images")
    stopped = []
    for number, moment in enumerate((9.0, 9.1, 9.2, 9.3), 1):  # the first one is slow
        at(0.0 if number == 1 else moment - 9.0)
        meter.event("client 1", 10 * number, 100, "images")
        stopped.append(meter.enough(number))
    assert stopped == [False, False, False, True]
    assert meter.extrapolated == pytest.approx(60 * 0.01)  # 60 images are left, 10 took 0.1 s


def test_slow_passes_and_late_measuring_stop_sooner(at):
    meter = _Meter()
    for moment, done in ((0.0, 0), (0.8, 10), (1.6, 20)):
        at(moment)
        meter.event("client 1", done, 100, "images")
    assert not meter.enough(1) and meter.enough(2)
    assert meter.extrapolated == pytest.approx(80 * 0.08)
    meter.event("client 1", 100, 100, "images")
    at(estimate.PATIENCE + 1)
    meter.event("client 2", 0, 100, "images")
    at(estimate.PATIENCE + 3)
    meter.event("client 2", 50, 100, "images")
    assert meter.enough(1) and meter.extrapolated == pytest.approx(80 * 0.08 + 2.0)


def test_abridged_passes_stop_and_keep_their_shapes(home):
    recipe = Recipe.of("fedavg", *SMALL)
    dataset = recipe.data.load()
    method = recipe.build_method(dataset)
    server = estimate.Server({}, {}, public=dataset.train)
    client = public_client(method, server, "test")
    with abridged(lambda batches: batches >= 2):
        assert len(list(client.batches(5, 16))) == 2
        found = client.features(lambda x: x.flatten(1), size=16)
    whole = client.features(lambda x: x.flatten(1), size=16)
    assert found.shape == whole.shape and len(found) == len(dataset.train)
    assert torch.equal(found[:32], whole[:32]) and torch.equal(found[32:64], whole[:32])
    assert len(list(client.batches(1, 16))) > 2


def test_bytes_are_those_of_the_run(home, undrawn, tmp_path):
    """Of FedCA, whose first round brings targets to all and has no dictionary yet."""
    words = ("public=shapes", "public.count=64", "method.align_epochs=2", "method.size=64")
    recipe = Recipe.of("fedca", *words, *SMALL, *QUICK)
    found = estimated(recipe)
    assert isinstance(found, Estimate) and found.rounds == 3
    assert found.setup > 0 and found.training > 0 and found.evaluation > 0
    rounds = start.run(recipe, out=tmp_path / "run").rounds
    for way in ("bytes_down", "bytes_up"):
        assert getattr(found, way) == sum(row[way] for row in rounds)
    assert "time     about" in found.line() and len(found.plain()["assumed"]) > 2
    json.dumps(found.plain())


def test_what_all_clients_measure_counts(home, monkeypatch):
    """Two of eight clients are asked in a round, and all of them for what is measured."""
    clients = ("clients=8", "participation.number=2", "evaluate.every=1", "rounds=3")
    words = (*clients, *SMALL[2:], "objective=spectral", "local.epochs=1", "evaluate.whiten=true")
    now, perform = [0.0], LocalEngine._in_process

    def slowly(self, *task):
        now[0] += 1.0
        return perform(self, *task)

    monkeypatch.setattr(LocalEngine, "_in_process", slowly)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(estimate, "_evaluations", lambda *given: estimate._Evaluations())
    found = estimated(Recipe.of("fedavg", *words))
    assert isinstance(found, Estimate)
    assert found.training == pytest.approx(3 * 2)
    assert found.evaluation == pytest.approx(
        3 * 3 * 8 + 2 * 8
    )  # means, gradients; moments not at first


def test_what_cannot_be_measured_says_why(home, monkeypatch):
    assert "missing" in estimated(Recipe.of("fedavg", "data=cifar10"))
    monkeypatch.setattr("harmonium.data.published_datasets.Published.missing", lambda spec: ())
    monkeypatch.setattr("harmonium.data.published_datasets.Published.identity", lambda spec: {})
    assert "cifar10 is not decoded" in estimated(Recipe.of("fedavg", "data=cifar10"))
    assert "pad_crop" in estimated(Recipe.of("fedavg", "data=digits", "views.pad_crop=8"))
    assert not (home / "runs").exists()


def test_a_comparison_measures_each_recipe_once_and_no_begun_one(home, monkeypatch):
    asked = []

    def pretended(recipe):
        asked.append(recipe.method.name)
        return Estimate(1.0, 6.0, 1.0, recipe.rounds, 4_000_000, 2_000_000, ("nothing",))

    monkeypatch.setattr("harmonium.studies.comparison.forecast.estimated", pretended)
    words = ["fedavg", "fedprox", "data=shapes", "rounds=4", "compare.references=none", "seeds=2"]
    found = forecast(words, measure=True)
    assert asked == ["fedavg", "fedprox"] and found.seconds == pytest.approx(4 * 8.0)
    assert "2 of 2 recipes" in found.measured
    assert found.sent == {"down": 16e6, "up": 8e6}  # of four runs
    assert "bytes    about 16.0 MB down and 8.0 MB up" in found.lines()
    assert forecast(words).seconds is None and len(asked) == 2
    monkeypatch.setattr(
        "harmonium.studies.comparison.forecast.estimated", lambda recipe: "no images"
    )
    assert "no images" in "\n".join(forecast(words, measure=True).lines())
