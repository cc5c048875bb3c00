"""Several data sets with the same classes joined into one, each a style; e.g. FedStyle's Digit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core.errors import ConfigError, DataError, Key
from harmonium.core.seeds import numpy_rng
from harmonium.data.cache import Writer
from harmonium.data.datasets import DataSpec, check_at_least, datasets
from harmonium.data.images import GROUP, Images, Integers
from harmonium.data.partition import pools_by_class
from harmonium.data.sets.npz import Npz
from harmonium.data.splits.sampling import levelled

CHUNK = 1024  # images written at once


@datasets("styles")
@dataclass(frozen=True)
class StyledImages(DataSpec):
    """Several data sets with the same classes, each one style; by default FedStyle's Digit.

    The factor `style` says which set an image comes from. `split=styles` gives every client one
    style, and brings the styles to equal sizes as FedStyle does. A set may be an archive as
    `data=npz` takes it; its style is called as the file is. Sets without a test part hold theirs
    out by their own default share and `seed`.
    """

    sets: tuple[str, ...] = ("mnist", "usps", "svhn")  # names of data sets, or .npz files
    each: int | None = None  # training images of every style, its classes level; none: all
    test_each: int | None = None  # and test images
    size: int = 32  # side that all images are brought to
    channels: int = 3  # 3: colour, 1: grey

    def check(self) -> None:
        """Check that there are two styles or more, and the settings of each member."""
        super().check()
        for setting in ("each", "test_each"):
            if (count := getattr(self, setting)) is not None:
                check_at_least(setting, count, 1)
        if len(self.sets) < 2 or len(set(self._names())) < len(self.sets):
            raise ConfigError(
                Key("data", "sets"),
                " needs at least two data sets of different names, e.g. [mnist, usps]",
            )
        for member in self._members():
            try:
                member.check()
            except DataError as error:  # names data.path, which is data.sets here
                raise error.with_keys(_as_member) from None

    def missing(self) -> tuple[str, ...]:
        """The members that were not fetched."""
        return tuple(text for member in self._members() for text in member.missing())

    def _members(self) -> list[DataSpec]:
        names = ("size", "channels", "fit", "seed")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        common["validation"] = 0
        return [
            Npz(path=name, **common) if is_archive(name) else datasets[name](**common)
            for name in self.sets
        ]

    def _names(self) -> tuple[str, ...]:
        """The names of the styles: of a file only its stem."""
        return tuple(Path(name).stem if is_archive(name) else name for name in self.sets)

    def identity(self) -> dict[str, Any]:
        """The settings and contents of the members."""
        loaded = [member.load() for member in self._members()]
        limits = {key: getattr(self, key) for key in ("each", "test_each") if getattr(self, key)}
        return {
            "styles": self._names(),
            "members": [[member.digest, member.notes] for member in loaded],
            **limits,
        }

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write the members one after another; their classes must be the same."""
        loaded = [member.load() for member in self._members()]
        classes = loaded[0].classes
        names = self._names()
        for name, member in zip(names, loaded, strict=True):
            if member.classes != classes:
                raise DataError(
                    Key("data", "sets"),
                    f": {names[0]} has {len(classes)} classes "
                    f"({', '.join(classes[:3])} …), but {name} has {len(member.classes)} "
                    f"({', '.join(member.classes[:3])} …): styles show the same classes",
                )
            if GROUP in member.train.factors:
                raise DataError(
                    *(Key("data", "sets"), f": {name} has a column '{GROUP}', and data=styles "),
                    "cannot keep groups together: remove the column",
                )
            writer.notes += [f"{name}: {note}" for note in member.notes]
        writer.names["style"] = names
        for part, setting in (("train", "each"), ("test", "test_each")):
            for style, (name, member) in enumerate(zip(names, loaded, strict=True)):
                images = getattr(member, part)
                chosen = self._chosen(images, setting, name, part)
                for start in range(0, len(chosen), CHUNK):
                    rows = chosen[start : start + CHUNK]
                    column = np.full(len(rows), style, np.int64)
                    writer.append(part, images.batch(rows), images.labels[rows], {"style": column})
        return classes

    def _chosen(self, images: Images, setting: str, name: str, part: str) -> Integers:
        """The rows of a style's part to use: all, or `each` of them, with classes balanced."""
        count = getattr(self, setting)
        if count is None:
            return np.arange(len(images))
        if count > len(images):
            kind = "training" if part == "train" else "test"
            raise DataError(
                Key("data", setting),
                f"={count}, but {name} has {len(images)} {kind} images: use {len(images)} or less",
            )
        pools = pools_by_class(images.labels, numpy_rng(self.seed, "data", setting, name))
        counts = levelled(np.array([len(pool) for pool in pools]), count)
        return np.sort(np.concatenate([pool[:n] for pool, n in zip(pools, counts, strict=True)]))


def _as_member(key: Key) -> Key:
    return Key("data", "sets") if key == Key("data", "path") else key


def is_archive(name: str) -> bool:
    """Whether a member is an `.npz` file, and not the name of a data set."""
    return name.endswith(".npz")
