"""InfoNCE: every row of one view is classified among the rows of the other view.

van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018. Unlike in
NT-Xent, rows of the same view are not contrasted, and only one view provides the anchors. In
Federated SimCLR (Louizos et al., 2024, eq. 3 and 6) it is the second view; in FedCA (Zhang et al.,
2020, eq. 4 to 8) the first, contrasted with a dictionary of further negatives too. Neither has
released code, and the former has no BatchNorm; views share a BatchNorm pass as in SimCLR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen, objectives
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Parts

Anchors = Literal["first", "second", "both"]


@dataclass(frozen=True, kw_only=True)
class WithNegatives(Context):
    """A context with further negatives."""

    negatives: Tensor | None = None  # rows (count, out)


@objectives("infonce")
@dataclass(frozen=True)
class InfoNCE(SimCLR):
    """Contrast of two views in one direction, with further negatives where a method has some.

    A method hands negatives to the loss by a context that extends `WithNegatives`.

    >>> InfoNCE(anchors="first").temperature
    0.5
    """

    paper = "van den Oord et al., 2018"

    anchors: Anchors = "second"  # view of the anchors; first as in FedCA; both: mean of the two

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """InfoNCE of the two projections."""
        first, second = seen.pair()
        negatives = context.negatives if isinstance(context, WithNegatives) else None
        return info_nce(first, second, self.temperature, anchors=self.anchors, negatives=negatives)


def info_nce(
    first: Tensor,
    second: Tensor,
    temperature: float,
    *,
    anchors: Anchors = "second",
    negatives: Tensor | None = None,
) -> Tensor:
    """Mean over anchors of -log softmax of the partner among the other view's rows and negatives.

    Args:
        first: projections of one view, (n, dim).
        second: projections of the other view of the same images, (n, dim).
        temperature: divides the cosine similarities.
        anchors: the view whose rows are the anchors; both is the mean of the two.
        negatives: further negatives, (count, dim); they get no gradient.

    >>> same = torch.ones(4, 3)
    >>> bool(torch.isclose(info_nce(same, same, 0.5), torch.tensor(4.0).log()))
    True
    """
    if anchors == "both":
        there = info_nce(first, second, temperature, anchors="first", negatives=negatives)
        back = info_nce(first, second, temperature, anchors="second", negatives=negatives)
        return (there + back) / 2
    queries, keys = (first, second) if anchors == "first" else (second, first)
    rows = functional.normalize(keys)
    if negatives is not None:
        rows = torch.cat([rows, functional.normalize(negatives.detach().to(rows.dtype))])
    logits = functional.normalize(queries) @ rows.T / temperature
    return functional.cross_entropy(logits, torch.arange(len(queries), device=logits.device))


def bound(loss: Tensor, batch: int) -> Tensor:
    """A lower bound of the mutual information of the views, in nats: log(batch) - loss.

    It is at most log(batch).

    Args:
        loss: InfoNCE without further negatives, a scalar.
        batch: rows in that batch; a smaller last batch has another bound.

    >>> bound(torch.tensor(0.5), 1).item()
    -0.5
    """
    return math.log(batch) - loss
