"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harmonium import seeds
from harmonium.errors import ConfigError
from harmonium.federation.wire import ClientId


@dataclass(frozen=True)
class Participation:
    """How many clients are asked in a round, and how many must answer."""

    fraction: float = 1.0  # share of all clients asked in a round
    number: int | None = None  # how many instead; overrides fraction
    quorum: int = 1  # fewest answers a round needs

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"participation.fraction is {self.fraction}; it must be above 0 and at most 1"
            )
        if self.number is not None and self.number < 1:
            raise ConfigError(f"participation.number is {self.number}; it must be at least 1")
        if self.quorum < 1:
            raise ConfigError(f"participation.quorum is {self.quorum}; it must be at least 1")

    def size(self, clients: int) -> int:
        """How many of `clients` take part in a round."""
        asked = self.number if self.number is not None else max(1, round(self.fraction * clients))
        if asked > clients:
            raise ConfigError(f"participation.number is {asked}, but there are {clients} clients")
        if self.quorum > asked:
            raise ConfigError(
                f"participation.quorum is {self.quorum}, but a round asks only {asked} clients"
            )
        return asked

    def cohort(self, everyone: Sequence[ClientId], round: int, seed: int) -> list[ClientId]:
        """The clients of a round, in ascending order: the order of asking and of adding up."""
        rng = seeds.numpy_rng(seed, "cohort", round)
        chosen = rng.choice(len(everyone), self.size(len(everyone)), replace=False)
        return sorted(everyone[int(position)] for position in chosen)
