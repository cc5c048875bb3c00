"""VICReg: views agree, every dimension varies, and dimensions do not repeat each other.

Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning,
2022, eq. 1 to 6. We follow the released code, which halves the variance term and takes the mean
over dimensions of squared differences; its weights belong to that. It has no negatives, normalised
outputs or stop-gradient. The paper's projector has three layers of 8192. The released code passes
each view through the network by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

EPSILON = 1e-4  # under the root, so that a collapsed dimension has a deviation of 0.01


@objectives("vicreg")
@dataclass(frozen=True)
class VICReg(Objective):
    """Agreement of two views, kept from collapse by variance and covariance.

    >>> VICReg().variance
    25.0
    """

    paper = "Bardes et al., 2022"
    views = (2, 2)
    joint_views = False

    invariance: float = 25.0  # weight of the squared difference of views
    variance: float = 25.0  # weight of the hinge on standard deviations below 1
    covariance: float = 1.0  # weight of the covariances between dimensions
    hidden: int | None = None  # width of the projector's inner layers; none: the encoder's
    out: int | None = None  # size of a projection; none: the encoder's; published 8192
    layers: int = 3  # linear layers of the projector
    norm: Norm = "batch"  # in the projector

    def __post_init__(self) -> None:
        weights = ("invariance", "variance", "covariance")
        check(self, "0 or more", lambda weight: 0 <= weight < math.inf, *weights)
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out", "layers")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector without biases, because the loss depends on differences only; averaged."""
        inner = [self.hidden or dim] * (self.layers - 1)
        return {"projector": Part(mlp(dim, *inner, self.out or dim, norm=self.norm, bias=False))}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The weighted sum of the three terms."""
        return vicreg(*seen.pair(), self.invariance, self.variance, self.covariance)


def vicreg(
    first: Tensor,
    second: Tensor,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> Tensor:
    """The weighted sum of the invariance, variance and covariance terms.

    Args:
        first: projections of one view, (n, dim).
        second: projections of the other view of the same images, (n, dim).
        invariance: weight of the mean squared difference.
        variance: weight of `flatness`, averaged over the views.
        covariance: weight of `overlap`, summed over the views.

    >>> round(vicreg(torch.ones(4, 3), torch.ones(4, 3)).item(), 4)  # collapsed: 25 times 0.99
    24.75
    """
    return (
        invariance * functional.mse_loss(first, second)
        + variance * (flatness(first) + flatness(second)) / 2
        + covariance * (overlap(first) + overlap(second))
    )


def flatness(rows: Tensor) -> Tensor:
    """The mean hinge on standard deviations below 1, over the dimensions of (n, dim): at most 0.99.

    >>> round(flatness(torch.ones(4, 3)).item(), 6)
    0.99
    """
    variance = rows.var(dim=0, correction=min(len(rows) - 1, 1))  # of one row it is 0
    return functional.relu(1 - (variance + EPSILON).sqrt()).mean()


def overlap(rows: Tensor) -> Tensor:
    """Sum of squared covariances of different dimensions of (n, dim), over dim.

    >>> overlap(torch.tensor([[1.0, 1.0], [-1.0, -1.0]])).item()
    4.0
    """
    centred = rows - rows.mean(dim=0)
    covariance = centred.T @ centred / max(len(rows) - 1, 1)
    rest = covariance - torch.diag(covariance.diagonal())
    return rest.square().sum() / rows.shape[1]
