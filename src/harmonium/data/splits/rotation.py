"""Images rotated by angles of their client: covariate shift, alone or with label skew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, splits
from harmonium.data.splits.dirichlet import Dirichlet
from harmonium.data.splits.iid import IID
from harmonium.data.splits.sampling import check_at_least, check_positive, log_dirichlet, shares_of


@splits("rotation")
@dataclass(frozen=True)
class RotationSplit(SplitRule):
    """Equal random shares, each client's images rotated by its own angles (Federated SimCLR).

    A full turn is cut into bins. Each client draws proportions of the bins, and each of its
    images a bin and an angle within it, which stay for the whole run. Test images stay upright.
    """

    alpha: float = 0.1  # concentration over all bins together: small is one or two bins a client
    bins: int = 10  # parts of a full turn

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.1)
        check_at_least("bins", self.bins, 1)

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Shares as `iid`, then the angles."""
        shares = IID().deal(images, clients, rng)
        return replace(shares, angles=draw_angles(shares.indices, self.alpha, self.bins, rng))


@splits("joint")
@dataclass(frozen=True)
class Joint(SplitRule):
    """Class proportions as in dirichlet and angles as in rotation, both drawn for each client."""

    alpha: float = 0.1  # concentration over the classes, and over all bins together
    prior: bool = True  # alpha times the share of each class, as Federated SimCLR counts it
    bins: int = 10  # parts of a full turn
    angle_alpha: float | None = None  # another concentration over all bins together; None: alpha

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_positive("alpha", self.alpha, 0.1)
        check_at_least("bins", self.bins, 1)
        if self.angle_alpha is not None:
            check_positive("angle_alpha", self.angle_alpha, 0.1)

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Shares as `dirichlet`, then the angles."""
        shares = Dirichlet(self.alpha, self.prior).deal(images, clients, rng)
        alpha = self.alpha if self.angle_alpha is None else self.angle_alpha
        return replace(shares, angles=draw_angles(shares.indices, alpha, self.bins, rng))


def draw_angles(
    indices: Sequence[Integers], alpha: float, bins: int, rng: np.random.Generator
) -> list[npt.NDArray[np.float32]]:
    """Degrees for every image of every client; bin weights are Dir(alpha / bins)."""
    weights = shares_of(log_dirichlet(np.full((len(indices), bins), alpha / bins), rng))
    angles = []
    for own, shares in zip(indices, weights, strict=True):
        places = rng.choice(bins, len(own), p=shares) + rng.random(len(own))
        angles.append((places * (360 / bins)).astype(np.float32))
    return angles
