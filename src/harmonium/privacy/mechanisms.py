"""Noise for guarded fields, and the record of each release."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.core.errors import ConfigError, WireError

Randomness = Literal["simulated", "system"]
Mechanism = Literal["gaussian", "discrete-laplace"]
Neighbours = Literal["replace", "add-remove", "client"]


@dataclass(frozen=True)
class Release:
    """Noise added to a guarded value before it left a client, as the accountant needs it.

    One image changes the value under the noise by at most `sensitivity`: in Euclidean distance for
    Gaussian noise, in the sum of absolute changes of integers for discrete Laplace noise.
    `replace` means one image in another's place, `add-remove` one image more or less, `client`
    any images in place of all images of a client. The number of images of a client is registered
    and public: under `add-remove` a missing image contributes zero, and divisors do not change.
    """

    field: str
    mechanism: Mechanism
    sensitivity: float
    scale: float  # gaussian: standard deviation; discrete-laplace: decay exp(-1 / scale)
    noise: Randomness = "system"
    count: int = 1  # releases of this kind, each with independent noise
    neighbours: Neighbours = "replace"

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `Client.release`, for Gaussian noise."""
        names = {"sensitivity": "sensitivity", "sigma": "scale", "neighbours": "neighbours"}
        return {word: getattr(self, name) for word, name in names.items()}


class Noise:
    """A source of privacy noise.

    `simulated` noise follows from the run's seed: a study can be repeated bit for bit, but anyone
    who knows the seed can subtract it. `system` noise comes from the operating system's
    cryptographic generator; a real release needs it.
    """

    def __init__(self, source: Randomness, rng: torch.Generator) -> None:
        """Draw from `rng` when simulated; it is not touched otherwise."""
        self.source: Randomness = source
        self._rng = rng

    def gaussian(self, value: Tensor, sigma: float) -> Tensor:
        """The value plus independent noise N(0, sigma^2) in every entry."""
        if not value.is_floating_point():
            raise WireError(
                f"noise cannot be added to {value.dtype}: rounding would remove most of it. "
                "Release value.double() instead."
            )
        _check_size("sigma", sigma)
        if self.source == "simulated":
            draws = torch.randn(value.shape, generator=self._rng, dtype=torch.float64)
        else:
            draws = torch.from_numpy(_system_normal(value.numel())).reshape(value.shape)
        return value + to_device((sigma * draws).to(value.dtype), value.device)

    def discrete_laplace(self, value: Tensor, scale: float) -> Tensor:
        """Integers plus independent noise: k with probability proportional to exp(-|k| / scale).

        System noise has exactly this distribution: it is drawn by integer arithmetic alone.
        """
        if value.dtype != torch.int64:
            raise WireError(f"discrete noise cannot be added to {value.dtype}: it needs int64")
        _check_size("scale", scale)
        if scale == 0:
            return value.clone()
        if self.source == "simulated":
            uniform = 1 - torch.rand((2, *value.shape), generator=self._rng, dtype=torch.float64)
            geometric = (-scale * uniform.log()).floor().long()
            draws = geometric[0] - geometric[1]  # a difference of two geometric draws
        else:
            one = Fraction(scale)
            integers = [_system_laplace(one) for _ in range(value.numel())]
            draws = torch.tensor(integers, dtype=torch.int64).reshape(value.shape)
        return value + draws


def _check_size(name: str, size: float) -> None:
    if not (size >= 0 and math.isfinite(size)):
        raise ConfigError(f"the noise's {name} is {size}; it must be finite and not negative")


def _system_normal(count: int) -> np.ndarray:
    """Standard normal draws by Box and Muller from 53-bit uniforms of the operating system."""
    pairs = (count + 1) // 2
    words = np.frombuffer(secrets.token_bytes(16 * pairs), dtype="<u8") >> 11
    uniform = (words.astype(np.float64) + 0.5) / 2.0**53
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _system_laplace(scale: Fraction) -> int:
    """One discrete Laplace draw, exact for a fraction (Canonne, Kamath and Steinke, 2020).

    With scale = t / s, a geometric draw in steps of 1 / t is composed of its remainder modulo t
    and its multiple of t; s of these steps are one unit of the result.
    """
    t, s = scale.numerator, scale.denominator
    while True:
        rest = secrets.randbelow(t)
        if not _bernoulli_exp(rest, t):
            continue
        whole = 0
        while _bernoulli_exp(1, 1):
            whole += 1
        size = (rest + t * whole) // s
        negative = secrets.randbelow(2) == 1
        if size or not negative:  # zero has one sign only
            return -size if negative else size


def _bernoulli_exp(top: int, bottom: int) -> bool:
    """True with probability exactly exp(-top / bottom), for a fraction of at most 1."""
    turn = 1
    while secrets.randbelow(bottom * turn) < top:
        turn += 1
    return turn % 2 == 1
