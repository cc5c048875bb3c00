import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.evaluation.geometry import spread
from harmonium.learning.context import Context
from harmonium.learning.objectives.simsiam import SimSiam, negative_cosine
from harmonium.learning.world import World


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_definition(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> float:
    """Equations 1 and 2 of the paper, image by image."""
    total = 0.0
    for a, b, c, d in zip(p1, p2, z1, z2, strict=True):
        total -= float(a @ d / a.norm() / d.norm()) / 2 + float(b @ c / b.norm() / c.norm()) / 2
    return total / len(p1)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_loss_is_its_definition(n: int) -> None:
    four = [rows(n, seed) for seed in range(4)]
    loss = negative_cosine(*four).item()
    assert loss == pytest.approx(by_definition(*four))
    assert -1 <= loss <= 1


def test_best_and_worst_guesses() -> None:
    z1, z2 = rows(5, 1), rows(5, 2)
    assert negative_cosine(3 * z2, z1, z1, z2).item() == pytest.approx(-1)
    assert negative_cosine(-z2, -z1, z1, z2).item() == pytest.approx(1)


def test_views_may_be_swapped() -> None:
    p1, p2, z1, z2 = (rows(5, seed) for seed in range(4))
    assert negative_cosine(p1, p2, z1, z2).item() == pytest.approx(
        negative_cosine(p2, p1, z2, z1).item()
    )


def test_what_is_guessed_gets_no_gradient() -> None:
    p1, p2, z1, z2 = (rows(3, seed).requires_grad_() for seed in range(4))
    negative_cosine(p1, p2, z1, z2).backward()
    assert z1.grad is None and z2.grad is None
    assert p1.grad.abs().sum() > 0 and p2.grad.abs().sum() > 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_right(n: int) -> None:
    p1, p2 = (rows(n, seed).requires_grad_() for seed in range(2))
    z1, z2 = rows(n, 2), rows(n, 3)
    assert torch.autograd.gradcheck(lambda a, b: negative_cosine(a, b, z1, z2), (p1, p2))


def test_zero_projections_have_finite_gradients() -> None:
    p1, p2, z1, z2 = torch.zeros(4, 3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(negative_cosine(p1, p2, z1, z2), p1)
    assert gradient.isfinite().all()


def test_the_loss_cannot_see_collapse() -> None:
    same, apart = torch.ones(8, 4), rows(8)
    collapsed = negative_cosine(same, same, same, same)
    assert collapsed.item() == pytest.approx(negative_cosine(*[apart] * 4).item())


def test_training_moves_every_part(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(SimSiam())
    loss = practice.learn()
    assert -1 <= loss <= 1
    assert practice.moved() == {"encoder", "projector", "predictor"}
    assert set(practice.parts.rules.values()) == {"mean"}


def test_the_objective_predicts_and_stops_gradients(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(SimSiam())
    seen = practice.see()
    loss = practice.method.objective.score(practice.parts.eval(), seen, Context(me=0))
    guesses = [practice.parts["predictor"](z) for z in seen.z]
    plain = (tensor.detach() for tensor in (*guesses, *seen.z))
    assert loss.item() == pytest.approx(by_definition(*plain), abs=1e-5)
    # Gradients reach projections by way of the predictor alone.
    expected = torch.autograd.grad(
        by_hand(*guesses, *(z.detach() for z in seen.z)), seen.z, retain_graph=True
    )
    found = torch.autograd.grad(loss, seen.z)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))


def by_hand(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    cosine = functional.cosine_similarity
    return -(cosine(p1, z2).mean() + cosine(p2, z1).mean()) / 2


class Leaking(SimSiam):
    """The same without the stop-gradient."""

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        first, second = seen.pair()
        return by_hand(parts["predictor"](first), parts["predictor"](second), first, second)


PLAIN = {"norm": "none", "out_norm": False}  # BatchNorm at the end slows collapse down


@pytest.mark.parametrize("seed", [0, 1])
def test_the_stop_gradient_keeps_projections_apart(seed, practise) -> None:  # type: ignore[no-untyped-def]
    wide = {"seed": seed, "count": 64, "batch": 32, "epochs": 20, "lr": 0.02}
    spreads = []
    for objective in (SimSiam(), SimSiam(**PLAIN), Leaking(**PLAIN)):
        practice = practise(objective, **wide)
        practice.learn()
        spreads.append(spread(torch.cat(practice.see().z)))
    usual, plain, leaking = spreads
    assert usual > 0.3 and plain > 0.15 and leaking < 0.05


def test_heads_have_the_published_sizes() -> None:
    def count(objective: SimSiam, dim: int = 512) -> list[int]:
        made = objective.build({}, dim, World())
        return [sum(p.numel() for p in part.module.parameters()) for part in made.values()]

    federated = {"hidden": 2048, "out": 128, "layers": 2, "out_norm": False, "bias": True}
    assert count(SimSiam(**federated, norm="none", predictor_hidden=2048)) == [1_312_896, 526_464]
    assert count(SimSiam(**federated, norm="group", predictor_hidden=2048)) == [
        1_312_896 + 4096,
        526_464 + 4096,
    ]
    assert count(SimSiam(hidden=256, predictor_hidden=512)) == [328_704, 525_824]  # Orchestra's
    fedstyle = {"hidden": 256, "out": 128, "layers": 2, "norm": "none", "out_norm": False}
    assert count(SimSiam(**fedstyle, bias=True, predictor_hidden=256)) == [164_224, 65_920]
    # The original: three layers of 2048 with scale and shift in the first two, 2048-512-2048.
    assert count(SimSiam(), 2048) == [3 * 2048**2 + 2 * 4096, 2 * 2048 * 512 + 1024 + 2048]


@pytest.mark.parametrize("name", ["hidden", "out", "layers", "predictor_hidden"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective.{name} is 0"):
        SimSiam(**{name: 0})
