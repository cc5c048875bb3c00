"""Whitening: features without their mean, every principal direction at the same scale.

Cosines between features that share a large mean, or vary along few directions, say little about the
rest. Whitening needs no labels, only the first and second moments of the training features, which
are sums over images and therefore over clients.

It improves nearest neighbours. On digits, kNN on features of SimCLR (256 of them, 10
rounds) rose from 90.5 to 99.4 % with 64 directions, to 98.9 % with 32. Classifiers with few labels
lose by it, because directions of little variance come to count as much as the others: with 10
labels a class from 91.1 to 83.0 %, and to 63.6 % with all 223 directions that vary.

Directions are the leading eigenvectors of the covariance. Each is divided by the root of its
variance, shrunk towards the mean variance of those that are kept, so that directions that hardly
vary are not blown up to the size of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmonium.core.errors import DataError
from harmonium.core.threads import single_thread

DIRECTIONS = 64  # at most, where no number is given
SHRINKAGE = 0.01  # share of the mean variance that is mixed into each
RANK = 1e-9  # of the largest variance; below it a direction counts as constant
STORED = "harmonium.whitening."  # begins the names of its tensors in an encoder's file
BLOCK = 4096  # rows that are added at a time, in float64


@dataclass(frozen=True)
class Moments:
    """Sums over images: how many, their features, and the products of all pairs of features."""

    count: float
    first: Tensor  # float64 `(dim,)`
    second: Tensor  # float64 `(dim, dim)`

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.first + other.first, self.second + other.second
        )


def moments_of(features: Tensor) -> Moments:
    """The sums of features `(n, dim)`."""
    dim = features.shape[1]
    first = torch.zeros(dim, dtype=torch.float64)
    second = torch.zeros(dim, dim, dtype=torch.float64)
    with single_thread():
        for block in torch.split(features.detach().cpu(), BLOCK):
            rows = block.double()
            first += rows.sum(dim=0)
            second += rows.T @ rows
    return Moments(float(len(features)), first, second)


class Whitening(nn.Module):
    """Features `(n, dim)` to whitened ones `(n, directions)`: `(features - mean) @ matrix`."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor) -> None:
        """Take the mean `(dim,)` and the matrix `(dim, directions)` of the training features."""
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("matrix", matrix)

    @property
    def directions(self) -> int:
        """How many whitened features there are."""
        return int(self.matrix.shape[1])

    def forward(self, features: Tensor) -> Tensor:
        """Whitened features in the precision of the features, computed in float32 at least."""
        wide = features if features.dtype == torch.float64 else features.float()
        mean, matrix = self.mean.to(wide), self.matrix.to(wide)
        return ((wide - mean) @ matrix).to(features.dtype)


class WhitenedEncoder(nn.Sequential):
    """An encoder followed by the whitening of its features."""

    def __init__(self, encoder: nn.Module, white: Whitening) -> None:
        """Combine an encoder and a whitening."""
        super().__init__(encoder, white)

    @property
    def encoder(self) -> nn.Module:
        """The encoder of the plain features."""
        return self[0]

    @property
    def white(self) -> nn.Module:
        """The whitening of its features."""
        return self[1]


def whitening(
    moments: Moments, directions: int | None = None, shrinkage: float = SHRINKAGE
) -> Whitening:
    """The whitening of features with these moments.

    Args:
        moments: of the training features.
        directions: how many to keep, those with the largest variance first; none: all that
            vary, which are also the most there can be.
        shrinkage: see `SHRINKAGE`.

    >>> rows = torch.tensor([[1.0, 1.0, 5.0], [3.0, 1.0, 5.0], [1.0, 2.0, 5.0], [3.0, 2.0, 5.0]])
    >>> whiten = whitening(moments_of(rows), shrinkage=0.0)
    >>> whiten(rows).var(dim=0, correction=0).tolist()
    [1.0, 1.0]
    """
    if moments.count < 2:
        raise DataError("whitening needs the features of at least 2 images")
    if not bool(moments.first.isfinite().all() and moments.second.isfinite().all()):
        raise DataError("the features to whiten are not finite numbers: the encoder has diverged")
    with single_thread():
        mean = moments.first / moments.count
        covariance = moments.second / moments.count - torch.outer(mean, mean)
        variances, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    variances, vectors = variances.flip(0), vectors.flip(1)
    # The difference of large sums leaves rounding, in proportion to the squared mean.
    least = RANK * float(variances[0].clamp_min(0) + mean.square().sum() * 1e-3)
    rank = int((variances > least).sum())
    if not rank:
        raise DataError("all images have the same features: there is nothing to whiten")
    rank = rank if directions is None else min(rank, directions)
    variances, vectors = variances[:rank], vectors[:, :rank]
    # An eigenvector's sign is arbitrary: its largest entry is made positive.
    largest = vectors.abs().argmax(dim=0)
    vectors = vectors * vectors[largest, torch.arange(rank)].sign()
    shrunk = (1 - shrinkage) * variances + shrinkage * variances.mean()
    return Whitening(mean.float(), (vectors / shrunk.sqrt()).float().contiguous())
