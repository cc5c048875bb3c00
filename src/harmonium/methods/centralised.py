"""Centralised: all images in one place, the reference for every federated method.

Plain training as one client of FedAvg (McMahan et al., 2017) that holds what all clients of the
recipe would hold. `clients=10` keeps its meaning: the shares of ten clients are drawn, then merged.
"""

from __future__ import annotations

from dataclasses import dataclass

from harmonium.core.errors import ConfigError
from harmonium.federation.method import Method
from harmonium.methods import methods


@methods("centralised")
@dataclass(frozen=True)
class Centralised(Method):
    """One client that holds everything."""

    paper = "a reference"

    def __post_init__(self) -> None:
        if self.world.clients != 1:
            raise ConfigError(
                f"centralised has one client, not {self.world.clients}: make it from a recipe, "
                "which merges the clients' images"
            )
