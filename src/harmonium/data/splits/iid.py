"""Equal shares, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from harmonium.data.images import Images
from harmonium.data.partition import Shares, SplitRule, splits


@splits("iid")
@dataclass(frozen=True)
class IID(SplitRule):
    """Every client the same number of images, drawn at random; the remainder goes to nobody."""

    moves_groups: ClassVar[bool] = True

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Cut one permutation into equal pieces."""
        each = len(images) // clients
        order = rng.permutation(len(images))[: clients * each]
        return Shares([np.sort(piece) for piece in order.reshape(clients, each)])
