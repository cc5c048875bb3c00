"""FedProx: FedAvg whose clients are pulled back towards the model they received.

Li et al., Federated Optimization in Heterogeneous Networks, 2020, Algorithm 2. A client starts from
the received model w^t and minimises

    L(w) + (mu / 2) ||w - w^t||^2.

With mu = 0 this is FedAvg, bit for bit. The paper asks clients for a gamma-inexact
solution only; here they train for `local.epochs`. The same pull is available to every other method
as `terms=proximal`.

    ask     to        down         up
    train   cohort    model: w^t   model: w, trained; loss

FedStyle's adaptation (Yang et al., 2022, appendix, mu = 0.2) is `init_from_global: false`. Its
LocalUpdate stores the received model as w_{k,g} but never loads it into w_k, so each client
continues its own model, is pulled towards w_{k,g} and sends its own. Then a client keeps w_k
(`mine` in its state), which starts from the common initialisation. With mu = 0 that is training
alone, and the server has the average of such models. The server remembers nothing but the model in
either form.
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
    init_from_global: bool = True  # start from the received model; else from the client's own

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"method.mu is {self.mu}; it must be 0 or more")

    def keeping(self) -> Mapping[str, Kind]:
        """The client's own model, if it starts from that."""
        return {} if self.init_from_global else self.keeps

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, or the client's own, with a pull towards the received one."""
        if self.init_from_global:
            return super().train(client, got)  # the pull is in `score`
        personal = resumed(self, client)  # w_k; got.model is w_{k,g}
        done = self.fit(personal, client, context=Context(me=client.id, anchor=got.model))
        client.state["mine"] = whole(personal)
        return {"model": self.push(client, personal), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The objective's loss and the pull, whose gradient is mu (w - w^t)."""
        loss = super().score(parts, seen, context)
        if not self.mu:  # not even 0 * distance is added: the bits are FedAvg's
            return loss
        return loss + self.mu / 2 * squared_distance(parts, context.received_model)

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """The encoder as it was sent; a model that is kept has its own BatchNorm statistics."""
        if self.init_from_global or "mine" not in state:
            return super().own(model, state)
        return Own(self.blueprint.copy_from(state["mine"]).eval()["encoder"])
