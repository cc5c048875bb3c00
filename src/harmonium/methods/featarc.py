"""FeatARC: clients keep their features close to the received model's; clusters may share models.

Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?,
2022 ("Dec-SSL"). The method is feature alignment regularisation with clustering.

Symbols:

    z_v(x)      unit projection of view v of image x by the model in training
    phi(x)      unit projection of image x, without augmentation, by the received model
    strength    weight of the alignment
    C           number of clusters, `method.clusters`

Alignment (`featarc`). A client minimises

    L_ssl - strength * mean over views v and images x of <z_v(x), phi(x)>.

phi is computed once, in evaluation mode, before the client trains, and is constant for the round.
The alignment lies in [-1, 1] times strength. With strength 0 this is FedAvg.

`featarc` is this part alone, the "Align Only" that Louizos et al., A Mutual Information Perspective
on Federated Contrastive Learning, 2024, appendix B.1, compare with. They use strength 0.5, because
the original's 1 diverged. It is the default here.

Clustering (`featarc-clustered`) is the whole system. The server has C models. In every round a
client first chooses the cluster c whose model agrees most with the model it sent last,

    argmax_c mean over its images x of <phi_own(x), phi_c(x)>,

then trains that model with the alignment above, and each model is averaged over its cluster. A
client's encoder is its cluster's. The federation's, by which a run is evaluated, is that of the
cluster with the most images.

Messages:

    ask      to              down                          up
    choose   cohort          clusters: all C models        cluster: the chosen number
    train    each cluster    model (and cluster)           model: the same, trained; loss

`choose` is asked by `featarc-clustered` with C > 1 only, `cluster` is sent down by it only.

The server remembers `clusters`, for each cluster its model and the state of the server optimiser,
and `chosen`, the cluster in which each client trained last. A client keeps, under clustering,
`mine`, the model it sent last, and `cluster`. `featarc` keeps nothing on either side.

Where this differs from the paper's released code (Dec-SSL):

- In the code phi(x) is the feature of the encoder and z a projection, two spaces that agree in size
  only. Here both are projections; `target: encoder` is as in the code and needs equal sizes.
- The code averages models with equal weights, and indexes them by client number, which mixes them
  up unless all clients take part. Here averages are weighted by images, over those who answered.
- As in the code, each view passes the network by itself, so that no BatchNorm sees two views
  together (`joint_views`).
- The models of all clusters start equal, so agreement cannot decide between them. A client that has
  not trained yet therefore takes the cluster of its number modulo C.
- Server optimisers, which the paper does not have, keep their state for each cluster.
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
class AlignmentContext(Context):
    """What the loss needs beside model and batch: the received model's features."""

    targets: Tensor | None  # phi(x) of all the client's images, (n, dim); none: strength is 0


