"""How far groups lie apart, from sums alone: a one-way analysis of variance in many dimensions.

The figure is the Hotelling-Lawley trace minus its expectation under equal means. It is an
unbiased estimate of the groups' mean squared distance from the mean of all, counted in standard
deviations within a group: sum over groups of n_k (m_k - m)' V^-1 (m_k - m) / N. With few images
only the directions of most variance are used; their variance is overestimated, so the figure is
slightly too low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harmonium.core.devices import to_double
from harmonium.core.errors import DataError
from harmonium.learning.symmetric import upper_triangle

IMAGES_PER_DIRECTION = 10  # with fewer, the covariance within groups is not known well enough
LEAST_VARIANCE = 1e-4  # directions with less, beside the largest, are rounding errors or repeats


@dataclass(frozen=True)
class Sums:
    """Sums over groups, which are all that is known of them."""

    groups: int
    images: int
    total: Tensor  # (d,) sum of all vectors
    within: Tensor  # (d, d) sum over groups of the scatter around the group's own mean
    between: Tensor  # (d, d) sum over groups of n m m'

    def part(self, where: slice) -> Sums:
        """The same sums of some of the dimensions."""
        return Sums(
            self.groups,
            self.images,
            self.total[where],
            self.within[where, where],
            self.between[where, where],
        )


@dataclass(frozen=True)
class Spread:
    """How far groups lie apart."""

    distance: float  # mean squared, in variances within a group; unbiased, so it may be below 0
    error: float  # its standard error
    score: float  # how unlikely by chance: standard deviations of a normal distribution
    directions: int  # dimensions that were used
    width: float = 1.0  # variance within groups along the distance; 1 is that of all directions


def group_sums(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one group contributes: total, and the packed scatters within and of its mean.

    Args:
        rows: one vector an image, `(n, d)`.

    >>> total, within, between = group_sums(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> total.tolist(), within.tolist(), between.tolist()
    ([4.0, 0.0], [2.0, 0.0, 0.0], [8.0, 0.0, 0.0])
    """
    exact = to_double(rows)
    mean = exact.mean(0)
    around = exact - mean
    between = len(rows) * torch.outer(mean, mean)
    return exact.sum(0), upper_triangle(around.T @ around), upper_triangle(between)


def spread(sums: Sums) -> Spread:
    """How far the groups lie apart, along the directions of most variance within groups.

    >>> rows = torch.tensor([[0.0], [1.0]]).repeat(50, 1)  # of each group: variance about 1/4
    >>> groups = [group_sums(rows + step) for step in (0.0, 1.0)]
    >>> total, within, between = (sum(parts) for parts in zip(*groups))
    >>> apart = spread(Sums(2, 200, total, within.reshape(1, 1), between.reshape(1, 1)))
    >>> round(apart.distance, 2), apart.score > 10  # each mean lies 1/2 from the mean of all
    (0.97, True)
    """
    if sums.groups < 2:
        raise DataError("how clients differ needs at least 2 clients that answer")
    free = sums.images - sums.groups  # degrees of freedom of the covariance within groups
    if free < 2 * IMAGES_PER_DIRECTION:
        raise DataError(
            f"{sums.images} images of {sums.groups} clients are too few to compare clients: "
            f"at least {sums.groups + 2 * IMAGES_PER_DIRECTION} are needed"
        )
    mean = sums.total / sums.images
    between = sums.between - sums.images * torch.outer(mean, mean)
    axes, variances = _axes(sums.within, free // IMAGES_PER_DIRECTION)
    size, ways = axes.shape[1], sums.groups - 1
    if size == 0:
        return Spread(0.0, 0.0, 0.0, 0, 0.0)
    # Expectation and variance if all means are equal (Gaussian vectors, covariance estimated).
    along = (axes.T @ between @ axes).diagonal() * (free - size - 1)
    trace, expected = float(along.sum()), size * ways
    # The factor by which estimating the covariance increases the variance.
    inflation = (free - 1) * (free + ways - size - 1) / ((free - size) * (free - size - 3))
    variance = 2 * expected * inflation
    distance = (trace - expected) / sums.images
    # Where means differ, the error grows: by their distance, and by the covariance's own error.
    excess = max(trace - expected, 0.0)
    error = math.sqrt(variance + 4 * excess + 2 * excess**2 / free) / sums.images
    wide = float(((along - ways) * variances).sum() / variances.mean())
    width = wide / excess if excess and wide > 0 else 0.0
    return Spread(distance, error, _score(trace, expected, variance), size, width)


def _axes(within: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` directions, those of most variance when every dimension counts alike.

    Returns:
        The directions, scaled so that the scatter within groups is 1, `(d, size)`; and the
        variance of each before that, `(size,)`.
    """
    deviations = within.diagonal().clamp(min=0).sqrt()
    varies = deviations > 1e-7 * deviations.max()
    scale = torch.where(varies, deviations.reciprocal(), 0.0)
    values, vectors = torch.linalg.eigh(within * scale * scale[:, None])
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > LEAST_VARIANCE * values[0].clamp(min=1e-300)).sum())
    size = min(rank, most)
    return scale[:, None] * vectors[:, :size] / values[:size].sqrt(), values[:size]


def _score(trace: float, expected: float, variance: float) -> float:
    """A sum of squares as a normal deviate: the cube root of Wilson and Hilferty, 1931."""
    freedom = 2 * expected**2 / variance
    unit = 2 / (9 * freedom)
    return (math.cbrt(trace / expected) - (1 - unit)) / math.sqrt(unit)
