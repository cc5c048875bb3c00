import math
from dataclasses import replace

import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives.moco import MoCo, contrast
from harmonium.learning.objectives.queue import queue_of
from harmonium.learning.world import World

SMALL = MoCo(queue=32, out=8)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(v: torch.Tensor) -> torch.Tensor:
    return v / v.norm(dim=-1, keepdim=True)


def by_definition(query, key, negatives, temperature) -> float:  # type: ignore[no-untyped-def]
    """Equation 1 of MoCo, query by query."""
    total = 0.0
    for q, k in zip(unit(query), unit(key), strict=True):
        scores = [math.exp(float(q @ row) / temperature) for row in [k, *negatives]]
        total -= math.log(scores[0] / sum(scores))
    return total / len(query)


def batch_of(practice) -> Batch:  # type: ignore[no-untyped-def]
    client = practice.client
    return Batch(torch.arange(6), client.examples, client.views, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.07, 0.2])
def test_the_loss_is_its_definition(n: int, temperature: float) -> None:
    query, key, negatives = rows(n, 5), rows(n, 5, seed=1), unit(rows(11, 5, seed=2))
    loss = contrast(query, key, negatives, temperature).item()
    assert loss == pytest.approx(by_definition(query, key, negatives, temperature))


@pytest.mark.parametrize("n", [1, 2, 8])
def test_collapse_costs_log_of_all_keys_and_spread_rows_less(n: int) -> None:
    same, apart = torch.ones(n, 20), torch.eye(20)[:n]
    full = unit(torch.ones(9, 20))
    assert contrast(same, same, full, 0.2).item() == pytest.approx(math.log(10), abs=1e-6)
    assert contrast(apart, apart, torch.eye(20)[n : n + 9], 0.02).item() < 1e-6


