"""Centralised: all images in one place, the reference for every federated method.

Training as a federation (FedAvg, McMahan et al., 2017) of one client that has the images of all
clients of the recipe. `clients=10` keeps its meaning: the images of ten clients are drawn by the
split and then merged, so that a centralised run sees exactly what the federated one would see.
"""

from __future__ import annotations

from dataclasses import dataclass

from harmonium.core.errors import ConfigError
from harmonium.federation.method import Method
from harmonium.methods import methods


@methods("centralised")
@dataclass(frozen=True)
class Centralised(Method):
    """One client that has the images of all clients."""

    paper = "a reference"

    def __post_init__(self) -> None:
        # The recipe merges the clients, not the method: built by hand for several, it is an error.
        if self.world.clients != 1:
            raise ConfigError(
                f"centralised has one client, not {self.world.clients}: make it from a recipe, "
                "which merges the clients' images"
            )
