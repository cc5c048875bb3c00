"""Barlow Twins: the same dimension of two views agrees, different dimensions are decorrelated.

Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, 2021, eq. 1 and 2.
The cross-correlation of the two views over the batch is pulled towards the identity. The paper has
a projector of three layers of 8192 and batches of 2048; for small encoders their own width is
enough, but a batch should not be much smaller than the projection. The released code passes each
view through the network by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

EPSILON = 1e-5  # added to a variance, as BatchNorm does


@objectives("barlow")
@dataclass(frozen=True)
class BarlowTwins(Objective):
    """Cross-correlation of two views drawn to the identity.

    >>> BarlowTwins(hidden=2048, out=2048).redundancy
    0.0051
    """

    paper = "Zbontar et al., 2021"
    views = (2, 2)
    joint_views = False

    redundancy: float = 0.0051  # weight of the correlations between dimensions
    hidden: int | None = None  # width of the projector's inner layers; none: the encoder's
    out: int | None = None  # size of a projection; none: the encoder's; published 8192
    layers: int = 3  # linear layers of the projector
    norm: Norm = "batch"  # in the projector

    def __post_init__(self) -> None:
        check(self, "0 or more", lambda weight: 0 <= weight < math.inf, "redundancy")
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out", "layers")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector without biases, which standardising would cancel; averaged."""
        inner = [self.hidden or dim] * (self.layers - 1)
        return {"projector": Part(mlp(dim, *inner, self.out or dim, norm=self.norm, bias=False))}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """How far the cross-correlation is from the identity."""
        return cross_correlation(*seen.pair(), self.redundancy)


def cross_correlation(first: Tensor, second: Tensor, redundancy: float = 0.0051) -> Tensor:
    """Sum of (1 - C_ii)^2 plus `redundancy` times the sum of C_ij^2, with C the cross-correlation.

    Args:
        first: projections of one view, (n, dim).
        second: projections of the other view of the same images, (n, dim).
        redundancy: weight of the second sum.

    >>> views = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> cross_correlation(views, views).item() < 1e-9
    True
    """
    c = _standardised(first).T @ _standardised(second) / len(first)
    same = c.diagonal()
    rest = c - torch.diag(same)
    return (1 - same).square().sum() + redundancy * rest.square().sum()


def _standardised(rows: Tensor) -> Tensor:
    """Every dimension of (n, dim) with mean 0 and variance 1; a constant one becomes 0."""
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    return (rows - mean) / (variance + EPSILON).sqrt()
