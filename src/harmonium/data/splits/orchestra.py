"""Each class divided among the clients by Dirichlet draws, balanced to equal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import (
    Floats,
    assign_from_pools,
    check_positive,
    log_dirichlet,
    log_sum,
    rounded,
    shares_of,
)

PUBLISHED_ROUNDS = 100
MOST_ROUNDS = 200  # a very small alpha would take thousands; what is left is moved by `fitted`


@splits("orchestra")
@dataclass(frozen=True)
class OrchestraSplit(SplitRule):
    """Each class cut among the clients by Dirichlet draws, then made equal in size (Orchestra).

    There is no prior: alpha is the concentration of each client. As published, fractions are cut
    off, so sizes differ a little and a few images are held by no client; a note says how many.
    Where classes are unequal, each keeps its own size.
    """

    alpha: float = 0.1  # concentration: small is a class to few clients, large is iid
    balance: bool = True  # make clients equal; otherwise sizes are as drawn
    rounding: Literal["floor", "largest"] = "floor"  # as published; largest: equal sizes, no loss

    needs_labels: ClassVar[bool] = True
    moves_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.1)

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Draw, balance, round and assign; a client without images raises an error."""
        pools = pools_by_class(images.labels, rng)
        sizes = np.array([len(pool) for pool in pools])
        logs = log_dirichlet(np.full((len(pools), clients), self.alpha), rng).T
        counts = self.counts(logs, sizes)
        if empty := int((counts.sum(1) == 0).sum()):
            ways = [] if self.balance else ["split.balance=true"]
            ways += ["split.rounding=largest"] if self.rounding == "floor" else []
            raise DataError(
                f"split 'orchestra' would leave {empty} of {clients} clients without an image: "
                f"use {', '.join(ways)} or fewer clients"
            )
        return Shares(assign_from_pools(pools, counts))

    def counts(self, logs: Floats, sizes: Integers) -> Integers:
        """How many of each class every client gets (clients, classes).

        Args:
            logs: logarithms of how a class is cut (clients, classes), up to a constant a class.
            sizes: how many images each class has.
        """
        total, clients = int(sizes.sum()), len(logs)
        logs = logs - log_sum(logs, 0) + np.log(sizes / total)
        if self.balance and self.rounding == "largest":
            each = total // clients
            logs = balanced(logs)
            return fitted(rounded(shares_of(logs) * each, each), sizes, logs)
        if self.rounding == "largest":
            columns = shares_of(logs.T) * sizes[:, None]
            return np.stack([rounded(*of) for of in zip(columns, sizes, strict=True)], 1)
        if self.balance:
            logs = balanced_as_published(logs)
        counts = np.floor(np.exp(logs) * total).astype(np.int64)
        ends = np.minimum(np.cumsum(counts, 0), sizes)  # so far from balance a class may run out
        within: Integers = np.diff(ends, axis=0, prepend=0)
        return within


def balanced_as_published(logs: Floats) -> Floats:
    """Rows and columns divided by both their sums at the same time, a hundred times.

    Published is the division by the sums alone, which changes the scale to and fro with period
    two; here every sum is brought to what it should be, so any number of rounds has the right
    scale, and an even number gives the published matrix.
    """
    each, wanted = -np.log(len(logs)), log_sum(logs, 0)
    for _ in range(PUBLISHED_ROUNDS):
        logs = logs + (each - log_sum(logs, 1)) + (wanted - log_sum(logs, 0))
    return logs


def balanced(logs: Floats) -> Floats:
    """Rows and columns scaled in turn (Sinkhorn) until both sums are right; rows always are."""
    each, wanted = -np.log(len(logs)), log_sum(logs, 0)
    for _ in range(MOST_ROUNDS):
        logs = logs + each - log_sum(logs, 1)
        columns = log_sum(logs, 0)
        if np.abs(np.expm1(columns - wanted)).max() < 1e-6:
            break
        logs = logs + wanted - columns
    rows_scaled: Floats = logs + each - log_sum(logs, 1)
    return rows_scaled


def fitted(counts: Integers, sizes: Integers, logs: Floats) -> Integers:
    """Counts with the same sum for each client, but no more of a class than there is.

    What is too much of one class is replaced by the class that most are left of, first at the
    clients that like it best in comparison. Each turn settles a class, so there are few turns.
    """
    counts, spare = counts.copy(), sizes - counts.sum(0)
    while spare.min() < 0:
        much, little = spare.argmin(), spare.argmax()
        moved = min(-spare[much], spare[little])
        order = np.argsort(logs[:, much] - logs[:, little], kind="stable")
        ends = np.minimum(np.cumsum(counts[order, much]), moved)
        step = np.diff(ends, prepend=0)
        counts[order, much] -= step
        counts[order, little] += step
        spare[[much, little]] += [moved, -moved]
    return counts
