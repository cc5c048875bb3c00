"""Classifiers by protocol: a plain loop with torch's own pieces, and what they refuse."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from harmonium.core.errors import ConfigError, DataError
from harmonium.evaluation.classifier import (
    ORCHESTRA,
    PROTOCOLS,
    Classifier,
    Protocol,
    ResidualAdapter,
    train,
)
from harmonium.learning.optimisers import SGD


def drawn(seed: int = 0, count: int = 50, dim: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=rng)
    centres = torch.randn(4, dim, generator=rng)
    return centres[labels] + torch.randn(count, dim, generator=rng) + 3, labels * 2 + 1


def order(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(
    features: torch.Tensor, labels: torch.Tensor, how: Protocol, adapter: nn.Module
) -> nn.Sequential:
    """The protocol as anyone would write it down; the adapter is changed."""
    names = sorted(set(labels.tolist()))
    columns = torch.tensor([names.index(label) for label in labels.tolist()])
    begun = adapter(features).detach()
    linear = nn.Linear(begun.shape[1], len(names))
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    norm = nn.BatchNorm1d(begun.shape[1], eps=0, affine=False)  # in evaluation mode: fixed numbers
    if how.standardise:
        norm.running_mean, norm.running_var = begun.mean(0), begun.var(0, correction=0)
    model = nn.Sequential(adapter, norm, linear).eval()
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[how.optimiser]
    more = {"momentum": how.momentum} if how.optimiser == "sgd" else {}
    optimiser = kind(model.parameters(), lr=how.lr, weight_decay=how.weight_decay, **more)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, how.epochs)
    rng = order()
    for _ in range(how.epochs):
        rows = torch.arange(len(labels))
        if how.shuffle:
            rows = torch.randperm(len(labels), generator=rng)
        for some in rows.split(how.batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(features[some]), columns[some]).backward()
            optimiser.step()
        if how.schedule == "cosine":
            slower.step()
    return model


VARIANTS = [
    Protocol("sgd", 0.1, 16, 5),
    Protocol("sgd", 0.05, 16, 5, momentum=0.9, weight_decay=0.01, schedule="cosine"),
    Protocol("sgd", 0.1, 16, 5, weight_decay=0.1, shuffle=False, standardise=True),
    Protocol("adam", 0.01, 16, 5, weight_decay=0.01, standardise=True),
    Protocol("adam", 0.01, 60, 5, schedule="cosine"),
]


@pytest.mark.parametrize("how", VARIANTS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_protocol_is_a_plain_loop(how: Protocol, adapted: bool) -> None:
    features, labels = drawn()
    adapter: nn.Module = nn.Identity()
    if adapted:
        adapter = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
    found = train(features, labels, how, order(), adapter=adapter if adapted else None)
    model = by_hand(features, labels, how, copy.deepcopy(adapter))
    assert torch.allclose(found.weights[:-1].T, model[2].weight, atol=2e-5)
    assert torch.allclose(found.weights[-1], model[2].bias, atol=2e-5)
    assert float(found.weights.abs().max()) > 0.01
    others = features + 0.1
    assert torch.equal(found.predict(others, chunk=33), found.classes[model(others).argmax(1)])
    if adapted:
        assert found.adapter is not None
        pairs = zip(found.adapter.parameters(), model[0].parameters(), strict=True)
        assert all(torch.allclose(one, other, atol=2e-5) for one, other in pairs)


def test_the_given_adapter_stays_and_its_copy_learns() -> None:
    features, labels = drawn()
    adapter = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5)).requires_grad_(False)
    before = copy.deepcopy(adapter.state_dict())
    found = train(features, labels, VARIANTS[0], order(), adapter=adapter)
    again = train(features, labels, VARIANTS[0], order(), adapter=adapter)
    assert all(torch.equal(before[key], value) for key, value in adapter.state_dict().items())
    assert found.adapter is not None and again.adapter is not None
    moved = [not torch.equal(before[k], v) for k, v in found.adapter.state_dict().items()]
    assert moved == [True, True]
    assert torch.equal(found.weights, again.weights)  # nothing is dropped by chance


def test_only_the_order_is_drawn_and_from_its_own_generator() -> None:
    features, labels = drawn()
    before = torch.random.get_rng_state()
    one, same, other = (train(features, labels, VARIANTS[0], order(s)) for s in (1, 1, 2))
    ResidualAdapter(7, 3, order())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.weights, same.weights) and not torch.equal(one.weights, other.weights)
    threads = torch.get_num_threads()
    train(features, labels, VARIANTS[0], order(), adapter=nn.Linear(7, 7))
    assert torch.get_num_threads() == threads


def test_standardised_features_may_have_any_size() -> None:
    features, labels = drawn()
    huge = features * torch.tensor([1e3, 1e-3, 1, 1, 50, 1, 1]) + 100
    huge = torch.cat([huge, torch.full((50, 1), 7.0)], 1)  # and one that says nothing
    first, second = (
        train(some, labels, PROTOCOLS["lp_style"], order()) for some in (features, huge)
    )
    assert torch.allclose(first.weights[:7], second.weights[:7], atol=1e-2)
    assert second.finite and float(second.weights[7].abs().max()) == 0
    raw = train(huge * 1e18, labels, PROTOCOLS["lp_fedca"], order())
    assert isinstance(raw, Classifier) and len(raw.predict(huge)) == 50


def test_labels_that_are_missing_or_all_alike() -> None:
    features, labels = drawn()
    some = torch.where(torch.arange(50) % 3 == 0, labels, -1)
    found = train(features, some, VARIANTS[0], order())
    alone = train(features[::3], labels[::3], VARIANTS[0], order())
    assert torch.equal(found.weights, alone.weights)
    few = train(features[labels != 3], labels[labels != 3], VARIANTS[0], order())
    assert few.classes.tolist() == [1, 5, 7] and 3 not in few.predict(features)
    for adapter in (None, nn.Linear(7, 2)):
        one = train(features, torch.full((50,), 9), VARIANTS[0], order(), adapter=adapter)
        assert one.predict(features).tolist() == [9] * 50
    single = train(features[:1], labels[:1], PROTOCOLS["lp_style"], order())
    assert single.predict(features[1:]).unique().tolist() == labels[:1].tolist()
    with pytest.raises(DataError, match="at least one labelled"):
        train(features, torch.full((50,), -1), VARIANTS[0], order())
    with pytest.raises(DataError, match="49 labels"):
        train(features, labels[1:], VARIANTS[0], order())


def test_a_residual_adapter_begins_as_nothing() -> None:
    adapter = ResidualAdapter(7, 11, order())
    rows, _ = drawn()
    assert torch.equal(adapter(rows), rows)
    assert sum(p.numel() for p in adapter.parameters()) == 2 * 7 * 11 + 7 + 11
    with torch.no_grad():
        adapter.outer.fill_(0.1)
        adapter.outer_bias.fill_(1.0)
    units = (rows @ adapter.inner.T + adapter.inner_bias).clamp_min(0)
    assert torch.allclose(adapter(rows), rows + 0.1 * units.sum(1, keepdim=True) + 1, atol=1e-4)
    largest = float(adapter.inner.detach().abs().max())
    assert largest <= 7**-0.5 < 1.2 * largest
    found = train(
        rows, drawn()[1], PROTOCOLS["lp_style"], order(), adapter=ResidualAdapter(7, 11, order())
    )
    assert found.finite and isinstance(found.adapter, ResidualAdapter)
    assert float(found.adapter.outer.abs().max()) > 0


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"lr": 0.0}, "lr"), ({"batch": 0}, "batch"), ({"epochs": 0}, "epochs"),
     ({"momentum": 1.0}, "momentum"), ({"weight_decay": -1.0}, "weight_decay")],
)  # fmt: skip
def test_protocols_that_cannot_be_right_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Protocol(**{"optimiser": "sgd", "lr": 0.1, "batch": 8, "epochs": 2, **wrong})


def test_epochs_take_passes_of_features_in_turn() -> None:
    features, labels = drawn()
    passes = [features, features.flip(1).contiguous(), features * 2]
    how = Protocol("sgd", 0.3, 16, 4, momentum=0.9, schedule="cosine")
    made = train(passes, labels, how, order())
    known = labels >= 0
    wanted = torch.unique(labels[known], return_inverse=True)[1]
    layer = torch.nn.Linear(features.shape[1], int(wanted.max()) + 1)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    step, rng = SGD(layer.parameters(), lr=0.3, momentum=0.9), order()
    orders = [torch.randperm(int(known.sum()), generator=rng) for _ in range(4)]
    for epoch, rows in enumerate(orders):
        step.param_groups[0]["lr"] = 0.3 * (1 + math.cos(math.pi * epoch / 4)) / 2
        for some in rows.split(16):
            step.zero_grad()
            scores = layer(passes[epoch % 3][known][some])
            torch.nn.functional.cross_entropy(scores, wanted[some]).backward()
            step.step()
    assert torch.allclose(made.weights[:-1].T, layer.weight, atol=1e-5)
    same = train([features], labels, how, order())
    assert torch.equal(same.weights, train(features, labels, how, order()).weights)
    with pytest.raises(ConfigError, match="one pass"):
        train(passes, labels, how, order(), adapter=ResidualAdapter(features.shape[1], 3, order()))
    assert (ORCHESTRA.lr, ORCHESTRA.batch, ORCHESTRA.epochs) == (30.0, 256, 50)
    assert (ORCHESTRA.momentum, ORCHESTRA.schedule) == (0.9, "cosine")
