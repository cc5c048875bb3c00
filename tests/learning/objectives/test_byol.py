import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.evaluation.geometry import spread
from harmonium.learning.context import Context
from harmonium.learning.objectives import mlp
from harmonium.learning.objectives.byol import BYOL, distance
from harmonium.learning.world import World


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / a.norm() / b.norm())


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_loss_is_its_definition(n: int) -> None:
    p1, p2, t1, t2 = (rows(n, seed) for seed in range(4))
    pairs = [(cosine(p1[i], t2[i]), cosine(p2[i], t1[i])) for i in range(n)]
    total = sum(2 - 2 * a + 2 - 2 * b for a, b in pairs) / n  # EasyFL, FedSC
    mean = sum(-(a + b) / 2 for a, b in pairs) / n  # Orchestra
    assert distance(p1, p2, t1, t2).item() == pytest.approx(total)
    assert distance(p1, p2, t1, t2, "mean").item() == pytest.approx(mean)


def test_it_is_the_squared_distance_of_unit_vectors() -> None:
    p1, p2, t1, t2 = (functional.normalize(rows(5, seed)) for seed in range(4))
    squared = (p1 - t2).square().sum(1).mean() + (p2 - t1).square().sum(1).mean()
    assert distance(p1, p2, t1, t2).item() == pytest.approx(squared.item())


def test_the_scales_differ_in_gradients_by_four() -> None:
    p1, p2, t1, t2 = (rows(5, seed) for seed in range(4))
    p1.requires_grad_()
    (large,) = torch.autograd.grad(distance(p1, p2, t1, t2, "sum"), p1)
    (small,) = torch.autograd.grad(distance(p1, p2, t1, t2, "mean"), p1)
    assert torch.allclose(large, 4 * small)


