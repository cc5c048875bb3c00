"""Contrast inside classes: self-supervised objectives that use the labels of some images.

Louizos et al., A Mutual Information Perspective on Federated Contrastive Learning, 2024, section
2.2, eq. 12 and algorithm 2. In every batch, images without a label are scored as the plain
objective scores them. Labelled ones are compared within their class only, class by class, and a
linear layer on the encoder's output predicts the label from both views:

    L = L(unlabelled) + sum over classes c of L(images of c) + CE(first view) + CE(second view)

Each L is a mean over its own images. With `terms=uv` this is eq. 13, whose printed version lacks
one client term. A class with one image has no negatives, so contrast would add nothing, and it is
left out. SimSiam compares images of a class with each other (section 4): all ordered pairs, or,
with `pairs: same`, the two views of each image only. A client without labels minimises the plain
objective. Views share a BatchNorm pass or not as in the plain objective; the paper's networks have
no BatchNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.data.images import UNKNOWN
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, objectives, two
from harmonium.learning.objectives.infonce import InfoNCE
from harmonium.learning.objectives.simsiam import SimSiam, negative_cosine
from harmonium.learning.objectives.spectral import Spectral
from harmonium.learning.objectives.supervised import classifier, known_cross_entropy
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

PAPER = "Louizos et al., 2024"


@dataclass(frozen=True)
class InsideClasses(Objective):
    """The base of the three variants, combined with an objective of two views."""

    uses_labels: ClassVar[bool] = True
    least: ClassVar[int] = 2  # fewest images of a class that can be compared

    def alone(self) -> bool:
        """False: images of a class are compared with each other."""
        return False

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """The plain objective's parts and a linear classifier."""
        return super().build(modules, dim, world) | {"classifier": classifier(self, dim, world)}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The plain loss of the unlabelled and of every class, and the label loss of each view."""
        labels, batch = seen.batch.labels, seen.batch
        loss = sum(
            (known_cross_entropy(parts["classifier"](h), labels) for h in seen.h),
            start=torch.zeros(()),
        )
        for label in sorted(set(batch.host_labels.tolist())):
            rows = batch.where(batch.host_labels == label)
            if len(rows) >= self.least:
                h, z, t = ([view[rows] for view in views] for views in (seen.h, seen.z, seen.t))
                within = replace(seen, h=h, z=z, t=t)
                loss = loss + self.within(parts, within, context, alike=label != UNKNOWN)
        return loss

    def within(self, parts: Parts, seen: Seen, context: Context, alike: bool) -> Tensor:
        """The plain loss of some images; `alike`: whether they are of one class."""
        return super().score(parts, seen, context)


@objectives("semi-infonce")
@dataclass(frozen=True)
class SemiInfoNCE(InsideClasses, InfoNCE):
    """SimCLR's contrast inside classes, with a label loss."""

    paper = PAPER


@objectives("semi-spectral")
@dataclass(frozen=True)
class SemiSpectral(InsideClasses, Spectral):
    """Spectral contrast inside classes, with a label loss."""

    paper = PAPER


@objectives("semi-simsiam")
@dataclass(frozen=True)
class SemiSimSiam(InsideClasses, SimSiam):
    """SimSiam between images of a class, with a label loss."""

    paper = PAPER
    least: ClassVar[int] = 1

    pairs: Literal["all", "same"] = "all"  # of a class: every ordered pair, or an image's views

    def projections(self, views: int) -> int:
        """None: `see` already computes the predictions from the projections."""
        return 0

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Predictions are computed for the whole batch, as the predictor may have BatchNorm."""
        seen = super().see(parts, batch)
        return replace(seen, t=parts.through(seen.z, "predictor")[0])

    def within(self, parts: Parts, seen: Seen, context: Context, alike: bool) -> Tensor:
        """Minus the similarity of predictions and projections, per image or over all pairs."""
        predictions, targets = two(seen.t), seen.pair()
        if alike and self.pairs == "all":
            return all_pairs(*predictions, *targets)
        return negative_cosine(*predictions, *targets)


def all_pairs(
    first_prediction: Tensor, second_prediction: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """As `negative_cosine`, but each prediction is compared with the other view of every image.

    >>> a, b = torch.eye(2), torch.eye(2).flip(0)
    >>> all_pairs(a, b, a, b).item(), negative_cosine(a, b, b, a).item()
    (-0.5, -1.0)
    """
    there, back = (
        functional.normalize(prediction).mean(0) @ functional.normalize(target.detach()).mean(0)
        for prediction, target in ((first_prediction, second), (second_prediction, first))
    )
    return -(there + back) / 2
