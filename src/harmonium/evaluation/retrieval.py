"""Retrieval: does an image find others of its class among its nearest by cosine?

Every query ranks all other images. Precision at k is the share of its class among the first k;
average precision is the mean, over all images of its class, of the precision at the place where
each is found. Both have a chance level, its expectation for a random ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import DataError
from harmonium.core.threads import single_thread

CHUNK = 500  # queries at a time


@dataclass(frozen=True)
class Retrieval:
    """Means over queries; shares between 0 and 1."""

    precision: dict[int, float]  # by k
    precision_chance: float  # the same for every k
    average: float  # mean average precision
    average_chance: float
    queries: int  # that have at least one other image of their class
    gallery: int  # images that are ranked


def retrieve(
    features: Tensor, labels: Tensor, queries: Tensor, at: Sequence[int] = (1, 5, 10)
) -> Retrieval:
    """How well rows of features find others with their label.

    Args:
        features: `(n, dim)`.
        labels: `(n,)`, all known.
        queries: positions of the rows that ask; each is left out of its own ranking.
        at: values of k; more than there are images means all of them.

    >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> retrieve(rows, torch.tensor([0, 0, 1, 1]), torch.arange(4), [1]).precision
    {1: 1.0}
    """
    counts = torch.bincount(labels)
    relevant = counts[labels] - 1  # images that each row could find
    queries = queries[relevant[queries] > 0]
    others = len(labels) - 1
    if not len(queries):
        raise DataError("retrieval needs at least 2 images of one class; there are none")
    unit = functional.normalize(features.double())
    places = torch.arange(1, others + 1, dtype=torch.float64)
    precision, average = dict.fromkeys(at, 0.0), 0.0
    with single_thread():
        for some in torch.split(queries, CHUNK):
            order = nearest(unit, some, others)
            alike = (labels[order] == labels[some][:, None]).double()
            precisions = alike.cumsum(1) / places
            for k in precision:
                precision[k] += float(precisions[:, min(k, others) - 1].sum())
            average += float(((precisions * alike).sum(1) / relevant[some]).sum())
    share = (relevant[queries].double() / others).numpy()
    return Retrieval(
        precision={k: value / len(queries) for k, value in precision.items()},
        precision_chance=float(share.mean()),
        average=average / len(queries),
        average_chance=float(
            np.mean([chance_precision(int(r), others) for r in relevant[queries].tolist()])
        ),
        queries=len(queries),
        gallery=others + 1,
    )


def nearest(unit: Tensor, some: Tensor, count: int) -> Tensor:
    """The `count` nearest other rows of some rows by cosine, nearest first, ties by their place."""
    alike = unit[some] @ unit.T
    alike[torch.arange(len(some)), some] = -torch.inf
    return alike.sort(dim=1, descending=True, stable=True).indices[:, :count]


def chance_precision(relevant: int, others: int) -> float:
    """The expected average precision of a random ranking.

    The image at place k is relevant with probability R/N; then the k - 1 places before it hold
    (k - 1)(R - 1)/(N - 1) relevant ones on average.

    >>> chance_precision(3, 3), round(chance_precision(1, 2), 3)
    (1.0, 0.75)
    """
    if others == 1:
        return 1.0
    harmonic = float((1 / np.arange(1, others + 1)).sum())
    return (harmonic + (others - harmonic) * (relevant - 1) / (others - 1)) / others
