"""Figures of a classifier from counts alone, which sites can send and add up.

A confusion matrix gives accuracy and balanced accuracy exactly. For AUROC, the scores of each class
are counted in a few bins, those of its own images apart from those of all others. Two images in one
bin count as a tie, so the area is off by at most half the share of pairs that share a bin, which
the counts themselves tell: `auroc_of` returns that bound beside the area.

Ridge regression needs means over images only, of features, of their products and of the features of
each class. Means over sites, weighted by images, therefore give the classifier that the images of
all sites in one place would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.data.images import Integers
from harmonium.evaluation.linear import RIDGE_STRENGTH, Array
from harmonium.evaluation.whitening import moments_of
from harmonium.learning.symmetric import positive, triangle, unpack, upper_triangle

LOGITS = 4.0  # log-odds that the bins of a probability give as much room as the middle
LOW, HIGH = -0.5, 1.5  # ends of the bins of ridge scores, which are near 0 or 1
CONSTANT = 1e-5  # of the largest deviation; features that vary less count as constant
CLOSE = 1e-6  # by which means may be off, relative to their size


# ---- counts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What is known of a classifier's answers to some images."""

    confusion: Tensor  # int64 (classes, classes): images by true and by predicted class
    scores: Tensor  # int64 (classes, 2, bins): for each class, other images and its own, by score

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.confusion + other.confusion, self.scores + other.scores)

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.confusion.sum())


def counts_of(predicted: Integers, shares: Array, labels: Integers, bins: int) -> Counts:
    """Counts of the answers to some images.

    Args:
        predicted: classes `(images,)`.
        shares: from 0 to 1 `(images, classes)`, higher for a class that is more likely.
        labels: the true classes `(images,)`.
        bins: of equal width between 0 and 1; 0: scores are not counted.

    >>> shares = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> counts = counts_of(shares.argmax(axis=1), shares, np.array([0, 1, 1]), 2)
    >>> counts.confusion.tolist(), counts.scores[1].tolist()
    ([[1, 0], [1, 1]], [[1, 0], [1, 1]])
    """
    classes = shares.shape[1]
    pairs = labels * classes + predicted
    confusion = np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    scores = np.zeros((classes, 2, bins), np.int64)
    if bins:
        places = np.clip((shares * bins).astype(np.int64), 0, bins - 1)
        for number in range(classes):
            rows = (labels == number) * bins + places[:, number]
            scores[number] = np.bincount(rows, minlength=2 * bins).reshape(2, bins)
    return Counts(torch.from_numpy(confusion.astype(np.int64)), torch.from_numpy(scores))


def counts_fault(counts: Counts, images: float, least: int) -> str | None:
    """Why these cannot be the counts of so many images; none if they can.

    Args:
        counts: of the declared shapes.
        images: the number that was stated with them.
        least: fewest images of a class that occurs.
    """
    confusion, scores = counts.confusion, counts.scores
    for name, table in (("confusion", confusion), ("scores", scores)):
        if table.numel() and int(table.min()) < 0:
            return f"`{name}` has a negative count"
    if counts.images != images:
        return f"`confusion` counts {counts.images} images, but `images` is {images:g}"
    of_class = confusion.sum(dim=1)
    if few := [int(count) for count in of_class if 0 < count < least]:
        return f"`confusion` counts {few[0]} images of a class, fewer than {least}"
    if scores.shape[2]:
        both = torch.stack([counts.images - of_class, of_class], dim=1)
        if not torch.equal(scores.sum(dim=2), both):
            return "`scores` does not count the images of `confusion`"
    return None


# ---- figures -----------------------------------------------------------------------------------


