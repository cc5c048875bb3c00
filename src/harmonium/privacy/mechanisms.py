"""Noise for guarded fields, and the record of each release."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from harmonium.errors import ConfigError, WireError

Randomness = Literal["simulated", "system"]


@dataclass(frozen=True)
class Release:
    """One guarded value that left a client: what the accountant needs to know of it."""

    field: str
    mechanism: str
    sensitivity: float
    sigma: float
    noise: Randomness


class Noise:
    """Where privacy noise comes from.

    `simulated` noise follows from the run's seed: a study can be repeated bit for bit, but whoever
    knows the seed can subtract it. `system` noise comes from the operating system's cryptographic
    generator and is what a real release needs.
    """

    def __init__(self, source: Randomness, rng: torch.Generator) -> None:
        """Draw from `rng` when simulated; it is not touched otherwise."""
        self.source: Randomness = source
        self._rng = rng

    def gaussian(self, value: Tensor, sigma: float) -> Tensor:
        """The value plus independent N(0, sigma squared) in every entry."""
        if not value.is_floating_point():
            raise WireError(
                f"noise cannot be added to {value.dtype}: rounding would take most of it away. "
                "Release value.double() instead."
            )
        if not (sigma >= 0 and math.isfinite(sigma)):
            raise ConfigError(f"the noise's sigma is {sigma}; it must be finite and not negative")
        if self.source == "simulated":
            draws = torch.randn(value.shape, generator=self._rng, dtype=torch.float64)
        else:
            draws = torch.from_numpy(_system_normal(value.numel())).reshape(value.shape)
        return value + (sigma * draws).to(value.dtype)


def _system_normal(count: int) -> np.ndarray:
    """Standard normal draws by Box and Muller from 53-bit uniforms of the operating system."""
    pairs = (count + 1) // 2
    words = np.frombuffer(secrets.token_bytes(16 * pairs), dtype="<u8") >> 11
    uniform = (words.astype(np.float64) + 0.5) / 2.0**53
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
