"""Orchestra: clients cluster projections, the server clusters their centroids, all predict those.

Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, ICML
2022. Algorithm 2 (server) is `Orchestra.setup` and `Orchestra.round`, Algorithm 1 (local training)
is `Orchestra.train`; the loss of its lines 3 to 16 is `learning/objectives/assignments.py`. Local
and global clustering are in `clustering.py`, the client's memory in `memory.py`, and the number of
images behind a centroid in `anonymity.py`.

Symbols
    f_O, f_T    online and target network, each an encoder and a projector; f_T follows f_O as an
                exponential moving average with rate m (`objective.momentum`)
    mu_k^L      local centroids of client k, L of them (`local_clusters`), unit rows
    mu^G        global centroids, G of them (`clusters`), unit rows
    P_f(x)      softmax(mu^G f(x) / t), the assignment of an image by a network, f(x) of unit length
    W_r         linear head that predicts by which quarter an image was turned

Loss of a step: the cross-entropy of P_fT(x) and P_fO(x'), x' another view of x (eq. 4), plus that
of the turns (eq. 3). Centroids and target get no gradient. Signs and further differences between
paper and code in the loss are explained with the objective.

Messages
    ask       to           down                     up
    cluster   the cohort   model                    centroids: mu_k^L, anonymity: images in the
              of round 0                            smallest cluster
    train     the cohort   model, centroids: mu^G   model, loss, centroids, anonymity

A model is f_O, f_T and W_r; with `objective.target: local` f_T stays at the client. The server
remembers `centroids`, mu^G, and `anonymity`, the smallest cluster behind those of the last round.
Clients keep nothing: the memory of projections lives as long as one task.

Local centroids are statistics if every cluster has at least two images. With `k_min: 1`, or
`local_clusters: 0`, which sends projections themselves, they count as per example. A client that
cannot make clusters of `k_min` images withholds its centroids and sends only its model.

Where the paper is unclear or its parts disagree
    - Line 18 of Algorithm 1 clusters all images of a client, section C.2 the newest 128 projections
      (`memory`). The latter is done here; private clusters are of all images.
    - Line 6 of Algorithm 2 averages networks uniformly. Here they are weighted by numbers of
      images; the code takes numbers of batches, which is almost the same.
    - Line 10 returns f_T, but the released evaluation loads f_O; `evaluated` chooses.
    - G and L differ between section 6 (64 and 8 for CIFAR-10, 128 and 16 for CIFAR-100), Table 2
      and the released configuration. Defaults are of section 6.
    - "Local" differential privacy (section D.4) is a clustering of the central model, Chang et al.,
      2021, that each client runs on its own images: it protects an image from the server, per
      release. The paper reports the epsilon of one release; 50 of epsilon 1 come to about 12. With
      `epsilon`, `privacy/kmeans.py` clusters the received target's projections of all images; the
      model is sent without protection.

Where it departs from the released code
    - The code uploads the memory with the network's state, and the server averages it. Here it
      cannot leave.
    - Local clusters are of equal size and of one row an image; the code's (`balance: argmax`,
      `distinct: false`) can be of any size, and of several views of one image.
    - mu^G starts from random directions, the code's from the default weights of a linear layer.
      The code's additional first round, which makes the first centroids, is the setup here.
    - Global clustering: see `clustering.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_host
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
from harmonium.methods.orchestra import anonymity
from harmonium.methods.orchestra.clustering import Balance, GlobalBalance, global_clustering
from harmonium.methods.orchestra.memory import ProjectionMemory
from harmonium.privacy.kmeans import multiplier, private_centroids, releases
from harmonium.privacy.mechanisms import Release


def _centroids_field(method: Orchestra) -> Field:
    """A client's centroids: noise guards them; clusters that may be of one image are per image."""
    guarded = method.epsilon is not None
    several_images = guarded or (method.local_clusters and method.k_min > 1)
    most = method.local_clusters or method.memory
    return Field(
        "statistic" if several_images else "per_example",
        "each",
        guarded=guarded,
        shape=lambda method, examples: (range(most + 1), method.width),
    )


