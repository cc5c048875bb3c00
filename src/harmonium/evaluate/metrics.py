"""Metrics of a probe's answers beside plain accuracy: balanced accuracy and AUROC.

Plain accuracy flatters where classes are unequal: always naming the commonest class may be right
most of the time. Balanced accuracy, the mean recall over classes, gives that rule one over the
number of classes; AUROC, for two classes, gives every constant rule one half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harmonium.errors import DataError

Array = np.ndarray


def balanced_accuracy(predicted: Array, labels: Array) -> float:
    """Mean recall over the classes that occur in `labels`; what is named otherwise is wrong.

    >>> balanced_accuracy(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))
    0.5
    """
    if len(labels) == 0:
        raise DataError("balanced accuracy needs at least one labelled image")
    _, columns, counts = np.unique(labels, return_inverse=True, return_counts=True)
    right = np.bincount(columns, weights=predicted == labels, minlength=len(counts))
    return float(np.mean(right / counts))


def auroc(scores: Array, positive: Array) -> float | None:
    """The area under the ROC curve: how often a positive has a higher score than a negative.

    Equal scores count one half. None where there are no positives, no negatives, or scores that
    are not numbers.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or np.isnan(scores).any():
        return None
    _, columns, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # tied scores share the mean of their places
    above = float(ranks[columns][positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


@dataclass(frozen=True)
class Answers:
    """What a probe said of the same test images, once for each draw of its labels."""

    right: Tensor  # uint8 `(draws, images)`: whether the label was named
    balanced: float  # mean over draws
    auroc: float | None  # mean over draws; none where there are not exactly two classes

    @property
    def accuracy(self) -> float:
        """Share of right answers, over all draws."""
        return float(self.right.double().mean())


def answers(draws: Sequence[tuple[Array, Array]], labels: Array) -> Answers:
    """Evaluate scores of test images, `(images, classes)`, whose columns are the sorted classes.

    The class with the highest score is named, the smallest one on a tie.

    Args:
        draws: scores and classes, one pair for each draw of what the probe knew.
        labels: of the test images, all known.
    """
    right, balanced, areas = [], [], []
    for scores, classes in draws:
        predicted = classes[scores.argmax(axis=1)]
        right.append(torch.from_numpy((predicted == labels).astype(np.uint8)))
        balanced.append(balanced_accuracy(predicted, labels))
        areas.append(_two_class_auroc(scores, classes, labels))
    known = [area for area in areas if area is not None]
    return Answers(
        torch.stack(right),
        float(np.mean(balanced)),
        float(np.mean(known)) if len(known) == len(areas) else None,
    )


def _two_class_auroc(scores: Array, classes: Array, labels: Array) -> float | None:
    """The area for the larger of two labels; none where there are more, or fewer, of them."""
    if len(classes) != 2 or len(np.union1d(classes, labels)) != 2:
        return None
    return auroc(scores[:, 1] - scores[:, 0], labels == classes[1])
