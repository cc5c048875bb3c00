import math

import pytest
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.learning.context import Context
from harmonium.learning.objectives.barlow import BarlowTwins, cross_correlation
from harmonium.learning.world import World


def rows(n: int, dim: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_definition(first: Tensor, second: Tensor, weight: float) -> float:
    """Equations 1 and 2, entry by entry, with BatchNorm's constant under the root."""
    n, dim = first.shape

    def column(view: Tensor, i: int) -> list[float]:
        values = [float(v) for v in view[:, i]]
        mean = sum(values) / n
        variance = sum((v - mean) ** 2 for v in values) / n
        return [(v - mean) / math.sqrt(variance + 1e-5) for v in values]

    total = 0.0
    for i in range(dim):
        for j in range(dim):
            pairs = zip(column(first, i), column(second, j), strict=True)
            c = sum(a * b for a, b in pairs) / n
            total += (1 - c) ** 2 if i == j else weight * c**2
    return total


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("weight", [0.0, 0.0051, 1.0])
def test_the_loss_is_its_definition(n: int, weight: float) -> None:
    a, b = rows(n, seed=1), rows(n, seed=2)
    assert cross_correlation(a, b, weight).item() == pytest.approx(by_definition(a, b, weight))


def test_standardising_is_batch_norm_without_scale_and_shift() -> None:
    a, b = rows(9, seed=1), 5 + 3 * rows(9, seed=2)
    norm = torch.nn.BatchNorm1d(4, affine=False).double()
    c = norm(a).T @ norm(b) / 9
    expected = (c - torch.eye(4)).square()
    expected[~torch.eye(4, dtype=torch.bool)] *= 0.0051
    assert cross_correlation(a, b).item() == pytest.approx(expected.sum().item())


def test_the_identity_costs_nothing() -> None:
    """Columns of a Hadamard matrix: unit variance, and no two have anything in common."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    eight = torch.kron(torch.kron(two, two), two)[:, 1:]
    assert cross_correlation(eight, eight, 1.0).item() == pytest.approx(0.0, abs=1e-8)
    assert cross_correlation(eight, -eight, 1.0).item() == pytest.approx(4 * 7, rel=1e-4)


def test_collapse_costs_the_most_that_aligned_views_can_cost() -> None:
    """Constant dimensions correlate with nothing: one each. Equal ones repeat each other."""
    constant = torch.ones(16, 8)
    assert cross_correlation(constant, constant).item() == pytest.approx(8.0)
    repeated = rows(16, 1).expand(16, 8)
    assert cross_correlation(repeated, repeated).item() == pytest.approx(0.0051 * 56, rel=1e-3)
    spread = rows(4096, 8)
    assert cross_correlation(spread, spread).item() < 0.01


def test_constant_dimensions_and_one_image_have_finite_gradients() -> None:
    for n in (1, 2, 5):
        a = torch.ones(n, 4, requires_grad=True)
        cross_correlation(a, a * 2).backward()
        assert a.grad.isfinite().all()


def test_views_may_be_swapped_shifted_and_stretched() -> None:
    a, b = 100 * rows(9, seed=1), 100 * rows(9, seed=2)
    loss = cross_correlation(a, b).item()
    assert cross_correlation(b, a).item() == pytest.approx(loss)
    assert cross_correlation(a, 2 * b + 3).item() == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_gradients_are_right(n: int) -> None:
    a, b = (rows(n, seed=seed).requires_grad_() for seed in range(2))
    assert torch.autograd.gradcheck(lambda x, y: cross_correlation(x, y, 0.1), (a, b))


def test_training_moves_every_part(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BarlowTwins())
    loss = practice.learn()
    assert 0 <= loss < 32
    assert practice.moved() == {"encoder", "projector"}
    assert set(practice.parts.rules.values()) == {"mean"}
    seen = practice.see()
    scored = practice.method.objective.score(practice.parts, seen, Context(me=0))
    expected = by_definition(*(z.detach() for z in seen.z), 0.0051)
    assert scored.item() == pytest.approx(expected, rel=1e-4)


def test_minimising_it_leads_to_the_identity() -> None:
    views = [(1 + 0.01 * rows(32, seed=seed)).requires_grad_() for seed in range(2)]
    optimiser = torch.optim.Adam(views, lr=0.02)
    before = cross_correlation(*views, 0.1).item()
    for _ in range(300):
        optimiser.zero_grad()
        cross_correlation(*views, 0.1).backward()
        optimiser.step()
    assert cross_correlation(*views, 0.1) < 0.02 * before


def test_the_projector_has_three_layers_of_the_encoders_or_the_published_width() -> None:
    def count(objective: BarlowTwins, dim: int) -> int:
        part = objective.build({}, dim, World())["projector"]
        return sum(p.numel() for p in part.module.parameters())

    assert count(BarlowTwins(), 64) == 3 * 64**2 + 4 * 64
    published = BarlowTwins(hidden=8192, out=8192)
    assert [published.hidden, published.out, published.layers] == [8192, 8192, 3]
    assert count(BarlowTwins(hidden=128, out=32, layers=2), 64) == 64 * 128 + 256 + 128 * 32


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective.redundancy is -1"):
        BarlowTwins(redundancy=-1)
    with pytest.raises(ConfigError, match=r"objective.layers is 0"):
        BarlowTwins(layers=0)
