"""Orchestra's eq. 5 as clients measure it: by hand, for any method, and without a trace."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import harmonium
from harmonium.core import seeds
from harmonium.data.augment.views import Views, preset
from harmonium.federation.wire import STEPS
from harmonium.measures.run_reader import Run, open_run
from harmonium.methods import methods
from harmonium.runs.loop import RunLoop
from harmonium.runs.start import changed_recipe
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.comparison.traffic import Device, components, course
from harmonium.testing import first_trial

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "count": 36, "test_count": 4, "size": 10},
    "split": {"name": "quantity", "min_size": 3},
    "encoder": {"name": "cnn-small", "width": 4, "out": 16},
    "local": {"epochs": 1, "batch": 8},
    "evaluate": {"k": 5, "labels_per_class": [], "every": 9, "tuning": "simclr"},
    "engine": {"workers": 0},
    "clients": 4,
    "rounds": 2,
}
CLUSTERED = {"name": "featarc-clustered", "clusters": 2}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run's folder, opened; verdicts and images, which take most time, are left out."""
    monkeypatch.setattr(RunLoop, "_test", lambda *given: {"figures": {}, "untrained": {}})
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)

    def play(name: str = "fedavg", folder: str = "run", **settings: Any) -> Run:
        path = tmp_path / folder
        harmonium.run(name, out=path, **{**SMALL, **settings})
        return open_run(path, folder, changed_recipe(path, []))

    return play


def told(run: Run) -> dict[str, float]:
    return RunFolder(run.path).read_log("metrics.jsonl")[-1]["reported"]


def by_hand(run: Run, ask: int = 0) -> dict[str, float]:
    """Eq. 5 with loops in double precision, over clients or over images."""
    align = unif = weight = total = 0.0
    first = run.method.views.pipelines[0]
    own = {"mean": first.mean, "std": first.std, "size": first.size}
    views = Views(preset("simclr", **own).pipelines[:2])
    for client, index in enumerate(run.split.indices):
        encoder = run.method.represent(run.server, run.state(client))
        pixels = torch.from_numpy(run.dataset.train.batch(index))
        rng = seeds.torch_rng(run.recipe.seed, "client", 2, ask, "appraise", client)
        with torch.no_grad():
            one, two = (encoder(view).double() for view in views(pixels, rng))
        if run.recipe.evaluate.tuning_centre:
            mean = (one.mean(0) + two.mean(0)) / 2
            one, two = one - mean, two - mean

        def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
            return float(x @ y / (x.norm() * y.norm()))

        count = len(index)
        near = sum(cosine(x, y) for x, y in zip(one, two, strict=True))
        apart = sum(math.log(sum(math.exp(cosine(x, y) / 0.2) for y in one) / count) for x in one)
        share = count if run.recipe.evaluate.tuning_over == "images" else 1
        align += share * near / count
        unif -= share * apart / count
        weight += share
        total += count
    return {"align": align / weight, "unif": unif / weight, "pictures": total}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"server": {"name": "average", "weighting": "uniform"}, "views": "orchestra"}),
        (
            "fedavg",
            {
                "encoder": {"name": "resnet8", "width": 4, "norm": "batch"},
                "batch_norm": "recalibrate",
            },
        ),
        (
            "fedavg",
            {"encoder": {"name": "resnet8", "width": 4, "norm": "batch"}, "batch_norm": "fedbn"},
        ),
        ("featarc-clustered", {"method": CLUSTERED}),
        ("orchestra", {"method": {"name": "orchestra", "evaluated": "target", "clusters": 4}}),
        ("fedavg", {"evaluate": {**SMALL["evaluate"], "tuning_centre": True}}),
        ("fedavg", {"evaluate": {**SMALL["evaluate"], "tuning_over": "images"}}),
    ],
    ids=[
        "weights and views",
        "recalibrated",
        "own BatchNorms",
        "clusters",
        "target",
        "centred",
        "over images",
    ],
)
def test_the_score_is_equation_five_over_all_clients(played, name, settings):
    run = played(name, **settings)
    assert len({len(index) for index in run.split.indices}) > 1  # else weights would not matter
    ask = 1 if run.recipe.batch_norm == "recalibrate" else 0
    found = told(run)
    assert found == pytest.approx({**found, **by_hand(run, ask)}, abs=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "featarc-clustered"])
