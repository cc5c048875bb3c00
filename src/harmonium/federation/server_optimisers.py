"""Server optimisers: the server takes the clients' average, or makes a step towards it.

A step treats `current - average`, the gap, as a gradient (Reddi et al., Adaptive Federated
Optimization, 2021, algorithms 1 and 2). There the second moment starts at tau^2 (our `epsilon`
squared), without bias correction; `adam` does the same with `style: reddi`, while its own style is
that of `torch.optim.Adam`, which Federated SimCLR uses (Louizos et al., 2024, appendix A).

Buffers such as BatchNorm's are not optimised: their average is always taken. A tensor that nobody
uploaded keeps its value and its moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, undefined
from harmonium.core.registry import Registry
from harmonium.core.types import Weights
from harmonium.learning import schedules
from harmonium.learning.schedules import MILESTONES, Schedule

Memory = dict[str, Any]
Style = Literal["torch", "reddi"]


@dataclass(frozen=True)
class ServerOptimiser:
    """How averaged uploads change the model."""

    name: ClassVar[str] = ""
    weighting: Literal["examples", "uniform"] = "examples"  # what weighs a client's upload

    def rate(self, round: int, rounds: int) -> float:
        """The server's learning rate in a round (the first is 1)."""
        return 1.0

    def step(
        self,
        current: Mapping[str, Tensor],
        average: Weights,
        steered: set[str],
        memory: Memory,
        rate: float,
    ) -> tuple[Weights, Memory]:
        """The new tensors and the new memory; only `steered` keys are parameters."""
        return average, memory


optimisers: Registry[ServerOptimiser] = Registry(
    "server optimiser", "harmonium.federation", ServerOptimiser
)


@optimisers("average")
@dataclass(frozen=True)
class Average(ServerOptimiser):
    """FedAvg: the average is the new model."""


@dataclass(frozen=True)
class Stepping(ServerOptimiser):
    """Base of the optimisers with a learning rate and its schedule."""

    lr: float = 1.0  # of the server
    schedule: Schedule = "constant"  # of lr over rounds
    warmup: int = 0  # rounds in which lr grows to its full value
    decay: float | None = None  # factor of step (none: 0.1) and of exponential (none: 0.99)
    milestones: tuple[float, ...] = MILESTONES  # shares of the rounds at which step multiplies

    def __post_init__(self) -> None:
        _check(self, positive=("lr",))
        schedules.check("server", self.schedule, self.warmup, self.decay, self.milestones)

    def rate(self, round: int, rounds: int) -> float:
        """The server's learning rate in a round, by its schedule."""
        return self.lr * schedules.factor(
            self.schedule, round, rounds, self.warmup, self.decay, self.milestones
        )


@optimisers("sgd")
@dataclass(frozen=True)
class Sgd(Stepping):
    """A step of SGD with momentum (FedAvgM); lr 1 without momentum is FedAvg."""

    momentum: float = 0.9  # of the server

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, shares=("momentum",))

    def step(
        self,
        current: Mapping[str, Tensor],
        average: Weights,
        steered: set[str],
        memory: Memory,
        rate: float,
    ) -> tuple[Weights, Memory]:
        """Velocity accumulates the gaps; the model moves by rate times the velocity."""
        model, velocity = dict(average), dict(memory.get("velocity", {}))
        for key in sorted(steered & set(average)):
            gap = current[key] - average[key]
            velocity[key] = self.momentum * velocity[key] + gap if key in velocity else gap
            model[key] = current[key] - rate * velocity[key]
        return model, {**memory, "velocity": velocity}


