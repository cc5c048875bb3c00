"""A second opinion on epsilon, by the library dp-accounting (the extra `dp`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

Kind = tuple[str, float, float]  # mechanism, sensitivity, scale


def together(releases: Iterable[Mapping[str, Any]]) -> str:
    """The neighbours between which epsilon of some releases holds: theirs if they agree."""
    stated = {str(one.get("neighbours", "replace")) for one in releases}
    return stated.pop() if len(stated) == 1 else "replace"


def epsilon_pld(releases: Iterable[Mapping[str, Any]], delta: float) -> float | None:
    """Epsilon by composed privacy loss distributions; none where the library is not installed.

    Losses are rounded up on a grid, so it may be a little above `budget.epsilon`, which is exact.
    """
    records = list(releases)
    neighbours = together(records)
    counts: dict[Kind, int] = {}
    for one in records:
        twice = 2 if one.get("neighbours") == "add-remove" != neighbours else 1
        scale = float(one["scale"] if "scale" in one else one["sigma"])
        kind = (str(one["mechanism"]), twice * float(one["sensitivity"]), scale)
        if kind[1]:
            counts[kind] = counts.get(kind, 0) + int(one.get("count", 1))
    if not counts:
        return 0.0
    if any(scale == 0 for _, _, scale in counts):
        return float("inf")
    return _composed(tuple(sorted(counts.items())), delta)


@lru_cache(maxsize=256)
def _composed(counts: tuple[tuple[Kind, int], ...], delta: float) -> float | None:
    try:
        from dp_accounting.pld import privacy_loss_distribution as losses
    except ImportError:
        return None
    total = None
    for (mechanism, sensitivity, scale), count in counts:
        if mechanism == "gaussian":
            one = losses.from_gaussian_mechanism(scale, sensitivity=sensitivity)
        else:
            one = losses.from_discrete_laplace_mechanism(1 / scale, sensitivity=int(sensitivity))
        many = one.self_compose(count)
        total = many if total is None else total.compose(many)
    return float(total.get_epsilon_for_delta(delta))  # type: ignore[union-attr]
