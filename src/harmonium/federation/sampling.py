"""Participation: who takes part in a round, and how reliable clients are.

Over-selection is Google's rule (Bonawitz et al., Towards Federated Learning at Scale, 2019): ask
more clients than are wanted, keep those who answer first. Drop-outs, slow clients and the deadline
are simulated by `harmonium.engines.unreliable`, so that a run can be studied and repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId


@dataclass(frozen=True)
class Participation:
    """How many clients are asked in a round, how many must answer, and how many fail to.

    >>> Participation(number=10, over=0.3).asked(clients=100)
    13
    """

    fraction: float = 1.0  # share of all clients wanted in a round
    number: int | None = None  # how many, in place of fraction
    quorum: int | Literal["majority"] = 1  # fewest answers; majority: of over half
    over: float = 0.0  # share asked beyond those wanted; the first to answer are kept
    dropout: float = 0.0  # chance that a client asked never answers (simulated)
    stragglers: float = 0.0  # share of the clients that are slow throughout the run (simulated)
    slowdown: float = 10.0  # how many times longer those take
    deadline: float | None = None  # longest wait, in times that an average client needs (simulated)

    def __post_init__(self) -> None:
        for name, right, words in (
            ("fraction", 0 < self.fraction <= 1, "above 0 and at most 1"),
            ("number", self.number is None or self.number >= 1, "at least 1"),
            ("quorum", self.quorum == "majority" or self.quorum >= 1, "at least 1, or majority"),
            ("over", 0 <= self.over < math.inf, "0 or more and finite"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("stragglers", 0 <= self.stragglers <= 1, "at least 0 and at most 1"),
            ("slowdown", 1 <= self.slowdown < math.inf, "at least 1"),
            ("deadline", self.deadline is None or self.deadline > 0, "above 0, or none"),
        ):
            if not right:
                value = getattr(self, name)
                raise ConfigError(f"participation.{name} is {value}; it must be {words}")

    @property
    def unreliable(self) -> bool:
        """Whether lost answers are simulated."""
        return bool(self.over or self.dropout or self.stragglers) or self.deadline is not None

    def size(self, clients: int) -> int:
        """How many of `clients` are wanted in a round."""
        wanted = self.number if self.number is not None else max(1, round(self.fraction * clients))
        if wanted > clients:
            raise ConfigError(f"participation.number is {wanted}, but there are {clients} clients")
        if self.quorum != "majority" and self.quorum > wanted:
            raise ConfigError(
                f"participation.quorum is {self.quorum}, but a round asks only {wanted} clients"
            )
        return wanted

    def least(self, clients: int) -> int:
        """The fewest answers that a round of `clients` needs.

        >>> Participation(quorum="majority").least(clients=4)
        3
        """
        wanted = self.size(clients)
        return wanted // 2 + 1 if self.quorum == "majority" else self.quorum

    def asked(self, clients: int) -> int:
        """How many of `clients` are asked in a round: those wanted and some to spare."""
        wanted = math.ceil((1 + self.over) * self.size(clients) - 1e-9)  # 1.1 * 50 is above 55
        return min(wanted, clients)

    def check(self, clients: int) -> int:
        """How many of `clients` are wanted; refuse over-selection if no clients are left for it."""
        wanted = self.size(clients)
        if self.over and self.asked(clients) == wanted:
            raise ConfigError(
                f"participation.over is {self.over}, but all {clients} clients are wanted already: "
                "set a smaller participation.fraction or number"
            )
        return wanted

    def cohort(self, everyone: Sequence[ClientId], round: int, seed: int) -> list[ClientId]:
        """The clients asked in a round, in ascending order, in which answers are also added up."""
        rng = seeds.numpy_rng(seed, "cohort", round)
        chosen = rng.choice(len(everyone), self.asked(len(everyone)), replace=False)
        return sorted(everyone[int(position)] for position in chosen)
