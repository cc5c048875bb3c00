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

from harmonium.core.errors import DataError

Array = np.ndarray


def balanced_accuracy(predicted: Array, labels: Array, weights: Array | None = None) -> float:
    """Mean recall over the classes that occur in `labels`; other predictions count as wrong.

    With `weights` above 0, one for each image, each recall is a weighted mean. Classes count alike
    all the same.

    >>> balanced_accuracy(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))
    0.5
    """
    if len(labels) == 0:
        raise DataError("balanced accuracy needs at least one labelled image")
    weights = np.ones(len(labels)) if weights is None else weights
    _, columns = np.unique(labels, return_inverse=True)
    right = np.bincount(columns, weights=weights * (predicted == labels))
    return float(np.mean(right / np.bincount(columns, weights=weights)))


def auroc(scores: Array, positive: Array, weights: Array | None = None) -> float | None:
    """The area under the ROC curve: how often a positive has a higher score than a negative.

    Equal scores count one half, and a pair of images the product of their `weights`. None where
    there are no positives, no negatives, or scores that are not numbers.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    if positive.all() or not positive.any() or np.isnan(scores).any():
        return None
    weights = np.ones(len(scores)) if weights is None else weights
    positives, negatives = weights * positive, weights * ~positive
    _, columns = np.unique(scores, return_inverse=True)
    tied = np.bincount(columns, weights=negatives)  # negatives with the same score
    below = np.cumsum(tied) - tied / 2
    return float(positives @ below[columns] / (positives.sum() * negatives.sum()))


@dataclass(frozen=True)
class Answers:
    """A probe's predictions on the same test images, once for each draw of its labels."""

    right: Tensor  # uint8 `(draws, images)`: whether the prediction was right
    balanced: float  # mean over draws
    auroc: float | None  # mean over draws; none where there are not exactly two classes

    @property
    def accuracy(self) -> float:
        """Share of right answers, over all draws."""
        return float(self.right.double().mean())


def answers(
    draws: Sequence[tuple[Array, Array]], labels: Array, weights: Array | None = None
) -> Answers:
    """Evaluate scores of test images, `(images, classes)`, whose columns are the sorted classes.

    The class with the highest score is predicted, the smallest one on a tie.

    Args:
        draws: scores and classes, one pair for each draw of what the probe knew.
        labels: of the test images, all known.
        weights: what each test image counts in balanced accuracy and AUROC; none: all alike.
    """
    right, balanced, areas = [], [], []
    for scores, classes in draws:
        predicted = classes[scores.argmax(axis=1)]
        right.append(torch.from_numpy((predicted == labels).astype(np.uint8)))
        balanced.append(balanced_accuracy(predicted, labels, weights))
        areas.append(_two_class_auroc(scores, classes, labels, weights))
    known = [area for area in areas if area is not None]
    return Answers(
        torch.stack(right),
        float(np.mean(balanced)),
        float(np.mean(known)) if len(known) == len(areas) else None,
    )


def commonest_class(known: Array, labels: Array, weights: Array | None = None) -> Answers:
    """The answers of always predicting the commonest of the `known` labels, the smallest on a tie.

    >>> constant = commonest_class(np.array([3, 3, 8]), np.array([3, 8, 8, 8]))
    >>> constant.accuracy, constant.balanced, constant.auroc
    (0.25, 0.5, 0.5)
    """
    classes, counts = np.unique(known, return_counts=True)
    return answers(
        [(np.broadcast_to(counts, (len(labels), len(counts))), classes)], labels, weights
    )


def _two_class_auroc(
    scores: Array, classes: Array, labels: Array, weights: Array | None
) -> float | None:
    """The area for the larger of two labels; none where there are more, or fewer, of them.

    A probe that knows only one of the two classes scores all images alike.
    """
    both = np.union1d(classes, labels)
    if len(both) != 2:
        return None
    margin = scores[:, 1] - scores[:, 0] if len(classes) == 2 else np.zeros(len(labels))
    return auroc(margin, labels == both[1], weights)
