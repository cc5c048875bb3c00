"""The (epsilon, delta) of several releases together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import scipy  # a part of it is loaded when it is first used
from numpy.typing import NDArray

from harmonium.core.errors import ConfigError, suggest
from harmonium.privacy.mechanisms import Neighbours

NEIGHBOURS: tuple[Neighbours, ...] = ("replace", "add-remove", "client")
MOST_STEPS = 1_000  # largest sensitivity of an integer release
CELLS = 1 << 14  # into which the range of the losses of unlike releases is divided

Steps = tuple[tuple[float, int, int], ...]  # discrete Laplace: loss of one step, steps, releases


class Losses(NamedTuple):
    """The privacy losses log p/q of integer releases, with their probabilities."""

    values: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    beyond: float  # probability of a loss larger than all of these


def epsilon(
    releases: Iterable[Mapping[str, Any]], delta: float, *, neighbours: Neighbours | None = None
) -> float:
    """The smallest epsilon that holds, with this delta, for all releases together.

    A release has the fields of `privacy.mechanisms.Release`; `sigma` is read as `scale`, and one
    that names no neighbours is taken for `replace`. Gaussian releases compose to one whose shift,
    counted in its noise, is the root of the summed squares (Dong et al., Gaussian Differential
    Privacy, 2022); its curve is Balle and Wang's (2018). Discrete Laplace releases have few
    possible losses log p/q, whose probabilities are convolved; the whole is the Gaussian curve
    averaged over them. All of it holds also when later releases depend on earlier answers. The
    result is exact for Gaussian noise and for one kind of discrete Laplace noise beside it; several
    kinds are rounded up, to about a 16,000th of the range of their losses each.

    Args:
        releases: as mappings.
        delta: above 0 and below 1.
        neighbours: the images between which epsilon is to hold; none: those that all releases
            name, or `replace` if they differ. To replace an image is to remove one and to add
            one, so a release stated for `add-remove` then counts with twice its sensitivity.
            What holds for any images of a client, `client`, holds for all neighbours.

    >>> round(epsilon([{"sensitivity": 1.0, "sigma": 1.0}], delta=1e-5), 3)
    4.377
    """
    _check_delta(delta)
    mu, steps = _summed(releases, neighbours)
    if math.isinf(mu * mu) or any(math.isinf(step * step) for step, _, _ in steps):
        return math.inf
    return _with_steps(mu, steps, delta) if steps else _gaussian(mu, delta)


def epsilon_rdp(
    releases: Iterable[Mapping[str, Any]], delta: float, *, neighbours: Neighbours | None = None
) -> float:
    """An epsilon by Renyi divergences, as papers often report it; never below `epsilon`.

    The divergences of order alpha add up, and epsilon is the least of their sum plus
    log(1 / delta) / (alpha - 1) (Mironov, 2017). For Gaussian releases, whose sum is alpha rho,
    that is rho + 2 sqrt(rho log(1 / delta)). Arguments are those of `epsilon`.

    >>> round(epsilon_rdp([{"sensitivity": 1.0, "sigma": 1.0}], delta=1e-5), 3)
    5.299
    """
    _check_delta(delta)
    mu, steps = _summed(releases, neighbours)
    rho, room = mu * mu / 2, -math.log(delta)
    if math.isinf(rho) or any(math.isinf(step * step) for step, _, _ in steps):
        return math.inf
    if not steps:
        return rho + 2 * math.sqrt(rho * room)
    kinds = [(count, _one(step, number)) for step, number, count in steps]

    def total(log_order: float) -> float:
        order = math.exp(log_order)  # alpha - 1
        moments = sum(
            n * scipy.special.logsumexp(loss * order, b=probabilities)
            for n, (loss, probabilities, _) in kinds
        )
        return float((order + 1) * rho + (moments + room) / order)

    return float(scipy.optimize.minimize_scalar(total, bounds=(-25, 25), method="bounded").fun)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must be above 0 and below 1, e.g. 1e-5")


def _summed(
    releases: Iterable[Mapping[str, Any]], neighbours: Neighbours | None
) -> tuple[float, Steps]:
    """The shift of all Gaussian releases together, and the discrete Laplace ones by kind."""
    listed = list(releases)
    together = _common_neighbours(listed, neighbours)
    shifts: list[float] = []
    steps: Counter[tuple[float, int]] = Counter()
    for release in listed:
        sensitivity, scale, count = _numbers(release)
        if release.get("neighbours") == "add-remove" != together:
            sensitivity *= 2
        if not sensitivity:
            continue
        mechanism = release.get("mechanism", "gaussian")
        if mechanism == "gaussian":
            shifts.append(math.sqrt(count) * (sensitivity / scale if scale else math.inf))
        elif mechanism == "discrete-laplace":
            step = 1 / scale if scale else math.inf
            steps[step, _whole_steps(sensitivity)] += count
        else:
            raise ConfigError(
                f"cannot count a release by '{mechanism}': only by gaussian and discrete-laplace"
            )
    return math.hypot(*shifts), tuple((*kind, count) for kind, count in sorted(steps.items()))


def _common_neighbours(
    releases: Sequence[Mapping[str, Any]], neighbours: Neighbours | None
) -> Neighbours:
    """The neighbours between which epsilon is to hold: as asked, or those of all releases."""
    stated = {str(release.get("neighbours", "replace")) for release in releases}
    for name in (*stated, *([] if neighbours is None else [neighbours])):
        if name not in NEIGHBOURS:
            raise ConfigError(f"a release has neighbours '{name}': {suggest(name, NEIGHBOURS)}")
    if neighbours == "add-remove" and "replace" in stated:
        raise ConfigError("a release is stated for `replace`: it has no epsilon for `add-remove`")
    if neighbours == "client" and stated - {"client"}:
        raise ConfigError("a release is stated for single images: it has no epsilon for `client`")
    if neighbours is not None:
        return neighbours
    return next((name for name in NEIGHBOURS if stated == {name}), "replace")


def _whole_steps(sensitivity: float) -> int:
    """The sensitivity of a discrete Laplace release, which is a whole number."""
    if sensitivity != int(sensitivity) or sensitivity > MOST_STEPS:
        raise ConfigError(
            f"a release by discrete-laplace has sensitivity {sensitivity:g}; it must be a "
            f"whole number of at most {MOST_STEPS}"
        )
    return int(sensitivity)


def _numbers(release: Mapping[str, Any]) -> tuple[float, float, int]:
    """Sensitivity, scale and count of a release."""
    try:
        sensitivity = float(release["sensitivity"])
        scale = float(release["scale"] if "scale" in release else release["sigma"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError("a release has no sensitivity or scale that is a number") from None
    if not (0 <= sensitivity < math.inf and 0 <= scale < math.inf):
        raise ConfigError(
            f"a release has sensitivity {sensitivity} and scale {scale}; both must be finite and "
            "not negative"
        )
    count = release.get("count", 1)
    if type(count) is not int or count < 1:
        raise ConfigError(f"a release has count {count!r}; it must be a whole number above 0")
    return sensitivity, scale, count


def _gaussian(mu: float, delta: float) -> float:
    """Epsilon of one Gaussian release that one image shifts by mu."""
    if mu == 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    # Without its second term the curve is higher and can be solved: an upper bound of epsilon.
    enough = mu * (mu / 2 - float(scipy.special.ndtri(delta)))
    if mu > 1e6 or gaussian_delta(enough, mu) >= delta:  # the second term is lost in rounding
        return enough
    return float(
        scipy.optimize.brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, enough, xtol=1e-14)
    )


@lru_cache(maxsize=256)
def _with_steps(mu: float, steps: Steps, delta: float) -> float:
    """Epsilon of discrete Laplace releases and one Gaussian release together."""
    values, probabilities, beyond = _composed(steps, 1e-9 * delta)

    def excess(epsilon: float) -> float:
        return float(probabilities @ gaussian_delta(epsilon - values, mu)) + beyond - delta

    if excess(0.0) <= 0:
        return 0.0
    enough = max(0.0, float(values.max())) + _gaussian(mu, delta / 2)
    return float(scipy.optimize.brentq(excess, 0.0, enough, xtol=1e-12))


def gaussian_delta(epsilon: Any, mu: float) -> Any:
    """The smallest delta for an epsilon, also one below 0, of a Gaussian shifted by mu.

    It is Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu), in logarithms because the
    exponential alone would overflow.
    """
    if mu == 0:
        return -np.expm1(np.minimum(0.0, epsilon))
    with np.errstate(over="ignore", invalid="ignore"):  # both may be minus infinity: then it is 0
        first = scipy.special.log_ndtr(mu / 2 - epsilon / mu)
        second = epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
        return -np.exp(first) * np.expm1(np.nan_to_num(np.minimum(0.0, second - first), nan=0.0))


def _one(step: float, number: int) -> Losses:
    """The losses of one discrete Laplace release that one image moves by some steps.

    With noise k the loss is (|k - number| - |k|) times that of a step: the greatest below 0, the
    smallest beyond the number, and each second whole multiple in between.
    """
    k = np.arange(number + 1.0)
    probabilities = -np.expm1(-step) / (1 + np.exp(-step)) * np.exp(-step * k)
    probabilities[[0, number]] = 1 / (1 + np.exp(-step)) * np.exp(-step * k[[0, number]])
    return Losses(step * (number - 2 * k), probabilities, 0.0)


def _composed(steps: Steps, spare: float) -> Losses:
    """The losses of all discrete Laplace releases together, rounded up where they are too many."""
    together = Losses(np.zeros(1), np.ones(1), 0.0)
    for step, number, count in steps:
        values, probabilities, beyond = _power(_one(step, number), count, spare / len(steps))
        sums = np.add.outer(together.values, values).ravel()
        weights = np.multiply.outer(together.probabilities, probabilities).ravel()
        if len(steps) > 1 and len(sums) > CELLS:
            least = sums.min()
            width = (sums.max() - least) / (CELLS - 1)
            cells = np.ceil((sums - least) / width - 1e-9).astype(np.int64)
            weights = np.bincount(cells, weights)
            sums = least + width * np.arange(len(weights))
        together = Losses(sums, weights, together.beyond + beyond)
    return together


def _power(one: Losses, count: int, spare: float) -> Losses:
    """The losses of `count` equal releases, without tails that together are below `spare`.

    Losses are evenly spaced, so those of a sum are a convolution. Large ones that are cut off
    count as beyond any epsilon, small ones as the smallest that stays.
    """
    width = one.values[0] - one.values[1]
    spare /= 4 * count

    def product(a: Losses, b: Losses) -> Losses:
        probabilities = np.convolve(a.probabilities, b.probabilities)
        beyond = a.beyond + b.beyond
        top = a.values[0] + b.values[0]
        first = int(np.searchsorted(np.cumsum(probabilities), spare))
        last = len(probabilities) - int(np.searchsorted(np.cumsum(probabilities[::-1]), spare))
        beyond += float(probabilities[:first].sum())
        kept = probabilities[first:last].copy()
        kept[-1] += probabilities[last:].sum()
        return Losses(top - width * np.arange(first, last), kept, beyond)

    result, square = None, one
    while True:
        if count & 1:
            result = square if result is None else product(result, square)
        count >>= 1
        if not count:
            assert result is not None
            return result
        square = product(square, square)
