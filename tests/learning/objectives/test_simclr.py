import math

import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.learning.objectives.simclr import SimCLR, nt_xent
from harmonium.learning.world import World


def by_definition(first: torch.Tensor, second: torch.Tensor, temperature: float) -> float:
    """The loss written out view by view, as SimCLR's equation 1 has it."""
    z = [v / v.norm() for v in [*first, *second]]
    n, total = len(first), 0.0
    for i in range(2 * n):
        positive = (i + n) % (2 * n)
        near = [math.exp(float(z[i] @ z[k]) / temperature) for k in range(2 * n) if k != i]
        total -= math.log(math.exp(float(z[i] @ z[positive]) / temperature) / sum(near))
    return total / (2 * n)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_the_loss_is_its_definition(n: int, temperature: float) -> None:
    a, b = torch.randn(2, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    assert nt_xent(a, b, temperature).item() == pytest.approx(by_definition(a, b, temperature))


@pytest.mark.parametrize("n", [1, 2, 16])
def test_equal_embeddings_cost_log_of_the_other_views(n: int) -> None:
    same = torch.ones(n, 4)
    assert nt_xent(same, same, 0.5).item() == pytest.approx(math.log(2 * n - 1), abs=1e-6)


def test_separated_pairs_cost_nothing_when_cold() -> None:
    apart = torch.eye(6)
    assert nt_xent(apart, apart, 0.01).item() == pytest.approx(0.0, abs=1e-6)


def test_views_may_be_swapped_and_rescaled() -> None:
    a, b = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert nt_xent(a, b, 0.2).item() == pytest.approx(nt_xent(b, 7 * a, 0.2).item(), rel=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_are_right(n: int) -> None:
    a, b = torch.randn(2, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a.requires_grad_(), b.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: nt_xent(x, y, 0.3), (a, b))


def test_a_batch_of_one_has_no_gradient_and_no_nan() -> None:
    a, b = torch.randn(2, 1, 4, requires_grad=True)
    nt_xent(a, b, 0.5).backward()
    assert nt_xent(a, b, 0.5).item() == 0.0


def test_the_projector_has_the_published_size() -> None:
    """Federated SimCLR: 512 to 2048 to 128 is 1,312,896 parameters."""
    part = SimCLR(hidden=2048, out=128, norm="none").build({}, 512, World())["projector"]
    assert sum(p.numel() for p in part.module.parameters()) == 1_312_896


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective.temperature is 0.0"):
        SimCLR(temperature=0.0)


def test_the_projector_may_have_batch_norm() -> None:
    plain, normed = (
        SimCLR(norm=norm).build({}, 8, World())["projector"].module for norm in ("none", "batch")
    )
    extra = sum(p.numel() for p in normed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 2 * 8
    assert any("running_mean" in key for key in normed.state_dict())
