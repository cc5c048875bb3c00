"""Clients that hold a few whole classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.images import Images, Integers
from harmonium.data.partition import Shares, SplitRule, pools_by_class, splits
from harmonium.data.splits.sampling import assign_from_pools, check_at_least


@splits("by_class")
@dataclass(frozen=True)
class ByClass(SplitRule):
    """Every client holds a few neighbouring classes and no others.

    Client k takes the next `classes_per_client` classes after client k-1, and after the last class
    comes the first. So every class is held by an equal number of clients, give or take one, and
    those divide it equally. Ten clients with 1 of 10 classes is FedSC's CIFAR-10, twenty with 5 of
    100 its CIFAR-100, five with 2 of 10 FedCA's CIFAR-10.

    With `least_used`, as FedU and FedEMA do it, every class is cut into as many parts as the class
    with most clients needs, and a client takes one part each of the classes that are least used so
    far, which are the same classes as above. All parts of a class are equal in size, but no client
    may hold some of them.
    """

    classes_per_client: int = 1  # how many classes each client holds
    assignment: Literal["consecutive", "least_used"] = "consecutive"  # least_used: FedU's

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be right."""
        super().__post_init__()
        check_at_least("classes_per_client", self.classes_per_client, 1)

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Raise an error if a class would have no client or a client too few images."""
        each = self.classes_per_client
        super().check(images, clients, called)
        values, counts = np.unique(images.labels, return_counts=True)
        if each > len(values):
            raise DataError(
                f"split.classes_per_client={each}, but {called} has {len(values)} classes: "
                f"use at most {len(values)}"
            )
        if clients * each < len(values):
            raise DataError(
                f"{clients} clients with split.classes_per_client={each} hold {clients * each} of "
                f"{len(values)} classes and leave the others out: use at least "
                f"{-(-len(values) // each)} clients or split.classes_per_client="
                f"{-(-len(values) // clients)}"
            )
        parts = self._parts(self._holders(len(values), clients))
        short = np.flatnonzero(counts < parts)
        if len(short):
            row = short[0]
            raise DataError(
                f"class {values[row]} has {counts[row]} images, but {parts[row]} clients "
                "would hold it: use fewer clients or a smaller split.classes_per_client"
            )

    def _holders(self, classes: int, clients: int) -> list[list[int]]:
        """The clients that hold each class."""
        holders: list[list[int]] = [[] for _ in range(classes)]
        for slot in range(clients * self.classes_per_client):
            holders[slot % classes].append(slot // self.classes_per_client)
        return holders

    def _parts(self, holders: Sequence[Sequence[int]]) -> Integers:
        """Number of parts of each class."""
        parts = np.array([len(of) for of in holders])
        return parts if self.assignment == "consecutive" else np.full_like(parts, parts.max())

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """Shuffle each class and divide it among its clients."""
        pools = pools_by_class(images.labels, rng)
        holders = self._holders(len(pools), clients)
        counts = np.zeros((clients, len(pools)), np.int64)
        for row, parts in enumerate(self._parts(holders)):
            sizes = [len(piece) for piece in np.array_split(pools[row], parts)]
            counts[holders[row], row] = sizes[: len(holders[row])]
        return Shares(assign_from_pools(pools, counts))
