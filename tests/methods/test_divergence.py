"""The rule that holds predictors back after rounds that move the model far."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.federation.method import Server
from harmonium.methods.fedu import distance
from harmonium.testing import Trial, first_trial

BYOL = {"name": "byol", "target": "local"}


def trial(threshold: float, **changes: Any) -> Trial:
    method = {"name": "divergence-aware", "threshold": threshold}
    return first_trial("divergence-aware", **{"method": method, "rounds": 1, **changes})


def after(method: Any, model: Any, moved: Any) -> Server:
    plan = method.round(Server({0: 6}, model, 2), [0])
    assert next(plan).step == "train"
    with pytest.raises(StopIteration) as stop:
        plan.send(SimpleNamespace(ids=[0], model=moved))
    server: Server = stop.value.value
    return server


def test_far_is_fedus_distance_whatever_else_moves() -> None:
    """The mean length of what convolutions changed, on either side of the threshold."""
    found = trial(0.5)
    method, model = found.method, found.server.model
    convolutions = [k for k, v in model.items() if k.startswith("encoder.") and v.ndim == 4]
    assert convolutions
    for length in (0.499, 0.501):
        moved = {key: value.clone() for key, value in model.items()}
        for place, key in enumerate(convolutions):  # of different lengths, with that mean
            share = 2 * (place + 1) / (len(convolutions) + 1)
            moved[key].flatten()[0] += length * share
        for key in set(model) - set(convolutions):  # heads, BatchNorm's statistics and counters
            moved[key] += 5
        server = after(method, model, moved)
        assert server.memory["divergence"] == pytest.approx(length, rel=1e-3)
        held = length > 0.5
        assert method.noted(server) == server.memory and server.memory["held"] == held
        for key in model:
            stays = key.startswith("predictor.") and held
            assert torch.equal(server.model[key], model[key] if stays else moved[key])


def test_other_distances_add_up_what_is_trained_or_all_entries() -> None:
    found = trial(0.5, method={"name": "divergence-aware", "divergence": "sum"})
    method, model = found.method, found.server.model
    trained = {key for key, p in method.blueprint.named_parameters() if p.requires_grad}
    moved = {key: value.clone() for key, value in model.items()}
    for key in model:
        if key in trained:
            moved[key].flatten()[0] += 0.4 / len(trained)
        else:
            moved[key] += 100
    server = after(method, model, moved)
    assert server.memory["divergence"] == pytest.approx(0.4, rel=1e-3)
    literal: Any = replace(method, divergence="released")  # type: ignore[call-arg]
    assert literal.distance(model, model) == 1  # the counter of rounds is above 0.5 by itself
    assert after(literal, model, model).memory["held"] == 1


def test_one_run_holds_the_predictor_back_and_averages_it() -> None:
    """Early rounds of a cosine schedule move the model far, late ones do not."""
    recipe: dict[str, Any] = {
        "objective": BYOL,
        "local": {"epochs": 2, "batch": 6, "lr": 2.0, "schedule": "cosine"},
        "rounds": 4,
    }
    found, models = first_trial("divergence-aware", **recipe), list[Any]()

    def record(engine: Any) -> Any:
        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

            def deliver(self, ask: Any, turn: Any) -> Any:
                models.append(ask.down["model"])
                return engine.deliver(ask, turn)

        return Recorder()

    last = found.again(wrap=record).server.model
    stayed = []
    for before, now in itertools.pairwise([*models, last]):
        far = distance(before, now)
        same = [torch.equal(before[k], now[k]) for k in now if k.startswith("predictor.")]
        assert all(same) == (far > 0.5)  # the published threshold
        stayed.append(all(same))
    assert stayed[0] and not stayed[-1]  # it freezes, and it moves


@pytest.mark.parametrize("objective", [BYOL, "simsiam"])
def test_without_a_limit_it_is_fedavg_and_with_none_the_predictor_stays(objective: Any) -> None:
    plain = first_trial("divergence-aware", method="fedavg", objective=objective, rounds=1)
    free = trial(1e9, objective=objective)
    assert all(torch.equal(free.server.model[k], v) for k, v in plain.server.model.items())
    held = trial(0.0, objective=objective)
    first = held.method.blueprint.shared()
    for key, value in held.server.model.items():
        wanted = first[key] if key.startswith("predictor.") else plain.server.model[key]
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("divergence", ["mean", "sum"])
def test_an_averaged_target_does_not_count_as_a_layer(divergence: str) -> None:
    found = trial(0.5, objective="byol")
    method: Any = replace(found.method, divergence=divergence)  # type: ignore[call-arg]
    model = found.server.model
    moved = {k: v + 1.0 if k.startswith("target.") else v for k, v in model.items()}
    assert method.distance(model, moved) == 0
    assert method.distance(model, {k: v + 1 for k, v in model.items()}) > 1


def test_it_needs_a_predictor() -> None:
    with pytest.raises(ConfigError, match="set objective=byol or objective=simsiam"):
        trial(0.5, objective="simclr")
    with pytest.raises(ConfigError, match="method.threshold is -1"):
        trial(-1.0)
