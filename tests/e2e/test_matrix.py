"""Every objective under every generic method: it moves, learns, and resumes to the same bits."""

import json

import numpy as np
import pytest
import torch

from harmonium.core.types import Weights
from harmonium.data.partition import make_split
from harmonium.federation.card import card
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives import objectives
from harmonium.recipe.presets import baselines, load_tree
from harmonium.recipe.schema import Recipe
from harmonium.testing import FEW, TINY, Trial

METHODS = ("fedavg", "fedadam", "fedprox", "scaffold")
OBJECTIVES = list(objectives.table())
# Every objective under FedAvg, and under one of the others in turn.
LEARNS = [(objective, "fedavg") for objective in OBJECTIVES]
LEARNS += [(objective, METHODS[1 + n % 3]) for n, objective in enumerate(OBJECTIVES)]
DATA = {**TINY["data"], "count": 100, "validation": 0.04}
LOCAL = {"epochs": 4, "batch": 12, "lr": 0.05, "momentum": 0.0}
SMALL = {
    "moco": {"queue": 32},
    "swav": {"prototypes": 8, "queue": 24, "freeze": 2},
    "assignments": {"cluster_weight": 0},  # centroids are its own method's
}

RATES = {"semi-simsiam": 0.2}  # pairs of a class take longer than two rounds to move otherwise


def trial(name: str, objective: str, *, short: bool = False) -> Trial:
    local = {**LOCAL, "lr": RATES.get(objective, LOCAL["lr"])}
    loss = {"name": objective, **SMALL.get(objective, {})}
    tree = {**TINY, **load_tree(name), "data": DATA, "local": local, "objective": loss}
    if short:
        tree |= {"clients": 2, "data": {**DATA, "count": 50}, "local": {**local, "epochs": 1}}
    if name == "fedadam":
        tree["server"] = {"name": "adam", "weighting": "uniform", "lr": 0.01}
    recipe = Recipe.from_tree(tree)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    return Trial(recipe, dataset, split).go()


def loss_of(method: Method, model: Weights, trial: Trial) -> float:
    """The loss of a model on all training images, under a few fixed draws of views."""
    images = trial.dataset.train
    examples = Examples(images, np.arange(len(images)), uses_labels=method.reads_labels)
    total = 0.0
    for draw in range(3):
        parts = method.blueprint.copy_from(model)
        method.objective.prepare(parts)
        rng = torch.Generator().manual_seed(draw)
        batch = Batch(torch.arange(len(images)), examples, method.views, rng)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw)
            seen = method.objective.see(parts, batch)
            total += method.objective.score(parts, seen, Context(me=0)).item() / 3
    return total


def check_bytes(found: Trial) -> None:
    """What the ledger counted is what the card says, for every message of the run."""
    made = card(found.method)
    for line in found.lines:
        entry = json.loads(line)
        for side in ("down", "up"):
            fields = made.exchanges[entry["step"]][side]
            known = {name for name, one in fields.items() if one.kind in ("weights", "scalar")}
            sent = sum(size for name, size in entry[side].items() if name in known)
            assert sent == made.bytes[entry["step"]][side]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_moves_and_resumes_under_a_method(objective: str, name: str) -> None:
    found = trial(name, objective, short=True)
    start = found.method.blueprint.shared()
    trained = {key for key, p in found.method.blueprint.named_parameters() if p.requires_grad}
    still = {key for key in trained if torch.equal(start[key], found.server.model[key])}
    still = {key for key in still if start[key].ndim > 1}  # BatchNorm cancels a bias before it
    assert not still
    assert all(value.isfinite().all() for value in found.server.model.values())
    check_bytes(found)
    assert found.again(reload=True).digest == found.digest


@pytest.mark.parametrize(("objective", "name"), LEARNS)
def test_an_objective_is_learned(objective: str, name: str) -> None:
    found = trial(name, objective)
    before = loss_of(found.method, found.method.blueprint.shared(), found)
    after = loss_of(found.method, found.server.model, found)
    assert np.isfinite(before) and after < before


@pytest.mark.parametrize("name", baselines())
def test_every_short_cut_runs(name: str) -> None:
    tree = {**load_tree(name), **{key: TINY[key] for key in ("data", "encoder", "clients")}}
    if tree.get("public"):  # fewer images and epochs than a real run has at the server
        tree |= {"public": FEW, "method": {"name": name, "align_epochs": 2}}
    recipe = Recipe.from_tree({**tree, "rounds": 1, "split": TINY["split"]})
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    found = Trial(recipe, dataset, split).go()
    trained = [line for line in found.lines if json.loads(line)["step"] == "train"]
    assert len(trained) == recipe.clients
    check_bytes(found)
