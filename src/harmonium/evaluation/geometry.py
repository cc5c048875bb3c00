"""Health of a representation: measures of collapse that need no labels.

Alignment and uniformity follow Wang & Isola (2020), the effective rank follows RankMe (Garrido et
al. 2023), the tuning score follows Orchestra eq. 5. All work in float64, because collapse is a
matter of small differences.

Thresholds of the warnings. Features behind a ReLU and average pooling are non-negative and share a
large mean, so raw cosines are near 1 even in a good encoder: the spread of an untrained network of
two to four layers is 0.03 to 0.45 on digits and on natural images, that of a trained one 0.1 to
0.7. Encoders trained to a constant end between 0.001 and 0.02. Spread alone misses the encoder that
keeps one direction; for that, `directions` counts those that carry the variance once the common
mean is taken away. How many a healthy encoder has depends on the images: 5 or more on digits, but
where brightness is most of what differs an untrained one may have 1.8, and a contrastive one dips
to 1.5 in its first epoch before it widens. So without a reference the threshold is low, 1.4 (a
line with 10 % noise has 1.3), and rises up to 2.5 when the start of the same run is known and was
three times as wide. The effective rank is less suited to a warning: it weighs singular values, not
their squares, and that line with 10 % noise in 512 dimensions has an effective rank of 72.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harmonium.core.errors import DataError

COLLAPSED_SPREAD = 0.02
COLLAPSED_PROJECTIONS = 0.2  # projections have no ReLU: healthy ones spread 0.6 to 1
COLLAPSED_DIRECTIONS = 1.4
NARROWED_DIRECTIONS = 2.5  # the same, for an encoder that began three times as wide or more
DEAD = 1e-3  # a dimension adds less than this to the spread
ROUNDING = 1e-6  # variation below float32 precision, relative to the size of the features


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of the unit features of two views: 0 equal, 4 opposite.

    Args:
        first: features `(n, dim)` of one view of each image.
        second: features `(n, dim)` of another view, in the same order.
    """
    return float((_unit(first) - _unit(second)).square().sum(dim=1).mean())


