"""Orchestra: clients cluster projections, the server clusters their centroids, all predict those.

Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, 2022,
Algorithms 1 and 2. Clients train to predict assignments to global centroids (the objective,
`objectives/assignments.py`). Then each clusters the target network's newest projections of its
images and sends the centroids, of which the server makes new global ones. Before round 1 clients
cluster what the network as first drawn makes of their images. The paper returns the target's
encoder, its released code judges the online network's; `evaluated` says which.

The code uploads its memory of projections; here it is a local variable and cannot leave. Clusters
by the largest Sinkhorn shares, as released (`balance: argmax`), can be of any size, and the memory
of a small client has several views of an image. So clusters are of equal size, of one row a
image; each client says how many images its smallest cluster has, and one with fewer than
`k_min` keeps its centroids back and sends its model alone.

With `epsilon` centroids are of a private clustering (`privacy/kmeans.py`) of what the received
target makes of all images. The budget is of each release; the model goes unprotected beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError, counted
from harmonium.core.types import ClientId
from harmonium.federation.method import TRAINED, Method, Server
from harmonium.federation.wire import (
    Ask,
    Field,
    FromSettings,
    Plan,
    Value,
    exchange,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Client, Decline
from harmonium.learning.objectives import Seen, check
from harmonium.learning.objectives.assignments import Assignments, Clustered
from harmonium.learning.parts import Parts
from harmonium.methods import methods
from harmonium.methods.orchestra import clustering
from harmonium.methods.orchestra.clustering import Balance, GlobalBalance, Recent
from harmonium.privacy.kmeans import multiplier, private_centroids, releases
from harmonium.privacy.mechanisms import Release


def _centroids(method: Orchestra) -> Field:
    """A client's centroids: noise guards them; clusters that may be of one image are per image."""
    guarded = method.epsilon is not None
    several = guarded or (method.local_clusters and method.k_min > 1)
    most = method.local_clusters or method.memory
    return Field(
        "statistic" if several else "per_example",
        "each",
        guarded=guarded,
        shape=lambda method, examples: (range(most + 1), method.width),
    )


CLUSTERED: dict[str, Field | FromSettings] = {
    "centroids": _centroids,
    "anonymity": scalar(),
}  # anonymity 0: nothing was sent


