"""The recipe's `privacy` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from harmonium.core.errors import ConfigError
from harmonium.federation.filters.update_noise import Updates
from harmonium.federation.secure_aggregation.fixed_point import Masks
from harmonium.privacy.mechanisms import Randomness


@dataclass(frozen=True)
class Privacy:
    """Privacy of clients' releases."""

    epsilon: float | None = None  # most that a client's noisy releases may spend; none: no limit
    delta: float = 1e-5  # at which epsilon is counted; below 1 / examples of a client
    update_clip: float | None = None  # largest change of the model by one client; none: any
    update_noise: float = 0.0  # on that change: standard deviations over its sensitivity
    update_place: Literal["client", "server"] = "client"  # who adds it; server: to the average
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
        if self.update_clip is not None and not 0 < self.update_clip < math.inf:
            raise ConfigError(
                f"privacy.update_clip is {self.update_clip}; it must be above 0, or none"
            )
        if not 0 <= self.update_noise < math.inf:
            raise ConfigError(f"privacy.update_noise is {self.update_noise}; it must be 0 or more")
        if self.update_noise and self.update_clip is None:
            raise ConfigError("privacy.update_noise needs privacy.update_clip, e.g. 1")
        if not 0.5 < self.secure_threshold <= 1:
            raise ConfigError(
                f"privacy.secure_threshold is {self.secure_threshold}; it must be above 0.5 and at "
                "most 1"
            )

    @property
    def updates(self) -> Updates | None:
        """Protection of whole clients, if it is on."""
        if self.update_clip is None:
            return None
        return Updates(self.update_clip, self.update_noise, self.update_place, self.noise)

    @property
    def masks(self) -> Masks | None:
        """Secure aggregation, if it is on."""
        return Masks(self.secure_threshold) if self.secure_aggregation else None
