"""FeatARC: features stay close to the received model's, which all clients or a cluster share.

Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?,
2022. A client minimises

  its objective - strength * mean over views and images of <z(view), phi(x)>,

z being unit projections and phi(x) the received model's for the image as it is, in evaluation
mode, found once before training. `featarc` is this alignment alone, which Louizos et al., 2024,
appendix B.1, compare with: there it has strength 0.5, as 1, the original's, diverged. In the
released code phi(x) is a feature and z a projection, of the same size only: `target=encoder`. That
code passes each view through the network by itself, so BatchNorm never sees two views together.

`featarc-clustered` is the whole system: the server has several models; a client takes the one whose
phi agrees most, by mean inner product over its images, with that of the model it sent last, and
models are averaged within clusters. All start alike, and clients first spread over them by number.
Each client's encoder is its cluster's; the federation's is that of the cluster with most images.
The released code averages all alike and mistakes who sent what unless everybody takes part; here
averages are weighted by images, over those who answered. Server optimisers work by cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.core.types import ClientId, Weights
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.wire import Ask, Field, Plan, Value, exchange, scalar, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.parts import Part, Parts
from harmonium.methods import methods


@dataclass(frozen=True, kw_only=True)
class Aligned(Context):
    """The received model's features of the client's images."""

    targets: Tensor | None  # unit rows, (n, dim); none: no alignment


@methods("featarc")
@dataclass(frozen=True)
class FeatARC(Method):
    """FedAvg whose clients keep close to the received model's features."""

    paper = "Wang et al., 2022"
    context = Aligned
    joint_views = False

    strength: float = 0.5  # of the alignment; published 1; 0: FedAvg
    target: Literal["projector", "encoder"] = "projector"  # what views are aligned with

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"method.strength is {self.strength}; it must be 0 or more")

    def extra_parts(self, made: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """No parts; what cannot be aligned is refused."""
        if "projector" not in made:
            raise ConfigError(
                f"method={self.name} aligns projections: objective={self.objective.name} makes "
                "none; choose one that does, e.g. objective=simclr"
            )
        with torch.no_grad():
            out = made["projector"].eval()(torch.zeros(1, dim)).shape[1]
        made["projector"].train()
        if self.target == "encoder" and out != dim:
            raise ConfigError(
                f"method.target=encoder compares features of size {dim} with projections of size "
                f"{out}: set objective.out={dim}, or method.target=projector"
            )
        return {}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Find the received model's features, then train with them as targets."""
        parts = self.pull(client, got.model)
        targets = self.features(parts, client) if self.strength else None
        context = Aligned(me=client.id, anchor=got.model, targets=targets)
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """One more makes the targets."""
        return super().passes_of(step) + (1 if step == "train" and self.strength else 0)

    def score(self, parts: Parts, seen: Seen, context: Aligned) -> Tensor:
        """The objective and the alignment."""
        loss = super().score(parts, seen, context)
        if context.targets is None:
            return loss
        return loss + self.strength * alignment(seen.z, context.targets[seen.batch.index])

    def features(self, parts: Parts, client: Client) -> Tensor:
        """phi: unit rows of the client's images as they are, `(n, dim)`, in evaluation mode."""
        parts.eval()
        head = parts["projector"] if self.target == "projector" else nn.Identity()
        return functional.normalize(client.features(lambda x: head(parts["encoder"](x))))


def alignment(views: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Minus the mean cosine of projections, `(n, dim)` a view, with unit targets, `(n, dim)`.

    >>> alignment([torch.eye(2) * 3, torch.eye(2)], torch.eye(2)).item()
    -1.0
    """
    cosines = [(functional.normalize(z) * targets).sum(1).mean() for z in views]
    return -torch.stack(cosines).mean()


@methods("featarc-clustered")
@dataclass(frozen=True)
class FeatARCClustered(FeatARC):
    """FeatARC with several models, each averaged among the clients that agree with it most."""

    keeps = {"mine": "weights", "cluster": "scalar"}
    remembers = {"clusters": "weights", "chosen": "scalar"}
    personal = True

    clusters: int = 2  # models at the server; 1: featarc

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1:
            raise ConfigError(f"method.clusters is {self.clusters}; it must be at least 1")
        if self.clusters > 1 and self.batch_norm == "recalibrate":
            raise ConfigError(
                f"batch_norm=recalibrate measures one model, not {self.clusters}: choose average, "
                "local or fedbn"
            )

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Ask the cohort to choose among the models, then each cluster to train its own."""
        start = {"model": server.model, "moments": server.moments}
        clusters = list(server.memory.get("clusters") or [start] * self.clusters)
        now: Mapping[ClientId, Any] = dict.fromkeys(cohort, 0)
        if self.clusters > 1:
            sent = {
                f"{number}/{key}": value
                for number, held in enumerate(clusters)
                for key, value in held["model"].items()
            }
            now = (yield Ask("choose", cohort, {"clusters": sent})).cluster
        chosen = dict(server.memory.get("chosen", {}))
        trained: list[ClientId] = []
        for number, held in enumerate(clusters):
            members = [client for client in cohort if now.get(client) == number]
            if members:  # one silent cluster spoils no round, where there are several
                down = {"model": held["model"], "cluster": number}
                got = yield Ask("train", members, down, least=0 if self.clusters > 1 else None)
                if got.ids:
                    after = self.merge(replace(server, **held), got.model)
                    clusters[number] = {"model": after.model, "moments": after.moments}
                chosen |= dict.fromkeys(got.ids, number)
                trained += got.ids
        if not trained:
            raise NotEnoughReplies("no client of any cluster trained")
        size, numbers = server.examples, range(self.clusters)
        pictures = [sum(size[c] for c in chosen if chosen[c] == number) for number in numbers]
        largest = clusters[pictures.index(max(pictures))]
        memory = {**server.memory, "clusters": clusters, "chosen": chosen}
        return replace(server, **largest, memory=memory)

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """A client chooses one of the clusters."""
        if step == "choose" and up["cluster"] not in range(self.clusters):
            return f"`cluster` is {up['cluster']:g}, not a whole number below {self.clusters}"
        return super().reply_fault(step, down, up, examples)

    @exchange(down={"clusters": Field("weights")}, up={"cluster": scalar()})
    def choose(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """The model whose features agree most with those of the client's own last one."""
        if "mine" not in client.state:
            return {"cluster": client.id % self.clusters}
        own = self.features(self.pull(client, client.state["mine"]), client)
        models: list[Weights] = [{} for _ in range(self.clusters)]
        for name, value in got.clusters.items():
            number, _, key = name.partition("/")
            models[int(number)][key] = value
        agree = [(own * self.features(self.pull(client, one), client)).sum() for one in models]
        return {"cluster": int(torch.stack(agree).argmax())}

    @exchange(down={"model": weights(), "cluster": scalar()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the cluster's model; the result and the cluster are remembered."""
        up = super().train(client, got)
        sent: Any = up["model"]
        of = self.blueprint.rule_of
        client.state["mine"] = {key: value for key, value in sent.items() if of(key) == "mean"}
        client.state["cluster"] = got.cluster
        return up

    def passes_of(self, step: str) -> float:
        """To choose, a client looks with its own model and with every cluster's."""
        return 1.0 + self.clusters if step == "choose" else super().passes_of(step)

    def known(self, server: Server, client: ClientId) -> Mapping[str, Any]:
        """Whose cluster is which."""
        return {"cluster": server.memory.get("chosen", {}).get(client)}

    def represent(self, server: Server, state: Mapping[str, Any] | None = None) -> nn.Module:
        """A client's encoder is its cluster's."""
        number, clusters = (state or {}).get("cluster"), server.memory.get("clusters")
        if number is not None and clusters:
            server = replace(server, model=clusters[number]["model"])
        return super().represent(server, state)
