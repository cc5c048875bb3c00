"""Several data sets with the same classes, each a style of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.store import Writer
from harmonium.errors import ConfigError, DataError

CHUNK = 1024  # pictures handed on at once


@datasets("styles")
@dataclass(frozen=True)
class Styles(DataSpec):
    """Several data sets with the same classes, each one style; FedStyle's Digit unless told.

    The factor `style` says which set a picture comes from. `split=styles` gives every client one
    style, and brings the styles to equal sizes as FedStyle does. Sets without a test part hold
    theirs out by their own default share and `seed`.
    """

    sets: tuple[str, ...] = ("mnist", "usps", "svhn")  # names of data sets
    size: int = 32  # side that all pictures are brought to
    channels: int = 3  # 3: colour, 1: grey

    def check(self) -> None:
        """Refuse fewer than two sets, and sets that need more than a name."""
        super().check()
        if len(self.sets) < 2 or len(set(self.sets)) < len(self.sets):
            raise ConfigError(
                "data.sets needs at least two different data sets, e.g. [mnist, usps]"
            )
        for member in self._members():
            member.check()

    def _members(self) -> list[DataSpec]:
        return [
            datasets[name](size=self.size, channels=self.channels, seed=self.seed, validation=0.0)
            for name in self.sets
        ]

    def identity(self) -> dict[str, Any]:
        """The settings and contents of the members."""
        loaded = [member.load() for member in self._members()]
        return {"members": [[member.digest, member.notes] for member in loaded]}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write the members one after another; their classes must be the same."""
        loaded = [member.load() for member in self._members()]
        classes = loaded[0].classes
        for name, member in zip(self.sets, loaded, strict=True):
            if member.classes != classes:
                raise DataError(
                    f"data.sets: {self.sets[0]} has {len(classes)} classes "
                    f"({', '.join(classes[:3])} …), but {name} has {len(member.classes)} "
                    f"({', '.join(member.classes[:3])} …): styles show the same classes"
                )
            writer.notes += [f"{name}: {note}" for note in member.notes]
        writer.names["style"] = tuple(self.sets)
        for part in ("train", "test"):
            for style, member in enumerate(loaded):
                images = getattr(member, part)
                for start in range(0, len(images), CHUNK):
                    rows = np.arange(start, min(start + CHUNK, len(images)))
                    labels = images.labels[rows]
                    column = np.full(len(rows), style, np.int64)
                    writer.append(part, images.batch(rows), labels, {"style": column})
        return classes
