"""FedProx: FedAvg whose clients are pulled back towards the model they received.

Li et al., Federated Optimization in Heterogeneous Networks, 2020, Algorithm 2: a client minimises
its loss plus (mu / 2) ||w - w_received||^2, starting from w_received. With mu = 0 it is FedAvg, bit
for bit. The same pull is there for every other method as `terms=proximal`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harmonium.errors import ConfigError
from harmonium.federation.method import Method
from harmonium.federation.parts import Parts
from harmonium.methods import methods
from harmonium.objectives import Seen
from harmonium.terms.proximal import squared_distance


@methods("fedprox")
@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term."""

    paper = "Li et al., 2020"

    mu: float = 0.01  # strength of the pull; 0: FedAvg

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"method.mu is {self.mu}; it must be 0 or more")

    def score(self, parts: Parts, seen: Seen, given: Mapping[str, Any]) -> Tensor:
        """The objective and the pull, whose gradient is mu (w - w_received)."""
        loss = super().score(parts, seen, given)
        return loss + self.mu / 2 * squared_distance(parts, given["anchor"])
