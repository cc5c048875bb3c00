import math
from dataclasses import replace

import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views, preset
from harmonium.data.partition import make_split
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives.queue import queue_of
from harmonium.learning.objectives.sinkhorn import sinkhorn
from harmonium.learning.objectives.swav import SwAV, prototypes_of, swapped_prediction
from harmonium.learning.world import World
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial

SMALL = SwAV(prototypes=6, out=8, queue=0)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(v: torch.Tensor) -> torch.Tensor:
    return v / v.norm(dim=-1, keepdim=True)


def published_sinkhorn(scores: torch.Tensor, epsilon: float, iterations: int) -> torch.Tensor:
    """As the paper has it: a matrix of total 1 whose rows sum to 1/K and columns to 1/B."""
    q = (scores / epsilon).exp().T
    q = q / q.sum()
    prototypes, batch = q.shape
    for _ in range(iterations):
        for k in range(prototypes):
            q[k] /= q[k].sum() * prototypes
        for b in range(batch):
            q[:, b] /= q[:, b].sum() * batch
    return (q * batch).T


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_sinkhorn_is_the_published_procedure(iterations: int) -> None:
    scores = unit(rows(7, 4)) @ unit(rows(5, 4, seed=1)).T
    wanted = published_sinkhorn(scores, 0.05, iterations)
    assert torch.allclose(sinkhorn(scores / 0.05, iterations), wanted, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (16, 64), (400, 64)])
def test_assignments_sum_to_one_and_prototypes_share_evenly(shape: tuple[int, int]) -> None:
    n, k = shape
    scores = (rows(n, 8) @ rows(k, 8, seed=1).T).float() / 8 / 0.05
    assert torch.allclose(sinkhorn(scores, 3).sum(1), torch.ones(n), atol=1e-5)
    balanced = sinkhorn(scores, 1000)
    assert torch.allclose(balanced.sum(0), torch.full((k,), n / k), rtol=1e-2)


