"""Optimisers are torch's to the bit, and a process that trains imports no more than it needs."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from harmonium.learning import optimisers

TRAINS = """
import sys, torch, harmonium.cli.main, harmonium.evaluation, harmonium.report, harmonium.runs.start
from harmonium.learning.training import Local
for name in ("sgd", "adam"):
    weight = torch.nn.Parameter(torch.ones(2))
    optimiser = Local(optimiser=name).optimise([weight], 0.1)
    weight.square().sum().backward()
    optimiser.step()
    optimiser.zero_grad()
heavy = ("torch._dynamo", "scipy.optimize", "scipy.stats", "sklearn", "matplotlib", "flwr")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_steps_are_torchs_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    found = []
    for kind in (getattr(optimisers, name), getattr(torch.optim, name)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        seen = torch.randn(20, 5)
        optimiser = kind(network.parameters(), **settings)
        for _ in range(20):
            optimiser.zero_grad()
            network(seen).square().mean().backward()
            optimiser.step()
        assert all(weight.requires_grad and weight.is_leaf for weight in network.parameters())
        found.append(torch.cat([weight.detach().flatten() for weight in network.parameters()]))
    assert torch.equal(*found)


def test_training_imports_only_what_it_needs() -> None:
    """Neither compilers nor solvers, probes, plots or Flower: every worker would pay for them."""
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("name", "settings"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.1})]
)
def test_parameters_without_gradients_stay_and_join_later(
    name: str, settings: dict[str, Any]
) -> None:
    found = []
    for kind in (getattr(optimisers, name), getattr(torch.optim, name)):
        weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimiser = kind(weights, **settings)
        for step in range(4):
            for place, weight in enumerate(weights):
                weight.grad = torch.full((3,), 0.3) if step >= 2 * place else None
            optimiser.step()
        found.append(torch.cat([weight.detach() for weight in weights]))
    assert torch.equal(*found)


def test_gradients_laid_out_otherwise_than_their_parameters() -> None:
    """Torch's fused step would pair the wrong entries."""
    found = []
    for kind in (optimisers.SGD, torch.optim.SGD):
        values = torch.arange(108.0).view(4, 3, 3, 3)
        weight = nn.Parameter(values.contiguous(memory_format=torch.channels_last))
        weight.grad = values.clone()
        optimiser = kind([weight], lr=0.1, momentum=0.9)
        optimiser.step()
        optimiser.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("most", [0.1, 100.0])
def test_clipping_is_torchs_to_the_bit(most: float) -> None:
    found = []
    for clip in (optimisers.clip_gradients, nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.zeros(size)) for size in (3, 50, 7)]
        for weight in weights[:2]:  # the third has no gradient
            weight.grad = torch.randn_like(weight)
        clip(weights, most)
        found.append(torch.cat([weight.grad for weight in weights[:2]]))
    assert torch.equal(*found)
    optimisers.clip_gradients([nn.Parameter(torch.zeros(1))], most)  # no gradient at all
