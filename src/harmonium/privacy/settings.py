"""The recipe's `privacy` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harmonium.errors import ConfigError
from harmonium.federation.summable import Masks
from harmonium.privacy.mechanisms import Randomness


@dataclass(frozen=True)
class Privacy:
    """Protection of what clients release."""

    epsilon: float | None = None  # most that a client's noisy releases may spend; none: no limit
    delta: float = 1e-5  # at which epsilon is counted; below 1 / examples of a client
    noise: Randomness = "system"  # from the operating system; simulated: repeatable, for studies
    secure_aggregation: bool = False  # the server learns sums over clients only
    secure_threshold: float = 0.66  # share of those who began that must stay to the end

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ConfigError(f"privacy.epsilon is {self.epsilon}; it must be above 0, or none")
        if not 0 < self.delta < 1:
            raise ConfigError(
                f"privacy.delta is {self.delta}; it must be above 0 and below 1, e.g. 1e-5"
            )
        if not 0.5 < self.secure_threshold <= 1:
            raise ConfigError(
                f"privacy.secure_threshold is {self.secure_threshold}; it must be above 0.5 and at "
                "most 1"
            )

    @property
    def masks(self) -> Masks | None:
        """Secure aggregation, if it is on."""
        return Masks(self.secure_threshold) if self.secure_aggregation else None
