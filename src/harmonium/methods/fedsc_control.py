"""FedSC with control variates: a client expects the others' matrices to move as its own does.

A variant of FedSC (Jing et al., FedSC: Provable Federated Self-supervised Learning with Spectral
Contrastive Objective over Non-i.i.d. Data, 2024) for several local steps a round, in the manner of
SCAFFOLD (Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
2020). It appears in neither paper. Symbols are those of `fedsc`, and

    theta_0     the model that a round starts from; R_j^0 is R_j at theta_0
    R           correlation matrix of all images, the sum of q_j R_j
    kappa       how far the others are taken to move as this client does (`curvature`)
    c_j         q_j + kappa (1 - q_j)
    S_j         R^0 - c_j R_j^0, without gradient

The problem. The global objective is L = -Tr R+ + 1/2 |R|_F^2. While client j trains, FedSC
(`share`) holds the others where they were, which takes q_j R_j + (1 - q_j) R_{-j}^0 for R. Its
gradient is exact at theta_0, but its quadratic term has only q_j of the curvature: all clients move
into directions that the stale matrices show as free, each as if no other did so. After several
local steps the average overshoots and L rises. FedSC's `decay` has more curvature but is biased at
theta_0.

The correction. Client j expects R_{-j} to be R_{-j}^0 + kappa (R_j - R_j^0), so it takes for R

    R^0 + c_j (R_j - R_j^0)

and minimises, as twice an equation as in `fedsc`,

    2 L_j = -2 Tr R+_j + c_j |R_j|_F^2 + 2 Tr(R_j S_j)

kappa = 0 is FedSC's `share`. For every kappa the gradients at theta_0, weighted by q_j, add up to
that of L: what c_j R_j adds, -c_j R_j^0 in S_j takes away. kappa = 1 is the local spectral contrast
with a linear correction, SCAFFOLD in the space of matrices. Then the sum of q_j L_j, all at one
model, touches L at theta_0 (up to a constant) and is nowhere below it, as |sum q_j D_j|^2 <= sum
q_j |D_j|^2 with D_j = R_j - R_j^0: a step that lowers it lowers L. That is safe and slow: clients
of different classes should move apart, and kappa = 1 charges each as if all followed it. The
default lies between.

Messages, of the same size as those of `fedsc`

    ask         to                           down                   up
    correlate   the cohort; in the first     model                  corr: R_j, packed
                exchange all clients
    train       the cohort                   model, correction:     model, loss
                                             S_j packed, weight: c_j

The server remembers the same as under `fedsc`; clients keep nothing. Matrices of absent clients
stay as they are, with their age. If R_j of a client is unknown because its answer was lost, kappa
is 0 for it: R^0 - q_j R_j^0 is the sum over the others. If no other client's matrix is known, c_j
is 1 and S_j is 0: FedAvg with the spectral loss. Between exchanges (`every`) the matrices are those
of an older model, and R^0 + c_j (R_j - R_j^0) also stands for what has moved since.

Noise, sensitivity and costs are those of `fedsc`. But there a client's own noise never enters its
loss; here R_j^0 comes back with its noise, of weight c_j - q_j. With much noise choose a small
kappa. A batch has a noisy R_j of its own, and E |R_batch|^2 > |R_j|^2: the identity holds for full
batches, and for small ones up to c_j times that excess (under `share` q_j times it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal, cast

from torch import Tensor

from harmonium.core.types import ClientId
from harmonium.federation.method import TRAINED, Server
from harmonium.federation.wire import Value, exchange, scalar, statistic, weights
from harmonium.learning.client import Client
from harmonium.learning.objectives import check
from harmonium.learning.symmetric import unpack
from harmonium.methods import methods
from harmonium.methods.fedsc import FedSC, InterClientContrast


@methods("fedsc-control")
@dataclass(frozen=True)
class ControlledFedSC(FedSC):
    """FedSC whose clients expect the others' matrices to move as their own does."""

    paper = "a variant of Jing et al., 2024"

    # Not settings of this variant, which kappa replaces: kappa = 0 is `share`.
    coefficient: Literal["share"] = field(init=False, default="share")
    final: float = field(init=False, default=0.0)

    curvature: float = 0.5  # kappa: how far others move as a client does; 0: fedsc's share

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "between 0 and 1", lambda kappa: 0 <= kappa <= 1, "curvature")

    def contrast_for(
        self, server: Server, client: ClientId, matrices: Mapping[str, Tensor]
    ) -> dict[str, Value]:
        """S_j = R^0 - c_j R_j^0, from R^0 = q_j R_j^0 + (1 - q_j) R_{-j}^0, and c_j."""
        share = super().contrast_for(server, client, matrices)
        q, others = cast(float, share["alpha"]), cast(Tensor, share["others"]).double()
        correction, c, own = (1 - q) * others, q, matrices.get(str(client))
        if own is not None:
            c = q + self.curvature * (1 - q)
            correction = correction + (q - c) * own.double()
        return {"correction": correction.float(), "weight": c}

    @exchange(down={"model": weights(), "correction": statistic(), "weight": scalar()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train by -2 Tr R+_j + c_j |R_j|^2 + 2 Tr(R_j S_j): FedSC's score, S_j with weight 1."""
        parts = self.pull(client, got.model)
        correction = unpack(got.correction, self.spectral.out)
        context = InterClientContrast(
            me=client.id, anchor=got.model, others=correction, alpha=got.weight, weight=1.0
        )
        done = self.fit(parts, client, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}