@methods("orchestra")
@dataclass(frozen=True)
class Orchestra(Method):
    """FedAvg of two networks whose assignments to common centroids agree."""

    paper = "Lubana et al., 2022"
    remembers = {"centroids": "statistic", "anonymity": "scalar"}
    context = Clustered

    clusters: int = 64  # of the federation (G); for CIFAR-100 128
    local_clusters: int = 8  # of a client (L); for CIFAR-100 16; 0: send rows of single images
    memory: int = 128  # newest projections that a client clusters
    distinct: bool = True  # one of them an image; false: one a view, as released
    balance: Balance = "exact"  # local clusters of equal size; argmax: as released, of any size
    global_balance: GlobalBalance = "soft"  # as released; exact: global clusters of equal size
    global_steps: int = 500  # of the server's clustering
    k_min: int = 2  # images in a client's smallest cluster; with fewer it sends no centroids
    evaluated: Literal["online", "target"] = "online"  # whose encoder is the result
    epsilon: float | None = None  # of one release of a client's centroids; none: no noise
    delta: float = 1e-3  # of one release; should be far below 1 / images of a client
    dims: int | None = None  # that private clusters are made in, by a public matrix; none: all

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Assignments):
            why = f"orchestra predicts assignments: objective is {self.objective.name}"
            raise ConfigError(f"{why}; set objective=assignments")
        check(self, "at least 2", lambda count: count >= 2, "clusters", "memory")
        check(self, "at least 1", lambda count: count >= 1, "k_min", "global_steps")
        check(self, "0 or more", lambda count: count >= 0, "local_clusters")
        check(self, "above 0", lambda budget: budget > 0, "epsilon", "dims")
        check(self, "above 0 and below 1", lambda delta: 0 < delta < 1, "delta")
        if not self.local_clusters and (self.k_min > 1 or self.epsilon is not None):
            why = "method.local_clusters=0 sends rows of single images: to allow that, set"
            raise ConfigError(f"{why} method.k_min=1 and no method.epsilon")
        known = (self.objective.target, self.batch_norm) == ("mean", "average")
        if not known and (self.evaluated == "target" or self.epsilon is not None):
            why = "method.evaluated=target and method.epsilon need a target that the server knows"
            raise ConfigError(f"{why}: set objective.target=mean batch_norm=average")

    @property
    def width(self) -> int:
        """How many numbers a centroid is: as many as a projection."""
        return cast(nn.Linear, self.blueprint["rotation"]).in_features

    def suits(self, cohort: int) -> None:
        """Refuse more global clusters than there can be local ones."""
        least = self.k_min if self.epsilon is None else 1
        clustering.check(self.clusters, cohort, self.local_clusters, least, self.memory)

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """First centroids, of what the network as first drawn makes of images."""
        got = yield Ask("cluster", cohort, {"model": server.model})
        if not any(len(sent) for sent in got.centroids.values()):
            raise ConfigError(f"no client has {self.k_min} images for a cluster (method.k_min)")
        return self.regroup(server, got, torch.randn(self.clusters, self.width))

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Networks are averaged; centroids of those who answered are clustered."""
        held = server.memory["centroids"]
        got = yield Ask("train", cohort, {"model": server.model, "centroids": held})
        return self.regroup(self.merge(server, got.model), got, held)

    def regroup(self, server: Server, got: SimpleNamespace, start: Tensor) -> Server:
        """The server with new global centroids, and the smallest cluster that they rest on."""
        rows = clustering.gathered(got.centroids.values(), start.shape[1])
        found = clustering.regrouped(rows, start, self.global_balance, self.global_steps)
        fewest = min((int(k) for k in got.anonymity.values() if k), default=0)
        return replace(server, memory={**server.memory, "centroids": found, "anonymity": fewest})

    @exchange(down={"model": weights()}, up=CLUSTERED)
    def cluster(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Cluster what the target makes of some images; nothing is trained."""
        parts, recent = self.pull(client, got.model), Recent(self.memory, distinct=self.distinct)
        if self.epsilon is not None:
            return self.private(client, parts)
        hear = cast(Assignments, self.objective).hear
        for batch in client.batches(1, self.local.batch, drop_last=self.local.drop_last):
            if len(recent) < self.memory:
                recent.push(batch.index, hear(parts.train(), batch))
        if not len(recent):
            raise Decline(f"it has {counted(len(client.examples), 'example')}, too few to cluster")
        return self.centroids(client, recent)

    @exchange(down={"model": weights(), "centroids": statistic()}, up={**TRAINED, **CLUSTERED})
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Predict assignments and turns, then cluster the target's newest projections."""
        parts, recent = self.pull(client, got.model), Recent(self.memory, distinct=self.distinct)
        sent = {} if self.epsilon is None else self.private(client, parts)  # before training
        context = Clustered(me=client.id, anchor=got.model, centroids=got.centroids)

        def remember(seen: Seen) -> None:
            recent.push(seen.batch.index, seen.t[0])

        done = self.fit(parts, client, context=context, watch=remember)
        sent = sent or self.centroids(client, recent)
        return {"model": self.push(client, parts), "loss": done.loss, **sent}

    def centroids(self, client: Client, recent: Recent) -> dict[str, Value]:
        """What a client sends of its memory: centroids, and images in the smallest cluster."""
        limits = (self.local_clusters, self.k_min, self.balance)
        found, fewest = clustering.anonymous(recent, *limits, client.rng)
        return {"centroids": found, "anonymity": fewest}

    def private(self, client: Client, parts: Parts) -> dict[str, Value]:
        """What it sends with noise: centroids of what a target makes of all images, unit rows."""
        target: Any = parts.eval()["target"]
        rows = functional.normalize(client.features(nn.Sequential(*target.values())))
        budget: Any = {"epsilon": self.epsilon, "delta": self.delta, "dims": self.dims}
        budget |= {"noise": client.noise, "rng": client.rng}
        found, told = private_centroids(rows, self.local_clusters, **budget)
        unit = functional.normalize(found)
        return {"centroids": client.released("centroids", unit, told), "anonymity": 0}

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Centroids are unit rows, and each of as many images as the client says."""
        why = None
        if step in ("cluster", "train"):
            least = None if self.epsilon is not None else self.k_min if self.local_clusters else 1
            why = clustering.odd_centroids(up["centroids"], up["anonymity"], examples, least)
        return why or super().reply_fault(step, down, up, examples)

    def passes_of(self, step: str) -> float:
        """Private centroids are of one more pass."""
        more = 1 if step == "train" and self.epsilon is not None else 0
        return super().passes_of(step) + more

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """Centroids, whenever it clusters or trains."""
        budget = self.epsilon if step in ("cluster", "train") else None
        return releases("centroids", multiplier(budget, self.delta)) if budget else ()

    def represent(self, server: Server, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The encoder of the network that is to be judged."""
        if self.evaluated == "online":
            return super().represent(server, state)
        target: Any = self.blueprint.copy_from(server.model).eval()["target"]
        return cast(nn.Module, target["encoder"])

    def revealed(self) -> tuple[str, ...]:
        """What leaves, by how many images are behind it."""
        return (clustering.in_words(self.local_clusters, self.k_min, self.epsilon),)

    def noted(self, server: Server) -> dict[str, float]:
        """Images in the smallest cluster of all whose centroids were sent; 0: none were."""
        return {"anonymity": server.memory["anonymity"]}

    def remark(self, step: str, up: Mapping[str, Any]) -> str:
        """A word where a client kept its centroids back."""
        if step not in ("cluster", "train") or up.get("anonymity") or self.epsilon is not None:
            return ""
        return f"kept its centroids back: fewer than {self.k_min} images to a cluster"