@dataclass(frozen=True)
class Adaptive(Stepping):
    """Base of the adaptive optimisers, which differ in their second moment."""

    lr: float = 0.01  # of the server; Reddi et al. tune it for each task
    beta1: float = 0.9  # how much of the first moment stays
    epsilon: float | None = 1e-3  # added to the root of the second moment (their tau)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, positive=("epsilon",), shares=("beta1", "beta2"))

    @property
    def tau(self) -> float:
        """The constant that is added to the root."""
        return 1e-3 if self.epsilon is None else self.epsilon

    @property
    def start(self) -> float:
        """The initial value of the second moment."""
        return self.tau**2

    def second(self, moment: Tensor, square: Tensor) -> Tensor:
        """The second moment after the square of one more gap."""
        raise undefined(self, "second")

    def corrected(self, first: Tensor, second: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The two moments as the step uses them, after `count` steps."""
        return first, second

    def step(
        self,
        current: Mapping[str, Tensor],
        average: Weights,
        steered: set[str],
        memory: Memory,
        rate: float,
    ) -> tuple[Weights, Memory]:
        """The model moves against the first moment over the root of the second."""
        model = dict(average)
        first, second, steps = (dict(memory.get(k, {})) for k in ("first", "second", "steps"))
        for key in sorted(steered & set(average)):
            gap = current[key] - average[key]
            m = first[key] if key in first else torch.zeros_like(gap)
            v = second[key] if key in second else torch.full_like(gap, self.start)
            first[key], second[key] = torch.lerp(gap, m, self.beta1), self.second(v, gap**2)
            steps[key] = steps.get(key, 0) + 1
            m, v = self.corrected(first[key], second[key], steps[key])
            model[key] = current[key] - rate * m / (v.sqrt() + self.tau)
        return model, {**memory, "first": first, "second": second, "steps": steps}


@optimisers("adam")
@dataclass(frozen=True)
class Adam(Adaptive):
    """Adam on the gaps (FedAdam)."""

    lr: float = 1e-3  # of the server
    style: Style = "torch"  # with bias correction; reddi: without, from tau^2 on
    beta2: float | None = None  # of the second moment; none: the style's, 0.999 or 0.99
    epsilon: float | None = None  # added to the root; none: the style's, 1e-8 or 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style not in _STYLES:
            raise ConfigError(f"server.style is {self.style}; it must be torch or reddi")

    @property
    def tau(self) -> float:
        """The constant that is added to the root: the style's unless given."""
        return _STYLES[self.style][1] if self.epsilon is None else self.epsilon

    @property
    def start(self) -> float:
        """Zero as in torch, or tau squared as in Reddi et al."""
        return 0.0 if self.style == "torch" else super().start

    @property
    def _beta2(self) -> float:
        return _STYLES[self.style][0] if self.beta2 is None else self.beta2

    def second(self, moment: Tensor, square: Tensor) -> Tensor:
        """A moving average of squares."""
        return torch.lerp(square, moment, self._beta2)

    def corrected(self, first: Tensor, second: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Without their bias towards zero in torch's style, as they are in Reddi's."""
        if self.style == "reddi":
            return first, second
        return first / (1 - self.beta1**count), second / (1 - self._beta2**count)


_STYLES: dict[Style, tuple[float, float]] = {"torch": (0.999, 1e-8), "reddi": (0.99, 1e-3)}


@optimisers("yogi")
@dataclass(frozen=True)
class Yogi(Adaptive):
    """FedYogi: as Adam, but the second moment moves by a bounded step and so falls slowly."""

    beta2: float = 0.99  # how slowly the second moment moves

    def second(self, moment: Tensor, square: Tensor) -> Tensor:
        """Towards the square, by (1 - beta2) of it: v - (1 - beta2) g^2 sign(v - g^2)."""
        return moment - (1 - self.beta2) * square * torch.sign(moment - square)


@optimisers("adagrad")
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: the second moment is the sum of all squares."""

    beta1: float = 0.0  # how much of the first moment stays

    def second(self, moment: Tensor, square: Tensor) -> Tensor:
        """The sum so far."""
        return moment + square


def _check(
    settings: ServerOptimiser, positive: Sequence[str] = (), shares: Sequence[str] = ()
) -> None:
    for name in (*positive, *shares):
        value = getattr(settings, name, None)  # none: the published value
        if value is None:
            continue
        if name in positive and not 0 < value < math.inf:
            raise ConfigError(f"server.{name} is {value}; it must be above 0")
        if name in shares and not 0 <= value < 1:
            raise ConfigError(f"server.{name} is {value}; it must be at least 0 and below 1")
