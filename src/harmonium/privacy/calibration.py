"""How much Gaussian noise a budget requires: the inverse of `budget.epsilon`."""

from __future__ import annotations

import math

import scipy  # a part of it is loaded when it is first used

from harmonium.core.errors import ConfigError
from harmonium.privacy.budget import gaussian_delta


def sigma_for(epsilon: float, delta: float, *, sensitivity: float, releases: int) -> float:
    """The smallest standard deviation that keeps all releases together within (epsilon, delta).

    Releases compose exactly, to one Gaussian whose shift grows with the root of their number.

    >>> round(sigma_for(3.0, 1e-5, sensitivity=1.0, releases=1), 3)
    1.391
    """
    if not (0 < epsilon < math.inf):
        raise ConfigError(f"epsilon is {epsilon}; it must be above 0 and finite, e.g. 3")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be above 0 and below 1, e.g. 1e-5")
    if not (0 <= sensitivity < math.inf):
        raise ConfigError(f"the sensitivity is {sensitivity}; it must be finite and not negative")
    if releases < 1:
        raise ConfigError(f"releases is {releases}; it must be at least 1")
    return math.sqrt(releases) * sensitivity / _largest_shift(epsilon, delta)


def _largest_shift(epsilon: float, delta: float) -> float:
    """How far one image may shift all releases together, in standard deviations of their noise."""
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
    low = high
    while gaussian_delta(epsilon, low) >= delta:
        low /= 2
    root = scipy.optimize.brentq(
        lambda mu: gaussian_delta(epsilon, mu) - delta, low, high, xtol=1e-15, rtol=1e-14
    )
    return float(root) * (1 - 1e-12)  # on the safe side of rounding
