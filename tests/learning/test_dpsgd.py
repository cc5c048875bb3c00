"""DP-SGD at a client: gradients of single images, their noise, what it costs, and refusals."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.learning import dpsgd
from harmonium.learning.client import Client, Examples
from harmonium.learning.context import Context
from harmonium.learning.training import Local
from harmonium.privacy.budget import epsilon
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, first_trial

ROTATION: dict[str, Any] = {"objective": "rotation", "split": "iid"}
LOSSES: dict[str, dict[str, Any]] = {
    "rotation": {"name": "rotation"},
    "autoencoder": {"name": "autoencoder", "width": 4},
    "byol": {"name": "byol", "norm": "none"},
    "simsiam": {"name": "simsiam", "norm": "none", "out_norm": False},
}


def trial(objective: Any = "rotation", **local: Any) -> Trial:
    chosen = {**TINY["local"], **local}
    return first_trial("fedavg", objective=objective, split="iid", rounds=1, local=chosen)


def setting(found: Trial) -> tuple[Any, list[nn.Parameter], Any, Any, Client]:
    """A model, its parameters, its loss, a batch of views, and the client."""
    method = found.method
    rng = seeds.torch_rng(0, "test")
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[0])
    client = Client(0, 1, 1, examples, method.views, rng, Noise("simulated", rng))
    parts = method.pull(client, found.server.model).train()
    parameters = [p for p in parts.parameters() if p.requires_grad]
    batch = next(client.batches(1, 6))
    return parts, parameters, method.loss(parts, Context(me=0, anchor={})), batch, client


@pytest.mark.parametrize("name", LOSSES)
def test_without_clip_and_noise_it_is_the_gradient_of_the_batch(name: str) -> None:
    """So the loss is the mean over images that it is taken for."""
    _, parameters, loss, batch, client = setting(trial(LOSSES[name]))
    value = loss(batch)
    wanted = torch.autograd.grad(value, parameters, allow_unused=True)
    mean = dpsgd.step(parameters, loss, batch, Local(dp_clip=1e9), client)
    assert mean == pytest.approx(value.item(), rel=1e-4)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        found = parameter.grad
        assert found is not None
        expected = torch.zeros_like(parameter) if gradient is None else gradient
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def gradient(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


def test_one_image_moves_a_step_by_no_more_than_is_said() -> None:
    """Whatever is put in its place, and however steep the loss is there."""
    _, parameters, loss, batch, client = setting(trial())
    clip, odd = 0.5, int(batch.index[2])

    def moved(steep: float) -> torch.Tensor:
        def at(one: Any) -> torch.Tensor:
            value: torch.Tensor = loss(one)
            return steep * value if int(one.index[0]) == odd else value

        dpsgd.step(parameters, at, batch, Local(dp_clip=clip), client)
        return gradient(parameters)

    here, there, broken = moved(1e4), moved(-1e4), moved(math.nan)
    assert (here - there).norm().item() * 6 == pytest.approx(2 * clip, rel=1e-4)
    assert (here - broken).norm().item() * 6 == pytest.approx(clip, rel=1e-4)
    assert all(one.norm().item() <= clip + 1e-6 for one in (here, there, broken))


def test_noise_is_of_its_size() -> None:
    _, parameters, loss, batch, client = setting(trial())
    dpsgd.step(parameters, loss, batch, Local(dp_clip=0.5), client)
    clean = gradient(parameters)
    dpsgd.step(parameters, loss, batch, Local(dp_clip=0.5, dp_noise=3.0), client)
    noise = (gradient(parameters) - clean) * 6
    assert noise.std().item() == pytest.approx(3.0, rel=0.1) and len(noise) > 500


def test_a_round_costs_a_release_an_epoch_and_repeats() -> None:
    found = trial(epochs=3, dp_clip=0.5, dp_noise=4.0)
    for entry in map(json.loads, found.lines):
        (told,) = entry["releases"]
        assert (told["field"], told["count"], told["neighbours"]) == ("model", 3, "replace")
        assert (told["sensitivity"], told["scale"]) == (1.0, 4.0)
    assert found.method.exchanges()["train"].up["model"].guarded
    one = {"sensitivity": 1.0, "sigma": 4.0}
    assert found.server.account.spent(0) == pytest.approx(epsilon([one] * 3, 1e-5))
    assert found.again(reload=True).digest == found.digest
    assert (
        "shortened to 0.5 in every step, and their sum gets noise of 4" in card(found.method).text()
    )
    quiet = trial(epochs=3, dp_clip=0.5)
    assert not any("releases" in line for line in quiet.lines)
    assert quiet.digest != found.digest


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"objective": "simclr"}, "objective=simclr"),
        ({"objective": {"name": "byol", "norm": "none", "update": "before"}}, "update=after"),
        ({"objective": "byol"}, "has BatchNorm"),
        ({"method": "fedprox"}, "fedprox overrides local training"),
        ({"terms": {"uv": {}}, "objective": "rotation"}, "uv"),
        ({"privacy": {"update_clip": 1.0, "update_noise": 1.0}}, "protect twice: choose one"),
        ({"local": {"dp_noise": 1.0}}, "local.dp_noise needs local.dp_clip"),
        ({"local": {"dp_clip": -1.0}}, "local.dp_clip is -1.0"),
    ],
)
def test_what_it_cannot_hide_is_refused(tree: dict[str, Any], message: str) -> None:
    base = {**TINY, **ROTATION, "local": {**TINY["local"], "dp_clip": 1.0, "dp_noise": 1.0}}
    with pytest.raises(ConfigError, match=message):
        Recipe.from_tree({**base, **tree})


def test_a_pull_to_the_received_model_goes_along() -> None:
    local = {**TINY["local"], "dp_clip": 1.0, "dp_noise": 1.0}
    Recipe.from_tree({**TINY, **ROTATION, "local": local, "terms": {"proximal": {"mu": 0.1}}})
