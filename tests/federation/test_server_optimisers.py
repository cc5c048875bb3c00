"""Server optimisers against torch's, and against Reddi et al.'s algorithm 2 written in loops."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harmonium.core import codec
from harmonium.core.errors import ConfigError
from harmonium.federation.server_optimisers import (
    Adagrad,
    Adam,
    Adaptive,
    Average,
    ServerOptimiser,
    Sgd,
    Yogi,
    optimisers,
)

EVERY = [Average(), Sgd(), Adam(), Adam(style="reddi"), Yogi(), Adagrad()]
STEPPING = EVERY[1:]


def averages(count: int = 6) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return list(torch.randn(count, 5, generator=draw, dtype=torch.float64))


def path(optimiser: ServerOptimiser, seen: list[Tensor], rates: list[float]) -> list[Tensor]:
    """Where the model goes from zero when these averages come in."""
    current, memory, places = torch.zeros(5, dtype=torch.float64), {}, []
    for average, rate in zip(seen, rates, strict=True):
        model, memory = optimiser.step({"w": current}, {"w": average}, {"w"}, memory, rate)
        current = model["w"]
        places.append(current)
    return places


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sgd(), lambda p: torch.optim.SGD(p, momentum=0.9)),
        (Sgd(momentum=0.0), lambda p: torch.optim.SGD(p)),
        (Adam(), lambda p: torch.optim.Adam(p)),
        (
            Adam(beta1=0.5, beta2=0.9, epsilon=0.1),
            lambda p: torch.optim.Adam(p, betas=(0.5, 0.9), eps=0.1),
        ),
        (
            Adagrad(epsilon=0.01),
            lambda p: torch.optim.Adagrad(p, initial_accumulator_value=1e-4, eps=0.01),
        ),
    ],
)
def test_steps_are_those_of_torch(
    ours: ServerOptimiser, theirs: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Also when the learning rate changes from round to round."""
    rates = [0.5, 0.4, 0.3, 0.02, 0.01, 1.0]
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimiser = theirs([parameter])
    for average, rate, place in zip(averages(), rates, path(ours, averages(), rates), strict=True):
        parameter.grad = parameter.detach() - average
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()
        assert torch.allclose(place, parameter, rtol=1e-9, atol=1e-12)


def reddi(seen: list[Tensor], rate: float, beta1: float, tau: float, grow) -> list[list[float]]:  # type: ignore[no-untyped-def]
    """Algorithm 2, one coordinate at a time; delta is average - current and x goes along it."""
    width = len(seen[0])
    x, m, v = [0.0] * width, [0.0] * width, [tau * tau] * width
    places = []
    for average in seen:
        for i in range(width):
            delta = average[i].item() - x[i]
            m[i] = beta1 * m[i] + (1 - beta1) * delta
            v[i] = grow(v[i], delta * delta)
            x[i] = x[i] + rate * m[i] / (math.sqrt(v[i]) + tau)
        places.append(list(x))
    return places


@pytest.mark.parametrize(
    ("ours", "beta1", "tau", "grow"),
    [
        (Adam(style="reddi"), 0.9, 1e-3, lambda v, g: 0.99 * v + 0.01 * g),
        (Adam(style="reddi", beta2=0.8, epsilon=0.1), 0.9, 0.1, lambda v, g: 0.8 * v + 0.2 * g),
        (Yogi(), 0.9, 1e-3, lambda v, g: v - 0.01 * g * math.copysign(1, v - g)),
        (
            Yogi(beta1=0.3, beta2=0.5, epsilon=1.0),
            0.3,
            1.0,
            lambda v, g: v - 0.5 * g * math.copysign(1, v - g),
        ),
        (Adagrad(), 0.0, 1e-3, lambda v, g: v + g),
    ],
)
def test_steps_are_those_of_the_paper(ours, beta1, tau, grow) -> None:  # type: ignore[no-untyped-def]
    found = path(ours, averages(), [0.05] * 6)
    for place, expected in zip(found, reddi(averages(), 0.05, beta1, tau, grow), strict=True):
        assert place.tolist() == pytest.approx(expected, rel=1e-9)


def test_the_second_moment_of_yogi_falls_slowly() -> None:
    held, small = torch.ones(1), torch.full((1,), 1e-6)
    assert Yogi().second(held, small) > 0.9999 > Adam(style="reddi").second(held, small)


def test_rate_one_without_momentum_is_the_average() -> None:
    found = path(Sgd(momentum=0.0), averages(), [1.0] * 6)
    for place, average in zip(found, averages(), strict=True):
        assert torch.allclose(place, average, rtol=0, atol=1e-15)
    assert all(
        torch.equal(a, b)
        for a, b in zip(path(Average(), averages(), [1.0] * 6), averages(), strict=True)
    )


