"""FedEMA: clients mix the average into their own model, the less of it the more they drift.

Zhuang et al., Divergence-aware Federated Self-Supervised Learning, 2022. As in FedU, clients train
by BYOL and targets stay with them; but a client goes on from

  W <- m W + (1 - m) W_average,   m = min(1, lambda d),

W being its encoder, projector and predictor, and d its divergence. Without a given lambda
(`scaler`) each client finds its own at its first mix, so that m is tau there: lambda = tau / d. A
client that has not moved at all takes the average, and finds its lambda later.

The paper has d between the received encoder and the client's own (`divergence: received`); the
released code between the client's before and after its last training (`train`). The code's default
of tau is 0.8, its page has 0.7. BatchNorm's statistics are the average's: the code mixes parameters
alone, and takes statistics of predictors from either side. `selective` is for federations in which
not all take part: who did not train in the round before begins anew with the received model, as
target too. The code of FedSC has it the other way round, that clients who drift keep less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harmonium.core.errors import ConfigError
from harmonium.core.types import Weights
from harmonium.learning.client import Client
from harmonium.methods import methods
from harmonium.methods.fedu import OwnTargets


@methods("fedema")
@dataclass(frozen=True)
class FedEMA(OwnTargets):
    """BYOL with targets that stay at the client, and models that are mixed by their divergence."""

    paper = "Zhuang et al., 2022"
    keeps = {**OwnTargets.keeps, "scaler": "scalar"}

    tau: float = 0.7  # own share at a client's first mix, where scaler is none
    scaler: float | None = None  # own share per divergence (lambda); none: by tau; inf: all
    selective: bool = False  # mix only at clients that trained in the round before

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau <= 1:
            raise ConfigError(f"method.tau is {self.tau}; it must lie between 0 and 1")
        if self.scaler is not None and not self.scaler >= 0:
            raise ConfigError(f"method.scaler is {self.scaler}; it must be 0 or more, or none")

    def begins_anew(self, client: Client) -> bool:
        """At first; with `selective` also after a round without the client."""
        away = self.selective and client.state.get("round") != client.round - 1
        return away or super().begins_anew(client)

    def sync(self, client: Client, model: Weights) -> Weights:
        """The client's own parameters and the average's, mixed; all else is the average's."""
        share, own = self.own_share(client, model), client.state["online"]
        return {**model, **{key: torch.lerp(model[key], own[key], share) for key in own}}

    def own_share(self, client: Client, model: Weights) -> float:
        """How much of itself the client keeps; its lambda is found at the first mix."""
        far = self.drift(client, model)
        scaler = client.state.get("scaler") if self.scaler is None else self.scaler
        if scaler is None:
            if not far:
                return 0.0
            scaler = client.state["scaler"] = self.tau / far
        return 1.0 if math.isinf(scaler) else min(1.0, scaler * far)
