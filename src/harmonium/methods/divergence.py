"""Divergence-aware FedAvg: where a round moves the model far, the predictor stays as it was.

Lubana et al., Orchestra, 2022, section 6, follow Zhuang et al., Collaborative Unsupervised Visual
Representation Learning from Decentralized Data, 2021 (FedU) in their cross-silo baselines BYOL and
SimSiam: clients keep their targets, and the predictor is averaged only where the encoder has moved
little. Orchestra's code has the rule at the server, for the average of all clients: beyond a
threshold of 0.5 the predictor keeps its previous value.

How far a round went is the mean length over convolutions of what the average changed, the distance
that FedU defines and its code computes (threshold 0.4 there, for single clients). Orchestra's code
adds up the lengths over all entries of the state instead, among them BatchNorm's counters and a
counter of rounds. The latter alone adds 1 in every round, so that the sum is never below 0.5 and
the predictor stays at its initialisation for ever, which is no rule at all. `released` does that;
`sum` adds up what is trained, a number that grows with the depth of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId, Weights
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, Plan
from harmonium.learning.objectives import check
from harmonium.methods import methods
from harmonium.methods.fedu import distance


@methods("divergence-aware")
@dataclass(frozen=True)
class DivergenceAware(Method):
    """FedAvg whose predictor is averaged only in rounds that move the model little."""

    paper = "Lubana et al., 2022"
    remembers = {"divergence": "scalar", "held": "scalar"}

    threshold: float = 0.5  # divergence above which the predictor is not averaged; published 0.5
    divergence: Literal["mean", "sum", "released"] = "mean"  # how a round is measured

    def __post_init__(self) -> None:
        check(self, "0 or more", lambda distance: distance >= 0, "threshold")

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Refuse models without a predictor that is averaged; nobody is asked."""
        if self.blueprint.rules.get("predictor") != "mean":
            raise ConfigError(
                f"divergence-aware holds predictors back: objective {self.objective.name} has "
                "none; set objective=byol or objective=simsiam"
            )
        return replace(server, memory={**server.memory, "divergence": 0.0, "held": 0})
        yield

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """FedAvg, and the predictor as it was if that is too far."""
        got = yield Ask("train", cohort, {"model": server.model})
        moved = self.merge(server, got.model)
        far = self.distance(server.model, moved.model)
        held = far > self.threshold
        before = {k: v for k, v in server.model.items() if k.startswith("predictor.") and held}
        memory = {**moved.memory, "divergence": far, "held": int(held)}
        return replace(moved, model={**moved.model, **before}, memory=memory)

    def distance(self, before: Weights, after: Weights) -> float:
        """How far a round moved the model."""
        if self.divergence == "mean":
            return distance(before, after)
        if self.divergence == "released":
            counter = 1.0  # of rounds, an entry of the released code's state
            return counter + sum(float((after[k].double() - before[k]).norm()) for k in before)
        trained = {key for key, p in self.blueprint.named_parameters() if p.requires_grad}
        return float(sum((after[k] - before[k]).norm() for k in before if k in trained))

    def noted(self, server: Server) -> dict[str, float]:
        """How far the round moved the model, and whether the predictor was held back (1)."""
        return {key: server.memory[key] for key in ("divergence", "held")}