@pytest.mark.parametrize("scale", ["sum", "mean"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_right(scale, n) -> None:  # type: ignore[no-untyped-def]
    p1, p2 = (rows(n, seed).requires_grad_() for seed in range(2))
    t1, t2 = rows(n, 2), rows(n, 3)
    assert torch.autograd.gradcheck(lambda a, b: distance(a, b, t1, t2, scale), (p1, p2))


def test_targets_get_no_gradient() -> None:
    p1, p2, t1, t2 = (rows(3, seed).requires_grad_() for seed in range(4))
    distance(p1, p2, t1, t2).backward()
    assert t1.grad is None and t2.grad is None and p1.grad.abs().sum() > 0


def test_the_loss_cannot_see_collapse() -> None:
    same, apart = torch.ones(8, 4), rows(8)
    assert distance(*[same] * 4).item() == pytest.approx(0.0, abs=1e-6)
    assert distance(*[apart] * 4).item() == pytest.approx(0.0, abs=1e-6)


def weights(parts, where: str) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Parameters of encoder and projector, of the target or of the model it follows."""
    found = parts["target"] if where == "target" else parts
    return [p for name in ("encoder", "projector") for p in found[name].parameters()]


def test_training_moves_every_part_and_the_target_a_little(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL())
    loss = practice.learn()
    assert 0 <= loss <= 8
    assert practice.moved() == {"encoder", "projector", "predictor", "target"}
    start, online, slow = (
        torch.cat([w.flatten() for w in weights(parts, where)])
        for parts, where in (
            (practice.start, "online"),
            (practice.parts, "online"),
            (practice.parts, "target"),
        )
    )
    assert 0 < (slow - start).norm() < 0.1 * (online - start).norm()
    assert all(not p.requires_grad for p in practice.parts["target"].parameters())


@pytest.mark.parametrize("update", ["after", "before"])
def test_a_momentum_of_one_keeps_the_target(update, practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(momentum=1.0, update=update))
    practice.learn()
    assert practice.moved() == {"encoder", "projector", "predictor"}


def test_a_momentum_of_zero_makes_the_target_the_model(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(momentum=0.0))
    practice.learn()
    pairs = zip(weights(practice.parts, "target"), weights(practice.parts, "online"), strict=True)
    assert all(torch.equal(slow, online) for slow, online in pairs)


@pytest.mark.parametrize("update", ["after", "before"])
def test_the_target_moves_after_the_step_or_before_it(update, practise) -> None:  # type: ignore[no-untyped-def]
    """One step: the target goes towards the trained weights, or towards those before."""
    practice = practise(BYOL(momentum=0.7, update=update), batch=24)
    for weight in weights(practice.parts, "target"):
        weight.data += 1
    old = [w.clone() for w in weights(practice.parts, "target")]
    practice.learn()
    towards = practice.parts if update == "after" else practice.start
    triples = zip(weights(practice.parts, "target"), old, weights(towards, "online"), strict=True)
    for now, before, online in triples:
        assert torch.allclose(now, 0.7 * before + 0.3 * online, atol=1e-6)


@pytest.mark.parametrize("update", ["after", "before"])
def test_targets_are_what_the_target_makes_of_the_views(update, practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(momentum=0.5, update=update))
    for weight in weights(practice.parts, "target"):
        weight.data *= 1.1
    seen = practice.see()
    target = practice.parts["target"]
    again = [target["projector"](target["encoder"](view)) for view in seen.batch.views]
    assert torch.equal(torch.cat(seen.t), torch.cat(again))
    assert not any(t.requires_grad for t in seen.t) and seen.z[0].requires_grad
    objective, predictor = practice.method.objective, practice.parts["predictor"]
    p1, p2 = (predictor(z) for z in seen.z)
    score = objective.score(practice.parts, seen, Context(me=0))
    assert score.item() == pytest.approx(distance(p1, p2, *seen.t).item())


def test_nothing_moves_where_nothing_is_trained(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(momentum=0.5, update="before"))
    for parts in (practice.parts, practice.start):
        for weight in weights(parts, "target"):
            weight.data += 1
    practice.parts.eval()
    practice.see()
    assert practice.moved() == set()


@pytest.mark.parametrize("buffers", ["own", "copy"])
def test_the_targets_batch_norm_measures_for_itself_or_copies(buffers, practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(momentum=1.0, ema_buffers=buffers), lr=0.5)
    practice.learn()
    start, slow, online = (
        head[1].running_mean
        for head in (
            practice.start["projector"],
            practice.parts["target"]["projector"],
            practice.parts["projector"],
        )
    )
    assert not torch.equal(slow, start)
    assert torch.equal(slow, online) == (buffers == "copy")


def test_statistics_are_copied_before_a_step_too(practise) -> None:  # type: ignore[no-untyped-def]
    found = []
    for buffers in ("own", "copy"):
        practice = practise(BYOL(momentum=1.0, ema_buffers=buffers, update="before"), lr=0.5)
        practice.learn()
        found.append(practice.parts["target"]["projector"][1].running_mean)
    assert not torch.equal(*found)


@pytest.mark.parametrize("owner", ["mean", "local", "fresh"])
def test_the_owner_of_the_target_is_a_setting(owner, practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(BYOL(target=owner))
    assert practice.parts.rules["target"] == owner
    sent = {key.partition(".")[0] for key in practice.parts.shared()}
    kept = {key.partition(".")[0] for key in practice.parts.kept()}
    assert ("target" in sent) == (owner == "mean") and ("target" in kept) == (owner == "local")
    assert practice.parts.reveals["target"] == "weights"
    # What a client finds when it is asked again and others have trained meanwhile:
    practice.learn()
    sent = practice.method.push(practice.client, practice.parts)
    received = {key: value + 1 for key, value in sent.items()}
    found = practice.method.pull(practice.client, received)["target"].state_dict()
    left = practice.parts["target"].state_dict()
    for key, value in found.items():
        averaged = received[f"target.{key}"] if owner == "mean" else None
        expected = {"mean": averaged, "local": left[key], "fresh": received[key]}[owner]
        assert torch.equal(value, expected), key


class Leaking(BYOL):
    """The model as its own target, and gradients reach it."""

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        p1, p2 = parts["predictor"](torch.cat(seen.pair())).chunk(2)
        first, second = seen.pair()
        same = functional.cosine_similarity
        return 4 - 2 * same(p1, second).mean() - 2 * same(p2, first).mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_target_keeps_projections_apart(seed, practise) -> None:  # type: ignore[no-untyped-def]
    wide = {"seed": seed, "count": 64, "batch": 32, "epochs": 40, "optimiser": "adam", "lr": 0.002}
    spreads = []
    for objective in (BYOL(), Leaking()):
        practice = practise(objective, **wide)
        practice.learn()
        spreads.append(spread(torch.cat(practice.see().z)))
    assert spreads[0] > 0.4 and spreads[1] < 0.2


def test_heads_have_the_published_sizes() -> None:
    def count(objective: BYOL) -> list[int]:
        made = objective.build({"encoder": mlp(1, 1)}, 512, World())
        heads = (made["projector"], made["predictor"])
        return [sum(p.numel() for p in part.module.parameters()) for part in heads]

    assert count(BYOL(hidden=1024, norm="none")) == [1_050_112, 1_050_112]  # FedSC
    assert count(BYOL(hidden=4096, out=2048)) == [10_500_096, 16_791_552]  # EasyFL
    assert count(BYOL(hidden=1024, bias=False)) == [1_050_624, 1_051_136]  # Orchestra


def test_bad_settings_are_refused() -> None:
    for momentum in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"objective.momentum is "):
            BYOL(momentum=momentum)
    with pytest.raises(ConfigError, match=r"objective.hidden is 0"):
        BYOL(hidden=0)
