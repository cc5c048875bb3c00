"""The base class of data sets, and the registry of their names.

A data set is a frozen dataclass whose fields are its settings. A subclass defines what identifies
its content (`identity`) and how to decode it (`decode`). Caching, resizing, limits and held-out
parts are implemented here, so that all methods see the same training, validation and test parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, DataError, Key, counted, undefined
from harmonium.core.registry import Registry
from harmonium.core.seeds import numpy_rng
from harmonium.data.cache import Stored, Writer, decoded, digest_of, is_decoded, reopened
from harmonium.data.decoding.conversion import Fit
from harmonium.data.grouping import check_parts, covering_groups, groups_of, whole_groups
from harmonium.data.images import CHANNELS, UNKNOWN, Dataset, Integers
from harmonium.data.labels import stratified

MOST_SIDE = 4096  # pixels; larger values are taken for typing errors


@dataclass(frozen=True)
class About:
    """The facts about a data set that `harmonium datasets` lists."""

    shape: tuple[int, int, int] | None  # height, width, channels; None: images of many sizes
    classes: int | None
    train: int | None  # images in the training part
    test: int | None  # images in the test part; 0: a share of the others is held out
    licence: str  # as its authors state it, or "not stated"


@dataclass(frozen=True)
class DataSpec:
    """The settings that all data sets share; `load` returns the images."""

    limit: int | None = None  # use only so many training images; None: all
    validation: float = 0.1  # share of the training images kept apart from the clients
    labelled: float = 0.0  # share kept apart with labels, for probes with few; at least 1 a class
    size: int | None = None  # side of the square that every image becomes; None: as is
    channels: int | None = None  # 3: colour, 1: grey, 2 and 4: as stored; None: as the data are
    seed: int = 0  # which images are held out
    fit: Fit = "cut"  # to a square: cut the centre out, resize (stretch), or pad with black

    name: ClassVar[str] = ""
    about: ClassVar[About | None] = None

    def load(self, key: str | None = None) -> Dataset:
        """The data set, decoded on the first call and memory-mapped from then on.

        With the `key` of an earlier result, the images decoded then are used even if their source
        has changed since, so that a resumed run continues with the same images. The source is read
        only if they are no longer in the cache.
        """
        stored = reopened(self.name, key) if key else None
        return self._select(stored or self.stored())

    def stored(self) -> Stored:
        """All parts as decoded, before anything is held out."""
        self.check()
        return decoded(
            self.name,
            self._whole_identity(),
            self.decode,
            size=self.size,
            channels=self.channels,
            fit=self.fit,
        )

    def is_decoded(self) -> bool:
        """Whether the images are in the cache; decoding them may take minutes."""
        return is_decoded(self.name, self._whole_identity())

    def _whole_identity(self) -> dict[str, Any]:
        fit = {} if self.size is None else changed(self, "fit")
        return {"size": self.size, "channels": self.channels, **fit, **self.identity()}

    def check(self) -> None:
        """Raise an error for invalid settings, before anything is read."""
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
        if self.channels not in (None, *CHANNELS):
            raise ConfigError(
                Key("data", "channels"),
                f"={self.channels}: use 1 (grey) or 3 (colour), or 2 or 4 where the data have them",
            )
        if self.fit not in get_args(Fit):
            raise ConfigError(Key("data", "fit"), f"={self.fit}: use cut, resize or pad")

    def missing(self) -> tuple[str, ...]:
        """What must be fetched before these images can be loaded, each with its command."""
        return ()

    @classmethod
    def column_way(cls, column: str) -> str:
        """How users can add a column to such data, for error messages; empty if they cannot."""
        return ""

    def identity(self) -> dict[str, Any]:
        """JSON values that change whenever the decoded content would; part of the cache key."""
        raise undefined(self, "identity")

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write the part "train", and "test", "validation" and "labelled" if the data have them.

        Returns the names of the classes.
        """
        raise undefined(self, "decode")

    def test_share(self) -> float:
        """Share to hold out for testing if the data have no test part."""
        return 0.0

    def _select(self, stored: Stored) -> Dataset:
        """Divide what was decoded into the parts of a data set, as the settings say."""
        parts = dict(stored.parts)
        rows, notes = np.arange(len(parts["train"])), list(stored.notes)
        check_parts(parts)
        groups = groups_of(parts["train"])
        rest, test = rows, parts.get("test")
        if test is None:
            rest, held_out = self._hold_out("test", rows, self.test_share(), len(rows), groups)
            test = parts["train"].subset(held_out)
        share = 0.0 if "validation" in parts else self.validation
        base = len(rest) if self.limit is None else self.limit
        self._check_limit(share, len(rest))
        order, validation_rows = self._hold_out("validation", rest, share, base, groups)
        chosen = order[:base]
        labelled_rows = chosen[:0]
        if self.labelled:
            labels = parts["train"].labels
            labelled_rows, chosen = self._keep_labelled(chosen, labels, groups, notes)
        if len(chosen) == 0:
            raise DataError(
                f"no training image is left of the {len(rows)} of {self.name}: lower ",
                *(Key("data", "validation"), ", ", Key("data", "labelled")),
                *(" or ", Key("data", "test")),
            )
        validation = parts["train"].subset(validation_rows)
        if "validation" in parts:  # shuffled, because monitoring evaluates the first ones only
            own = parts["validation"]
            validation_rows = numpy_rng(self.seed, "data", "validation").permutation(len(own))
            validation = own.subset(validation_rows)
        selected = [chosen, validation_rows, rest, *([labelled_rows] if len(labelled_rows) else [])]
        labelled = parts["train"].subset(labelled_rows) if len(labelled_rows) else None
        return Dataset(
            name=self.name,
            train=parts["train"].subset(chosen),
            validation=validation,
            test=test,
            classes=stored.classes,
            digest=digest_of([stored.digest, *map(_sum, selected)]),
            notes=tuple(notes),
            names=stored.names,
            labelled=parts.get("labelled") if labelled is None else labelled,
            key=stored.key,
        )

    def _check_limit(self, share: float, count: int) -> None:
        """Raise an error if `count` images are too few for the limit and its validation part."""
        if self.limit is None or self.limit + round(share * self.limit) <= count:
            return
        held_out = (", of which ", Key("data", "validation"), f"={share} holds some out")
        raise DataError(
            *(Key("data", "limit"), f"={self.limit}, but {self.name} has {count} training images"),
            *(held_out if share else ()),
            *(": use ", Key("data", "limit"), f"={int(count / (1 + share))} or less"),
        )

    def _hold_out(
        self, purpose: str, rows: Integers, share: float, base: int, groups: Integers | None
    ) -> tuple[Integers, Integers]:
        """`rows` in random order, without and with the last round(share * base) of them.

        With `groups` whole groups are held out, of as many images as comes closest.
        """
        order = numpy_rng(self.seed, "data", purpose).permutation(rows)
        wanted = round(share * base)
        if groups is None:
            cut = len(rows) - wanted
            return order[:cut], order[cut:]
        held_out = whole_groups(groups[order], wanted)
        self._check_near(purpose, wanted, held_out, groups[order])
        return order[~held_out], order[held_out]

    def _check_near(
        self, part: str, wanted: int, inside: npt.NDArray[np.bool_], groups: Integers
    ) -> None:
        """Raise an error if groups are so large that a part is far from what its share says."""
        found, count = int(inside.sum()), len(groups)
        if wanted / 2 <= found <= 2 * wanted and found < max(count, 1):
            return
        near = found or int(np.unique(groups, return_counts=True)[1].min())
        key = Key("data", part)
        raise DataError(
            *(key, f"={getattr(self, part):g} is {counted(wanted, 'image')} of {self.name}, but "),
            f"groups are kept together and the nearest that they allow is {near} of {count}: use ",
            *(key, f"={near / count:.2g} or " if near < count else "=", "0"),
        )

    def _keep_labelled(
        self, rows: Integers, labels: Integers, groups: Integers | None, notes: list[str]
    ) -> tuple[Integers, Integers]:
        """The rows of the labelled part, the same share of every class, and all other rows.

        With `groups` these are whole groups, at least that share of every class. Their images
        without a label are in neither.
        """
        if not (labels[rows] != UNKNOWN).any():
            raise DataError(
                Key("data", "labelled"),
                f"={self.labelled}, but {self.name} has no labels: leave it out",
            )
        rng = numpy_rng(self.seed, "data", "labelled")
        positions = stratified(labels[rows], self.labelled, rng)
        if groups is None:
            return rows[positions], np.delete(rows, positions)
        share = np.bincount(labels[rows][positions])
        inside = covering_groups(groups[rows], labels[rows], share, rng)
        known = inside & (labels[rows] != UNKNOWN)
        self._check_near("labelled", len(positions), known, groups[rows])
        if lost := int((inside & ~known).sum()):
            notes.append(
                f"{counted(lost, 'image')} without a label are left out: their groups are "
                "in the labelled part"
            )
        return rows[known], rows[~inside]


