"""What the server does with the clients' average: take it, or step towards it.

The step treats `current - average` as a gradient (Reddi et al., Adaptive Federated Optimization,
2021). Buffers such as BatchNorm's are averages, not directions: they are always taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from harmonium.errors import ConfigError
from harmonium.federation.wire import Weights
from harmonium.registry import Registry

Memory = dict[str, Any]


@dataclass(frozen=True)
class ServerOptimiser:
    """How averaged uploads change the model."""

    name: ClassVar[str] = ""
    weighting: Literal["examples", "uniform"] = "examples"  # what weighs a client's upload

    def step(
        self, current: Mapping[str, Tensor], average: Weights, steered: set[str], memory: Memory
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


@optimisers("sgd")
@dataclass(frozen=True)
class Sgd(ServerOptimiser):
    """A step of SGD with momentum; lr 1 without momentum is FedAvg."""

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self, positive=("lr",), shares=("momentum",))

    def step(
        self, current: Mapping[str, Tensor], average: Weights, steered: set[str], memory: Memory
    ) -> tuple[Weights, Memory]:
        """Velocity accumulates the gaps; the model moves by lr times the velocity."""
        model, velocity = dict(average), {}
        for key in sorted(steered & set(average)):
            gap = current[key] - average[key]
            held = memory.get("velocity", {}).get(key)
            velocity[key] = gap if held is None else self.momentum * held + gap
            model[key] = current[key] - self.lr * velocity[key]
        return model, {**memory, "velocity": {**memory.get("velocity", {}), **velocity}}


@optimisers("adam")
@dataclass(frozen=True)
class Adam(ServerOptimiser):
    """Adam with bias correction on the gaps, as Federated SimCLR uses it (appendix A)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check(self, positive=("lr", "epsilon"), shares=("beta1", "beta2"))

    def step(
        self, current: Mapping[str, Tensor], average: Weights, steered: set[str], memory: Memory
    ) -> tuple[Weights, Memory]:
        """First and second moments of the gaps live in the server's memory."""
        count = memory.get("steps", 0) + 1
        model, first, second = dict(average), {}, {}
        for key in sorted(steered & set(average)):
            gap = current[key] - average[key]
            zero = torch.zeros_like(gap)
            first[key] = torch.lerp(gap, memory.get("first", {}).get(key, zero), self.beta1)
            second[key] = torch.lerp(gap**2, memory.get("second", {}).get(key, zero), self.beta2)
            mean = first[key] / (1 - self.beta1**count)
            scale = (second[key] / (1 - self.beta2**count)).sqrt() + self.epsilon
            model[key] = current[key] - self.lr * mean / scale
        moments = {
            "first": {**memory.get("first", {}), **first},
            "second": {**memory.get("second", {}), **second},
        }
        return model, {**memory, **moments, "steps": count}


def _check(settings: ServerOptimiser, positive: Sequence[str], shares: Sequence[str]) -> None:
    for name in positive:
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"server.{name} is {getattr(settings, name)}; it must be above 0")
    for name in shares:
        if not 0 <= getattr(settings, name) < 1:
            raise ConfigError(
                f"server.{name} is {getattr(settings, name)}; it must be at least 0 and below 1"
            )
