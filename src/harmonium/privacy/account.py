"""What every client has released so far, and whether it may release more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache

from harmonium.privacy.budget import epsilon
from harmonium.privacy.mechanisms import Release


class Account:
    """Releases of all clients of a run, counted when they are asked for.

    A lost answer counts too, because it may have left its client. Plans read the account as
    `server.account`; only the driver adds to it. A resumed run rebuilds it from its ledger.

    >>> account = Account(limit=5.0, delta=1e-5)
    >>> one = Release("corr", "gaussian", sensitivity=1.0, scale=1.0)
    >>> account.charge(0, [one])
    >>> round(account.spent(0), 2), account.affords(0, [one])
    (4.38, False)
    """

    def __init__(self, limit: float | None = None, delta: float = 1e-5) -> None:
        """Set the largest epsilon that a client may spend; none: no limit."""
        self.limit = limit
        self.delta = delta
        self.refused: dict[str, set[int]] = {}  # step -> who could not afford it in this round
        self._releases: dict[int, Counter[Release]] = {}

    def charge(self, client: int, releases: Sequence[Release]) -> None:
        """Count what a client releases, or may have released."""
        self._releases.setdefault(client, Counter()).update(map(_cost, releases))

    def spent(self, client: int, more: Sequence[Release] = ()) -> float:
        """Epsilon of all that a client has released, and of `more` on top."""
        releases = self._releases.get(client, Counter[Release]()) + Counter(map(_cost, more))
        return _epsilon(frozenset(releases.items()), self.delta)

    def affords(self, client: int, more: Sequence[Release]) -> bool:
        """Whether a client may release this as well."""
        return self.limit is None or not more or self.spent(client, more) <= self.limit


def _cost(release: Release) -> Release:
    """A release without the fields that do not change its cost."""
    return replace(release, field="", noise="system")


@lru_cache(maxsize=10_000)
def _epsilon(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    """Epsilon of counted releases; cached, because many clients of a run have the same."""
    ordered = sorted(releases, key=repr)  # sums of floats depend on the order
    counted = (replace(one, count=times * one.count) for one, times in ordered)
    return epsilon(map(asdict, counted), delta)
