"""Supervised learning: predict the labels, for comparison with learning without them.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017:
FedAvg as it was first published, and the upper reference of most federated self-supervised papers.
Images without a label are left out, but a client's upload is weighted by all of its images, as the
server knows no other number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.images import UNKNOWN
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, objectives
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@objectives("supervised")
@dataclass(frozen=True)
class Supervised(Objective):
    """Classification by a linear layer on the features of every view."""

    paper = "McMahan et al., 2017"
    uses_labels: ClassVar[bool] = True

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A linear classifier, averaged like the encoder."""
        return {"classifier": classifier(self, dim, world)}

    def among(self, examples: Examples) -> Tensor:
        """Images whose label is known; a client with fewer than two takes no part."""
        return (examples.host_labels() != UNKNOWN).nonzero().flatten()

    def alone(self) -> bool:
        """True: images do not depend on each other; which labels are known is public."""
        return True

    def projections(self, views: int) -> int:
        """None: the loss uses features."""
        return 0

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Features of every view; there is no projector."""
        (h,) = parts.through(batch.views, "encoder")
        return Seen(batch, h, [])

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Mean cross-entropy over all views of the images whose label is known."""
        logits = parts["classifier"](torch.cat(seen.h))
        return known_cross_entropy(logits, seen.batch.labels.repeat(len(seen.h)))


def classifier(objective: Objective, dim: int, world: World) -> Part:
    """A linear layer from features to classes; raises ConfigError if there are no classes."""
    if not world.classes:
        raise ConfigError(
            f"objective={objective.name} needs labelled images: choose data with labels, or an "
            "objective without, e.g. objective=simclr"
        )
    return Part(nn.Linear(dim, world.classes))


def known_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over known labels of -log softmax; 0, with gradient 0, if none is known.

    Args:
        logits: (n, classes).
        labels: (n,), -1 where unknown.

    >>> known_cross_entropy(torch.zeros(2, 3), torch.tensor([-1, -1])).item()
    0.0
    """
    total = functional.cross_entropy(logits, labels, ignore_index=UNKNOWN, reduction="sum")
    return total / (labels != UNKNOWN).sum().clamp(min=1)
