"""Divergence-aware FedAvg: where a round moves the model far, the predictor stays as it was.

Lubana et al., Orchestra, 2022, appendix C, have this rule at the server for the cross-silo
baselines BYOL and SimSiam, after the update of single clients by Zhuang et al., Collaborative
Unsupervised Visual Representation Learning from Decentralized Data, 2021. The distance of a round
is the sum over layers of the norm of what the average changed.

The released code adds up the changes of BatchNorm's counters too, which grow by every step: with
them the sum is above the threshold in every round, so that the predictor would stay as first drawn
for ever. Here the sum is over what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harmonium.errors import ConfigError
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, ClientId, Plan, Weights
from harmonium.methods import methods
from harmonium.objectives import check


@methods("divergence-aware")
@dataclass(frozen=True)
class DivergenceAware(Method):
    """FedAvg whose predictor is averaged only in rounds that move the model little."""

    paper = "Lubana et al., 2022"
    remembers = {"divergence": "scalar"}

    threshold: float = 0.5  # of the summed norms of what a round changes; published 0.5

    def __post_init__(self) -> None:
        check(self, "0 or more", lambda distance: distance >= 0, "threshold")

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Refuse models without a predictor that is averaged; nobody is asked."""
        if self.blueprint.rules.get("predictor") != "mean":
            raise ConfigError(
                f"divergence-aware holds predictors back: objective {self.objective.name} has "
                "none; set objective=byol or objective=simsiam"
            )
        return replace(server, memory={**server.memory, "divergence": 0.0})
        yield

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """FedAvg, and the predictor as it was if that is too far."""
        got = yield Ask("train", cohort, {"model": server.model})
        moved = self.merge(server, got.model)
        far = self.distance(server.model, moved.model)
        held = {k: v for k, v in server.model.items() if k.startswith("predictor.")}
        model = {**moved.model, **held} if far > self.threshold else moved.model
        return replace(moved, model=model, memory={**moved.memory, "divergence": far})

    def distance(self, before: Weights, after: Weights) -> float:
        """Summed norms of the changes of all trained tensors."""
        trained = {key for key, p in self.blueprint.named_parameters() if p.requires_grad}
        return float(sum((after[k] - before[k]).norm() for k in before if k in trained))

    def noted(self, server: Server) -> dict[str, float]:
        """How far the round moved the model."""
        return {"divergence": server.memory["divergence"]}
