"""Clients that hold images of one style each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import (
    assign_from_pools,
    check_complete,
    check_positive,
    column_of,
    draw_clients,
    levelled,
    log_dirichlet,
    rounded,
    shares_of,
)


@splits("styles")
@dataclass(frozen=True)
class StyleSplit(SplitRule):
    """Every client has one style, every style as many clients, all the same size (FedStyle).

    The first clients have the first style, and so on. Every style gives as many images as the
    mean of all styles, the same number of each class or, with `beta`, in proportions that each
    client draws. Where a class has too few, images repeat. FedStyle says only "duplicate sampling
    if necessary"; here the images of a class are first divided among the clients that want it,
    and each then repeats its own, so that no two clients hold the same image.
    """

    column: str = "style"  # the column that holds the style
    beta: float | None = None  # concentration of class weights; None: every class alike
    equalise: bool = True  # every style as large as their mean; otherwise as it is, none repeats

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        if self.beta is not None:
            check_positive("beta", self.beta, 0.2)

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Raise an error if the clients cannot be divided evenly among the styles."""
        super().check(images, clients, called)
        column = column_of(images, self.column, called)
        check_complete(column, self.column, "leave these images out of the data")
        values, counts = np.unique(column, return_counts=True)
        styles = len(values)
        if clients % styles:
            near = [n for n in (clients // styles * styles, (clients // styles + 1) * styles) if n]
            raise DataError(
                f"clients={clients}, but split.column={self.column} of {called} has {styles} "
                f"styles, each for as many clients: use {' or '.join(map(str, near))} clients"
            )
        each = clients // styles
        if counts.min() < each:
            raise DataError(
                f"style {values[counts.argmin()]} of {called} has {counts.min()} images for "
                f"{each} clients: use at most {counts.min() * styles} clients"
            )
        missing = int((images.labels < 0).sum())
        if self.beta is not None and missing:
            raise DataError(
                f"split.beta={self.beta} needs a label for every image; {missing} of "
                f"{len(images)} have none: leave split.beta out"
            )

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Style by style: how many of each class, which images, and how often."""
        column = images.factors[self.column]
        styles = np.unique(column)
        each, holders = len(images) // clients, clients // len(styles)
        labels = images.labels if (images.labels >= 0).all() else np.zeros_like(images.labels)
        indices: list[Integers] = []
        for style in styles:
            rows = np.flatnonzero(column == style)
            pools = pools_by_class(labels[rows], rng)
            if self.equalise:
                shares = self._repeating(pools, holders, each, rng)
            else:
                shares = self._distinct(pools, holders, len(rows) // holders, rng)
            indices += [np.sort(rows[own]) for own in shares]
        total = sum(len(own) for own in indices)
        distinct = sum(len(np.unique(own)) for own in indices)
        note = f"{total - distinct} of {total} images are repeats: their classes are too small"
        return Shares(indices, notes=[note] if total > distinct else [])

    def _distinct(
        self, pools: Sequence[Integers], clients: int, each: int, rng: np.random.Generator
    ) -> list[Integers]:
        """Equally many images for each client of one style, without repeats."""
        sizes = np.array([len(pool) for pool in pools])
        if self.beta is not None:
            concentration = np.full(len(pools), self.beta)
            return assign_from_pools(pools, draw_clients(concentration, sizes, clients, each, rng))
        # The largest classes give way first; then the clients take turns, class after class.
        counts = levelled(sizes, clients * each)
        row = np.concatenate([pool[:size] for pool, size in zip(pools, counts, strict=True)])
        return list(row.reshape(each, clients).T)

    def _repeating(
        self, pools: Sequence[Integers], clients: int, each: int, rng: np.random.Generator
    ) -> list[Integers]:
        """Exact class counts for each client of one style, repeating images of small classes."""
        shares = np.full((clients, len(pools)), 1 / len(pools))
        if self.beta is not None:
            shares = shares_of(log_dirichlet(np.full(shares.shape, self.beta), rng))
        sizes = np.array([len(pool) for pool in pools])
        wanted, distinct = supplied(rounded(shares * each, each), sizes)
        starts = np.cumsum(distinct, 0) - distinct
        chosen = []
        for client in range(clients):
            own = [
                pool[start : start + many][np.arange(want) * many // want]
                for pool, start, many, want in zip(
                    pools, starts[client], distinct[client], wanted[client], strict=True
                )
                if want
            ]
            chosen.append(np.concatenate(own))
        return chosen


def supplied(wanted: Integers, sizes: Integers) -> tuple[Integers, Integers]:
    """How many different images of each class the clients get, both (clients, classes).

    A class that is wanted more often than it has images is divided in proportion, one image at
    least to each who wants it while there are any. Who gets none of a class has more of another.

    Returns:
        What is wanted, changed where there was nothing to be had, and the different images.
    """
    wanted, distinct = wanted.copy(), wanted.copy()
    for row in np.flatnonzero(wanted.sum(0) > sizes):
        need = wanted[:, row]
        shared = rounded(need * (sizes[row] / need.sum()), int(sizes[row]))
        for client in np.flatnonzero((need > 0) & (shared == 0)):
            if shared.max() > 1:
                shared[shared.argmax()] -= 1
                shared[client] = 1
        distinct[:, row] = shared
    for client in np.flatnonzero(
        distinct.sum(1) == 0
    ):  # other clients hold all images that it wants
        spare = sizes - distinct.sum(0)
        if spare.max() == 0:
            rich = distinct.sum(1).argmax()
            distinct[rich, distinct[rich].argmax()] -= 1
            spare = sizes - distinct.sum(0)
        distinct[client, spare.argmax()] = 1
    nothing = distinct == 0
    moved = np.where(nothing, wanted, 0).sum(1)
    wanted[nothing] = 0
    wanted[np.arange(len(wanted)), distinct.argmax(1)] += moved
    return wanted, distinct
