"""Rotation prediction: tell by which quarter an image was turned.

Gidaris et al., Unsupervised Representation Learning by Predicting Image Rotations, 2018. Two
federated systems have it as a baseline: FedCA's (FedPR; all four turns of each image, a linear
head on the features) is the default; Orchestra's (RotPred) is `turns: one, head: projector`, one
random turn of each unaugmented image, and a linear head on the projector's output as it is.
Orchestra itself has the task beside its own loss, on images or on views. The original code passes
the four turns of a batch together, so they share a BatchNorm pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views, quarter_turns
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@dataclass(kw_only=True)
class Turned(Seen):
    """Turned images as the model sees them; with all four turns, each turn is a view."""

    turns: Tensor  # (views * n,) quarter turns, 0 to 3


@objectives("rotation")
@dataclass(frozen=True)
class Rotation(Objective):
    """Classification of quarter turns.

    >>> Rotation(turns="one", head="projector").turns
    'one'
    """

    paper = "Gidaris et al., 2018"

    turns: Literal["all", "one"] = "all"  # all four of each image, or one at random
    head: Literal["encoder", "projector"] = "encoder"  # what the linear head looks at
    augment: bool = False  # turn the last view instead of the image itself
    out: int | None = None  # width of the projector, if the head needs one; none: the encoder's
    bias: bool = True  # in the projector's last layer; false in Orchestra, but not in RotPred

    def __post_init__(self) -> None:
        check(self, "at least 1", lambda size: size >= 1, "out")

    def build(self, made: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A linear head, and the projector under it if it has one; all averaged."""
        if self.head == "encoder":
            return {"rotation": Part(nn.Linear(dim, 4))}
        out = self.out or dim
        projector = mlp(dim, out, out, norm="batch", bias=False, out_bias=self.bias, out_norm=True)
        return {"projector": Part(projector), "rotation": Part(nn.Linear(out, 4))}

    def alone(self) -> bool:
        """No image looks at another."""
        return True

    def projections(self, views: int) -> int:
        """One of every turned image, if the head looks at them."""
        return 0 if self.head == "encoder" else 4 if self.turns == "all" else 1

    def see(self, parts: Parts, batch: Batch) -> Turned:
        """Features of the turned images, and projections if there is a projector."""
        views, turns = self.turned(batch)
        if self.head == "encoder":
            (h,) = parts.through(views, "encoder")
            return Turned(batch, h, [], turns=turns)
        h, z = parts.through(views, "encoder", "projector")
        return Turned(batch, h, z, turns=turns)

    def turned(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Turned images, each of the four turns a view, and the quarters they were turned by."""
        pictures = self._images(batch)
        if self.turns == "all":
            turns = torch.arange(4).repeat_interleave(len(pictures))
            return list(quarter_turns(pictures.repeat(4, 1, 1, 1), turns).chunk(4)), turns
        turns = torch.randint(4, (len(pictures),), generator=batch.rng)
        return [quarter_turns(pictures, turns)], turns

    def check_views(self, views: Views) -> None:
        """Refuse views that are turned already."""
        if self.augment and views.pipelines[-1].quarter_turn:
            raise ConfigError(
                "objective=rotation turns the views itself, but views.quarter_turn has turned them "
                "already: set objective.augment=false or views.quarter_turn=false"
            )

    def _images(self, batch: Batch) -> Tensor:
        """What is to be turned, (n, channels, side, side); views are made only if wanted."""
        pictures = batch.views[-1] if self.augment else batch.plain
        height, width = pictures.shape[2:]
        if height != width:
            raise ConfigError(
                f"objective=rotation needs square images but these are {height} x {width}: set "
                "views.size"
            )
        return pictures

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Cross-entropy of the predicted turns; guessing costs log 4."""
        looked_at = seen.z if self.head == "projector" else seen.h
        predicted = parts["rotation"](torch.cat(looked_at))
        return functional.cross_entropy(predicted, cast(Turned, seen).turns)