def test_random_rows_do_not_tell_collapse_from_spread() -> None:
    """Why negatives are images: with a queue not yet filled the published loss sees nothing."""
    random = unit(torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)))
    same, apart = torch.eye(64)[:1].repeat(16, 1), torch.eye(64)[:16]
    blind = [contrast(x, x, random, 0.2).item() for x in (same, apart)]
    assert blind[0] == pytest.approx(blind[1], abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_right(n: int) -> None:
    key, negatives = rows(n, 4, seed=1), unit(rows(6, 4, seed=2))
    query = rows(n, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: contrast(q, key, negatives, 0.2), (query,))


def test_keys_and_negatives_get_no_gradient() -> None:
    query, key, negatives = (rows(3, 4, seed=s).requires_grad_() for s in range(3))
    contrast(query, key, negatives, 0.2).backward()
    assert query.grad.abs().sum() > 0 and key.grad is None and negatives.grad is None


@pytest.mark.parametrize(
    ("settings", "parameters", "temperature"),
    [
        (MoCo(version=1), 512 * 128 + 128, 0.07),
        (MoCo(version=2, norm="none"), 512 * 512 + 512 + 512 * 128 + 128, 0.2),
        (MoCo(version=2), 512 * 512 + 512 + 2 * 512 + 512 * 128 + 128, 0.2),
        (MoCo(temperature=0.1, hidden=2048, norm="none"), 1_312_896, 0.1),
    ],
)
def test_versions_differ_in_head_and_temperature(
    settings: MoCo, parameters: int, temperature: float
) -> None:
    made = {"encoder": torch.nn.Linear(1, 512)}
    built = settings.build(made, 512, World())
    assert sum(p.numel() for p in built["projector"].module.parameters()) == parameters
    assert settings.softmax_temperature == temperature
    assert len(built["queue"].module.rows) == 4096  # type: ignore[arg-type]


@pytest.mark.parametrize("negatives", ["pictures", "queue"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_view_is_scored_against_the_others_key_and_the_right_negatives(
    practise, negatives: str, steps: int, symmetric: bool
) -> None:  # type: ignore[no-untyped-def]
    """Written out from the parts alone, with an empty queue and with one that is filled."""
    settings = replace(SMALL, negatives=negatives, symmetric=symmetric, norm="none")  # type: ignore[arg-type]
    practice = practise(settings, count=8, epochs=max(steps, 1))
    if steps:
        practice.learn()
    parts, batch = practice.parts, batch_of(practice)
    queue = queue_of(parts)
    assert len(queue.real()) == min(32, 8 * steps * (1 + symmetric))

    def project(model, x):  # type: ignore[no-untyped-def]
        return model["projector"](model["encoder"](x)).detach().double()

    first, second = batch.views
    total = 0.0
    for asking, answering in ((first, second), (second, first))[: 1 + symmetric]:
        z, keys = unit(project(parts, asking)), unit(project(parts["target"], answering))
        for i in range(6):
            others = queue.rows if negatives == "queue" else queue.real()
            batch_keys = keys[torch.arange(6) != i] if negatives == "pictures" else keys[:0]
            scores = [
                math.exp(float(z[i] @ k) / 0.2) for k in [keys[i], *batch_keys, *others.double()]
            ]
            total -= math.log(scores[0] / sum(scores)) / 6
    seen = settings.see(parts, batch)
    assert settings.score(parts, seen, Context(me=0)).item() == pytest.approx(total, rel=1e-4)
    assert len(seen.h) == len(seen.z) == len(seen.t) == 1 + symmetric


def test_only_the_asking_network_gets_gradients(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(SMALL)
    seen = practice.see()
    practice.method.objective.score(practice.parts, seen, Context(me=0)).backward()
    for key, parameter in practice.parts.named_parameters():
        asks = key.partition(".")[0] in ("encoder", "projector")
        assert (parameter.grad is not None) == asks == parameter.requires_grad, key
    assert not any(t.requires_grad for t in seen.t)


@pytest.mark.parametrize("settings", [SMALL, replace(SMALL, version=1, symmetric=False)])
def test_training_moves_what_it_should(practise, settings: MoCo) -> None:  # type: ignore[no-untyped-def]
    practice = practise(settings)
    assert math.isfinite(practice.learn())
    assert practice.moved() == {"encoder", "projector", "target"}
    assert int(queue_of(practice.parts).count) == 24 * (1 + settings.symmetric)
    rules = {"encoder": "mean", "projector": "mean", "target": "fresh", "queue": "fresh"}
    assert practice.parts.rules == rules
    assert not practice.method.may_keep()
    sent = {key.partition(".")[0] for key in practice.parts.shared()}
    assert sent == {"encoder", "projector"}


def test_the_target_follows_by_its_momentum(practise) -> None:  # type: ignore[no-untyped-def]
    for momentum in (0.0, 0.7, 1.0):
        practice = practise(replace(SMALL, momentum=momentum), batch=24)  # one step
        practice.learn()
        for part in ("encoder", "projector"):
            slow = practice.parts["target"][part].parameters()
            pairs = zip(practice.start[part].parameters(), practice.parts[part].parameters(), slow)  # noqa: B905
            for old, new, followed in pairs:
                assert torch.allclose(followed, momentum * old + (1 - momentum) * new, atol=1e-6)


@pytest.mark.parametrize("owner", ["fresh", "local", "mean"])
def test_who_owns_the_target_decides_where_it_starts(practise, owner: str) -> None:  # type: ignore[no-untyped-def]
    """Fresh: from the received model; local: from what the client kept; mean: from the message."""
    practice = practise(replace(SMALL, target=owner, momentum=0.0))  # type: ignore[arg-type]
    practice.learn()
    method, client, parts = practice.method, practice.client, practice.parts
    sent = method.push(client, parts)
    received = {key: torch.zeros_like(value) for key, value in sent.items()}
    target = method.pull(client, received)["target"]["encoder"].state_dict()
    for key, value in target.items():
        kept = owner == "local"
        wanted = parts["encoder"].state_dict()[key] if kept else torch.zeros_like(value)
        assert torch.allclose(value, wanted), key
    assert any(key.startswith("target") for key in sent) == (owner == "mean")


def test_a_kept_queue_survives_the_round_and_a_fresh_one_does_not(practise) -> None:  # type: ignore[no-untyped-def]
    for owner, real in (("local", 32), ("fresh", 0)):
        practice = practise(replace(SMALL, queue_owner=owner))  # type: ignore[arg-type]
        practice.learn()
        sent = practice.method.push(practice.client, practice.parts)
        again = practice.method.pull(practice.client, sent)
        assert len(queue_of(again).real()) == real


def test_published_random_rows_differ_between_rounds(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(replace(SMALL, negatives="queue"))
    assert not torch.equal(queue_of(practice.start).rows, queue_of(practice.parts).rows)


def test_impossible_settings_are_refused() -> None:
    for settings, message in (
        ({"temperature": 0.0}, "objective.temperature is 0.0"),
        ({"momentum": 1.5}, "objective.momentum is 1.5"),
        ({"queue": 0}, "objective.queue is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoCo(**settings)