def figures_of(counts: Counts) -> dict[str, Any]:
    """Accuracy, balanced accuracy and AUROC, and what naming the commonest class reaches.

    AUROC is that of the larger class where there are two, else the mean over classes of each
    against all others; `auroc_error` is the most by which bins can have changed it. Both are none
    where no class has scores, or only one class occurs.

    >>> shares = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> counts = counts_of(shares.argmax(axis=1), shares, np.array([0, 1, 1]), 4)
    >>> {key: round(value, 2) for key, value in figures_of(counts).items()}
    {'images': 3, 'accuracy': 0.67, 'commonest': 0.67, 'balanced': 0.75, 'auroc': 1.0, \
'auroc_error': 0.0}
    """
    confusion, images = counts.confusion.double(), counts.images
    of_class = confusion.sum(dim=1)
    there = of_class > 0
    recalls = confusion.diagonal()[there] / of_class[there]
    classes = range(1, 2) if len(confusion) == 2 else range(len(confusion))
    areas = [area for one in classes if (area := auroc_of(counts.scores[one])) is not None]
    return {
        "images": images,
        "accuracy": float(confusion.trace() / images),
        "commonest": float(of_class.max() / images),
        "balanced": float(recalls.mean()),
        "auroc": float(np.mean([area for area, _ in areas])) if areas else None,
        "auroc_error": float(np.mean([error for _, error in areas])) if areas else None,
    }


def auroc_of(scores: Tensor) -> tuple[float, float] | None:
    """The area under the ROC curve from counts by bin, and the most by which it can be off.

    Every pair of images in different bins is in the right order. Those that share a bin count one
    half each, and could all be right or all be wrong. None without images of both kinds.

    >>> auroc_of(torch.tensor([[2, 2, 0], [0, 2, 4]]))
    (0.9166666666666666, 0.08333333333333333)
    """
    others, own = scores.double()
    pairs = float(others.sum() * own.sum())
    if not pairs:
        return None
    below = others.cumsum(0) - others
    tied = float(own @ others)
    return (float(own @ below) + tied / 2) / pairs, tied / 2 / pairs


# ---- shares ------------------------------------------------------------------------------------


def shares_of_logits(logits: Array) -> Array:
    """Shares for the bins from the outputs of a logistic regression `(images, classes)`.

    They rank images as the probability of each class does, but give as much room to the many
    probabilities near 0 and 1 as to those between.
    """
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True)
    # Log-odds: of a class that takes almost all, the others' share is what is left beside it.
    others = np.maximum(total - np.exp(shifted), np.finfo(np.float64).tiny)
    odds = (shifted - np.log(others)) / LOGITS
    return np.asarray(1 / (1 + np.exp(-np.clip(odds, -50, 50))))


def shares_of_ridge(scores: Array) -> Array:
    """Shares for the bins from the scores of a ridge regression on one-hot labels."""
    return np.asarray(np.clip((scores - LOW) / (HIGH - LOW), 0, 1))


# ---- ridge regression from means ---------------------------------------------------------------


def class_means(features: Tensor, labels: Integers, classes: int) -> dict[str, Tensor]:
    """The means over images that ridge regression needs, in double precision.

    `first` of features, `second` of their products (each pair once), `cross` of the features of
    each class, the others' counting as 0, and `shares` of the classes.
    """
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(labels), classes).double()
    sums, count = moments_of(features), len(features)
    return {
        "first": sums.first / count,
        "second": upper_triangle(sums.second / count),
        "cross": one_hot.T @ features.detach().cpu().double() / count,
        "shares": one_hot.mean(dim=0),
    }


def means_fault(means: Mapping[str, Tensor], images: float, least: int) -> str | None:
    """Why these cannot be the means over so many labelled images; none if they can."""
    shares, first = means["shares"], means["first"]
    of_class = shares * images
    if not bool(((of_class - of_class.round()).abs() <= CLOSE * max(1.0, images)).all()):
        return "`shares` are not those of whole images"
    counted = of_class.round()
    if bool((counted < 0).any()) or int(counted.sum()) != images:
        return f"`shares` do not add up to the {images:g} `images`"
    if few := [int(count) for count in counted if 0 < count < least]:
        return f"`shares` have {few[0]} images of a class, fewer than {least}"
    size = float(first.abs().max()) if len(first) else 0.0
    if bool(((means["cross"].sum(dim=0) - first).abs() > CLOSE * max(1.0, size)).any()):
        return "`cross` does not add up to `first`"
    squares = unpack(means["second"], len(first)).diagonal()
    if bool((squares < first.square() * (1 - CLOSE) - CLOSE).any()):
        return "`second` has a variance below 0"
    return None


