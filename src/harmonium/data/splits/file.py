"""A split that was saved before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Shares, Split, SplitRule, splits


@splits("file")
@dataclass(frozen=True)
class SavedSplit(SplitRule):
    """A saved split, e.g. the `split.npz` of a run, with its angles and its seen labels."""

    path: str = ""  # the .npz file

    def __post_init__(self) -> None:
        """Check that a file is named."""
        super().__post_init__()
        if not self.path:
            raise ConfigError("split 'file' needs split.path=FILE.npz")

    def check(self, images: Images, clients: int, called: str = "this data set") -> None:
        """Raise an error if the file was made for other clients or other data."""
        super().check(images, clients, called)
        split = self._load()
        if len(split) != clients:
            way = f"set clients={len(split)}"
            if self.merge > 1:
                way = f"clients times split.merge must be {len(split)}"
            raise DataError(f"split.path={self.path} holds {len(split)} clients: {way}")
        try:
            split.validate(len(images))
        except DataError as error:
            raise DataError(f"split.path={self.path}: {error}") from None
        if split.labelled is not None and self.labels < 1:
            raise ConfigError(
                f"split.labels={self.labels}, but split.path={self.path} says itself which labels "
                "may be seen: leave split.labels out"
            )
        if (new := len(split.newcomers)) and new != self.newcomers:
            raise ConfigError(
                f"split.path={self.path} says itself who the newcomers are: set "
                f"split.newcomers={new}"
            )
        if new and 1 < self.merge < clients:
            raise ConfigError(f"split.path={self.path} has newcomers: leave split.merge out")

    def assign(self, images: Images, clients: int, rng: np.random.Generator) -> Shares:
        """The shares in the file; nothing is random."""
        split = self._load()
        origin = f"made by split={split.spec.get('name')} with seed={split.spec.get('seed')}"
        notes = [*split.notes, f"read from a file, {origin}"]
        new = split.newcomers
        return Shares(split.indices, split.angles, notes, split.labelled, split.data, new)

    def client_names(self, dataset: Dataset) -> tuple[str, ...]:
        """The names in the file."""
        return self._load().names

    def _load(self) -> Split:
        return Split.load(Path(self.path).expanduser())
