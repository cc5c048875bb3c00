import math

import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.learning.objectives.infonce import InfoNCE, WithNegatives, bound, info_nce
from harmonium.learning.objectives.simclr import SimCLR, nt_xent
from harmonium.learning.world import World


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def critic(a: torch.Tensor, b: torch.Tensor, temperature: float) -> float:
    return math.exp(float(a @ b / a.norm() / b.norm()) / temperature)


def federated_simclr(first: torch.Tensor, second: torch.Tensor, temperature: float) -> float:
    """The bound of equation 3, pair by pair: its inner mean runs over the first view."""
    n, total = len(first), 0.0
    for k in range(n):
        others = [critic(first[j], second[k], temperature) for j in range(n)]
        total += math.log(critic(first[k], second[k], temperature) / (sum(others) / n))
    return total / n


def fedca(first, second, dictionary, temperature) -> float:  # type: ignore[no-untyped-def]
    """Equations 4 to 8: row i of the first view among the second view and the dictionary."""
    total = 0.0
    for i in range(len(first)):
        scores = [critic(first[i], row, temperature) for row in [*second, *dictionary]]
        total -= math.log(scores[i] / sum(scores))
    return total / len(first)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_log_of_the_batch_minus_the_loss_is_the_bound_of_federated_simclr(
    n: int, temperature: float
) -> None:
    a, b = rows(2, n, 5, seed=n)
    value = bound(info_nce(a, b, temperature), n).item()
    assert value == pytest.approx(federated_simclr(a, b, temperature), abs=1e-12)
    assert value <= math.log(n) + 1e-12


@pytest.mark.parametrize("count", [0, 1, 9])
def test_the_first_view_among_a_dictionary_is_fedca(count: int) -> None:
    (a, b), dictionary = rows(2, 4, 5), rows(count, 5, seed=1)
    loss = info_nce(a, b, 0.5, anchors="first", negatives=dictionary)
    assert loss.item() == pytest.approx(fedca(a, b, dictionary, 0.5))


def test_an_empty_dictionary_is_no_dictionary() -> None:
    a, b = rows(2, 4, 5)
    for anchors in ("first", "second", "both"):
        plain = info_nce(a, b, 0.5, anchors=anchors)
        assert torch.equal(plain, info_nce(a, b, 0.5, anchors=anchors, negatives=rows(0, 5)))


def test_the_order_and_the_length_of_negatives_are_irrelevant() -> None:
    (a, b), dictionary = rows(2, 4, 5), rows(9, 5, seed=1)
    loss = info_nce(a, b, 0.5, negatives=dictionary)
    assert loss.item() == pytest.approx(
        info_nce(a, b, 0.5, negatives=3 * dictionary.flip(0)).item()
    )
    assert loss > info_nce(a, b, 0.5)


def test_negatives_get_no_gradient() -> None:
    a, b, dictionary = (rows(3, 4, seed=s).requires_grad_() for s in range(3))
    info_nce(a, b, 0.5, negatives=dictionary).backward()
    assert dictionary.grad is None and a.grad.abs().sum() > 0 and b.grad.abs().sum() > 0


def test_directions_are_transposed_and_both_is_their_mean() -> None:
    a, b = rows(2, 5, 3)
    there, back = info_nce(a, b, 0.3, anchors="first"), info_nce(a, b, 0.3, anchors="second")
    assert there.item() != pytest.approx(back.item(), abs=1e-3)
    assert back.item() == pytest.approx(info_nce(b, a, 0.3, anchors="first").item())
    assert info_nce(a, b, 0.3, anchors="both").item() == pytest.approx((there + back).item() / 2)


def test_it_is_not_nt_xent() -> None:
    a, b = rows(2, 5, 3)
    assert info_nce(a, b, 0.5, anchors="both") < nt_xent(a, b, 0.5) - 0.1


@pytest.mark.parametrize("n", [1, 2, 16])
def test_collapse_costs_log_of_all_rows_and_spread_partners_nothing(n: int) -> None:
    same, apart = torch.ones(n, 16), torch.eye(16)[:n]
    assert info_nce(same, same, 0.5).item() == pytest.approx(math.log(n), abs=1e-6)
    crowded = info_nce(same, same, 0.5, negatives=torch.ones(9, 16)).item()
    assert crowded == pytest.approx(math.log(n + 9), abs=1e-6)
    assert info_nce(apart, apart, 0.01).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("anchors", ["first", "second", "both"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_right(anchors, n) -> None:  # type: ignore[no-untyped-def]
    a, b = (rows(n, 4, seed=s).requires_grad_() for s in range(2))
    extra = rows(3, 4, seed=9)
    assert torch.autograd.gradcheck(
        lambda x, y: info_nce(x, y, 0.3, anchors=anchors, negatives=extra), (a, b)
    )


def test_training_moves_what_it_should_and_takes_negatives_from_the_method(practise) -> None:  # type: ignore[no-untyped-def]
    plain, crowded = practise(InfoNCE(out=8)), practise(InfoNCE(out=8))
    extra = rows(50, 8).float()
    assert plain.learn() < crowded.learn(context=WithNegatives(me=0, negatives=extra)) < math.inf
    assert plain.moved() == {"encoder", "projector"}
    assert plain.parts.rules == {"encoder": "mean", "projector": "mean"}
    seen = crowded.see()
    scored = crowded.method.objective.score(
        crowded.parts, seen, WithNegatives(me=0, negatives=extra)
    )
    assert torch.equal(scored, info_nce(*seen.pair(), 0.5, negatives=extra))


def test_the_projector_is_that_of_simclr() -> None:
    heads = (kind(hidden=2048, norm="none").build({}, 512, World()) for kind in (SimCLR, InfoNCE))
    counts = [sum(p.numel() for p in head["projector"].module.parameters()) for head in heads]
    assert counts == [1_312_896] * 2


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective.temperature is -1"):
        InfoNCE(temperature=-1)
