"""Clients of unequal size whose images are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harmonium.data.images import Images
from harmonium.data.partition import Shares, SplitRule, splits
from harmonium.data.splits.sampling import (
    assign_from_pools,
    check_at_least,
    check_positive,
    check_sizes,
    log_dirichlet,
    rounded,
    shares_of,
)


@splits("quantity")
@dataclass(frozen=True)
class Quantity(SplitRule):
    """Unequal sizes from a Dirichlet distribution, images drawn at random; needs no labels.

    Every client has `min_size` images; what is left is shared out in the drawn proportions, and
    nothing is dropped.
    """

    alpha: float = 0.5  # concentration: small is one large client, large is equal sizes
    min_size: int = 10  # images that every client has at least

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
        """Draw the sizes, then cut one permutation."""
        spare = len(images) - clients * self.min_size
        shares = shares_of(log_dirichlet(np.full(clients, self.alpha), rng))
        sizes = self.min_size + rounded(shares * spare, spare)
        return Shares(assign_from_pools([rng.permutation(len(images))], sizes[:, None]))
