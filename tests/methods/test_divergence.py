"""The rule that holds predictors back after rounds that move the model far."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harmonium.errors import ConfigError
from harmonium.federation.method import Server
from harmonium.testing import Trial, first_trial

BYOL = {"name": "byol", "target": "local"}


def trial(threshold: float, **changes: Any) -> Trial:
    method = {"name": "divergence-aware", "threshold": threshold}
    return first_trial("divergence-aware", **{"method": method, "rounds": 1, **changes})


def test_far_is_the_sum_over_layers_of_what_was_trained() -> None:
    """An update of known length, on either side of the threshold, buffers aside."""
    found = trial(0.5)
    method, model = found.method, found.server.model
    trained = {key for key, p in method.blueprint.named_parameters() if p.requires_grad}
    assert any(key.startswith("predictor.") for key in trained)
    for length in (0.499, 0.501):
        moved = {key: value.clone() for key, value in model.items()}
        for key in model:
            if key in trained:
                moved[key].flatten()[0] += length / len(trained)
            elif moved[key].is_floating_point():
                moved[key] += 5.0  # BatchNorm's statistics
            else:
                moved[key] += 100  # and its counters
        plan = method.round(Server({0: 6}, model, 2), [0])
        assert next(plan).step == "train"
        with pytest.raises(StopIteration) as stop:
            plan.send(SimpleNamespace(ids=[0], model=moved))
        after: Server = stop.value.value
        assert after.memory["divergence"] == pytest.approx(length, rel=1e-3)
        assert method.noted(after) == after.memory
        for key in model:
            held = key.startswith("predictor.") and length > 0.5
            assert torch.equal(after.model[key], model[key] if held else moved[key])


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


def test_an_averaged_target_does_not_count_as_a_layer() -> None:
    found = trial(0.5, objective="byol")
    model = found.server.model
    moved = {k: v + 1.0 if k.startswith("target.") else v for k, v in model.items()}
    assert found.method.distance(model, moved) == 0  # type: ignore[attr-defined]
    assert found.method.distance(model, {k: v + 1 for k, v in model.items()}) > 1  # type: ignore[attr-defined]


def test_it_needs_a_predictor() -> None:
    with pytest.raises(ConfigError, match="set objective=byol or objective=simsiam"):
        trial(0.5, objective="simclr")
    with pytest.raises(ConfigError, match="method.threshold is -1"):
        trial(-1.0)
