"""Coarse classes first, then fine ones within them: two levels of Dirichlet draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import (
    assign_from_pools,
    check_complete,
    check_positive,
    column_of,
    draw_counts,
    log_dirichlet,
)


@splits("pachinko")
@dataclass(frozen=True)
class Pachinko(SplitRule):
    """Coarse classes, then fine ones within them, by Dirichlet draws (Reddi et al., 2021).

    Each client draws proportions of the coarse classes and, within each, of its fine classes; then
    its images one after another without replacement. A fine or coarse class that has run out is
    left out and the others keep their ratios. Made for CIFAR-100: 500 clients with 100 each.
    """

    alpha: float = 0.1  # concentration over the coarse classes
    beta: float = 10.0  # concentration over the fine classes of a coarse one
    column: str = "coarse"  # the column that holds the coarse class

    needs_labels: ClassVar[bool] = True
    moves_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.1)
        check_positive("beta", self.beta, 10.0)

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Refuse data without coarse classes."""
        super().check(images, clients, called)
        coarse = column_of(images, self.column, called)
        check_complete(coarse, self.column, "use split=dirichlet, which needs no coarse classes")

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """For each client, draw counts of the coarse classes, then of their fine classes."""
        leaves, pools, slots = _tree(images.factors[self.column], images.labels, rng)
        above = log_dirichlet(np.full((clients, 1, len(leaves)), self.alpha), rng)
        below = log_dirichlet(np.full((clients, *leaves.shape), self.beta), rng)
        each = np.array([len(images) // clients])
        counts = np.empty((clients, len(pools)), np.int64)
        for row, coarse, fine in zip(counts, above, below, strict=True):
            wanted = draw_counts(coarse, leaves.sum(1)[None], each, rng)[0]
            taken = draw_counts(fine, leaves, wanted, rng)
            leaves -= taken
            row[:] = taken[slots]
        return Shares(assign_from_pools(pools, counts))


def _tree(
    coarse: Integers, fine: Integers, rng: np.random.Generator
) -> tuple[Integers, list[Integers], tuple[Integers, Integers]]:
    """Images of each leaf (a fine class of a coarse one): counts, shuffled pools and positions.

    The counts are (coarse classes, most fine classes of one), zero where one has fewer.
    """
    width = int(fine.max()) + 1
    _, rows = np.unique(coarse, return_inverse=True)
    pools = pools_by_class(rows * width + fine, rng)
    parents = np.array([rows[pool[0]] for pool in pools])
    places = np.arange(len(pools)) - np.searchsorted(parents, parents)
    leaves = np.zeros((parents[-1] + 1, places.max() + 1), np.int64)
    leaves[parents, places] = [len(pool) for pool in pools]
    return leaves, pools, (parents, places)