def test_the_model_is_the_same_with_and_without(played, name):
    settings = {"method": CLUSTERED} if name == "featarc-clustered" else {}
    quiet = {**SMALL["evaluate"], "tuning": None}
    one = played(name, "with", participation={"number": 2}, **settings)
    other = played(name, "without", participation={"number": 2}, evaluate=quiet, **settings)
    assert one.server.model.keys() == other.server.model.keys()
    for key, value in one.server.model.items():
        assert torch.equal(value, other.server.model[key])
    for client in one.examples:
        mine, theirs = (run.state(client).get("parts", {}) for run in (one, other))
        assert all(torch.equal(mine[key], theirs[key]) for key in {*mine, *theirs})
    assert "align" not in RunFolder(other.path).read_log("metrics.jsonl")[-1].get("reported", {})


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_its_bytes_and_answers_are_kept_apart_from_the_methods_own(played, masked):
    """In the log, the ledger and comparisons, the asks of secure aggregation around it included."""
    few = {"participation": {"number": 3}, "privacy": {"secure_aggregation": masked}}
    one = played(folder="with", **few)
    other = played(folder="without", evaluate={**SMALL["evaluate"], "tuning": None}, **few)
    rows = [RunFolder(run.path).read_log("metrics.jsonl") for run in (one, other)]
    own = ("answered", "missing", "bytes_down", "bytes_up", "loss")
    for mine, theirs in zip(*rows, strict=True):
        assert [mine[key] for key in own] == [theirs[key] for key in own]
    assert rows[0][-1]["bytes_measuring"] > 0 and "bytes_measuring" not in rows[1][-1]
    lines = RunFolder(one.path).read_log("ledger.jsonl")
    measuring = [e for e in lines if "appraise" in (e["step"], e.get("of"))]
    spent = sum(sum(e[way].values()) for e in measuring for way in ("down", "up"))
    assert spent == rows[0][-1]["bytes_measuring"]
    assert {e["step"] for e in measuring} - {"appraise"} == (set(STEPS) if masked else set())
    courses = [
        course(run.path, run.method, [*run.examples.values()], Device()) for run in (one, other)
    ]
    assert courses[0] == courses[1] and components(one.path) == components(other.path)


def test_simulated_dropouts_leave_nobody_out_of_the_score(played):
    run = played(participation={"dropout": 0.5}, rounds=1)
    assert told(run)["pictures"] == sum(run.examples.values())


def test_a_server_without_images_has_the_scores_of_all_looks(played, monkeypatch):
    monkeypatch.setattr("harmonium.runs.start.evaluation_data", lambda dataset, split: None)
    run = played(evaluate={**SMALL["evaluate"], "every": 1})
    rows = RunFolder(run.path).read_log("metrics.jsonl")
    assert [row["round"] for row in rows if "align" in row.get("reported", {})] == [1, 2]
    assert all("health" not in row for row in rows)


def test_all_clients_are_asked_whoever_trains(played):
    run = played(participation={"number": 1})
    assert told(run)["pictures"] == sum(run.examples.values())


def test_secure_aggregation_hides_the_numbers_and_leaves_the_mean(played):
    plain = told(played())
    masked = told(played(folder="masked", privacy={"secure_aggregation": True}))
    assert masked == pytest.approx(plain, abs=1e-4)  # the models differ by fixed point, too


def test_a_client_with_one_image_declines(played):
    run = played(data={"name": "shapes", "count": 12, "test_count": 4, "size": 10}, split="iid")
    alone = [index for index in run.split.indices if len(index) < 2]
    lines = RunFolder(run.path).read_log("ledger.jsonl")
    silent = [e for e in lines if e["step"] == "appraise" and e["outcome"] != "answered"]
    assert len(silent) == len(alone)


@pytest.mark.parametrize("name", methods.table())
def test_every_method_can_be_scored(name):
    """Each says so on its card, and every client answers with two numbers and a count."""
    quick = {"method": {"name": name, "align_epochs": 1}} if name == "fedca" else {}
    trial = first_trial(name, evaluate={"tuning": "simclr"}, rounds=1, **quick)
    entries = [json.loads(line) for line in trial.lines]
    asked = [entry for entry in entries if entry["step"] == "appraise"]
    assert len(asked) == trial.recipe.clients
    assert all(entry["outcome"] == "answered" for entry in asked)
    assert {tuple(entry["up"]) for entry in asked} == {("align", "unif", "pictures")}