@pytest.mark.parametrize("scale", [0.0, 20.0, 1e5])
def test_equal_points_are_spread_evenly_without_nan(scale: float) -> None:
    scores = scale * torch.randn(1, 9, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    assert torch.allclose(sinkhorn(scores, 3), torch.full((4, 9), 1 / 9), atol=1e-4)


def test_huge_scores_stay_finite_in_single_precision() -> None:
    scores = 1e4 * torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    found = sinkhorn(scores, 3)
    assert torch.isfinite(found).all() and torch.allclose(found.sum(1), torch.ones(20), atol=1e-4)


def test_assignments_have_no_gradient_and_follow_their_points() -> None:
    scores = rows(6, 3).requires_grad_()
    found = sinkhorn(scores, 3)
    assert not found.requires_grad
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    assert torch.allclose(sinkhorn(scores[order], 3), found[order])


def by_definition(scores, codes, temperature) -> float:  # type: ignore[no-untyped-def]
    """Equations 1 and 2 of SwAV over all ordered pairs of views, point by point."""
    total, pairs = 0.0, 0
    for s, code in enumerate(codes):
        for t, score in enumerate(scores):
            if s == t:
                continue
            pairs += 1
            for q, x in zip(code.tolist(), score.tolist(), strict=True):
                norm = math.log(sum(math.exp(value / temperature) for value in x))
                ways = zip(q, x, strict=True)
                total -= sum(w * (v / temperature - norm) for w, v in ways) / len(code)
    return total / pairs


@pytest.mark.parametrize(("views", "n"), [(2, 1), (2, 2), (2, 5), (3, 4)])
def test_the_loss_is_its_definition(views: int, n: int) -> None:
    scores = list(rows(views, n, 6).tanh())
    codes = [sinkhorn(score / 0.05, 3) for score in scores]
    loss = swapped_prediction(scores, codes, 0.1).item()
    assert loss == pytest.approx(by_definition(scores, codes, 0.1))


def test_gradients_are_right_and_none_reaches_codes() -> None:
    a, b = (rows(3, 4, seed=s).requires_grad_() for s in range(2))
    codes = [torch.softmax(rows(3, 4, seed=s), 1).requires_grad_() for s in (2, 3)]
    assert torch.autograd.gradcheck(lambda x, y: swapped_prediction([x, y], codes, 0.3), (a, b))
    swapped_prediction([a, b], codes, 0.3).backward()
    assert a.grad.abs().sum() > 0 and all(code.grad is None for code in codes)


def test_collapse_costs_at_least_log_of_the_prototypes_and_clusters_less() -> None:
    """Equal points get uniform codes, which no prediction meets for less than their entropy."""

    def cost(scores: torch.Tensor) -> float:
        code = sinkhorn(scores / 0.05, 3)
        return swapped_prediction([scores, scores], [code, code], 0.1).item()

    one = rows(1, 8).tanh()
    assert cost(one.repeat(16, 1)) >= math.log(8) - 1e-9
    assert cost(torch.zeros(16, 8)) == pytest.approx(math.log(8), abs=1e-6)
    assert cost(torch.eye(8).repeat(2, 1)) < 0.01


def test_one_view_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective=swav compares 2 or more views"):
        swapped_prediction([torch.zeros(2, 3)], [torch.zeros(2, 3)], 0.1)


def batch_of(practice, views: Views) -> Batch:  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(3)
    return Batch(torch.arange(5), practice.client.examples, views, rng)


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("queue", [0, 16])
def test_the_score_is_made_of_the_parts(practise, views: int, queue: int) -> None:  # type: ignore[no-untyped-def]
    """Written out, with a queue that joins the assignment once images have filled it."""
    settings = replace(SMALL, queue=queue, norm="none")
    practice = practise(settings, count=8)
    parts, batch = practice.parts, batch_of(practice, Views(preset("digits").pipelines[:1] * views))
    earlier = [torch.randn(9, 8), torch.randn(7, 8)] if queue else []

    def wanted(extra: torch.Tensor) -> float:
        directions = prototypes_of(parts).rows.detach().double()
        z = [parts["projector"](parts["encoder"](view)).detach().double() for view in batch.views]
        scores = [unit(view) @ directions.T for view in z]
        more = extra.double() @ directions.T
        both = [published_sinkhorn(torch.cat([more, s]), 0.05, 3)[len(more) :] for s in scores]
        return by_definition(scores, both, 0.1)

    def found() -> float:
        return settings.score(parts, settings.see(parts, batch), Context(me=0)).item()

    nothing = torch.empty(0, 8)
    assert found() == pytest.approx(wanted(nothing), rel=1e-4)
    for more in earlier:
        assert found() == pytest.approx(wanted(nothing), rel=1e-4)  # not full: not used
        queue_of(parts).offer(more)
        queue_of(parts).push()
    if queue:
        full = queue_of(parts).rows
        assert wanted(full) != pytest.approx(wanted(nothing), rel=1e-3)
        assert found() == pytest.approx(wanted(full), rel=1e-4)


def test_training_moves_what_it_should_and_keeps_prototypes_unit(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(replace(SMALL, queue=20))
    assert math.isfinite(practice.learn())
    assert practice.moved() == {"encoder", "projector", "prototypes"}
    assert practice.parts.rules["prototypes"] == "mean" and practice.parts.rules["queue"] == "fresh"
    assert {key.partition(".")[0] for key in practice.parts.shared()} == practice.moved()
    prototypes = prototypes_of(practice.parts)
    assert torch.allclose(prototypes.rows.norm(dim=1), torch.ones(6))
    assert int(prototypes.steps) == 3
    assert int(queue_of(practice.parts).count) == 3 * 2 * 8


def test_prototypes_are_still_at_first_and_then_move(practise) -> None:  # type: ignore[no-untyped-def]
    for freeze, moves in ((3, False), (2, True)):
        practice = practise(replace(SMALL, freeze=freeze))  # three steps
        practice.learn()
        now, before = (prototypes_of(p).rows for p in (practice.parts, practice.start))
        assert torch.allclose(now, before, atol=1e-5) != moves
        assert (now.grad is None) != moves


def test_prototypes_that_a_method_holds_keep_their_bits(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(SMALL)
    practice.learn(train=["encoder", "projector"])
    for key, value in prototypes_of(practice.start).state_dict().items():
        assert torch.equal(prototypes_of(practice.parts).state_dict()[key], value)


def test_averaged_prototypes_get_their_length_back(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(SMALL)
    sent = practice.parts.shared()
    sent["prototypes.rows"] *= 0.3
    pulled = prototypes_of(practice.method.pull(practice.client, sent)).rows
    assert torch.allclose(pulled, prototypes_of(practice.start).rows, atol=1e-6)


def test_the_server_takes_the_largest_count_of_steps() -> None:
    """So that prototypes are released together: two rounds of the busiest client's steps."""
    objective = {"name": "swav", "prototypes": 6, "out": 8, "queue": 8}
    split = {"name": "quantity"}
    recipe = Recipe.from_tree({**TINY, "objective": objective, "split": split})
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    trial = Trial(recipe, dataset, split).go()
    steps = [n // 6 + (n % 6 >= 2) for n in map(len, split.indices)]
    assert len(set(steps)) > 1 and int(trial.server.model["prototypes.steps"]) == 2 * max(steps)


def test_without_a_queue_there_is_no_such_part() -> None:
    assert set(SwAV(queue=0).build({}, 16, World())) == {"projector", "prototypes"}
    kept = SwAV(queue_owner="local").build({}, 16, World())["queue"]
    assert kept.share == "local" and kept.reveals == "per_example"


def test_impossible_settings_are_refused() -> None:
    for settings, message in (
        ({"epsilon": 0.0}, "objective.epsilon is 0.0"),
        ({"temperature": -1.0}, "objective.temperature is -1.0"),
        ({"prototypes": 1}, "objective.prototypes is 1"),
        ({"iterations": 0}, "objective.iterations is 0"),
        ({"queue": -1}, "objective.queue is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SwAV(**settings)
