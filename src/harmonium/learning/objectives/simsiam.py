"""SimSiam: a predictor maps the projection of one view to that of the other, with a stop-gradient.

Chen and He, Exploring Simple Siamese Representation Learning, 2021. The target side gets no
gradient; with that and BatchNorm it does not collapse, which the loss alone would not show. Watch
`harmonium.evaluation.geometry.spread` of the projections: about 1 is healthy, 0 is collapse. With
GroupNorm it collapses easily (Louizos et al., 2024).

As in the released code, each view passes the networks by itself, so that BatchNorm never sees
two views together. One departure: the predictor's learning rate follows the recipe's schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives, two
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@objectives("simsiam")
@dataclass(frozen=True)
class SimSiam(Objective):
    """Similarity of predictions and projections, with a stop-gradient.

    >>> SimSiam(hidden=2048, out=2048, predictor_hidden=512).layers
    3
    """

    paper = "Chen and He, 2021"
    views = (2, 2)
    joint_views = False

    hidden: int | None = None  # width of the projector's inner layers; none: the encoder's
    out: int | None = None  # size of a projection; none: the encoder's; published 2048
    layers: int = 3  # linear layers of the projector
    norm: Norm = "batch"  # in projector and predictor
    out_norm: bool = True  # end the projector with BatchNorm without scale and shift
    predictor_hidden: int | None = None  # width of its inner layer; none: a quarter of out
    bias: bool = False  # in all linear layers; else only in the predictor's last

    def __post_init__(self) -> None:
        sizes = ("hidden", "out", "layers", "predictor_hidden")
        check(self, "at least 1", lambda size: size >= 1, *sizes)

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """Projector and predictor, averaged like the encoder."""
        out = self.out or dim
        inner = [self.hidden or dim] * (self.layers - 1)
        projector = mlp(dim, *inner, out, norm=self.norm, bias=self.bias, out_norm=self.out_norm)
        narrow = self.predictor_hidden or max(out // 4, 1)
        predictor = mlp(out, narrow, out, norm=self.norm, bias=self.bias, out_bias=True)
        return {"projector": Part(projector), "predictor": Part(predictor)}

    def alone(self) -> bool:
        """True: the loss of an image does not depend on other images."""
        return True

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Minus the similarity of each view's prediction to the projection of the other."""
        (predictions,) = parts.through(seen.pair(), "predictor")
        return negative_cosine(*two(predictions), *seen.pair())


def negative_cosine(
    first_prediction: Tensor, second_prediction: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Minus the mean cosine of predictions and the other view's projections, between -1 and 1.

    Args:
        first_prediction: predictions from one view, (n, dim).
        second_prediction: predictions from the other view of the same images, (n, dim).
        first: projections of the one view, (n, dim); they get no gradient.
        second: projections of the other view, (n, dim); they get no gradient.

    >>> a, b = torch.eye(2)[:1], torch.eye(2)[1:]
    >>> negative_cosine(b, a, a, b).item()
    -1.0
    """
    predictions, targets = (
        torch.cat([first_prediction, second_prediction]),
        torch.cat([second, first]),
    )
    return -functional.cosine_similarity(predictions, targets.detach()).mean()
