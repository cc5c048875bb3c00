"""Ditto: each client trains, beside the shared model, a personal one that is kept near it.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021, Algorithm 1.

    w     shared model, trained and averaged as in FedAvg, bit for bit
    v     the client's personal model (v_k in the paper), which never leaves it
    mu    strength of the pull, lambda in the paper

After w, the client trains v on its loss L plus a pull towards w:

    L(v) + (mu / 2) ||v - w||^2.

With mu = 0 that is training alone, bit for bit: v sees the same batches and augmentations as w did.

    ask     to        down       up
    train   cohort    model: w   model: w, trained; loss

The server remembers nothing else; a client keeps v (`mine` in its state). A run is evaluated by the
shared encoder, which is FedAvg's; v serves the client's own tasks.

Where the sources differ or are unclear:

- In the paper and its code, v is pulled towards w as received in this round (`towards: received`).
  In FedStyle's adaptation (Yang et al., 2022, appendix, mu = 2) it is pulled towards w_{k,g} after
  the client has trained it, constant while v is trained (`towards: updated`).
- FedStyle's listing has epoch loops inside LocalTraining, which its Algorithm 1 calls in another
  loop of E_l epochs. Only the inner loops count here.
- v has the same initialisation at every client, that of w, and BatchNorm statistics of its own.
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
    """What the personal model is pulled towards."""

    near: Weights | None = None  # w; none: the shared model is in training, which is not pulled


@methods("ditto")
@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, and at each client a personal model that is pulled towards the shared one."""

    paper = "Li et al., 2021"
    context = Pulled
    keeps = {"mine": "weights"}

    mu: float = 1.0  # strength of the pull on the personal model (lambda); 0: it trains alone
    towards: Literal["received", "updated"] = "received"  # shared model before or after training
    personal_epochs: int | None = None  # epochs of the personal model; none: local.epochs

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"method.mu is {self.mu}; it must be 0 or more")
        check(self, "at least 1, or none", lambda epochs: epochs >= 1, "personal_epochs")

    @property
    def workload(self) -> float:
        """Epochs of the shared and of the personal model, in units of local.epochs."""
        return 1 + (self.personal_epochs or self.local.epochs) / self.local.epochs

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model, then the personal one; only the former is sent."""
        rng_state, torch_rng_state = client.rng.get_state(), torch.get_rng_state()
        shared = self.pull(client, got.model)
        done = self.fit(shared, client, context=Pulled(me=client.id, anchor=got.model))
        w = got.model
        if self.towards == "updated":
            # From the model in training and not from the reply: of a table with a row for each
            # client the reply has one row, and v has them all.
            w = {key: value for key, value in shared.state_dict().items() if key in got.model}
        # v draws the same batches and augmentations as w has drawn.
        client.rng.set_state(rng_state)
        torch.set_rng_state(torch_rng_state)
        personal = resumed(self, client)
        local = replace(self.local, epochs=self.personal_epochs or self.local.epochs)
        self.fit(personal, client, local=local, context=Pulled(me=client.id, anchor=w, near=w))
        client.state["mine"] = whole(personal)
        return {"model": self.push(client, shared), "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Pulled) -> Tensor:
        """The objective's loss; for the personal model also the pull, of gradient mu (v - w)."""
        loss = super().score(parts, seen, context)
        if not self.mu or context.near is None:
            return loss
        return loss + self.mu / 2 * squared_distance(parts, context.near)

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """The personal encoder; before the client has one, the encoder it sent, as FedAvg's."""
        if "mine" not in state:
            return super().own(model, state)
        return Own(self.blueprint.copy_from(state["mine"]).eval()["encoder"])