@dataclass(frozen=True)
class UnsplitSpec(DataSpec):
    """Settings of data that may come without a test part."""

    test: float = 0.2  # share held out for testing where the data bring no test part

    def check(self) -> None:
        """Check the test share too."""
        super().check()
        check_share("test", self.test)

    def test_share(self) -> float:
        """The setting `test`."""
        return self.test


datasets: Registry[DataSpec] = Registry("data set", "harmonium.data.sets", DataSpec)
"""Every data set by name."""


def changed(spec: DataSpec, *names: str) -> dict[str, Any]:
    """The settings with these names that are not at their defaults.

    Settings added later are part of an identity only where they are set, so that what earlier
    versions decoded stays in use.
    """
    defaults = {field.name: field.default for field in fields(spec)}
    return {name: v for name in names if (v := getattr(spec, name)) != defaults[name]}


def read_alike(spec: DataSpec, model: DataSpec) -> DataSpec:
    """`spec` with what `model` says of fit and grey levels, which an encoder depends on.

    What `model` leaves at its default stays as `spec` has it.

    >>> from harmonium.data.sets.digits import Digits
    >>> read_alike(Digits(), Digits(fit="pad")).fit
    'pad'
    """
    names = ("fit", "window", "percentiles")
    said: dict[str, Any] = {name: getattr(model, name, None) for name in names}
    known = {field.name for field in fields(spec)}
    said = {name: v for name, v in said.items() if name in known and v not in (None, "cut")}
    if said.keys() & {"window", "percentiles"}:  # either replaces the other
        said = {"window": None, "percentiles": None, **said}
    return replace(spec, **said)


def check_share(setting: str, value: float) -> None:
    """Raise an error unless the value is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ConfigError(
            Key("data", setting), f"={value}: a share is at least 0 and below 1, e.g. 0.1"
        )


def check_at_least(setting: str, value: float, least: float) -> None:
    """Raise an error if the value is below `least`."""
    if not value >= least:
        raise ConfigError(Key("data", setting), f"={value}: at least {least} is needed")


def check_is_file(name: str, path: str) -> None:
    """Refuse a `data.path` of the set `name` that is not a file."""
    if not path:
        raise ConfigError(f"data set '{name}' needs ", Key("data", "path"), f"=FILE.{name}")
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise DataError(
            Key("data", "path"),
            f"={path} is a folder: for image files use ",
            Key("data"),
            "=folder",
        )
    if not file.is_file():
        raise DataError(Key("data", "path"), f"={path}: there is no such file")


def no_labels(count: int) -> Integers:
    """Labels of `count` images whose classes are unknown."""
    return np.full(count, UNKNOWN, np.int64)


def _sum(rows: Integers) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
