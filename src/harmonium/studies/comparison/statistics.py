"""Statistics over seeds: intervals, paired tests, ranks.

Runs with the same seed have the same images, split, first weights and cohorts, so methods are
compared seed by seed. p values are of two-sided paired t-tests, corrected for their number by
Holm's rule (1979); with two or three seeds they can hardly be small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from harmonium.report.tables import estimate

CONFIDENCE = 0.95
ALPHA = 0.05  # significance level of corrected p values
TEST = "two-sided paired t-test over seeds"
CORRECTION = "Holm"
ROUNDING = 1e-9  # of the figures; differences that vary less count as constant

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
class PairedDifference:
    """The difference of a method from another, over their common seeds."""

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


def differences(rows: Mapping[str, Figures], base: str) -> dict[str, PairedDifference]:
    """Paired differences of all other rows from `base`, p values corrected by Holm's rule.

    >>> found = differences({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 3.1}}, "a")["b"]
    >>> round(found.mean, 2), round(found.p, 3)
    (1.05, 0.03)
    """
    raw: dict[str, float] = {}
    tested: dict[str, PairedDifference] = {}
    for label, figures in rows.items():
        shared = sorted(set(figures) & set(rows[base]))
        if label == base or not shared:
            continue
        apart = summary({seed: figures[seed] - rows[base][seed] for seed in shared})
        tested[label] = PairedDifference(apart.mean, None, None, None, apart.seeds)
        size = max(abs(some[seed]) for some in (figures, rows[base]) for seed in shared)
        if apart.stderr is not None and apart.stderr > ROUNDING * size:
            tested[label] = PairedDifference(apart.mean, apart.low, apart.high, None, apart.seeds)
            raw[label] = p_value(apart.mean, apart.stderr, apart.seeds)
    for label, p in holm(raw).items():
        one = tested[label]
        tested[label] = PairedDifference(one.mean, one.low, one.high, p, one.seeds)
    return tested


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


@dataclass(frozen=True)
class Standing:
    """The best rows of a column, and those not significantly worse."""

    best: tuple[str, ...]  # the largest mean, and means that are shown as the same number
    near: tuple[str, ...]  # others that do not differ significantly from the best


def standing(rows: Mapping[str, Figures], digits: int = 3) -> Standing:
    """The rows with the best mean as shown, and those that do not differ significantly from it.

    Rows without two seeds in common with the best are not tested.

    >>> standing({"a": {0: 0.5, 1: 0.6, 2: 0.5}, "b": {0: 0.4, 1: 0.7, 2: 0.4}, "c": {0: 0.1}})
    Standing(best=('a',), near=('b',))
    """
    means = {label: summary(figures).mean for label, figures in rows.items() if figures}
    if not means:
        return Standing((), ())
    first = max(means, key=lambda label: means[label])
    best = [k for k in means if round(means[k], digits) == round(means[first], digits)]
    apart = differences({label: rows[label] for label in means}, first)
    near = [k for k, one in apart.items() if one.p is not None and one.p > ALPHA and k not in best]
    return Standing(tuple(best), tuple(near))


def half_width(stderr: float | None, seeds: int) -> float | None:
    """Half the width of the interval in plots: the 95 % interval, or the range of two seeds.

    Student's interval of two values is 25 times as wide as their distance, so it is not shown.

    >>> round(half_width(1.0, 3), 2), half_width(1.0, 2), half_width(None, 1)
    (4.3, 1.0, None)
    """
    if stderr is None or seeds < 2:
        return None
    return stderr if seeds == 2 else _quantile(seeds - 1) * stderr


def interval_words(counts: Collection[int]) -> str:
    """The caption of intervals in plots of means over these numbers of seeds; empty for one.

    >>> interval_words({5}), interval_words({2}), interval_words({1})
    ('95 % interval over 5 seeds', 'range of 2 seeds', '')
    >>> interval_words({2, 5})
    '95 % interval over 2 to 5 seeds (range of 2)'
    """
    several = sorted({count for count in counts if count > 1})
    if not several:
        return ""
    if several == [2]:
        return "range of 2 seeds"
    over = f"{several[0]} to {several[-1]}" if len(several) > 1 else str(several[0])
    return f"95 % interval over {over} seeds{' (range of 2)' if several[0] == 2 else ''}"


def mean_ranks(rows: Mapping[str, Figures]) -> dict[str, float]:
    """The mean rank of every row over the common seeds; 1 is the best, ties share their mean.

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


def p_value(mean: float, stderr: float, seeds: int) -> float:
    """The p value of a two-sided t-test that a mean over `seeds` seeds is 0.

    >>> round(p_value(2.0, 1.0, 5), 3), p_value(2.0, 0.0, 5), p_value(0.0, 0.0, 5)
    (0.116, 0.0, 1.0)
    """
    from scipy.stats import t

    if stderr == 0:  # the same difference with every seed
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / stderr, seeds - 1))


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))
