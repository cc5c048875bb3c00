import math

import pytest
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.learning.context import Context
from harmonium.learning.objectives.vicreg import VICReg, flatness, overlap, vicreg
from harmonium.learning.world import World


def rows(n: int, dim: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def covariance(view: Tensor, i: int, j: int) -> float:
    n = len(view)
    mean = [sum(float(v) for v in view[:, k]) / n for k in (i, j)]
    products = [(float(row[i]) - mean[0]) * (float(row[j]) - mean[1]) for row in view]
    return sum(products) / (n - 1)


def by_definition(first: Tensor, second: Tensor) -> float:
    """The released code's loss, entry by entry."""
    n, dim = first.shape
    differ = sum(float(a - b) ** 2 for a, b in zip(first.flatten(), second.flatten(), strict=True))
    total = 25 * differ / (n * dim)
    for view in (first, second):
        for i in range(dim):
            deviation = math.sqrt(covariance(view, i, i) + 1e-4)
            total += 25 * max(0.0, 1 - deviation) / dim / 2
            total += sum(covariance(view, i, j) ** 2 for j in range(dim) if j != i) / dim
    return total


@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])  # below, around and above a deviation of 1
def test_the_loss_is_its_definition(n: int, scale: float) -> None:
    a, b = scale * rows(n, seed=1), scale * rows(n, seed=2)
    assert vicreg(a, b).item() == pytest.approx(by_definition(a, b))


def test_each_term_has_its_weight() -> None:
    a, b = 0.5 * rows(9, seed=1), 0.5 * rows(9, seed=2)
    alone = [vicreg(a, b, *weights).item() for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert min(alone) > 0
    mixed = 2 * alone[0] + 3 * alone[1] + 5 * alone[2]
    assert vicreg(a, b, 2, 3, 5).item() == pytest.approx(mixed)


def test_collapse_lacks_0_99_of_every_deviation() -> None:
    """A constant dimension has a deviation of sqrt(1e-4), so its hinge is 0.99."""
    same = torch.ones(8, 4, dtype=torch.float64)
    assert flatness(same).item() == pytest.approx(0.99)
    assert vicreg(same, same).item() == pytest.approx(25 * 0.99)
    spread = 2 * rows(4096)
    assert vicreg(spread, spread).item() < 0.1


def test_repeating_a_dimension_costs_covariance() -> None:
    once, apart = rows(64, 1), 2 * rows(64)
    repeated = 2 * once.expand(64, 4)
    assert flatness(repeated).item() == 0
    assert overlap(repeated) > 10 * overlap(apart)
    assert overlap(once).item() == 0


def test_one_image_has_no_variance_and_finite_gradients() -> None:
    a, b = torch.randn(2, 1, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    loss = vicreg(a, b)
    assert loss.item() == pytest.approx(25 * (a - b).square().mean().item() + 25 * 0.99)
    assert torch.autograd.grad(loss, a)[0].isfinite().all()


def test_collapsed_views_have_finite_gradients() -> None:
    a = torch.ones(5, 4, requires_grad=True)
    vicreg(a, a + 1).backward()
    assert a.grad.isfinite().all()


def test_the_same_shift_of_both_views_changes_nothing() -> None:
    a, b = rows(9, seed=1), rows(9, seed=2)
    assert vicreg(a + 7, b + 7).item() == pytest.approx(vicreg(a, b).item())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_gradients_are_right(n: int) -> None:
    a, b = (0.6 * rows(n, seed=seed) for seed in range(2))
    a.requires_grad_(), b.requires_grad_()
    assert torch.autograd.gradcheck(vicreg, (a, b))


def test_training_moves_every_part(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(VICReg(invariance=10.0))
    loss = practice.learn()
    assert 0 <= loss < 100
    assert practice.moved() == {"encoder", "projector"}
    assert set(practice.parts.rules.values()) == {"mean"}
    seen = practice.see()
    scored = practice.method.objective.score(practice.parts, seen, Context(me=0))
    difference = (seen.z[0] - seen.z[1]).square().mean().item()
    expected = by_definition(*(z.detach() for z in seen.z)) - 15 * difference
    assert scored.item() == pytest.approx(expected, rel=1e-4)


def test_minimising_it_undoes_collapse() -> None:
    views = [(1 + 0.01 * rows(32, seed=seed)).requires_grad_() for seed in range(2)]
    optimiser = torch.optim.Adam(views, lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        vicreg(*views).backward()
        optimiser.step()
    assert flatness(views[0]) < 0.05 and vicreg(*views) < 0.5


def test_the_projector_has_three_layers_of_the_encoders_width() -> None:
    def count(objective: VICReg) -> int:
        part = objective.build({}, 64, World())["projector"]
        return sum(p.numel() for p in part.module.parameters())

    assert count(VICReg()) == 3 * 64**2 + 4 * 64
    assert count(VICReg(hidden=128, out=32, layers=2, norm="none")) == 64 * 128 + 128 * 32


def test_bad_settings_are_refused() -> None:
    for name in ("invariance", "variance", "covariance"):
        with pytest.raises(ConfigError, match=rf"objective.{name} is -1"):
            VICReg(**{name: -1})
    with pytest.raises(ConfigError, match=r"objective.out is 0"):
        VICReg(out=0)
