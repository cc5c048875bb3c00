"""Helpers of split rules: checks, Dirichlet sampling, rounding, and assignment of images."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.datasets import datasets
from harmonium.data.images import Images, Integers

Floats = npt.NDArray[np.float64]


# ---- checks --------------------------------------------------------------------------------------


def check_positive(key: str, value: float, example: float) -> None:
    """Raise an error unless a concentration is positive and finite."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"split.{key} is {value}; it must be above 0, e.g. {example}")


def check_at_least(key: str, value: int, least: int) -> None:
    """Raise an error if a setting is below `least`."""
    if value < least:
        raise ConfigError(f"split.{key} is {value}; it must be at least {least}")


def check_sizes(images: Images, clients: int, least: int, called: str) -> None:
    """Raise an error if there are fewer than `least` images per client."""
    if clients * least > len(images):
        most = len(images) // least
        way = f"at most {most} clients" if most else f"split.min_size={len(images) // clients}"
        raise DataError(
            f"clients={clients} with split.min_size={least} need {clients * least} images, but "
            f"{called} has {len(images)}: use {way}"
        )


def column_of(images: Images, name: str, called: str) -> Integers:
    """The values of a column; raises DataError with the available columns if it is missing."""
    if name not in images.factors:
        known = ", ".join(sorted(images.factors))
        other = (
            f"choose split.column from: {known}" if known else "use another split, e.g. split=iid"
        )
        spec = datasets.table().get(called)
        ways = [*filter(None, [spec.column_way(name) if spec else ""]), other]
        raise DataError(
            f"split.column={name}, but {called} has no such column: {', or '.join(ways)}"
        )
    return images.factors[name]


def check_complete(values: Integers, name: str, way: str) -> None:
    """Raise an error if a column has unknown values; `way` says what to do about it."""
    if missing := int((values < 0).sum()):
        raise DataError(
            f"split.column={name}, but {missing} of {len(values)} images have no value there: {way}"
        )


# ---- numbers -------------------------------------------------------------------------------------


def log_dirichlet(concentration: Floats, rng: np.random.Generator) -> Floats:
    """Logarithms of Dirichlet draws along the last axis, each up to a constant.

    Gamma(a) is Gamma(a + 1) * U^(1/a): in logarithms nothing underflows, however small a is, so
    the ratio of two classes is right even where both shares are below the smallest float.
    """
    uniform = 1.0 - rng.random(concentration.shape)  # in (0, 1]: its logarithm is finite
    gammas = np.log(rng.standard_gamma(concentration + 1)) + np.log(uniform) / concentration
    # Below about 1e-307 even the logarithm overflows; then the largest finite value stands in.
    return np.maximum(gammas, -np.finfo(np.float64).max / 4)


def shares_of(logs: Floats) -> Floats:
    """Softmax: shares that sum to 1 along the last axis, from logarithms up to a constant."""
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    shares: Floats = weights / weights.sum(-1, keepdims=True)
    return shares


def log_sum(logs: Floats, axis: int) -> Floats:
    """Logarithm of the sum of exponentials along an axis, which is kept."""
    highest = logs.max(axis, keepdims=True)
    total: Floats = highest + np.log(np.exp(logs - highest).sum(axis, keepdims=True))
    return total


def rounded(values: Floats, total: int) -> Integers:
    """Integers that sum to `total` along the last axis, by the largest-remainder method.

    >>> rounded(np.array([0.4, 0.5, 2.1]), 3).tolist()
    [0, 1, 2]
    """
    whole = np.floor(values).astype(np.int64)
    rank = np.argsort(np.argsort(whole - values, axis=-1, kind="stable"), axis=-1)
    whole += rank < total - whole.sum(-1, keepdims=True)
    return whole


def levelled(sizes: Integers, total: int) -> Integers:
    """The sizes capped at one level, so that they sum to `total`.

    >>> levelled(np.array([9, 2, 7]), 13).tolist()
    [6, 2, 5]
    """
    levels = range(int(sizes.max()) + 1)
    level = bisect_right(levels, total, key=lambda at: np.minimum(sizes, at).sum()) - 1
    capped = np.minimum(sizes, level)
    capped[np.flatnonzero(sizes > level)[: total - capped.sum()]] += 1
    return capped


def draw_counts(
    logs: Floats, left: Integers, wanted: Integers, rng: np.random.Generator
) -> Integers:
    """Counts of each class for each row, as if drawn one at a time and skipping empty classes.

    Drawing all that are wanted at once, keeping what is available and drawing the rest again has
    the same distribution; each turn but the last empties a class, so there are few turns.

    Args:
        logs: logarithms of the shares (rows, classes), up to a constant for each row.
        left: number available (rows, classes); rows do not compete with each other.
        wanted: number that each row gets (rows,), at most what is available.
        rng: the random generator.
    """
    taken, rows = np.zeros_like(left), np.flatnonzero(wanted)
    while len(rows):
        room = left[rows] - taken[rows]
        missing = wanted[rows] - taken[rows].sum(1)
        shares = shares_of(np.where(room > 0, logs[rows], -np.inf))
        counts = np.minimum(rng.multinomial(missing, shares), room)
        taken[rows] += counts
        rows = rows[counts.sum(1) < missing]
    return taken


def draw_clients(
    concentration: Floats, left: Integers, clients: int, each: int, rng: np.random.Generator
) -> Integers:
    """Counts of each class for each client (clients, classes), one client after another.

    Each draws its own shares from a Dirichlet distribution and then `each` images out of `left`
    without replacement (Hsu et al., 2019).
    """
    left, counts = left.copy(), np.empty((clients, len(left)), np.int64)
    for row in counts:
        logs = log_dirichlet(concentration, rng)
        row[:] = draw_counts(logs[None], left[None], np.array([each]), rng)[0]
        left -= row
    return counts


# ---- images ------------------------------------------------------------------------------------


def positions_by_client(holder: Integers, clients: int) -> list[Integers]:
    """The sorted positions of every client, from the client of each image; -1 is none.

    >>> [own.tolist() for own in positions_by_client(np.array([1, 0, -1, 1]), 2)]
    [[1], [0, 3]]
    """
    order = np.argsort(holder, kind="stable")
    ends = np.cumsum(np.bincount(holder + 1, minlength=clients + 1))
    return np.split(order, ends[:-1])[1:]


def assign_from_pools(pools: Sequence[Integers], counts: Integers) -> list[Integers]:
    """Assign images of shuffled pools to clients; `counts` is (clients, pools)."""
    clients = len(counts)
    holder = np.full(sum(len(pool) for pool in pools), -1, np.int64)
    for pool, column in zip(pools, counts.T, strict=True):
        holder[pool[::-1][: column.sum()]] = np.repeat(np.arange(clients), column)
    return positions_by_client(holder, clients)
