"""What Gaussian releases amount to together: their exact (epsilon, delta)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from harmonium.errors import ConfigError


def epsilon(releases: Iterable[Mapping[str, Any]], delta: float) -> float:
    """The smallest epsilon that holds, with this delta, for all releases together.

    Each release has a `sensitivity` and a `sigma`, as `privacy.mechanisms.Release` has. Gaussian
    releases compose to one whose shift, counted in its noise, is the root of the summed squares,
    also when later ones depend on earlier answers (Dong et al., Gaussian Differential Privacy,
    2022); its curve is Balle and Wang's (2018). Neighbours are those that the sensitivities are
    stated for, the same for all.

    >>> round(epsilon([{"sensitivity": 1.0, "sigma": 1.0}], delta=1e-5), 3)
    4.377
    """
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be above 0 and below 1, e.g. 1e-5")
    mu = math.hypot(*(_shift(release) for release in releases))
    if math.isinf(mu * mu):
        return math.inf
    if mu == 0 or _excess(0.0, mu, delta) <= 0:
        return 0.0
    # Without its second term the curve is larger and can be solved: an epsilon that is enough.
    enough = mu * (mu / 2 - float(ndtri(delta)))
    if mu > 1e6 or _excess(enough, mu, delta) >= 0:  # the second term is lost in rounding
        return enough
    return float(brentq(_excess, 0.0, enough, args=(mu, delta), xtol=1e-14))


def _shift(release: Mapping[str, Any]) -> float:
    """How far one picture moves a release, in standard deviations of its noise."""
    try:
        sensitivity, sigma = float(release["sensitivity"]), float(release["sigma"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError("a release has no sensitivity or sigma that is a number") from None
    if release.get("mechanism", "gaussian") != "gaussian":
        raise ConfigError(f"cannot count a release by '{release['mechanism']}': only by gaussian")
    if not (0 <= sensitivity < math.inf and 0 <= sigma < math.inf):
        raise ConfigError(
            f"a release has sensitivity {sensitivity} and sigma {sigma}; both must be finite and "
            "not negative"
        )
    return sensitivity / sigma if sigma else math.inf


def _excess(epsilon: float, mu: float, delta: float) -> float:
    """The delta that this epsilon takes, above the one that there is.

    It is Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu), in logarithms because the
    exponential alone would overflow.
    """
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return -math.exp(first) * math.expm1(min(0.0, second - first)) - delta
