"""FedPer: clients share the encoder, and each has heads of its own.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019. A client takes the average
encoder, trains it together with its own heads, and sends the encoder alone. Heads are all that the
objective and the terms add to the encoder: projectors, predictors, slow copies. They begin as one
common draw, stay at the client and go on from where they were, however long it was away. What is
made anew each round is still made anew. With no head at all it is FedAvg, bit for bit.

A table with a row for each client, as user verification has, compares what all heads make of
images, which says nothing where every client has heads of its own: such a term is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harmonium.core.errors import ConfigError
from harmonium.core.types import Rule
from harmonium.federation.method import Method
from harmonium.methods import methods

HEADS_STAY: Mapping[str, Rule] = {"encoder": "mean", "*": "local"}


@methods("fedper")
@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg of encoders whose heads stay at the clients."""

    paper = "Arivazhagan et al., 2019"
    share = HEADS_STAY

    def __post_init__(self) -> None:
        refuse_tables(self)


def refuse_tables(method: Method) -> None:
    """Refuse terms that compare rows of different clients, for a method whose heads stay apart."""
    if method.terms and (tables := method.blueprint.tables):
        raise ConfigError(
            f"method={method.name} keeps heads apart, but part '{min(tables)}' has a row for each "
            "client, to be compared behind one head: leave its term out, or set method=fedavg"
        )
