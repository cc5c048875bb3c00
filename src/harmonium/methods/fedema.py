"""FedEMA: clients mix the average into their own model, the less of it the more they diverge.

Zhuang et al., Divergence-aware Federated Self-Supervised Learning, 2022. As in FedU, clients train
with BYOL and keep their target networks. Where FedU starts a round from the average, a client here
starts from

    W_k <- m W_k + (1 - m) W_g,    m = min(1, lambda_k d_k):

    W_k         its online network (encoder, projector) and predictor, as it last trained them
    W_g         the received average of the same
    d_k         its divergence, see `harmonium.methods.fedu`: the more, the more it keeps of W_k
    lambda_k    `scaler`; if none is given, autoscaled once, at the client's first mix, to
                tau / d_k, so that m is tau there. If d_k is 0 then, the client takes the average
                and scales at a later mix.

Messages are FedU's. The server remembers nothing but the model. A client keeps its target
(`parts`), W_k (`online`), d_k (`divergence`), the `round` it trained in last, and lambda_k
(`scaler`).

Where paper and released code (EasyFL) differ:

- The paper measures d_k between the received encoder and the client's own (`divergence: received`);
  the code between the client's encoder before and after its last training (`train`, the default).
- The code's default of tau is 0.8, its documentation has 0.7, which is the default here.
- BatchNorm statistics are the average's here. The code mixes parameters only; it takes the
  encoder's statistics from the average, and the predictor's from the side with the larger share.
- `selective` is the code's option for partial participation: a client that did not train in the
  previous round starts from the received model, target included.

FedSC's re-implementation has m the other way round, so that clients that diverge keep less. That
contradicts FedEMA's paper and is not offered.
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
    """BYOL with targets that stay at the client, and models mixed according to their divergence."""

    paper = "Zhuang et al., 2022"
    keeps = {**OwnTargets.keeps, "scaler": "scalar"}

    tau: float = 0.7  # m at a client's first mix, if scaler is none
    scaler: float | None = None  # lambda, m per divergence; none: by tau; inf: m is 1
    selective: bool = False  # mix only at clients that trained in the previous round

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau <= 1:
            raise ConfigError(f"method.tau is {self.tau}; it must lie between 0 and 1")
        if self.scaler is not None and not self.scaler >= 0:
            raise ConfigError(f"method.scaler is {self.scaler}; it must be 0 or more, or none")

    def begins_anew(self, client: Client) -> bool:
        """The first time; with `selective` also after a round without the client."""
        away = self.selective and client.state.get("round") != client.round - 1
        return away or super().begins_anew(client)

    def sync(self, client: Client, model: Weights) -> Weights:
        """The mixture m W_k + (1 - m) W_g; BatchNorm's statistics are the average's."""
        m, own = self.own_share(client, model), client.state["online"]
        return {**model, **{key: torch.lerp(model[key], own[key], m) for key in own}}

    def own_share(self, client: Client, model: Weights) -> float:
        """The share m of its own model that the client keeps."""
        divergence = self.drift(client, model)
        scaler = client.state.get("scaler") if self.scaler is None else self.scaler
        if scaler is None:  # the autoscaler, at the client's first mix
            if not divergence:
                return 0.0
            scaler = client.state["scaler"] = self.tau / divergence
        # An infinite lambda is tested separately, as inf * 0 is NaN.
        return 1.0 if math.isinf(scaler) else min(1.0, scaler * divergence)
