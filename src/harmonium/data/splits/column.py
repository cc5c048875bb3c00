"""Natural clients: those that a column of the data names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from harmonium.core.errors import DataError
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Shares, SplitRule, splits
from harmonium.data.splits.sampling import check_complete, column_of, positions_by_client


@splits("column")
@dataclass(frozen=True)
class Column(SplitRule):
    """Natural clients: one for each value of a column of the data, in the order of the values."""

    column: str = "client"  # the column that says whose an image is
    missing: Literal["refuse", "drop"] = "refuse"  # images without a value there

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Raise an error unless `clients` is the number of values of the column."""
        super().check(images, clients, called)
        values = column_of(images, self.column, called)
        if self.missing == "refuse":
            check_complete(values, self.column, "set split.missing=drop to leave them out")
        named = len(np.unique(values[values >= 0]))
        if named != clients:
            way = f"set clients={named}"
            if self.merge > 1:
                way = f"clients times split.merge must be {named}"
            raise DataError(
                f"split.column={self.column} names {named} clients among the training images of "
                f"{called}: {way}"
            )

    def client_names(self, dataset: Dataset) -> tuple[str, ...]:
        """The names of the column's values."""
        values = np.unique(dataset.train.factors[self.column])
        names = dataset.names.get(self.column)
        return tuple(names[k] if names else str(k) for k in values[values >= 0].tolist())

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """The clients of the column; nothing is random."""
        values = images.factors[self.column]
        holder = np.searchsorted(np.unique(values[values >= 0]), values)
        return Shares(positions_by_client(np.where(values < 0, -1, holder), clients))
