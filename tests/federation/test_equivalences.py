"""Methods that must agree where their equations do: the same seeds, the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core import seeds
from harmonium.data.partition import make_split
from harmonium.learning.client import Client, Examples
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.presets import load_tree
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial

PLAIN = {"epochs": 2, "batch": 6, "lr": 0.1, "momentum": 0.0, "clip": None}
# BatchNorm over a handful of images would blow a rounding error up ten thousand times a round.
CALM = [{"name": "simclr", "norm": "none"}, {"name": "byol", "norm": "none"}]
UNEVEN = {"name": "lda", "alpha": 0.5, "min_size": 4}  # sizes differ, so that weights matter


def go(name: str, **settings: Any) -> Trial:
    tree = {**TINY, "split": UNEVEN, "rounds": 3, "local": PLAIN, **load_tree(name), **settings}
    recipe = Recipe.from_tree(tree)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    return Trial(recipe, dataset, split).go()


def same(first: Trial, second: Trial, tolerance: float | None = None) -> None:
    ours, theirs = first.server.model, second.server.model
    assert set(ours) == set(theirs)
    start = first.method.blueprint.shared()
    assert any(not torch.equal(start[key], ours[key]) for key in ours)
    for key, tensor in ours.items():
        if tolerance is None:
            assert torch.equal(tensor, theirs[key]), key
        else:
            torch.testing.assert_close(tensor, theirs[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("objective", ["simclr", "byol"])
def test_fedprox_without_a_pull_is_fedavg(objective: str) -> None:
    """X1, bit for bit."""
    settings = {"objective": objective, "participation": {"number": 2}}
    same(
        go("fedavg", **settings),
        go("fedprox", method={"name": "fedprox", "mu": 0.0}, **settings),
    )


def test_fedprox_with_a_pull_is_not() -> None:
    with pytest.raises(AssertionError):
        same(go("fedavg"), go("fedprox", method={"name": "fedprox", "mu": 1.0}))


@pytest.mark.parametrize("objective", CALM)
def test_a_server_step_of_length_one_is_the_plain_mean(objective: Any) -> None:
    """X2: FedAdam whose server takes SGD steps of length one is FedAvg with equal weights."""
    mean = {"name": "average", "weighting": "uniform"}
    step = {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weighting": "uniform"}
    found = go("fedadam", server=step, objective=objective)
    same(go("fedavg", server=mean, objective=objective), found, tolerance=1e-6)
    with pytest.raises(AssertionError):  # sizes differ, so the weighted mean is another
        same(go("fedavg", objective=objective), found, tolerance=1e-6)


def test_scaffold_without_correction_is_the_plain_mean() -> None:
    """X3: variates that stay zero, steps without momentum."""
    settings = {"participation": {"number": 3}, "objective": CALM[0]}
    mean = go("fedavg", server={"name": "average", "weighting": "uniform"}, **settings)
    off = go("scaffold", method={"name": "scaffold", "strength": 0.0}, local=PLAIN, **settings)
    same(mean, off, tolerance=1e-6)
    on = go("scaffold", local=PLAIN, **settings)
    with pytest.raises(AssertionError):
        same(mean, on, tolerance=1e-6)


def by_hand(trial: Trial) -> dict[str, torch.Tensor]:
    """Centralised training written out: one model, one loop over rounds, epochs and batches."""
    method, recipe = trial.method, trial.recipe
    model = method.blueprint.shared()
    index = np.sort(np.concatenate(trial.split.indices))
    assert np.array_equal(trial.split.indices[0], index) or len(trial.split.indices) == 1
    for number in range(1, recipe.rounds + 1):
        path = ("client", number, 0, "train", 0)
        rng = seeds.torch_rng(recipe.seed, *path)
        client = Client(
            id=0,
            round=number,
            rounds=recipe.rounds,
            examples=Examples(trial.dataset.train, trial.split.indices[0]),
            views=method.views,
            rng=rng,
            noise=Noise("simulated", rng),
        )
        parts = method.blueprint.copy_from(model)
        parts.train()
        trained = [p for p in parts.parameters() if p.requires_grad]
        local = recipe.local
        rate = local.lr * 0.5 * (1 + np.cos(np.pi * (number - 1) / recipe.rounds))
        optimiser = torch.optim.SGD(trained, lr=rate)
        for _ in range(local.epochs):
            order = torch.randperm(len(client.examples), generator=rng)
            for rows in order.split(local.batch):
                if len(rows) < 2:
                    continue
                views = method.views(client.examples.pixels(rows), rng)
                z = parts["projector"](parts["encoder"](torch.cat(views)))
                unit = nn.functional.normalize(z)
                similar = unit @ unit.T / method.objective.temperature  # type: ignore[attr-defined]
                similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
                partner = torch.arange(len(z)).roll(len(rows))
                optimiser.zero_grad()
                nn.functional.cross_entropy(similar, partner).backward()
                optimiser.step()
        model = {key: tensor.clone() for key, tensor in parts.state_dict().items()}
    return model


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "centralised"])
def test_one_client_is_centralised_training(name: str) -> None:
    """X14: a single client that always takes part is a plain training loop.

    FedProx without its pull; SCAFFOLD's two variates are the same, so that nothing is corrected.
    """
    method: Any = {"name": "fedprox", "mu": 0.0} if name == "fedprox" else name
    clients = 3 if name == "centralised" else 1  # it merges what three clients would hold
    found = go(name, method=method, clients=clients, split={"name": "iid"}, local=PLAIN)
    assert found.recipe.clients == 1
    expected = by_hand(found)
    for key, tensor in found.server.model.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5)


def test_centralised_holds_what_the_clients_hold() -> None:
    fedavg, together = go("fedavg"), go("centralised")
    pooled = np.sort(np.concatenate(fedavg.split.indices))
    assert len(together.split.indices) == 1
    assert np.array_equal(np.sort(together.split.indices[0]), pooled)


def test_centralised_by_hand_is_told_to_use_a_recipe(tmp_path: Path) -> None:
    from harmonium.core.errors import ConfigError
    from harmonium.methods.centralised import Centralised

    with pytest.raises(ConfigError, match="one client, not 2"):
        Centralised()


def test_the_recipe_says_how_uploads_become_one() -> None:
    """With three clients the median of each weight is the middle upload, not the mean."""
    settings = {"clients": 3, "rounds": 1, "server": {"name": "average", "weighting": "uniform"}}
    mean, middle = go("fedavg", **settings), go("fedavg", aggregation="median", **settings)
    key = "encoder.0.weight"
    assert not torch.equal(mean.server.model[key], middle.server.model[key])
    trimmed = go("fedavg", aggregation={"name": "trimmed", "trim": 0.34}, **settings)
    torch.testing.assert_close(trimmed.server.model[key], middle.server.model[key])