CLUSTERED: dict[str, Field | FromSettings] = {
    "centroids": _centroids_field,
    "anonymity": scalar(),  # 0: no centroids were sent, or they have noise
}


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
        """The size of a centroid, which is that of a projection."""
        return cast(nn.Linear, self.blueprint["rotation"]).in_features

    # ---- server (Algorithm 2) ------------------------------------------------------------------
    def suits(self, cohort: int) -> None:
        """Refuse more global clusters than there can be local centroids."""
        k_min = self.k_min if self.epsilon is None else 1
        anonymity.check_enough_centroids(
            self.clusters, cohort, self.local_clusters, k_min, self.memory
        )

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Line 2: first global centroids, by the networks at initialisation (section C.2)."""
        got = yield Ask("cluster", cohort, {"model": server.model})
        if not any(len(sent) for sent in got.centroids.values()):
            raise ConfigError(f"no client has {self.k_min} images for a cluster (method.k_min)")
        return self.with_global_centroids(server, got, torch.randn(self.clusters, self.width))

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Lines 4 to 8: average the networks, and cluster the centroids of those who answered."""
        global_centroids = server.memory["centroids"]
        got = yield Ask("train", cohort, {"model": server.model, "centroids": global_centroids})
        averaged = self.merge(server, got.model)  # line 6
        return self.with_global_centroids(averaged, got, global_centroids)

    def with_global_centroids(self, server: Server, got: SimpleNamespace, start: Tensor) -> Server:
        """The server with new global centroids, and the smallest cluster that stands behind them.

        Local centroids are never averaged, and those of earlier rounds are not used again.
        """
        none = torch.zeros(0, start.shape[1])
        local_centroids = torch.cat([none, *got.centroids.values()])  # line 7
        global_centroids = global_clustering(  # line 8
            local_centroids, start, self.global_balance, self.global_steps
        )
        fewest = min((int(k) for k in got.anonymity.values() if k), default=0)
        memory = {**server.memory, "centroids": global_centroids, "anonymity": fewest}
        return replace(server, memory=memory)

    # ---- client (Algorithm 1) ------------------------------------------------------------------
    @exchange(down={"model": weights()}, up=CLUSTERED)
    def cluster(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Cluster the target's projections of some images; nothing is trained.

        BatchNorm is in training mode, as when the memory is filled later; its statistics move in
        the client's copy of the model alone, which is not sent back.
        """
        parts = self.pull(client, got.model)
        if self.epsilon is not None:
            return self.private_local_centroids(client, parts)
        memory = ProjectionMemory(self.memory, distinct=self.distinct)
        target_projections = cast(Assignments, self.objective).target_projections
        for batch in client.batches(1, self.local.batch, drop_last=self.local.drop_last):
            if len(memory) < self.memory:
                memory.push(batch.index, target_projections(parts.train(), batch))
        if not len(memory):
            raise Decline(f"it has {counted(len(client.examples), 'example')}, too few to cluster")
        return self.local_centroids(client, memory)

    @exchange(down={"model": weights(), "centroids": statistic()}, up={**TRAINED, **CLUSTERED})
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Predict assignments and turns, then cluster the target's newest projections."""
        parts = self.pull(client, got.model)
        memory = ProjectionMemory(self.memory, distinct=self.distinct)
        clustered: dict[str, Value] = {}
        if self.epsilon is not None:
            # Before training: a target that was trained on all images carries each of them into
            # every row, and the noise is counted for one row an image.
            clustered = self.private_local_centroids(client, parts)
        context = Clustered(me=client.id, anchor=got.model, centroids=got.centroids)

        def remember(seen: Seen) -> None:
            memory.push(seen.batch.index, seen.t[0])

        done = self.fit(parts, client, context=context, watch=remember)  # lines 2 to 17
        clustered = clustered or self.local_centroids(client, memory)  # line 18
        return {"model": self.push(client, parts), "loss": done.loss, **clustered}

    def local_centroids(self, client: Client, memory: ProjectionMemory) -> dict[str, Value]:
        """What a client sends of its memory: centroids, and images in the smallest cluster."""
        centroids, fewest = anonymity.anonymous_centroids(
            memory, self.local_clusters, self.k_min, self.balance, client.rng
        )
        return {"centroids": centroids, "anonymity": fewest}

    def private_local_centroids(self, client: Client, parts: Parts) -> dict[str, Value]:
        """Centroids with noise, of the unit projections of all images by the target (section D.4).

        In evaluation mode and without augmentation, so that a row follows from its image alone.
        """
        target: Any = parts.eval()["target"]
        rows = to_host(functional.normalize(client.features(nn.Sequential(*target.values()))))
        budget: Any = {"epsilon": self.epsilon, "delta": self.delta, "dims": self.dims}
        budget |= {"noise": client.noise, "rng": client.rng}
        noisy, made_with = private_centroids(rows, self.local_clusters, **budget)
        centroids = client.released("centroids", functional.normalize(noisy), made_with)
        return {"centroids": centroids, "anonymity": 0}

    # ---- what the framework asks of a method ---------------------------------------------------
    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Refuse centroids not of unit length, and an impossible number of images behind them."""
        fault = None
        if step in ("cluster", "train"):
            k_min = None if self.epsilon is not None else self.k_min if self.local_clusters else 1
            fault = anonymity.centroids_fault(up["centroids"], up["anonymity"], examples, k_min)
        return fault or super().reply_fault(step, down, up, examples)

    def passes_of(self, step: str) -> float:
        """Private centroids take one more pass."""
        more = 1 if step == "train" and self.epsilon is not None else 0
        return super().passes_of(step) + more

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """Noisy centroids, which `cluster` and `train` release."""
        budget = self.epsilon if step in ("cluster", "train") else None
        return releases("centroids", multiplier(budget, self.delta)) if budget else ()

    def represent(self, server: Server, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The encoder of f_O or f_T, according to `evaluated`."""
        if self.evaluated == "online":
            return super().represent(server, state)
        target: Any = self.blueprint.copy_from(server.model).eval()["target"]
        return cast(nn.Module, target["encoder"])

    def revealed(self) -> tuple[str, ...]:
        """What leaves, with the number of images behind each centroid."""
        return (anonymity.disclosure(self.local_clusters, self.k_min, self.epsilon),)

    def noted(self, server: Server) -> dict[str, float]:
        """Images in the smallest cluster of all whose centroids were sent; 0: none were."""
        return {"anonymity": server.memory["anonymity"]}

    def remark(self, step: str, up: Mapping[str, Any]) -> str:
        """A note in the ledger if a client withheld its centroids."""
        if step not in ("cluster", "train") or up.get("anonymity") or self.epsilon is not None:
            return ""
        return f"kept its centroids back: fewer than {self.k_min} images to a cluster"
