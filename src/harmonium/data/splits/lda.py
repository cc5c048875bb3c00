"""Each class divided among the clients by Dirichlet draws, with a least size for all clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import (
    assign_from_pools,
    check_at_least,
    check_positive,
    check_sizes,
    levelled,
    log_dirichlet,
    shares_of,
)

TRIES = 20  # draws of the whole split before images are moved between clients instead


@splits("lda")
@dataclass(frozen=True)
class Lda(SplitRule):
    """Each class cut among the clients by Dirichlet draws, sizes unequal (as FedX and EasyFL do).

    Clients that already hold their equal share of all images get nothing of the classes after.
    Where a client stays below `min_size` everything is drawn again, a few times; then those who
    are short take images from the largest clients, and a note says how many. Nothing is dropped.
    """

    alpha: float = 0.5  # concentration: small is a class to few clients, large is iid
    min_size: int = 10  # images that every client has at least

    needs_labels: ClassVar[bool] = True
    moves_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.5)
        check_at_least("min_size", self.min_size, 1)

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse more clients than the least size allows."""
        super().check(images, clients, called)
        check_sizes(images, clients, self.min_size, called)

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Draw until all clients have the least size; after `TRIES` draws move images."""
        pools = pools_by_class(images.labels, rng)
        per_class = np.array([len(pool) for pool in pools])
        for _ in range(TRIES):
            counts = self._cut(per_class, clients, rng)
            if counts.sum(1).min() >= self.min_size:
                return Shares(assign_from_pools(pools, counts))
        return _topped_up(assign_from_pools(pools, counts), self.min_size, rng)

    def _cut(self, per_class: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """How many of each class every client gets (clients, classes)."""
        counts = np.zeros((clients, len(per_class)), np.int64)
        sizes, full = np.zeros(clients, np.int64), per_class.sum() / clients
        for column, size in enumerate(per_class):
            logs = log_dirichlet(np.full(clients, self.alpha), rng)
            shares = shares_of(np.where(sizes < full, logs, -np.inf))
            ends = np.floor(np.cumsum(shares) * size).astype(np.int64)
            ends[-1] = size
            counts[:, column] = np.diff(ends, prepend=0)
            sizes += counts[:, column]
        return counts


def _topped_up(indices: Sequence[Integers], least: int, rng: np.random.Generator) -> Shares:
    """The split after moving images from the largest clients to those below `least`."""
    sizes = np.array([len(own) for own in indices])
    short = np.maximum(least - sizes, 0)
    reduced = levelled(sizes, int(sizes.sum() - short.sum()))
    filled, surplus = list(indices), []
    for client in np.flatnonzero(reduced < sizes).tolist():
        own = rng.permutation(indices[client])
        filled[client] = np.sort(own[: reduced[client]])
        surplus.append(own[reduced[client] :])
    takers = np.flatnonzero(short).tolist()
    additions = np.split(np.concatenate(surplus), np.cumsum(short[takers])[:-1])
    for client, added in zip(takers, additions, strict=True):
        filled[client] = np.sort(np.concatenate([filled[client], added]))
    return Shares(
        filled,
        notes=[
            f"{len(takers)} of {len(sizes)} clients were below split.min_size={least} in each of "
            f"{TRIES} draws and took {short.sum()} images from the largest"
        ],
    )
