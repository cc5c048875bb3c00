"""Fine-tuning: every step by hand, nothing drawn but by the seed, nothing chosen."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.augment.pipeline import View
from harmonium.data.augment.views import plain
from harmonium.data.images import Images
from harmonium.evaluation.finetune import TUNINGS, Tuning, finetune
from harmonium.learning.optimisers import SGD, Adam


def pictures(count: int = 24, classes: int = 3) -> Images:
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes * 2 + 1  # 1, 3, 5
    pixels = rng.integers(0, 120, (count, 6, 6, 1), np.uint8)
    pixels[np.arange(count), labels] += 120  # a bright row names the class
    return Images(pixels, labels)


def encoder(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(144)] if norm else []))


def test_the_papers_settings() -> None:
    assert TUNINGS["mlp"] == Tuning("mlp", "adam", 0.001, 100)
    orchestra = TUNINGS["linear"]
    assert (orchestra.optimiser, orchestra.lr, orchestra.epochs) == ("sgd", 0.1, 50)
    assert orchestra.rate(0) == 0.1 and orchestra.rate(25) == pytest.approx(0.05)
    assert 0 < orchestra.rate(49) < 0.001 and TUNINGS["mlp"].rate(99) == 0.001


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_it_is_the_training_by_hand(head: str) -> None:
    images, network = pictures(), encoder()
    how = replace(TUNINGS[head], epochs=3, batch=10, hidden=7 if head == "mlp" else None)
    made = finetune(network, images, how, plain, seed=5)
    wanted = torch.from_numpy((images.labels - 1) // 2)
    torch.manual_seed(seeds.seed_of(5, "finetune", "torch"))
    whole = nn.Sequential(
        copy.deepcopy(network),
        nn.Linear(144, 3)
        if head == "linear"
        else nn.Sequential(nn.Linear(144, 7), nn.ReLU(), nn.Linear(7, 3)),
    )
    rng = seeds.torch_rng(5, "finetune")
    step: torch.optim.Optimizer = (
        SGD(whole.parameters(), lr=0.1, momentum=0.9)
        if head == "linear"
        else Adam(whole.parameters(), lr=0.001)
    )
    for epoch in range(3):
        step.param_groups[0]["lr"] = how.rate(epoch)
        for rows in torch.randperm(24, generator=rng).split(10):
            step.zero_grad()
            seen = plain(torch.from_numpy(images.pixels[rows.numpy()]))
            functional.cross_entropy(whole(seen), wanted[rows]).backward()
            step.step()
    for ours, theirs in zip(made.network.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert not torch.equal(made.network[0][0].weight, network[0].weight)  # the encoder learnt
    assert made.classes.tolist() == [1, 3, 5]


def test_it_learns_and_leaves_the_encoder_and_chance_alone() -> None:
    images, network = pictures(), encoder(norm=True)
    before = copy.deepcopy(network.state_dict())
    network.requires_grad_(False)  # as one may be handed over
    how = replace(TUNINGS["mlp"], epochs=30, lr=0.01, batch=23)  # a batch of 1 is left, and skipped
    torch.manual_seed(3)
    ahead = torch.rand(1)
    torch.manual_seed(3)
    made = finetune(network, images, how, plain, seed=0)
    assert torch.equal(torch.rand(1), ahead)
    given = made.answers(images, plain)
    assert given is not None and given.accuracy == given.balanced == 1.0 and given.auroc is None
    assert not torch.equal(made.network.state_dict()["0.0.weight"], before["0.weight"])
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    again, other = (finetune(network, images, how, plain, seed=seed) for seed in (0, 1))
    key = "1.0.weight"
    assert torch.equal(made.network.state_dict()[key], again.network.state_dict()[key])
    assert not torch.equal(made.network.state_dict()[key], other.network.state_dict()[key])


def test_views_are_drawn_anew_at_every_step() -> None:
    seen: list[torch.Tensor] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(36))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.detach().clone())
            return x.flatten(1) * self.scale

    how = Tuning("linear", "sgd", 0.1, 2, 24, view=View(crop_min=0.5, jitter=0, gray=0))
    finetune(Look(), pictures(), how, plain, seed=0)
    assert len(seen) == 3 and not torch.equal(seen[1], seen[2])  # the first tells the size


def test_labels_that_are_not_known_are_left_out() -> None:
    images = pictures()
    some = Images(images.pixels, np.where(np.arange(24) < 12, images.labels, -1))
    how = replace(TUNINGS["linear"], epochs=1)
    first = finetune(encoder(), some, how, plain, 0)
    second = finetune(encoder(), images.subset(np.arange(12)), how, plain, 0)
    for ours, theirs in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    asked = Images(images.pixels, np.full(24, -1))
    with pytest.raises(DataError, match="no labelled image"):
        first.answers(asked, plain)
    with pytest.raises(DataError, match="at least 2"):
        finetune(encoder(), asked, how, plain, 0)


def test_a_network_that_diverged_answers_nothing() -> None:
    how = replace(TUNINGS["linear"], epochs=3, lr=1e30)
    assert finetune(encoder(), pictures(), how, plain, 0).answers(pictures(), plain) is None
    for wrong in ({"epochs": 0}, {"lr": 0.0}, {"batch": 1}, {"hidden": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(TUNINGS["mlp"], **wrong)