def uniformity(features: Tensor, t: float = 2.0, chunk: int = 1000) -> float:
    """Log of the mean of exp(-t * squared distance) over distinct pairs of unit features.

    0 when all features are equal; on the whole sphere about -2 t in high dimension.

    Args:
        features: `(n, dim)`, at least two rows.
        t: sharpness of the kernel.
        chunk: rows at a time; memory is `chunk * n` numbers.
    """
    unit = _unit(_several(features))
    length = unit.any(dim=1).double()  # 1, or 0 for a row of zeros
    total = torch.tensor(-math.inf, dtype=torch.float64)
    for start in range(0, len(unit), chunk):
        rows = unit[start : start + chunk]
        sides = length[start : start + chunk, None] + length
        exponent = -t * (sides - 2.0 * (rows @ unit.T)).clamp_min(0.0)
        exponent[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = -math.inf
        total = torch.logaddexp(total, exponent.flatten().logsumexp(dim=0))
    return float(total) - math.log(len(unit) * (len(unit) - 1))


def effective_rank(features: Tensor, *, centre: bool = True) -> float:
    """Exponential of the entropy of the normalised singular values of features `(n, dim)`.

    RankMe takes the features as they are (`centre=False`). The default takes their mean away
    first: behind a ReLU the common mean is one huge singular value that hides all others. At most
    `min(n, dim)`, and one less when centred with few rows; 0 for constant features.
    """
    return _entropy_count(_singular_values(features.double(), centre))


def directions(features: Tensor) -> float:
    """How many orthogonal directions carry the variance of the unit features `(n, dim)`.

    Exponential of the entropy of each principal direction's share of the variance; 0 when there is
    no variance. Unlike the effective rank it is steady under small noise in many dimensions.
    """
    return _entropy_count(_singular_values(_unit(features), centre=True).square())


def spread(features: Tensor) -> float:
    """Mean over dimensions of the deviation of the unit features `(n, dim)`, times sqrt(dim).

    1 when the features fill the sphere evenly, 0 when they are all the same.
    """
    unit = _unit(features)
    return float(unit.std(dim=0, correction=0).mean()) * math.sqrt(unit.shape[1])


def tuning_parts(
    first: Tensor, second: Tensor, *, temperature: float = 0.2, chunk: int = 1000
) -> tuple[float, float]:
    """Align and Unif of Orchestra eq. 5; both are higher where a representation is better.

    Align is the mean cosine of two views, so 1 - `alignment` / 2. Unif is minus the mean over
    images x of log mean_y exp(cosine(x, y) / temperature), y running over all images, x itself
    included: between -1 / temperature, where all features are the same, and about
    log(n) - 1 / temperature where n of them are far apart. It is not minus `uniformity`, which
    takes the logarithm of one mean over all pairs and leaves x itself out.

    Args:
        first: features `(n, dim)` of one view of a client's images; Unif is of these.
        second: features `(n, dim)` of another view of the same.
        temperature: of Unif.
        chunk: rows at a time.
    """
    unit, other = _unit(first), _unit(second)
    crowding = 0.0
    for start in range(0, len(unit), chunk):
        cosine = unit[start : start + chunk] @ unit.T
        crowding += float((cosine / temperature).logsumexp(dim=1).sum())
    align = float((unit * other).sum(dim=1).mean())
    return align, math.log(len(unit)) - crowding / len(unit)


def tuning_score(align: float, unif: float, weight: float = 0.2) -> float:
    """Orchestra eq. 5 as one number, by which settings are ranked without labels.

    >>> tuning_score(1.0, -5.0)  # all features are the same
    0.0
    """
    return align + weight * unif


@dataclass(frozen=True)
class Health:
    """The geometry of one representation; every number is NaN where `finite` is false."""

    alignment: float
    uniformity: float
    effective_rank: float
    directions: float
    spread: float
    dead: float  # share of dimensions that are equal for all images
    dimensions: int
    pictures: int  # images measured; runs store it under this name
    finite: bool
    view_distance: float = math.nan  # of two views, in units of that of two images: 0 alike, 1 not

    def warnings(
        self, start: Health | None = None, *, projections: bool = False
    ) -> tuple[str, ...]:
        """What is wrong, in plain words; empty when nothing is.

        Args:
            start: the same encoder before training, if known. A deep network without normalisation
                can give nearly equal features from the outset; with `start` it counts as
                collapsed only if it loses half of its initial spread. The threshold of few
                directions is higher for the same reason.
            projections: these are outputs of a projector after training rather than features.
                Self-distillation without a stop-gradient often empties the projector first and
                leaves the encoder behind it nearly untrained but spread.
        """
        if not self.finite:
            return (
                "The representation is not finite: some features are NaN or infinite. "
                "Training has diverged; lower local.lr or turn on gradient clipping.",
            )
        what = "projection" if projections else "feature"
        healthy = COLLAPSED_PROJECTIONS if projections else COLLAPSED_SPREAD
        limit = healthy if start is None or not start.finite else min(healthy, start.spread / 2)
        if self.spread < limit or self.spread == 0.0:
            return (
                f"The representation has collapsed: all images get nearly the same {what} "
                f"(spread {self.spread:.3g}; healthy is above {healthy:.3g}). "
                "Lower local.lr; if the objective has targets, check that they get no gradient.",
            )
        if self.directions < self._narrow(start):
            return (
                f"The representation has collapsed onto few directions: of {self.dimensions} "
                f"dimensions about {self.directions:.1f} carry what differs between images "
                f"(healthy is above {NARROWED_DIRECTIONS:.1f}). Use stronger augmentation, a "
                "wider projector or a lower local.lr; in the first rounds it may pass by itself.",
            )
        return ()

    def _narrow(self, start: Health | None) -> float:
        """Number of directions below which the representation counts as collapsed onto them."""
        limit = COLLAPSED_DIRECTIONS
        if start is not None and start.finite:
            if start.directions < limit:
                return 0.0  # it was as narrow before training
            limit = min(NARROWED_DIRECTIONS, max(limit, start.directions / 3))
        # Few dimensions or few images limit the number of directions: a quarter of that is enough.
        return min(limit, min(self.dimensions, self.pictures - 1) / 4)


def health(first: Tensor, second: Tensor) -> Health:
    """Health of a representation from features `(n, dim)` of two views of held-out images.

    A few hundred images are enough; fewer than about 50 make `effective_rank` small by
    themselves.
    """
    if first.shape != second.shape:
        raise DataError(
            "health compares two views of the same images, got features "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    first, second = _several(first).double(), second.double()
    images, dimensions = first.shape
    finite = bool(first.isfinite().all()) and bool(second.isfinite().all())
    if not finite:
        unknown = math.nan
        return Health(
            unknown, unknown, unknown, unknown, unknown, unknown, dimensions, images, False
        )
    unit = _unit(first)
    deviation = unit.std(dim=0, correction=0) * math.sqrt(dimensions)
    apart = 2 * float(unit.var(dim=0, correction=1).sum())  # mean over pairs of different images
    near = alignment(first, second)
    return Health(
        alignment=near,
        uniformity=uniformity(first),
        effective_rank=effective_rank(first),
        directions=directions(first),
        spread=spread(first),
        dead=float((deviation < DEAD).double().mean()),
        dimensions=dimensions,
        pictures=images,
        finite=True,
        view_distance=near / apart if apart else math.nan,
    )


def _several(features: Tensor) -> Tensor:
    """The features `(n, dim)` themselves, if there are at least two to compare."""
    if features.ndim != 2 or len(features) < 2:
        raise DataError(
            "the geometry of a representation needs the features of at least 2 images as "
            f"(images, dim), got {tuple(features.shape)}"
        )
    return features


def _unit(features: Tensor) -> Tensor:
    """Rows of `(n, dim)` scaled to length 1 in float64; a zero row stays zero."""
    # Scaled by its largest entry first, so that squares of tiny or huge numbers stay in range.
    rows = features.detach().double()
    tiny = torch.finfo(rows.dtype).tiny
    rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp_min(tiny)
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / length.clamp_min(tiny)


def _singular_values(features: Tensor, centre: bool) -> Tensor:
    """Singular values of `(n, dim)`; none where only rounding is left after centring."""
    size = torch.linalg.vector_norm(features)
    if centre:
        features = features - features.mean(dim=0)
    if not bool(torch.linalg.vector_norm(features) > ROUNDING * size):
        return features.new_zeros(0)
    values: Tensor = torch.linalg.svdvals(features)
    return values[values > 0]


def _entropy_count(weights: Tensor) -> float:
    """exp(entropy) of positive weights `(k,)` scaled to sum 1: the effective number of weights."""
    if len(weights) == 0:
        return 0.0
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum().exp())