@methods("featarc")
@dataclass(frozen=True)
class FeatARC(Method):
    """FedAvg whose clients keep their features close to the received model's."""

    paper = "Wang et al., 2022"
    context = AlignmentContext
    joint_views = False  # as in the released code

    strength: float = 0.5  # of the alignment; published 1; 0: FedAvg
    target: Literal["projector", "encoder"] = "projector"  # whose output is phi, the target

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"method.strength is {self.strength}; it must be 0 or more")

    def extra_parts(self, modules: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """No parts; refuse objectives without projections, and targets of another size."""
        if "projector" not in modules:
            raise ConfigError(
                f"method={self.name} aligns projections: objective={self.objective.name} makes "
                "none; choose one that does, e.g. objective=simclr"
            )
        with torch.no_grad():  # in evaluation mode, as BatchNorm cannot train on a single row
            out = modules["projector"].eval()(torch.zeros(1, dim)).shape[1]
        modules["projector"].train()
        if self.target == "encoder" and out != dim:
            raise ConfigError(
                f"method.target=encoder compares features of size {dim} with projections of size "
                f"{out}: set objective.out={dim}, or method.target=projector"
            )
        return {}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Compute the received model's features, then train with them as targets."""
        parts = self.pull(client, got.model)
        # Before training, while `parts` still is the received model; `fit` sets training mode.
        targets = self.features(parts, client) if self.strength else None
        context = AlignmentContext(me=client.id, anchor=got.model, targets=targets)
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """Beside training, one pass computes the targets."""
        return super().passes_of(step) + (1 if step == "train" and self.strength else 0)

    def score(self, parts: Parts, seen: Seen, context: AlignmentContext) -> Tensor:
        """The objective's loss and the alignment."""
        loss = super().score(parts, seen, context)
        if context.targets is None:
            return loss
        return loss + self.strength * alignment(seen.z, context.targets[seen.batch.device_index])

    def features(self, parts: Parts, client: Client) -> Tensor:
        """phi(x) of the client's images without augmentation, unit rows `(n, dim)`."""
        parts.eval()
        head = parts["projector"] if self.target == "projector" else nn.Identity()
        return functional.normalize(client.features(lambda x: head(parts["encoder"](x))))


def alignment(views: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Minus the mean over views and images of <z_v(x), phi(x)>.

    Args:
        views: projections of each view, `(n, dim)` each, of any length.
        targets: unit rows phi(x), `(n, dim)`.

    >>> alignment([torch.eye(2) * 3, torch.eye(2)], torch.eye(2)).item()
    -1.0
    """
    cosines = [(functional.normalize(z) * targets).sum(1).mean() for z in views]
    return -torch.stack(cosines).mean()


@methods("featarc-clustered")
@dataclass(frozen=True)
class FeatARCClustered(FeatARC):
    """FeatARC with several models, each averaged over the clients that agree with it most."""

    keeps = {"mine": "weights", "cluster": "scalar"}
    remembers = {"clusters": "weights", "chosen": "scalar"}
    personal = True

    clusters: int = 2  # models at the server; 1: featarc

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1:
            raise ConfigError(f"method.clusters is {self.clusters}; it must be at least 1")
        # Recalibration measures the statistics of `server.model`, the largest cluster's, alone.
        if self.clusters > 1 and self.batch_norm == "recalibrate":
            raise ConfigError(
                f"batch_norm=recalibrate measures one model, not {self.clusters}: choose average, "
                "local or fedbn"
            )

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Ask the cohort to choose among the models, then each cluster to train its own."""
        initial = {"model": server.model, "moments": server.moments}
        clusters = list(server.memory.get("clusters") or [initial] * self.clusters)
        choices: Mapping[ClientId, Any] = dict.fromkeys(cohort, 0)  # C = 1 leaves no choice
        if self.clusters > 1:
            # One field with all models: keys are "number/name of the tensor".
            models = {
                f"{number}/{key}": value
                for number, cluster in enumerate(clusters)
                for key, value in cluster["model"].items()
            }
            choices = (yield Ask("choose", cohort, {"clusters": models})).cluster
        chosen = dict(server.memory.get("chosen", {}))
        trained: list[ClientId] = []
        for number, cluster in enumerate(clusters):
            members = [client for client in cohort if choices.get(client) == number]
            if not members:
                continue
            # With several clusters, one from which nobody answers must not fail the round; it keeps
            # its model (least=0). A round in which nobody at all trains fails below.
            least = 0 if self.clusters > 1 else None
            down = {"model": cluster["model"], "cluster": number}
            replies = yield Ask("train", members, down, least=least)
            if replies.ids:
                # FedAvg, with its server optimiser, within the cluster.
                updated = self.merge(replace(server, **cluster), replies.model)
                clusters[number] = {"model": updated.model, "moments": updated.moments}
            chosen |= dict.fromkeys(replies.ids, number)
            trained += replies.ids
        if not trained:
            raise NotEnoughReplies("no client of any cluster trained")
        # The federation's model: that of the cluster whose clients, by their last choice, have the
        # most images; the lowest number if several have as many.
        sizes = [
            sum(server.examples[client] for client in chosen if chosen[client] == number)
            for number in range(self.clusters)
        ]
        largest = clusters[sizes.index(max(sizes))]
        memory = {**server.memory, "clusters": clusters, "chosen": chosen}
        return replace(server, **largest, memory=memory)

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Refuse a choice that is not one of the clusters."""
        if step == "choose" and up["cluster"] not in range(self.clusters):
            return f"`cluster` is {up['cluster']:g}, not a whole number below {self.clusters}"
        return super().reply_fault(step, down, up, examples)

    @exchange(down={"clusters": Field("weights")}, up={"cluster": scalar()})
    def choose(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """The cluster whose model agrees most with the one that the client sent last."""
        if "mine" not in client.state:
            return {"cluster": client.id % self.clusters}
        own = self.features(self.pull(client, client.state["mine"]), client)
        models: list[Weights] = [{} for _ in range(self.clusters)]
        for name, value in got.clusters.items():
            number, _, key = name.partition("/")
            models[int(number)][key] = value
        # Sums over the images in place of means: the argmax is the same.
        agreement = [
            (own * self.features(self.pull(client, model), client)).sum() for model in models
        ]
        return {"cluster": torch.stack(agreement).argmax()}

    @exchange(down={"model": weights(), "cluster": scalar()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the cluster's model; keep the result and the cluster for the next choice."""
        up = super().train(client, got)
        sent: Any = up["model"]
        # Averaged parts only: the client's row of a table has no part in the features compared.
        rule_of = self.blueprint.rule_of
        client.state["mine"] = {key: value for key, value in sent.items() if rule_of(key) == "mean"}
        client.state["cluster"] = got.cluster
        return up

    def passes_of(self, step: str) -> float:
        """To choose, a client passes its images through its own model and every cluster's."""
        return 1.0 + self.clusters if step == "choose" else super().passes_of(step)

    def known(self, server: Server, client: ClientId) -> Mapping[str, Any]:
        """The cluster in which the client trained last, which `represent` reads."""
        return {"cluster": server.memory.get("chosen", {}).get(client)}

    def represent(self, server: Server, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The encoder of the client's cluster; without a client, of the largest cluster."""
        number, clusters = (state or {}).get("cluster"), server.memory.get("clusters")
        if number is not None and clusters:
            server = replace(server, model=clusters[number]["model"])
        return super().represent(server, state)
