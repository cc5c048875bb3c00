"""What every data set has in common, and the table of their names.

A data set is a frozen dataclass whose fields are its settings. It says what identifies its content
and how to decode it; everything else (cache, held-out parts, limits) is done here, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from harmonium.data.images import Dataset, Images, Integers
from harmonium.data.store import Stored, Writer, decoded, digest_of
from harmonium.errors import ConfigError, DataError
from harmonium.registry import Registry
from harmonium.seeds import numpy_rng


@dataclass(frozen=True)
class DataSpec:
    """The settings of any data set; `load` gives the pictures."""

    limit: int | None = None  # use only so many training pictures; None: all
    validation: float = 0.1  # share of the training pictures kept apart from the clients
    seed: int = 0  # which pictures are held out

    name: ClassVar[str] = ""

    def load(self) -> Dataset:
        """The data set, decoded on the first call and memory-mapped from then on."""
        self.check()
        stored = decoded(self.name, self.identity(), self.decode)
        return self._select(stored)

    def check(self) -> None:
        """Refuse settings that cannot be right, before anything is read."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"data.limit={self.limit}: use at least 1 picture, or leave it out")
        check_share("validation", self.validation)

    def identity(self) -> dict[str, Any]:
        """Plain values that change whenever the decoded content would."""
        raise TypeError(f"{type(self).__name__} must define `identity`")

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write part "train", and "test" and "validation" where they exist; return the classes."""
        raise TypeError(f"{type(self).__name__} must define `decode`")

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
        if self.limit is not None and self.limit > len(rest):
            raise DataError(
                f"data.limit={self.limit}, but {self.name} has {len(rest)} training pictures: "
                f"use data.limit={len(rest)} or less"
            )
        base = len(rest) if self.limit is None else self.limit
        share = 0.0 if "validation" in parts else self.validation
        order, held = self._hold_out("validation", rest, share, base)
        chosen = order[:base]
        if len(chosen) == 0:
            raise DataError(
                f"no training picture is left of the {len(everything)} of {self.name}: "
                "lower data.validation or data.test"
            )
        validation = parts["train"].subset(held)
        if "validation" in parts:  # in random order too: monitoring looks at the first of them
            given = parts["validation"]
            held = numpy_rng(self.seed, "data", "validation").permutation(len(given))
            validation = given.subset(held)
        return Dataset(
            name=self.name,
            train=parts["train"].subset(chosen),
            validation=validation,
            test=test,
            classes=stored.classes,
            digest=digest_of([stored.digest, _sum(chosen), _sum(held), _sum(rest)]),
            notes=stored.notes,
        )

    def _hold_out(
        self, purpose: str, rows: Integers, share: float, base: int
    ) -> tuple[Integers, Integers]:
        """`rows` in the order drawn for this purpose, cut before its last round(share * base)."""
        order = numpy_rng(self.seed, "data", purpose).permutation(rows)
        cut = len(rows) - round(share * base)
        return order[:cut], order[cut:]


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


datasets: Registry[DataSpec] = Registry("data set", "harmonium.data", DataSpec)
"""Every data set by name."""


def check_share(setting: str, value: float) -> None:
    """Refuse a share that is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"data.{setting}={value}: a share is at least 0 and below 1, e.g. 0.1")


def check_at_least(setting: str, value: float, least: float) -> None:
    """Refuse a value below the least that makes sense."""
    if not value >= least:
        raise ConfigError(f"data.{setting}={value}: at least {least} is needed")


def _sum(rows: Integers) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()


@datasets("digits")
@dataclass(frozen=True)
class Digits(UnsplitSpec):
    """The 1,797 handwritten digits of scikit-learn, 8x8 grey: small enough for a first try."""

    def identity(self) -> dict[str, Any]:
        """The set never changes."""
        return {}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Stretch the 17 grey levels over a byte."""
        from sklearn.datasets import load_digits

        found = load_digits()
        pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
        writer.append("train", pixels, found.target)
        return tuple(str(digit) for digit in range(10))


def no_labels(count: int) -> Integers:
    """Labels for pictures whose classes are not known."""
    return np.full(count, -1, np.int64)


__all__ = ["DataSpec", "Dataset", "Digits", "Images", "UnsplitSpec", "datasets"]
