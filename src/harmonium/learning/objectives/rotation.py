"""Rotation prediction: classify by how many quarter turns an image was rotated.

Gidaris et al., Unsupervised Representation Learning by Predicting Image Rotations, 2018. Two
federated systems have it as a baseline: FedCA's (FedPR; all four turns of each image, a linear
head on the features) is the default; Orchestra's (RotPred) is `turns: one, head: projector`, one
random turn of each unaugmented image, and a linear head on the projector's output. Orchestra itself
adds this task to its own loss, on images or on views. The original code passes the four turns of a
batch together, so they share BatchNorm statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_device
from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views, quarter_turns
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@dataclass(kw_only=True)
class Turned(Seen):
    """The model's outputs for turned images; with all four turns, each turn is a view."""

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
    head: Literal["encoder", "projector"] = "encoder"  # input of the linear head
    augment: bool = False  # turn the last view instead of the image itself
    out: int | None = None  # width of the projector, if the head needs one; none: the encoder's
    bias: bool = True  # in the projector's last layer; false in Orchestra, but not in RotPred

    def __post_init__(self) -> None:
        check(self, "at least 1", lambda size: size >= 1, "out")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A linear head, and the projector before it if there is one; all are averaged."""
        if self.head == "encoder":
            return {"rotation": Part(nn.Linear(dim, 4))}
        out = self.out or dim
        projector = mlp(dim, out, out, norm="batch", bias=False, out_bias=self.bias, out_norm=True)
        return {"projector": Part(projector), "rotation": Part(nn.Linear(out, 4))}

    def alone(self) -> bool:
        """True: the loss of an image does not depend on other images."""
        return True

    def projections(self, views: int) -> int:
        """One for every turned image, if the head is on the projector."""
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
        """Turned images, one view for each turn, and their numbers of quarter turns."""
        images = self._images(batch)
        if self.turns == "all":
            turns = torch.arange(4).repeat_interleave(len(images))
            turned = list(quarter_turns(images.repeat(4, 1, 1, 1), turns).chunk(4))
        else:
            turns = torch.randint(4, (len(images),), generator=batch.rng)
            turned = [quarter_turns(images, turns)]
        return turned, to_device(turns, images.device)

    def check_views(self, views: Views) -> None:
        """Refuse views that are turned already."""
        if self.augment and views.pipelines[-1].quarter_turn:
            raise ConfigError(
                "objective=rotation turns the views itself, but views.quarter_turn has turned them "
                "already: set objective.augment=false or views.quarter_turn=false"
            )

    def _images(self, batch: Batch) -> Tensor:
        """The images to turn, (n, channels, side, side); views are made only if needed."""
        images = batch.views[-1] if self.augment else batch.plain
        height, width = images.shape[2:]
        if height != width:
            raise ConfigError(
                f"objective=rotation needs square images but these are {height} x {width}: set "
                "views.size"
            )
        return images

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Cross-entropy of the predicted turns; chance level is log 4."""
        inputs = seen.z if self.head == "projector" else seen.h
        predicted = parts["rotation"](torch.cat(inputs))
        return functional.cross_entropy(predicted, cast(Turned, seen).turns)
