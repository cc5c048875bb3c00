"""Assignments to given centroids: the loss by its formula, the target, and what passes what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.learning.client import Batch
from harmonium.learning.objectives.assignments import Assignments, Clustered, assignment_loss
from harmonium.learning.objectives.rotation import Rotation
from harmonium.learning.world import World

Practise = Callable[..., Any]
OUT = 16


def centroids(count: int = 5, dim: int = OUT) -> Tensor:
    rng = torch.Generator().manual_seed(7)
    return functional.normalize(torch.randn(count, dim, generator=rng))


def batch_of(practice: Any, count: int = 6) -> Batch:
    client = practice.client
    return Batch(torch.arange(count), client.examples, client.views, client.rng)


def test_it_is_the_cross_entropy_of_equation_4() -> None:
    rng = torch.Generator().manual_seed(0)
    slow, fast = (torch.randn(4, OUT, generator=rng, requires_grad=True) for _ in range(2))
    given = centroids().requires_grad_()
    loss = assignment_loss(slow, fast, given, 0.1)
    total = 0.0
    near, rows = functional.cosine_similarity, given.detach()
    for t, z in zip(slow.detach(), fast.detach(), strict=True):
        p = torch.stack([(near(t, m, dim=0) / 0.1).exp() for m in rows])
        q = torch.stack([(near(z, m, dim=0) / 0.1).exp() for m in rows])
        total -= float((p / p.sum() * (q / q.sum()).log()).sum()) / 4
    assert loss.item() == pytest.approx(total, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert fast.grad is not None and slow.grad is None and given.grad is None


def test_equal_networks_and_views_cost_the_entropy_of_the_assignment(practise: Practise) -> None:
    objective = Assignments(rotation_weight=0.0, momentum=0.0, augment=False)
    practice = practise(objective)
    client, parts = practice.client, practice.parts
    client.views = preset("none")
    seen = objective.see(parts, batch_of(practice))
    context = Clustered(me=0, centroids=centroids())
    p = (functional.normalize(seen.t[0]) @ context.centroids.T / 0.1).softmax(1)
    entropy = -(p * p.log()).sum(1).mean()
    assert objective.score(parts, seen, context).item() == pytest.approx(entropy.item(), rel=1e-4)


def test_the_whole_loss_is_the_weighted_sum_of_both(practise: Practise) -> None:
    practice = practise(Assignments(cluster_weight=2.0, rotation_weight=0.5))
    objective, parts = practice.method.objective, practice.parts
    seen = objective.see(parts, batch_of(practice))
    context = Clustered(me=0, centroids=centroids())
    turns = functional.cross_entropy(parts["rotation"](torch.cat(seen.turned.z)), seen.turned.turns)
    apart = assignment_loss(seen.t[0], seen.z[0], context.centroids, 0.1)
    loss = objective.score(parts, seen, context)
    assert loss.item() == pytest.approx((2 * apart + 0.5 * turns).item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is None for p in parts["target"].parameters())
    assert all(p.grad is not None for p in parts["encoder"].parameters())


def test_without_centroids_it_says_who_has_them(practise: Practise) -> None:
    practice = practise(Assignments())
    with pytest.raises(ConfigError, match="centroids.*method=orchestra"):
        practice.learn()


@pytest.mark.parametrize("update", ["before", "after"])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_the_target_follows_by_its_momentum(
    practise: Practise, momentum: float, update: str
) -> None:
    """m = 1: it stays; m = 0: it is the online network of the step before, or of this one."""
    practice = practise(Assignments(momentum=momentum, update=update), epochs=1, batch=8)  # type: ignore[arg-type]
    parts, start = practice.parts, practice.start
    online: list[dict[str, Tensor]] = []

    class Watched(Assignments):
        def see(self, parts: Any, batch: Batch) -> Any:
            online.append({k: v.clone() for k, v in parts["encoder"].named_parameters()})
            return super().see(parts, batch)

    object.__setattr__(practice.method, "objective", Watched(momentum=momentum, update=update))  # type: ignore[arg-type]
    practice.learn(context=Clustered(me=0, centroids=centroids()))
    online.append(dict(parts["encoder"].named_parameters()))
    seen = online[:-1] if update == "before" else online[1:]
    for key, held in start["target"]["encoder"].named_parameters():
        wanted = held.clone()
        for step in seen:
            wanted = momentum * wanted + (1 - momentum) * step[key]
        found = dict(parts["target"]["encoder"].named_parameters())[key]
        torch.testing.assert_close(found, wanted)
    moved = practice.moved()
    assert {"encoder", "projector", "rotation"} <= moved
    assert ("target" in moved) == (momentum < 1)


def test_what_has_no_weight_is_not_looked_at(practise: Practise) -> None:
    practice = practise(Assignments(cluster_weight=0.0))
    seen = practice.method.objective.see(practice.parts, batch_of(practice))
    assert seen.z == [] and seen.turned is not None
    practice = practise(Assignments(rotation_weight=0.0))
    seen = practice.method.objective.see(practice.parts, batch_of(practice))
    assert seen.turned is None and len(seen.z) == 1


@pytest.mark.parametrize("extra", [False, True])
def test_one_more_pass_changes_statistics_and_nothing_else(practise: Practise, extra: bool) -> None:
    practice = practise(Assignments(extra_forward=extra))
    parts = practice.parts
    norms = [m for m in parts["projector"].modules() if isinstance(m, torch.nn.BatchNorm1d)]
    before = {k: v.clone() for k, v in parts.named_parameters()}
    practice.method.objective.see(parts.train(), batch_of(practice))
    assert int(norms[0].num_batches_tracked or 0) == 2 + extra
    for key, value in parts.named_parameters():
        if not key.startswith("target"):
            assert torch.equal(value, before[key])


@pytest.mark.parametrize("view", ["augmented", "raw"])
def test_the_target_sees_the_first_view_or_the_image(practise: Practise, view: str) -> None:
    practice = practise(Assignments(target_view=view))  # type: ignore[arg-type]
    batch, target = batch_of(practice), practice.parts.eval()["target"]
    with torch.no_grad():
        pictures = batch.plain if view == "raw" else batch.views[0]
        wanted = functional.normalize(target["projector"](target["encoder"](pictures)))
    torch.testing.assert_close(
        practice.method.objective.target_projections(practice.parts, batch), wanted
    )
    torch.testing.assert_close(wanted.norm(dim=1), torch.ones(6))


def test_the_online_network_sees_the_second_view(practise: Practise) -> None:
    practice = practise(Assignments())
    batch, parts = batch_of(practice), practice.parts.eval()
    seen = practice.method.objective.see(parts, batch)
    with torch.no_grad():
        wanted = parts["projector"](parts["encoder"](batch.views[1]))
    torch.testing.assert_close(seen.z[0], wanted)


@pytest.mark.parametrize("owner", ["mean", "local", "fresh"])
def test_a_target_that_is_not_sent_begins_as_the_received_model(
    practise: Practise, owner: str
) -> None:
    practice = practise(Assignments(target=owner))  # type: ignore[arg-type]
    objective, parts = practice.method.objective, practice.parts
    with torch.no_grad():
        for parameter in parts["encoder"].parameters():
            parameter.add_(1.0)
    objective.prepare(parts, first=True)
    follower = parts["target"]["encoder"].parameters()
    pairs = list(zip(parts["encoder"].parameters(), follower, strict=True))
    assert all(torch.equal(own, slow) for own, slow in pairs) == (owner != "mean")


def test_the_last_of_three_views_is_turned(practise: Practise) -> None:
    practice = practise(Assignments())
    practice.client.views = preset("orchestra_three", size=8)
    batch = batch_of(practice)
    seen = practice.method.objective.see(practice.parts.eval(), batch)
    with torch.no_grad():
        straight = practice.parts["encoder"](batch.views[2])
    still = seen.turned.turns == 0
    assert still.any() and not still.all()
    torch.testing.assert_close(seen.turned.h[0][still], straight[still])
    assert not torch.allclose(seen.turned.h[0][~still], straight[~still])


def test_parts_have_the_published_sizes() -> None:
    encoder = torch.nn.Linear(3, 512)
    built = Assignments().build({"encoder": encoder}, 512, World())
    sizes = {name: sum(p.numel() for p in part.module.parameters()) for name, part in built.items()}
    assert sizes["projector"] == 525_312 and sizes["rotation"] == 2_052
    assert sizes["target"] == 525_312 + 3 * 512 + 512
    assert built["target"].share == "mean" and isinstance(Assignments(), Rotation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "objective.temperature is 0.0"),
        ({"momentum": 1.1}, "objective.momentum is 1.1"),
        ({"rotation_weight": -1.0}, "objective.rotation_weight is -1.0"),
        ({"rotation_weight": 0.0, "cluster_weight": 0.0}, "are both 0"),
        ({"head": "encoder"}, "objective.head=projector"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Assignments(**settings)
