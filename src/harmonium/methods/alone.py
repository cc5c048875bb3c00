"""Alone: every client trains on its own images and no part of the model is ever sent.

The reference that shows what federation gains: the same local training, rounds and budget as
FedAvg (McMahan et al., 2017) without the averaging. Each client ends with its own encoder.

    ask     to        down       up
    train   cohort    nothing    loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from harmonium.core.types import ClientId
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import EXAMPLES, Ask, Plan, Value, exchange, scalar
from harmonium.learning.client import Client
from harmonium.methods import methods


@methods("alone")
@dataclass(frozen=True)
class Alone(Method):
    """Local training only."""

    paper = "a reference"
    share = {"*": "local"}  # every part of the model stays at the client
    personal = True

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Ask the cohort to train; there is nothing to average."""
        yield Ask("train", cohort)
        return server

    @exchange(up={"loss": scalar("mean", by=EXAMPLES)})
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Continue to train the client's own model."""
        got.model = {}  # nothing is received: `pull` takes all parts from the client's state
        up = super().train(client, got)
        return {"loss": up["loss"]}
