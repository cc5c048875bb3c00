"""FedProx: FedAvg whose clients are pulled back towards the model they received.

Li et al., Federated Optimization in Heterogeneous Networks, 2020, Algorithm 2: a client minimises
its loss plus (mu / 2) ||w - w_received||^2, starting from w_received. With mu = 0 it is FedAvg, bit
for bit. The same pull is there for every other method as `terms=proximal`.

FedStyle (Yang et al., 2022) compares with a form in which clients never load the received model:
each keeps its own, goes on from it, is pulled towards the received one, and sends its own
(`init_from_global: false`, mu = 0.2). With mu = 0 that is training alone, of which the server has
an average. A client's own model begins as the common first draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.types import Kind, Weights
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.personal import Own, resumed, whole
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.parts import Parts
from harmonium.learning.terms.proximal import squared_distance
from harmonium.methods import methods


@methods("fedprox")
@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term."""

    paper = "Li et al., 2020"
    keeps = {"mine": "weights"}

    mu: float = 0.01  # strength of the pull; 0: FedAvg
    init_from_global: bool = (
        True  # begin with the received model; else clients go on from their own
    )

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"method.mu is {self.mu}; it must be 0 or more")

    def keeping(self) -> Mapping[str, Kind]:
        """The client's own model, if it goes on from that."""
        return {} if self.init_from_global else self.keeps

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, or the client's own, near the received one."""
        if self.init_from_global:
            return super().train(client, got)
        mine = resumed(self, client.state.get("mine"))
        done = self.fit(mine, client, context=Context(me=client.id, anchor=got.model))
        client.state["mine"] = whole(mine)
        return {"model": self.push(client, mine), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The objective and the pull, whose gradient is mu (w - w_received)."""
        loss = super().score(parts, seen, context)
        if not self.mu:
            return loss
        return loss + self.mu / 2 * squared_distance(parts, context.received_model)

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """By the encoder as it was sent, with the statistics of a model that is kept."""
        if self.init_from_global or "mine" not in state:
            return super().own(model, state)
        return Own(self.blueprint.copy_from(state["mine"]).eval()["encoder"])
