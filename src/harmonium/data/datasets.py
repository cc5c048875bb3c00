"""What every data set has in common, and the table of their names.

A data set is a frozen dataclass whose fields are its settings. It says what identifies its content
and how to decode it; everything else (cache, size, held-out parts, limits) is done here, once, so
that all methods see the same training, validation and test parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from harmonium.core.errors import ConfigError, DataError, Key, undefined
from harmonium.core.registry import Registry
from harmonium.core.seeds import numpy_rng
from harmonium.data.cache import Stored, Writer, decoded, digest_of, is_decoded, reopened
from harmonium.data.images import UNKNOWN, Dataset, Integers
from harmonium.data.labels import stratified

MOST_SIDE = 4096  # pixels; more is a slip of the keyboard


@dataclass(frozen=True)
class About:
    """What a reader should know of a data set before using it."""

    shape: tuple[int, int, int] | None  # height, width, channels; None: images of many sizes
    classes: int | None
    train: int | None  # images in the training part
    test: int | None  # and in the test part; 0: a share of the others is held out
    licence: str  # as its makers state it, or that they do not


@dataclass(frozen=True)
class DataSpec:
    """The settings of any data set; `load` gives the images."""

    limit: int | None = None  # use only so many training images; None: all
    validation: float = 0.1  # share of the training images kept apart from the clients
    labelled: float = 0.0  # share kept apart with labels, for probes with few; at least 1 a class
    size: int | None = None  # shorter side scaled to this, centre cut out as a square; None: as is
    channels: int | None = None  # 3: colour, 1: grey; None: as the data are
    seed: int = 0  # which images are held out

    name: ClassVar[str] = ""
    about: ClassVar[About | None] = None

    def load(self, key: str | None = None) -> Dataset:
        """The data set, decoded on the first call and memory-mapped from then on.

        With the `key` of an earlier call's result, its source is looked at only if what was decoded
        then is gone: a run goes on with the images it began with.
        """
        stored = reopened(self.name, key) if key else None
        return self._select(stored or self.stored())

    def stored(self) -> Stored:
        """All parts as decoded, before anything is held out."""
        self.check()
        return decoded(
            self.name, self._whole_identity(), self.decode, size=self.size, channels=self.channels
        )

    def is_decoded(self) -> bool:
        """Whether loading these images takes a moment only; it may take minutes otherwise."""
        return is_decoded(self.name, self._whole_identity())

    def _whole_identity(self) -> dict[str, Any]:
        return {"size": self.size, "channels": self.channels, **self.identity()}

    def check(self) -> None:
        """Refuse settings that cannot be right, before anything is read."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                Key("data", "limit"), f"={self.limit}: use at least 1 image, or leave it out"
            )
        check_share("validation", self.validation)
        check_share("labelled", self.labelled)
        if self.size is not None and not 1 <= self.size <= MOST_SIDE:
            raise ConfigError(
                Key("data", "size"), f"={self.size}: between 1 and {MOST_SIDE} pixels"
            )
        if self.channels not in (None, 1, 3):
            raise ConfigError(
                Key("data", "channels"), f"={self.channels}: use 1 (grey) or 3 (colour)"
            )

    def missing(self) -> tuple[str, ...]:
        """What must be fetched before these images can be loaded, each with its command."""
        return ()

    @classmethod
    def column_way(cls, column: str) -> str:
        """How such data are given a column, for a message; empty where they cannot have one."""
        return ""

    def identity(self) -> dict[str, Any]:
        """Plain values that change whenever the decoded content would."""
        raise undefined(self, "identity")

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write part "train", and "test", "validation" and "labelled" where they exist.

        Returns the classes.
        """
        raise undefined(self, "decode")

    def test_share(self) -> float:
        """Share to hold out for testing where the data bring no test part."""
        return 0.0

    def _select(self, stored: Stored) -> Dataset:
        parts = dict(stored.parts)
        everything = np.arange(len(parts["train"]))
        if "test" in parts:
            test, rest = parts["test"], everything
        else:
            rest, held = self._hold_out("test", everything, self.test_share(), len(everything))
            test = parts["train"].subset(held)
        base = len(rest) if self.limit is None else self.limit
        share = 0.0 if "validation" in parts else self.validation
        if base + round(share * base) > len(rest) and self.limit is not None:
            apart = (", of which ", Key("data", "validation"), f"={share} keeps some apart")
            less = apart if share else ()
            raise DataError(
                Key("data", "limit"),
                f"={self.limit}, but {self.name} has {len(rest)} training images",
                *less,
                ": use ",
                Key("data", "limit"),
                f"={int(len(rest) / (1 + share))} or less",
            )
        order, held = self._hold_out("validation", rest, share, base)
        chosen = order[:base]
        kept = chosen[:0]
        if self.labelled:
            kept, chosen = self._keep_labelled(chosen, parts["train"].labels)
        if len(chosen) == 0:
            raise DataError(
                f"no training image is left of the {len(everything)} of {self.name}: lower ",
                Key("data", "validation"),
                ", ",
                Key("data", "labelled"),
                " or ",
                Key("data", "test"),
            )
        validation = parts["train"].subset(held)
        if "validation" in parts:  # in random order too: monitoring looks at the first of them
            given = parts["validation"]
            held = numpy_rng(self.seed, "data", "validation").permutation(len(given))
            validation = given.subset(held)
        selected = [_sum(chosen), _sum(held), _sum(rest), *([_sum(kept)] if len(kept) else [])]
        return Dataset(
            name=self.name,
            train=parts["train"].subset(chosen),
            validation=validation,
            test=test,
            classes=stored.classes,
            digest=digest_of([stored.digest, *selected]),
            notes=stored.notes,
            names=stored.names,
            labelled=parts["train"].subset(kept) if len(kept) else parts.get("labelled"),
            key=stored.key,
        )

    def _hold_out(
        self, purpose: str, rows: Integers, share: float, base: int
    ) -> tuple[Integers, Integers]:
        """`rows` in the order drawn for this purpose, cut before its last round(share * base)."""
        order = numpy_rng(self.seed, "data", purpose).permutation(rows)
        cut = len(rows) - round(share * base)
        return order[:cut], order[cut:]

    def _keep_labelled(self, rows: Integers, labels: Integers) -> tuple[Integers, Integers]:
        """The labelled part that no client gets, the same share of every class, and the rest."""
        if not (labels[rows] != UNKNOWN).any():
            raise DataError(
                Key("data", "labelled"),
                f"={self.labelled}, but {self.name} has no labels: leave it out",
            )
        rng = numpy_rng(self.seed, "data", "labelled")
        picked = stratified(labels[rows], self.labelled, rng)
        return rows[picked], np.delete(rows, picked)


@dataclass(frozen=True)
class UnsplitSpec(DataSpec):
    """Settings of data that may come without a test part."""

    test: float = 0.2  # share held out for testing where the data bring no test part

    def check(self) -> None:
        """Refuse a test share that leaves nothing."""
        super().check()
        check_share("test", self.test)

    def test_share(self) -> float:
        """The setting `test`."""
        return self.test


datasets: Registry[DataSpec] = Registry("data set", "harmonium.data.sets", DataSpec)
"""Every data set by name."""


def check_share(setting: str, value: float) -> None:
    """Refuse a share that is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ConfigError(
            Key("data", setting), f"={value}: a share is at least 0 and below 1, e.g. 0.1"
        )


def check_at_least(setting: str, value: float, least: float) -> None:
    """Refuse a value below the least that makes sense."""
    if not value >= least:
        raise ConfigError(Key("data", setting), f"={value}: at least {least} is needed")


def no_labels(count: int) -> Integers:
    """Labels for images whose classes are not known."""
    return np.full(count, UNKNOWN, np.int64)


def _sum(rows: Integers) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
