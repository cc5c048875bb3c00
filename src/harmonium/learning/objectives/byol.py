"""BYOL: a predictor predicts the projection of the other view by an EMA target network.

Grill et al., Bootstrap Your Own Latent, 2020. The target is an exponential moving average of the
online network and gets no gradient. In a federation it matters who owns it between rounds:
Orchestra's baseline averages it over clients, FedSC's restarts it from the received model, FedU and
FedEMA keep it at the client.

Codes differ in the scale of the loss, hence in the learning rates that fit, and in when the target
moves; both are settings here. Orchestra's code has the two coefficients of the average swapped; we
keep the usual form. All of these codes, and the original, pass each view through the networks by
itself, the predictor and the target too, so BatchNorm never sees two views together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives, two
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.objectives.simsiam import negative_cosine
from harmonium.learning.objectives.twin import Buffers, Owner, follow, restart, targets, twin
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

Scale = Literal["sum", "mean"]


@objectives("byol")
@dataclass(frozen=True)
class BYOL(Objective):
    """Similarity of predictions to the projections of an EMA target.

    >>> BYOL(momentum=0.996).target
    'mean'
    """

    paper = "Grill et al., 2020"
    views = (2, 2)
    joint_views = False

    hidden: int | None = None  # width of both heads' inner layers; none: the encoder's
    out: int | None = None  # size of a projection; none: the encoder's; published 256
    norm: Norm = "batch"  # in projector and predictor; none in FedSC
    bias: bool = True  # in all linear layers; else only in the predictor's last, as Orchestra
    momentum: float = 0.99  # how much of itself the target keeps in a step
    update: Literal["after", "before"] = "after"  # target moves after a step, or before it
    scale: Scale = "sum"  # sum: 2 - 2 cos, both ways added; mean: -cos, a quarter of that
    target: Owner = "mean"  # sent and averaged, kept at the client, or restarted every round
    ema_buffers: Buffers = "own"  # BatchNorm statistics of the target: its own, or copied

    def __post_init__(self) -> None:
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out")
        check(self, "within 0 and 1", lambda momentum: 0 <= momentum <= 1, "momentum")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """Projector and predictor, and the target of encoder and projector."""
        out, hidden = self.out or dim, self.hidden or dim
        projector = mlp(dim, hidden, out, norm=self.norm, bias=self.bias)
        predictor = mlp(out, hidden, out, norm=self.norm, bias=self.bias, out_bias=True)
        followed = {**modules, "projector": projector}
        return {
            "projector": Part(projector),
            "predictor": Part(predictor),
            "target": twin(followed, ("encoder", "projector"), self.target),
        }

    def prepare(self, parts: Parts, *, first: bool = False) -> None:
        """A `fresh` target starts as the received model."""
        restart(parts, first=first)

    def alone(self) -> bool:
        """Whether images are independent; not if the target moves at every forward pass."""
        return self.update == "after"

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Outputs of the online network and of the target for every view."""
        if self.update == "before":
            follow(parts, self.momentum, self.ema_buffers)
        seen = super().see(parts, batch)
        seen.t = targets(parts, batch.views)
        return seen

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The distance of each view's prediction to the target's projection of the other view."""
        (predictions,) = parts.through(seen.pair(), "predictor")
        return distance(*two(predictions), *two(seen.t), self.scale)

    def after_step(self, parts: Parts) -> None:
        """Update the target."""
        if self.update == "after":
            follow(parts, self.momentum, self.ema_buffers)


def distance(
    first_prediction: Tensor,
    second_prediction: Tensor,
    first: Tensor,
    second: Tensor,
    scale: Scale = "sum",
) -> Tensor:
    """Distance of predictions to the target's projections of the other view.

    Args:
        first_prediction: predictions from one view, (n, dim).
        second_prediction: predictions from the other view of the same images, (n, dim).
        first: the target's projections of the one view, (n, dim); they get no gradient.
        second: the target's projections of the other view, (n, dim); they get no gradient.
        scale: sum is 2 - 2 cos, the two directions added; mean is -cos, their mean.

    >>> import torch
    >>> a, b = torch.eye(2)[:1], torch.eye(2)[1:]
    >>> distance(a, b, b, a).item(), distance(a, b, b, a, scale="mean").item()
    (0.0, -1.0)
    """
    loss = negative_cosine(first_prediction, second_prediction, first, second)
    return 4 + 4 * loss if scale == "sum" else loss
