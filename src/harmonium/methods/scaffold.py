"""SCAFFOLD: control variates correct the drift of clients whose images differ.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020,
Algorithm 1 with option II. A client steps along g - c_i + c, then sets c_i to c_i - c plus the mean
gradient of its steps, (x - y) / (K lr). The server adds |S| / N of the mean change to c, N being
all clients, so that c is always the mean of all c_i. Uploads are averaged with equal weights.

The paper's steps have no momentum. With momentum m the K steps together apply each gradient
sum_{j <= K} (1 - m^j) / (1 - m) times instead of K times, and that sum takes the place of K.
Clipped gradients and weight decay count as they were applied: (x - y) / (K lr) is then the mean of
clipped, decayed steps. `harmonium run scaffold` therefore has neither momentum nor clipping.
BatchNorm's statistics have no gradient and no control variate: they follow `batch_norm`. With an
aggregation other than the mean, c is no longer exactly the mean of all c_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId, Weights
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import EXAMPLES, Ask, Plan, Value, exchange, scalar, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.parts import Parts
from harmonium.methods import methods


@dataclass(frozen=True, kw_only=True)
class Corrected(Context):
    """What is added to gradients."""

    gap: Weights  # c - c_i, by parameter


@methods("scaffold")
@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with control variates at the server and at every client."""

    paper = "Karimireddy et al., 2020"
    context = Corrected
    keeps = {"control": "weights"}
    remembers = {"control": "weights"}

    strength: float = 1.0  # of the correction; 0: FedAvg with equal weights

    def __post_init__(self) -> None:
        if self.local.optimiser != "sgd":
            raise ConfigError(
                "scaffold reads gradients off the length of SGD's steps: local.optimiser is "
                f"{self.local.optimiser}; it must be sgd"
            )
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"method.strength is {self.strength}; it must lie between 0 and 1")

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Models are averaged; the server's variate moves by the cohort's share of all clients."""
        control = server.memory.get("control") or self.zero(server.model)
        got = yield Ask("train", cohort, {"model": server.model, "control": control})
        share = len(got.ids) / len(server.everyone)
        moved = {key: value + share * got.control[key] for key, value in control.items()}
        server = self.merge(server, got.model)
        return replace(server, memory={**server.memory, "control": moved})

    @exchange(
        down={"model": weights(), "control": weights(of="parameters")},
        up={
            "model": weights(),
            "control": weights(of="parameters"),  # the change of the client's own
            "loss": scalar("mean", by=EXAMPLES),
        },
    )
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train with corrected gradients, then move the client's own variate."""
        own: Weights = client.state.get("control") or self.zero(got.model)
        gap = {key: got.control[key] - value for key, value in own.items()}
        parts = self.pull(client, got.model)
        done = self.fit(parts, client, context=Corrected(me=client.id, anchor=got.model, gap=gap))
        trained = dict(parts.named_parameters())
        reach = self.local.rate(client.round, client.rounds) * applied(
            done.steps, self.local.momentum
        )
        change = {
            key: (got.model[key] - trained[key].detach()) / reach - value - self.strength * gap[key]
            if reach
            else torch.zeros_like(value)
            for key, value in own.items()
        }
        client.state["control"] = {key: own[key] + value for key, value in change.items()}
        return {"model": self.push(client, parts), "control": change, "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Corrected) -> Tensor:
        """The objective's loss; c - c_i is added to its gradient and nothing to its value."""
        loss = super().score(parts, seen, context)
        named = dict(parts.named_parameters())
        linear = [
            (named[key] * gap).sum() for key, gap in context.gap.items() if named[key].requires_grad
        ]
        added = self.strength * torch.stack(linear).sum() if linear else torch.zeros(())
        return loss + (added - added.detach())

    def zero(self, model: Mapping[str, Tensor]) -> Weights:
        """A variate that corrects nothing."""
        return {key: torch.zeros_like(model[key]) for key in self.blueprint.layouts()["parameters"]}


def applied(steps: int, momentum: float) -> float:
    """How many times `steps` steps with momentum apply a gradient that stays the same.

    >>> applied(3, 0.0), applied(2, 0.5)
    (3.0, 2.5)
    """
    return sum((1 - momentum**step) / (1 - momentum) for step in range(1, steps + 1))
