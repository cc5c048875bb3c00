"""SCAFFOLD: control variates correct the drift of clients whose images differ.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020,
Algorithm 1 with option II for the control variates.

    x, c        the server's model and control variate
    y_i, c_i    client i's model in training, from x, and its control variate, at first 0
    g_i(y)      stochastic gradient of client i's loss at y
    K, lr       number of local steps, and local learning rate (eta_l)
    S, N        clients that answered, and the number of all clients

    client      K times   y_i <- y_i - lr (g_i(y_i) - c_i + c)
                c_i+ = c_i - c + (x - y_i) / (K lr);    c_i <- c_i+
    server      x <- x + eta_g mean over S of (y_i - x)
                c <- c + |S| / N mean over S of (c_i+ - c_i): c stays the mean of all c_i

Messages:

    ask     to        down                       up
    train   cohort    model: x;  control: c      model: y_i;  control: c_i+ - c_i;  loss

The server remembers c (`control`), a client keeps c_i (`control`). Models and changes are averaged
with equal weights, as in the paper. eta_g is the server optimiser's rate.

Beyond the paper:

- The paper's steps have no momentum. With momentum m, K steps together apply a constant gradient
  sum_{j <= K} (1 - m^j) / (1 - m) times in place of K times; that sum takes the place of K.
- Clipped gradients and weight decay count as they were applied: (x - y_i) / (K lr) is then the mean
  of clipped, decayed steps. `harmonium run scaffold` therefore uses neither momentum nor clipping.
- BatchNorm statistics have no gradient and so no control variate: they follow `batch_norm`.
- With an aggregation other than the mean, c is not exactly the mean of all c_i.
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
    """The correction that is added to gradients."""

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
        """Average the models; move c by |S| / N of the mean change of the clients' variates."""
        control = server.memory.get("control") or self.zero(server.model)
        replies = yield Ask("train", cohort, {"model": server.model, "control": control})
        share = len(replies.ids) / len(server.everyone)  # |S| / N; the reply's mean is over S
        updated = {key: c + share * replies.control[key] for key, c in control.items()}
        server = self.merge(server, replies.model)
        return replace(server, memory={**server.memory, "control": updated})

    @exchange(
        down={"model": weights(), "control": weights(of="parameters")},
        up={
            "model": weights(),
            "control": weights(of="parameters"),  # c_i+ - c_i
            "loss": scalar("mean", by=EXAMPLES),
        },
    )
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train with corrected gradients, then update the client's control variate."""
        own: Weights = client.state.get("control") or self.zero(got.model)
        gap = {key: got.control[key] - value for key, value in own.items()}
        parts = self.pull(client, got.model)
        done = self.fit(parts, client, context=Corrected(me=client.id, anchor=got.model, gap=gap))
        trained = dict(parts.named_parameters())
        lr = self.local.rate(client.round, client.rounds)
        step_sum = lr * applied(done.steps, self.local.momentum)  # K lr without momentum
        # (x - y_i) / (K lr) is the mean of the steps taken, g - strength (c_i - c). Subtracting the
        # correction leaves the mean of g, which is c_i+ (option II); minus c_i it is the change.
        # With a learning rate of 0 nothing is learned about gradients and c_i stays.
        change = {
            key: (got.model[key] - trained[key].detach()) / step_sum
            - value
            - self.strength * gap[key]
            if step_sum
            else torch.zeros_like(value)
            for key, value in own.items()
        }
        client.state["control"] = {key: own[key] + value for key, value in change.items()}
        return {"model": self.push(client, parts), "control": change, "loss": done.loss}

    def score(self, parts: Parts, seen: Seen, context: Corrected) -> Tensor:
        """The objective's loss; c - c_i is added to its gradient and nothing to its value."""
        # The gradient of <parameter, c - c_i> by the parameter is c - c_i. Subtracting the detached
        # value leaves the loss as it was, so that logs show the objective alone.
        loss = super().score(parts, seen, context)
        named = dict(parts.named_parameters())
        linear = [
            (named[key] * gap).sum() for key, gap in context.gap.items() if named[key].requires_grad
        ]
        added = self.strength * torch.stack(linear).sum() if linear else torch.zeros(())
        return loss + (added - added.detach())

    def zero(self, model: Mapping[str, Tensor]) -> Weights:
        """The control variate at the start, 0 for every parameter."""
        return {key: torch.zeros_like(model[key]) for key in self.blueprint.layouts()["parameters"]}


def applied(steps: int, momentum: float) -> float:
    """How many times `steps` steps with momentum apply a gradient that stays the same.

    >>> applied(3, 0.0), applied(2, 0.5)
    (3.0, 2.5)
    """
    return sum((1 - momentum**step) / (1 - momentum) for step in range(1, steps + 1))
