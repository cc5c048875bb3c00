"""What repeated runs of several methods amount to: intervals, paired tests, ranks.

Runs with the same seed have the same pictures, split, first weights and cohorts, so methods are
compared seed by seed. p values are of two-sided paired t-tests, corrected for their number by
Holm's rule (1979); with two or three seeds they can hardly be small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harmonium.report.tables import estimate

CONFIDENCE = 0.95
ROUNDING = 1e-9  # of the figures; differences that vary less are the same

Figures = Mapping[int, float]
"""A figure by seed; seeds whose run failed are not in it."""


@dataclass(frozen=True)
class Summary:
    """A figure over seeds."""

    mean: float
    stderr: float | None  # none: a single seed
    low: float | None  # of the 95 % interval
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """How far a method is from another, over the seeds that both have."""

    mean: float
    low: float | None
    high: float | None
    p: float | None  # corrected; none: a single seed, or the same difference with every seed
    seeds: int


def summary(figures: Figures) -> Summary:
    """Mean, standard error and Student's interval.

    >>> found = summary({0: 1.0, 1: 3.0})
    >>> found.mean, found.stderr, round(found.high, 2)
    (2.0, 1.0, 14.71)
    """
    values = list(figures.values())
    mean, stderr = estimate(values)
    if stderr is None:
        return Summary(mean, None, None, None, 1)
    half = _quantile(len(values) - 1) * stderr
    return Summary(mean, stderr, mean - half, mean + half, len(values))


def differences(rows: Mapping[str, Figures], base: str) -> dict[str, Difference]:
    """Every other row against one of them, p values corrected for their number.

    >>> found = differences({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 3.1}}, "a")["b"]
    >>> round(found.mean, 2), round(found.p, 3)
    (1.05, 0.03)
    """
    raw: dict[str, float] = {}
    found: dict[str, Difference] = {}
    for label, figures in rows.items():
        shared = sorted(set(figures) & set(rows[base]))
        if label == base or not shared:
            continue
        apart = summary({seed: figures[seed] - rows[base][seed] for seed in shared})
        found[label] = Difference(apart.mean, None, None, None, apart.seeds)
        size = max(abs(some[seed]) for some in (figures, rows[base]) for seed in shared)
        if apart.stderr is not None and apart.stderr > ROUNDING * size:
            found[label] = Difference(apart.mean, apart.low, apart.high, None, apart.seeds)
            raw[label] = _p(apart.mean, apart.stderr, apart.seeds)
    for label, p in holm(raw).items():
        one = found[label]
        found[label] = Difference(one.mean, one.low, one.high, p, one.seeds)
    return found


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """P values corrected for their number (Holm, 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, label in enumerate(sorted(p, key=lambda one: (p[one], one))):
        largest = max(largest, min(1.0, (len(p) - place) * p[label]))
        corrected[label] = largest
    return corrected


def mean_ranks(rows: Mapping[str, Figures]) -> dict[str, float]:
    """The mean place of every row over the seeds that all rows have; 1 is the best, ties share.

    >>> mean_ranks({"a": {0: 1.0, 1: 5.0}, "b": {0: 2.0, 1: 5.0}})
    {'a': 1.75, 'b': 1.25}
    """
    shared = sorted(set.intersection(*(set(figures) for figures in rows.values())))
    if not shared:
        return {}
    values = np.array([[figures[seed] for seed in shared] for figures in rows.values()])
    above = (values[None] > values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    places = 1 + above + (equal - 1) / 2
    return dict(zip(rows, (float(rank) for rank in places.mean(1)), strict=True))


def _p(mean: float, stderr: float, seeds: int) -> float:
    from scipy.stats import t

    return float(2 * t.sf(abs(mean) / stderr, seeds - 1))


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))
