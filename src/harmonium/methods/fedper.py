"""FedPer: clients share the encoder, and each has heads of its own.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019. A client loads the average
encoder (the paper's base layers), trains it together with its own heads (personalisation layers),
and sends the encoder alone. Heads are all parts that the objective and the terms add to the
encoder: projectors, predictors, EMA copies. They have the same initialisation at every client, stay
there, and are trained further whenever the client takes part. Parts that a method creates anew in
every round are still created anew. With no head at all this is FedAvg, bit for bit.

    ask     to        down              up
    train   cohort    model: encoder    model: encoder, trained; loss

The server remembers nothing else; a client keeps its heads (`parts` in its state).

Terms with a row for each client, such as user verification, compare rows behind one common head.
That has no meaning where every client has heads of its own, so such terms are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harmonium.core.errors import ConfigError
from harmonium.core.types import Rule
from harmonium.federation.method import Method
from harmonium.methods import methods

# Share rules by part: the encoder is averaged, all other parts stay at the client.
HEADS_STAY: Mapping[str, Rule] = {"encoder": "mean", "*": "local"}


@methods("fedper")
@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg of the encoder; heads stay at the clients and are trained with it."""

    paper = "Arivazhagan et al., 2019"
    share = HEADS_STAY

    def __post_init__(self) -> None:
        refuse_tables(self)


def refuse_tables(method: Method) -> None:
    """Refuse terms that compare rows of different clients if heads are not shared."""
    if method.terms and (tables := method.blueprint.tables):
        raise ConfigError(
            f"method={method.name} keeps heads apart, but part '{min(tables)}' has a row for each "
            "client, to be compared behind one head: leave its term out, or set method=fedavg"
        )
