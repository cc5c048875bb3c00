"""FedU: BYOL whose targets stay at home, and whose predictors do where the client has drifted.

Zhuang et al., Collaborative Unsupervised Visual Representation Learning from Decentralized Data,
2021. Online encoders, projectors and predictors are averaged. A client's target is its own: it
starts as the first model that the client receives and follows what the client trains from then on,
whatever `objective.target` says. A client takes the average's predictor if its divergence is below
a threshold (mu), and goes on with its own otherwise.

The paper compares the received encoder with the client's own (`divergence: received`); the released
code compares the client's before and after its last training (`train`), and 0.4 is its threshold.
Either is the mean length of the difference over convolutions, shortcuts aside. A predictor that
stays does so with its parameters; BatchNorm's statistics are the average's. In the code's first
round target and online network are one object, so that the target does not lag; here it is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from torch import Tensor

from harmonium.core.errors import ConfigError, undefined
from harmonium.core.types import Weights
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.twin import restart
from harmonium.methods import methods

Source = Literal["train", "received"]
ONLINE = ("encoder", "projector", "predictor")


@dataclass(frozen=True)
class OwnTargets(Method):
    """FedAvg of BYOL with targets that stay, for methods that mind how far a client has drifted."""

    share = {"target": "local"}
    keeps = {"online": "weights", "divergence": "scalar", "round": "scalar"}

    divergence: Source = "train"  # before and after the last training, or own and received

    def __post_init__(self) -> None:
        if type(self).sync is OwnTargets.sync:  # else it would show in the second round only
            raise undefined(self, "sync")
        if not isinstance(self.objective, BYOL):
            raise ConfigError(
                f"method={self.name} needs BYOL's predictor and target: objective is "
                f"{self.objective.name}; set objective=byol"
            )

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Begin where `sync` says, train, and remember the result and how far it went."""
        anew = self.begins_anew(client)
        start = got.model if anew else self.sync(client, got.model)
        parts = self.pull(client, start)
        if anew:
            restart(parts, first=True)
        done = self.fit(parts, client, context=Context(me=client.id, anchor=got.model))
        sent = self.push(client, parts)
        shared, kept = self.blueprint.layouts()["parameters"], self.remembered()
        client.state["online"] = {k: sent[k] for k in shared if k.partition(".")[0] in kept}
        client.state |= {"divergence": distance(start, sent), "round": client.round}
        return {"model": sent, "loss": done.loss}

    def sync(self, client: Client, model: Weights) -> Weights:
        """The model to begin with, given the average and what the client remembers."""
        raise undefined(self, "sync")

    def remembered(self) -> tuple[str, ...]:
        """Parts that `sync` wants of the client's last model."""
        return ONLINE

    def begins_anew(self, client: Client) -> bool:
        """Whether the client takes all of the received model, as target too."""
        return "online" not in client.state

    def drift(self, client: Client, model: Mapping[str, Tensor]) -> float:
        """The client's divergence, from one source or the other."""
        if self.divergence == "received":
            return distance(client.state["online"], model)
        return float(client.state["divergence"])


@methods("fedu")
@dataclass(frozen=True)
class FedU(OwnTargets):
    """BYOL with targets that stay at the client, and predictors that stay where it has drifted."""

    paper = "Zhuang et al., 2021"

    threshold: float = 0.4  # divergence from which on a predictor stays (mu); inf: none ever does

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ConfigError(f"method.threshold is {self.threshold}; it must be 0 or more")

    def remembered(self) -> tuple[str, ...]:
        """The predictor, and the encoder where it is compared."""
        return ("predictor",) if self.divergence == "train" else ("encoder", "predictor")

    def sync(self, client: Client, model: Weights) -> Weights:
        """The average, with the client's own predictor if it has drifted."""
        if self.drift(client, model) < self.threshold:
            return model
        own = client.state["online"]
        return {**model, **{key: own[key] for key in own if key.startswith("predictor.")}}


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """How far two encoders are apart: the mean over convolutions of their differences' lengths.

    Shortcuts do not count; in an encoder without convolutions all matrices do.

    >>> import torch
    >>> weight = torch.zeros(1, 1, 2, 2)
    >>> distance({"encoder.0.weight": weight}, {"encoder.0.weight": weight + 1.5})
    3.0
    """
    matrices = [k for k in first if k.startswith("encoder.") and first[k].ndim > 1 and k in second]
    layers = [k for k in matrices if first[k].ndim == 4 and ".shortcut." not in k] or matrices
    lengths = [float((first[k].double() - second[k].double()).norm()) for k in layers]
    return sum(lengths) / len(lengths) if lengths else 0.0