@pytest.mark.parametrize("optimiser", EVERY, ids=str)
def test_without_a_gap_the_model_stays_to_the_bit(optimiser: ServerOptimiser) -> None:
    start = averages(1)[0].float()
    current, memory = {"w": start}, {}
    for _ in range(5):
        current, memory = optimiser.step(current, {"w": start.clone()}, {"w"}, memory, 0.3)
        assert torch.equal(current["w"], start)


@pytest.mark.parametrize("optimiser", [Adam(), Adam(style="reddi"), Yogi(), Adagrad()], ids=str)
def test_adaptive_directions_do_not_depend_on_the_length_of_the_gaps(optimiser: Adaptive) -> None:
    """Up to epsilon: all gaps a thousand times longer give the same step."""
    gaps = averages()
    first: list[Tensor] = []
    for scale in (1.0, 1000.0):
        memory, zero = {}, torch.zeros(5, dtype=torch.float64)
        small = replace(optimiser, epsilon=1e-10)
        for gap in gaps:
            model, memory = small.step({"w": zero}, {"w": scale * gap}, {"w"}, memory, 0.1)
        first.append(model["w"])
    assert torch.allclose(first[0], first[1], rtol=1e-4)


@pytest.mark.parametrize("optimiser", EVERY, ids=str)
def test_buffers_are_taken_as_averaged(optimiser: ServerOptimiser) -> None:
    current = {"w": torch.zeros(2), "bn.mean": torch.zeros(2), "bn.count": torch.tensor(3)}
    average = {"w": torch.ones(2), "bn.mean": torch.full((2,), 7.0), "bn.count": torch.tensor(9)}
    memory: dict[str, object] = {}
    for _ in range(2):
        model, memory = optimiser.step(current, average, {"w"}, memory, 0.1)
        assert model["bn.mean"] is average["bn.mean"] and model["bn.count"] == 9
    assert all(set(held) == {"w"} for held in memory.values())  # type: ignore[call-overload]


@pytest.mark.parametrize("optimiser", STEPPING, ids=str)
def test_absent_tensors_keep_their_moments_and_their_place(optimiser: ServerOptimiser) -> None:
    """Skipping a round leaves a tensor as if that round had not been, as torch does it."""
    zero, gap = torch.zeros(3), torch.tensor([1.0, -2.0, 0.5])
    keys = {"a", "b"}
    both, memory = optimiser.step({"a": zero, "b": zero}, {"a": gap, "b": gap}, keys, {}, 0.1)
    before = {name: held["b"] for name, held in memory.items()}
    one, memory = optimiser.step(both, {"a": gap}, keys, memory, 0.1)
    assert set(one) == {"a"}
    assert all(memory[name]["b"] is held for name, held in before.items())
    late, _ = optimiser.step({**both, **one}, {"a": gap, "b": gap}, keys, memory, 0.1)
    assert torch.equal(late["b"], one["a"])


@pytest.mark.parametrize("optimiser", STEPPING, ids=str)
def test_resuming_from_written_moments_changes_nothing(optimiser: ServerOptimiser) -> None:
    current, average = {"w": torch.zeros(3)}, {"w": torch.tensor([1.0, 2.0, 3.0])}
    model, memory = optimiser.step(current, average, {"w"}, {}, 0.1)
    read = codec.decode(codec.encode(memory))
    on, _ = optimiser.step(model, average, {"w"}, memory, 0.1)
    resumed, _ = optimiser.step(model, average, {"w"}, read, 0.1)
    assert torch.equal(on["w"], resumed["w"])


def test_all_are_registered() -> None:
    assert set(optimisers.table()) == {"average", "sgd", "adam", "yogi", "adagrad"}


@pytest.mark.parametrize(
    ("owner", "settings", "message"),
    [
        (Sgd, {"lr": 0.0}, "server.lr is 0.0"),
        (Sgd, {"momentum": 1.0}, "server.momentum is 1.0"),
        (Adam, {"beta1": -0.1}, "server.beta1 is -0.1"),
        (Adam, {"beta2": 1.0}, "server.beta2 is 1.0"),
        (Adam, {"epsilon": 0.0}, "server.epsilon is 0.0"),
        (Adam, {"style": "keras"}, "server.style is keras.*torch.*reddi"),
        (Yogi, {"beta2": math.nan}, "server.beta2 is nan"),
        (Adagrad, {"epsilon": -1.0}, "server.epsilon is -1.0"),
        (Adagrad, {"lr": math.inf}, "server.lr is inf"),
    ],
)
def test_impossible_settings_are_refused(owner, settings, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        owner(**settings)
