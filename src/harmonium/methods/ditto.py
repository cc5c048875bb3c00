"""Ditto: beside the shared model every client trains one of its own, held near the shared one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021, Algorithm 1. The
shared model w goes the way of FedAvg, bit for bit. Then the client's own model v, which never
leaves, minimises loss + (mu / 2) ||v - w||^2; the paper's lambda is `mu` here. With mu = 0 that is
training alone, bit for bit: it draws the same batches and views as the shared model did.

In the paper v is pulled towards w as received this round (`towards: received`), in FedStyle's
adaptation (Yang et al., 2022; mu = 2) towards the client's updated copy of it, which then stays
put. Its listing has epochs around both paths and inside them; only the inner ones count. v begins
as the common first draw and has BatchNorm statistics of its own. What a run judges is the shared
encoder, which is FedAvg's; v is for tasks of the client's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.types import Weights
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.personal import Own, resumed, whole
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen, check
from harmonium.learning.parts import Parts
from harmonium.learning.terms.proximal import squared_distance
from harmonium.methods import methods


@dataclass(frozen=True, kw_only=True)
class Pulled(Context):
    """What a client's own model is pulled towards."""

    near: Weights | None = None  # none: the shared model is trained


@methods("ditto")
@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, and beside it a model of each client's own that is pulled towards the shared one."""

    paper = "Li et al., 2021"
    context = Pulled
    keeps = {"mine": "weights"}

    mu: float = 1.0  # strength of the pull on the client's own model; 0: it trains alone
    towards: Literal["received", "updated"] = "received"  # shared model before or after training
    personal_epochs: int | None = None  # passes that train it; none: as many as local.epochs

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"method.mu is {self.mu}; it must be 0 or more")
        check(self, "at least 1, or none", lambda epochs: epochs >= 1, "personal_epochs")

    @property
    def workload(self) -> float:
        """Those of the shared model, and those of the client's own."""
        return 1 + (self.personal_epochs or self.local.epochs) / self.local.epochs

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, then the client's own; only the former is sent."""
        drawn, drawn_by_torch = client.rng.get_state(), torch.get_rng_state()
        parts = self.pull(client, got.model)
        done = self.fit(parts, client, context=Pulled(me=client.id, anchor=got.model))
        near = got.model
        if self.towards == "updated":  # whole tables, of which an answer has a row
            near = {k: value for k, value in parts.state_dict().items() if k in got.model}
        client.rng.set_state(drawn)
        torch.set_rng_state(drawn_by_torch)
        mine = resumed(self, client.state.get("mine"))
        local = replace(self.local, epochs=self.personal_epochs or self.local.epochs)
        context = Pulled(me=client.id, anchor=near, near=near)
        self.fit(mine, client, local=local, context=context)
        client.state["mine"] = whole(mine)
        return {"model": self.push(client, parts), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Pulled) -> Tensor:
        """The objective, and for the client's own model the pull, of gradient mu (v - w)."""
        loss = super().score(parts, seen, context)
        if not self.mu or context.near is None:
            return loss
        return loss + self.mu / 2 * squared_distance(parts, context.near)

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """By the client's own model; whoever has none yet, by the one it sent."""
        if "mine" not in state:
            return super().own(model, state)
        return Own(self.blueprint.copy_from(state["mine"]).eval()["encoder"])
