"""Clients that hold pictures of one style each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.drawing import (
    check_complete,
    check_positive,
    column_of,
    dealt,
    draw_clients,
    levelled,
)
from harmonium.errors import DataError


@splits("styles")
@dataclass(frozen=True)
class Styles(SplitRule):
    """Every client has one style, every style as many clients, all the same size (FedStyle).

    The first clients have the first style, and so on. A style that has too many pictures gives as
    many as the mean of all styles; of one that has too few, pictures repeat. Its pictures are
    first divided among its clients, and each then repeats its own, so that no two clients hold the
    same picture.
    """

    column: str = "style"  # the column that holds the style
    beta: float | None = None  # concentration of class weights; None: as even as the classes allow
    equalise: bool = True  # every style as large as their mean; otherwise as it is, none repeats

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        if self.beta is not None:
            check_positive("beta", self.beta, 0.2)

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse clients that the styles cannot share."""
        super().check(images, clients, called)
        column = column_of(images, self.column, called)
        check_complete(column, self.column, "leave these pictures out of the data")
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
                f"style {values[counts.argmin()]} of {called} has {counts.min()} pictures for "
                f"{each} clients: use at most {counts.min() * styles} clients"
            )
        missing = int((images.labels < 0).sum())
        if self.beta is not None and missing:
            raise DataError(
                f"split.beta={self.beta} needs a label for every picture; {missing} of "
                f"{len(images)} have none: leave split.beta out"
            )

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Style by style: divide its pictures, then repeat where they are too few."""
        column = images.factors[self.column]
        styles = np.unique(column)
        mean, holders = len(images) // len(styles), clients // len(styles)
        indices: list[Integers] = []
        repeats = 0
        for style in styles:
            rows = np.flatnonzero(column == style)
            each = (mean if self.equalise else len(rows)) // holders
            distinct = min(each, len(rows) // holders)
            for own in self._divided(images.labels[rows], holders, distinct, rng):
                indices.append(np.sort(rows[own[np.arange(each) * distinct // each]]))
            repeats += holders * (each - distinct)
        total = sum(len(own) for own in indices)
        notes = [f"{repeats} of {total} pictures are repeats: their styles are smaller than others"]
        if nobody := len(images) - (total - repeats):
            notes.append(f"{nobody} of {len(images)} training pictures are held by nobody")
        return Shares(indices, notes=notes if repeats else notes[1:])

    def _divided(
        self, labels: Integers, clients: int, each: int, rng: np.random.Generator
    ) -> list[Integers]:
        """Distinct positions for each of the clients of one style."""
        pools = pools_by_class(labels, rng)
        sizes = np.array([len(pool) for pool in pools])
        if self.beta is not None:
            concentration = np.full(len(pools), self.beta)
            return dealt(pools, draw_clients(concentration, sizes, clients, each, rng))
        # The largest classes give way first; then the clients take turns, class after class.
        kept = levelled(sizes, clients * each)
        row = np.concatenate([pool[:size] for pool, size in zip(pools, kept, strict=True)])
        return list(row.reshape(each, clients).T)
