"""Divergence-aware FedAvg: the predictor is not updated in rounds that move the model far.

Lubana et al., Orchestra, 2022, section 6, follow Zhuang et al., Collaborative Unsupervised Visual
Representation Learning from Decentralized Data, 2021 (FedU) in their cross-silo baselines BYOL and
SimSiam: clients keep their targets, and the predictor is averaged only if the encoder has moved
little. Orchestra's released code applies the rule at the server, to the average of all clients:

    w' = average of the clients' models
    if divergence(w, w') > threshold:  predictor of w' <- predictor of w

`method.divergence` chooses the measure:

    mean       mean over the encoder's convolutions of the norm of their change: the distance that
               FedU defines and its code computes (with a threshold of 0.4, for single clients)
    sum        sum of these norms over all trained tensors, which grows with the network's depth
    released   what Orchestra's code computes: the sum over all entries of the state, among them
               BatchNorm's counters and a counter of rounds. The latter changes by 1 in every round,
               so the sum always exceeds 0.5 and the predictor stays at its initialisation.

    ask     to        down       up
    train   cohort    model      model, trained; loss

The server remembers, for the log, the last `divergence` and whether the predictor was `held` (1).
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
        """Refuse models without a predictor that is averaged; no client is asked."""
        if self.blueprint.rules.get("predictor") != "mean":
            raise ConfigError(
                f"divergence-aware holds predictors back: objective {self.objective.name} has "
                "none; set objective=byol or objective=simsiam"
            )
        return replace(server, memory={**server.memory, "divergence": 0.0, "held": 0})
        yield  # never reached: makes this function a generator, as plans are

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """FedAvg; the predictor keeps its value if the divergence exceeds the threshold."""
        replies = yield Ask("train", cohort, {"model": server.model})
        updated = self.merge(server, replies.model)
        divergence = self.distance(server.model, updated.model)
        hold = divergence > self.threshold
        predictor = {k: v for k, v in server.model.items() if k.startswith("predictor.")}
        model = {**updated.model, **predictor} if hold else updated.model
        memory = {**updated.memory, "divergence": divergence, "held": int(hold)}
        return replace(updated, model=model, memory=memory)

    def distance(self, before: Weights, after: Weights) -> float:
        """The divergence between the models before and after a round."""
        if self.divergence == "mean":
            return distance(before, after)
        if self.divergence == "released":
            counter = 1.0  # the change of the released code's counter of rounds
            return counter + sum(float((after[k].double() - before[k]).norm()) for k in before)
        trained = {key for key, p in self.blueprint.named_parameters() if p.requires_grad}
        return float(sum((after[k] - before[k]).norm() for k in before if k in trained))

    def noted(self, server: Server) -> dict[str, float]:
        """How far the round moved the model, and whether the predictor was held back (1)."""
        return {key: server.memory[key] for key in ("divergence", "held")}
