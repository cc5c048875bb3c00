"""Class proportions drawn from Dirichlet distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harmonium.data.images import Images
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import assign_from_pools, check_positive, draw_clients


@splits("dirichlet")
@dataclass(frozen=True)
class Dirichlet(SplitRule):
    """Class proportions from a Dirichlet distribution, equal sizes (Hsu et al., 2019).

    Each client draws its proportions, then its images one after another without replacement; a
    class that has run out is left out and the others keep their ratios.
    """

    alpha: float = 0.1  # concentration: small is one class a client, large is iid
    prior: bool = False  # alpha times the share of each class, as Federated SimCLR counts it

    needs_labels: ClassVar[bool] = True
    moves_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.1)

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Client by client, as many as possible of the wanted images at a time."""
        pools = pools_by_class(images.labels, rng)
        left = np.array([len(pool) for pool in pools])
        concentration = self.alpha * (left / left.sum() if self.prior else np.ones(len(left)))
        counts = draw_clients(concentration, left, clients, len(images) // clients, rng)
        return Shares(assign_from_pools(pools, counts))
