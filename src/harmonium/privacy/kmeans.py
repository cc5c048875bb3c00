"""Private clustering at a client: centroids of its images' representations, with noise.

After Chang, Ghazi, Kumar and Manurangsi, Locally Private k-Means in One Round, 2021, in the form
for a client with many rows. Random hyperplanes sort rows into a tree of prefixes; noisy counts
decide where it branches; a noisy sum over each leaf gives a point; k-means over the weighted points
is post-processing and spends no further privacy.

It protects each image of one client against anyone who sees this release, for one image more or
less. It is not local differential privacy, in which each image would carry its own noise. The
(epsilon, delta) is that of one release, and a run has many: at a delta of 1e-3, releases at epsilon
0.8, 1 and 10 add up to 9.0, 11.6 and 205 after fifty and to 14.5, 18.9 and 382 after 101. For one
image in another's place the totals are more than twice as large (`privacy.budget.epsilon`).

The noise of a leaf's mean has norm a sqrt(columns) radius / images, and that of a count a standard
deviation of 28 a, where a is 3.2, 2.6 and 0.42 at those epsilons. With a few hundred images and an
epsilon of at most 1 the noise is as large as the signal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import scipy  # loads its submodules on first use
import torch
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.privacy.budget import epsilon as spent
from harmonium.privacy.mechanisms import Noise, Randomness, Release

DEPTH = 20  # the largest number of hyperplanes that rows are sorted by
COUNTS = 20  # scale of the counts' noise over the deviation of the sums' noise at a radius of 1
SWEEPS = 20  # the largest number of Lloyd iterations


@dataclass(frozen=True)
class Leaf:
    """A part of the rows and its noisy count."""

    index: Tensor
    count: int


def private_centroids(
    rows: Tensor,
    k: int,
    *,
    epsilon: float,
    delta: float,
    noise: Noise,
    rng: torch.Generator,
    radius: float = 1.0,
    dims: int | None = None,
    depth: int = DEPTH,
) -> tuple[Tensor, list[Release]]:
    """At most `k` private centroids of rows, and the records to pass to `Client.released`.

    Args:
        rows: one for each image, (n, columns), a function of that image alone; rows longer than
            `radius` are clipped to it, and entries that are not finite become zero.
        k: the largest number of centroids; there are fewer if the tree has fewer leaves.
        epsilon: of this release alone, for one row more or less; inf: no noise, no protection.
        delta: of this release alone.
        noise: source of the privacy noise.
        rng: draws that protect nothing: hyperplanes and initial centroids.
        radius: the norm that rows are clipped to.
        dims: columns after projection by a public random matrix; none: all. Noise falls with
            their square root, but centroids then lie in a subspace of that many dimensions,
            where their cosine with whole rows is at most about sqrt(dims / columns).
        depth: the largest number of hyperplanes. With fewer, each gets more of epsilon.

    Returns:
        Centroids, (at most k, columns), of norm at most `radius`, and the releases.
    """
    _check(k, radius, dims, depth)
    a = 0.0 if epsilon == math.inf else multiplier(epsilon, delta, depth)
    records = releases("", a, radius, depth, noise.source)
    projection = (
        None if dims is None or dims >= rows.shape[1] else public_matrix(rows.shape[1], dims)
    )
    points = rows.detach().double().nan_to_num(0.0, 0.0, 0.0)
    if projection is not None:
        points = math.sqrt(len(projection) / projection.shape[1]) * points @ projection
    points = clipped(points, radius)
    leaves = tree(points, k, a, noise, rng, depth)
    sums = torch.stack([points[leaf.index].sum(0) for leaf in leaves])
    weights = torch.tensor([max(1, leaf.count) for leaf in leaves], dtype=torch.float64)
    means = clipped(noise.gaussian(sums, a * radius) / weights[:, None], radius)
    centroids = weighted_kmeans(means, weights, k, rng)
    if projection is not None:
        centroids = centroids @ projection.T
    return centroids.to(rows.dtype), records


def releases(
    field: str,
    a: float,
    radius: float = 1.0,
    depth: int = DEPTH,
    source: Randomness = "system",
) -> list[Release]:
    """The releases behind a set of centroids at noise multiplier `a`: of sums and of counts."""
    return [
        Release(field, "gaussian", radius, a * radius, source, 1, "add-remove"),
        Release(field, "discrete-laplace", 1, COUNTS * a, source, depth + 1, "add-remove"),
    ]


@lru_cache(maxsize=64)
def multiplier(epsilon: float, delta: float, depth: int = DEPTH) -> float:
    """The least noise of sums, in radii, that keeps one release within (epsilon, delta).

    The counts of each level have discrete Laplace noise of `COUNTS` times this scale.

    >>> [round(multiplier(epsilon, 1e-3), 3) for epsilon in (0.8, 1.0, 10.0)]
    [3.186, 2.641, 0.417]
    """
    if epsilon == math.inf:
        return 0.0
    if not epsilon > 0:
        raise ConfigError(f"epsilon is {epsilon}; it must be above 0, e.g. 1, or inf for no noise")
    common = {"sensitivity": 1, "neighbours": "add-remove"}
    counts = {"mechanism": "discrete-laplace", "count": depth + 1, **common}

    def excess(log_a: float) -> float:
        a = math.exp(log_a)
        return spent([{"scale": a, **common}, {"scale": COUNTS * a, **counts}], delta) - epsilon

    low = high = 0.0
    while excess(high) > 0:
        high += 1
    while excess(low) <= 0:
        low -= 1
    least = math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-10)) * (1 + 1e-9)
    return least if excess(math.log(least)) <= 0 else least * (1 + 1e-6)  # safe from rounding


def public_matrix(columns: int, dims: int) -> Tensor:
    """The same orthonormal directions for everyone, (columns, dims), drawn without any data."""
    rng = seeds.torch_rng(0, "private-centroids", columns, dims)
    draws = torch.randn(columns, dims, generator=rng, dtype=torch.float64)
    matrix: Tensor = torch.linalg.qr(draws).Q
    return matrix


def clipped(rows: Tensor, radius: float) -> Tensor:
    """Rows clipped to a norm of at most `radius`."""
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows * (radius / lengths.clamp(min=radius))


def tree(
    points: Tensor, k: int, a: float, noise: Noise, rng: torch.Generator, depth: int
) -> list[Leaf]:
    """Split points by random hyperplanes while the noisy counts are large enough.

    A part is split if its count is at least three times the least count. A half below the least
    count is dropped, because its mean would be mostly noise; if both are, the part stays whole.
    The least count keeps a mean's noise to a tenth of the radius unless that would leave fewer
    than 2k parts. A point is in one part of each level, so each level is one release of
    sensitivity 1.
    """
    planes = torch.randn(depth, points.shape[1], generator=rng, dtype=torch.float64)
    sides = points @ planes.T >= 0
    everyone = torch.arange(len(points))
    (root,) = _counted([everyone], COUNTS * a, noise)
    least = int(10 * math.sqrt(points.shape[1]) * a)
    least = max(1, min(least, root.count // (2 * k)))
    leaves, waiting = [], [root]
    for level in range(depth):
        branching = [part for part in waiting if part.count >= 3 * least]
        leaves += [part for part in waiting if part.count < 3 * least]
        if not branching:
            return leaves
        halves = []
        for part in branching:
            side = sides[part.index, level]
            halves += [part.index[~side], part.index[side]]
        counted = _counted(halves, COUNTS * a, noise)
        waiting = []
        for part, left, right in zip(branching, counted[::2], counted[1::2], strict=True):
            large = [half for half in (left, right) if half.count >= least]
            waiting += large
            leaves += [] if large else [part]
    return leaves + waiting


def weighted_kmeans(points: Tensor, weights: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """Weighted k-means: Lloyd's algorithm, initialised by k-means++.

    There are fewer than `k` centroids if there are fewer distinct points.

    >>> some = torch.tensor([[0.0], [1.0], [9.0], [9.0]])
    >>> weights = torch.tensor([3.0, 1.0, 1.0, 1.0])
    >>> weighted_kmeans(some, weights, 2, torch.Generator()).sort(0).values.tolist()
    [[0.25], [9.0]]
    """
    chosen = points[torch.multinomial(weights, 1, generator=rng)]
    while len(chosen) < k:
        away = weights * _distances(points, chosen).square().min(1).values
        if not away.sum() > 0:
            break
        chosen = torch.cat([chosen, points[torch.multinomial(away, 1, generator=rng)]])
    nearest = torch.full((len(points),), -1)
    for _ in range(SWEEPS):
        before, nearest = nearest, _distances(points, chosen).argmin(1)
        if torch.equal(before, nearest):
            break
        mass = torch.zeros(len(chosen), dtype=points.dtype).index_add(0, nearest, weights)
        total = torch.zeros_like(chosen).index_add(0, nearest, weights[:, None] * points)
        chosen = torch.where(mass[:, None] > 0, total / mass.clamp(min=1e-300)[:, None], chosen)
    return chosen


def _distances(points: Tensor, others: Tensor) -> Tensor:
    """Euclidean distances, exactly 0 between equal points, unlike those by matrix products."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def _counted(parts: list[Tensor], scale: float, noise: Noise) -> list[Leaf]:
    counts = noise.discrete_laplace(torch.tensor([len(part) for part in parts]), scale)
    return [Leaf(part, int(count)) for part, count in zip(parts, counts, strict=True)]


def _check(k: int, radius: float, dims: int | None, depth: int) -> None:
    for name, value, least in (("k", k, 1), ("dims", dims, 1), ("depth", depth, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if not 0 < radius < math.inf:
        raise ConfigError(f"the radius is {radius}; it must be above 0 and finite")