@dataclass(frozen=True)
class Ridge:
    """A linear classifier of standardised features."""

    weights: Tensor  # float64 (classes + 2, dim + 1): mean, deviation, then a row for each class

    @classmethod
    def fit(cls, means: Mapping[str, Tensor], strength: float = RIDGE_STRENGTH) -> Ridge:
        """Least squares on one-hot labels, from the means of `class_means` over all images.

        `strength` is the penalty on half the squared weights of standardised features.
        """
        first, shares = means["first"].double(), means["shares"].double()
        covariance = unpack(means["second"].double(), len(first)) - torch.outer(first, first)
        scale = covariance.diagonal().clamp_min(0).sqrt()
        scale = torch.where(scale > CONSTANT * scale.max(), scale, torch.ones_like(scale))
        gram = covariance / torch.outer(scale, scale)
        moment = (means["cross"].double() - torch.outer(shares, first)) / scale
        penalty = strength * torch.eye(len(first), dtype=torch.float64)
        root, failed = torch.linalg.cholesky_ex(gram + penalty)
        if failed:  # rounding of a sum, or false numbers of a site
            root = torch.linalg.cholesky(positive(gram) + penalty)
        slopes = torch.cholesky_solve(moment.T, root).T
        rows = [torch.cat([row, row.new_zeros(1)]) for row in (first, scale)]
        return cls(torch.cat([torch.stack(rows), torch.cat([slopes, shares[:, None]], 1)]))

    def scores(self, features: Tensor) -> Array:
        """Scores `(images, classes)` of features, near 1 for the class of an image."""
        shift, scale = self.weights[:2, :-1]
        rows = (features.detach().cpu().double() - shift) / scale
        slopes, shares = self.weights[2:, :-1], self.weights[2:, -1]
        return np.asarray((rows @ slopes.T + shares).numpy())


def ridge_shape(dim: int, classes: int) -> tuple[int, int]:
    """The shape of a ridge classifier's tensor."""
    return classes + 2, dim + 1


def means_shapes(dim: int, classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the means of `class_means`."""
    return {
        "first": (dim,),
        "second": (triangle(dim),),
        "cross": (classes, dim),
        "shares": (classes,),
    }


# ---- held-out images ---------------------------------------------------------------------------


def held_out(
    labels: Integers, groups: Integers | None, share: float, rng: np.random.Generator
) -> Integers:
    """Sorted positions of the images to test on: a share of each class, or of whole groups.

    Images of one group, such as those of a patient, stay together; -1 is no group. Images of
    unknown class are never chosen, nor are all images of a class or all groups.

    >>> rng = np.random.default_rng(0)
    >>> held_out(np.array([0, 0, 0, 0, 1, 1, -1]), None, 0.5, rng).shape
    (3,)
    >>> rows = held_out(np.array([0, 1, 0, 1]), np.array([7, 7, 9, 9]), 0.5, rng)
    >>> rows.tolist() in ([0, 1], [2, 3])
    True
    """
    known = np.flatnonzero(labels >= 0)
    if groups is None or bool((groups[known] < 0).all()):
        chosen = [np.empty(0, np.int64)]
        for number in np.unique(labels[known]):
            rows = rng.permutation(np.flatnonzero(labels == number))
            chosen.append(rows[: min(len(rows) - 1, max(1, round(share * len(rows))))])
        return np.sort(np.concatenate(chosen))
    of_image = groups[known].copy()
    nobody = of_image < 0
    of_image[nobody] = of_image.max(initial=0) + 1 + np.arange(nobody.sum())
    names, sizes = np.unique(of_image, return_counts=True)
    order = rng.permutation(len(names))[: max(0, len(names) - 1)]
    before = np.cumsum(sizes[order]) - sizes[order]
    return np.asarray(known[np.isin(of_image, names[order[before < share * len(known)]])])


def at_least(labels: Integers, rows: Integers, least: int) -> Integers:
    """Those of the positions whose class has at least so many of them.

    >>> at_least(np.array([0, 0, 1, -1]), np.array([0, 1, 2, 3]), 2).tolist()
    [0, 1]
    """
    classes, counts = np.unique(labels[rows], return_counts=True)
    enough = classes[(counts >= least) & (classes >= 0)]
    return np.asarray(rows[np.isin(labels[rows], enough)])
