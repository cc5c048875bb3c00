"""FedU: BYOL with targets that stay at the client, as do predictors of clients that diverged.

Zhuang et al., Collaborative Unsupervised Visual Representation Learning from Decentralized Data,
2021. Online networks (encoder and projector) and predictors are averaged as in FedAvg. What differs
is how a client starts a round:

    online      <- the average
    target      stays the client's own; a copy of the first model it received, then an EMA of its
                online network, whatever `objective.target` is
    predictor   <- the average's if d_k < mu, else the client's own (divergence-aware predictor
                update, DAPU)

    mu          `threshold`
    d_k         divergence: the mean over the encoder's convolutions, shortcuts not counted, of the
                norm of the difference between two encoders

Messages:

    ask     to        down                                  up
    train   cohort    model: online network, predictor      model: the same, trained; loss

The server remembers nothing but the model. A client keeps its target (`parts`), what it needs of
its last model (`online`), d_k (`divergence`) and the `round` it trained in last.

Where paper and released code (EasyFL) differ:

- The paper measures d_k between the received encoder and the client's own (`divergence: received`);
  the code between the client's encoder before and after its last training (`train`, the default),
  to which its threshold of 0.4 belongs.
- In the code's first round, target and online network are one object, so the target does not lag
  behind. Here it is a copy.
- The code uploads the targets as well, which no client uses. Here they stay.
- A predictor that stays keeps its parameters; its BatchNorm statistics are the average's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from harmonium.core.devices import to_double, to_host
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
    """FedAvg of BYOL with targets that stay; base of methods that measure a client's divergence."""

    share = {"target": "local"}
    keeps = {"online": "weights", "divergence": "scalar", "round": "scalar"}

    divergence: Source = "train"  # before to after the last training, or own to received

    def __post_init__(self) -> None:
        # Refused now, because `sync` is first called in a client's second round.
        if type(self).sync is OwnTargets.sync:
            raise undefined(self, "sync")
        if not isinstance(self.objective, BYOL):
            raise ConfigError(
                f"method={self.name} needs BYOL's predictor and target: objective is "
                f"{self.objective.name}; set objective=byol"
            )

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Start from what `sync` returns, train, and keep the result and its divergence."""
        anew = self.begins_anew(client)
        start = got.model if anew else self.sync(client, got.model)
        parts = self.pull(client, start)  # the client's own target comes with it
        if anew:
            restart(parts, first=True)  # target <- copy of the received online network
        done = self.fit(parts, client, context=Context(me=client.id, anchor=got.model))
        sent = self.push(client, parts)
        # Parameters only: BatchNorm's statistics are always the average's.
        parameters, remembered = self.blueprint.layouts()["parameters"], self.remembered()
        client.state["online"] = {
            k: sent[k] for k in parameters if k.partition(".")[0] in remembered
        }
        # All that waits for a device comes home together.
        answer: dict[str, Value] = {"model": sent, "loss": done.loss}
        answer, client.state, norms = to_host([answer, client.state, changes(start, sent)])
        client.state |= {"divergence": mean(norms), "round": client.round}
        return dict(answer)

    def sync(self, client: Client, model: Weights) -> Weights:
        """The model to start from, given the average and what the client kept."""
        raise undefined(self, "sync")

    def remembered(self) -> tuple[str, ...]:
        """Names of the parts of the client's last model that `sync` needs."""
        return ONLINE

    def begins_anew(self, client: Client) -> bool:
        """Whether the client starts from the received model alone, target included."""
        return "online" not in client.state

    def drift(self, client: Client, model: Mapping[str, Tensor]) -> float:
        """d_k, measured according to `divergence`."""
        if self.divergence == "received":
            return distance(client.state["online"], model)
        return float(client.state["divergence"])


@methods("fedu")
@dataclass(frozen=True)
class FedU(OwnTargets):
    """BYOL with targets that stay at the client, and predictors that stay if it has diverged."""

    paper = "Zhuang et al., 2021"

    threshold: float = 0.4  # divergence from which a predictor stays (mu); inf: none ever does

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise ConfigError(f"method.threshold is {self.threshold}; it must be 0 or more")

    def remembered(self) -> tuple[str, ...]:
        """The predictor, and the encoder if it is compared with the received one."""
        return ("predictor",) if self.divergence == "train" else ("encoder", "predictor")

    def sync(self, client: Client, model: Weights) -> Weights:
        """DAPU: the average, with the client's own predictor unless d_k < mu."""
        if self.drift(client, model) < self.threshold:
            return model
        own = client.state["online"]
        return {**model, **{key: own[key] for key in own if key.startswith("predictor.")}}


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The divergence of two encoders: mean over convolutions of the norm of their difference.

    >>> weight = torch.zeros(1, 1, 2, 2)
    >>> distance({"encoder.0.weight": weight}, {"encoder.0.weight": weight + 1.5})
    3.0
    """
    return mean(to_host(changes(first, second)))


def changes(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """The norm of the difference of two encoders in each convolution, `(layers,)`.

    Shortcuts are left out, because the released code selects weights with "conv" in their name. In
    an encoder without convolutions all matrices count.
    """
    matrices = [k for k in first if k.startswith("encoder.") and first[k].ndim > 1 and k in second]
    layers = [k for k in matrices if first[k].ndim == 4 and ".shortcut." not in k] or matrices
    norms = [(to_double(first[k]) - to_double(second[k])).norm() for k in layers]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def mean(norms: Tensor) -> float:
    """The mean of some norms on the CPU; 0 of none."""
    return float(sum(norms.tolist()) / max(1, len(norms)))
