"""Images as one array, with labels and further columns beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError

Pixels = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

UNKNOWN = -1
"""The label of an image whose class is not known."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their labels; `pixels` is usually a read-only memory map.

    >>> images = Images(np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 0, 1]))
    >>> len(images), images.labelled, images.subset([3, 0]).labels.tolist()
    (4, True, [1, 0])
    """

    pixels: Pixels  # (n, height, width, channels), channels 1 or 3
    labels: Integers  # (n,), -1 where unknown
    factors: Mapping[str, Integers] = field(default_factory=dict)  # further columns, each (n,)

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together."""
        check_pixels(self.pixels, "pixels")
        count = len(self.pixels)
        object.__setattr__(self, "labels", _column("labels", self.labels, count))
        columns = {name: _column(name, values, count) for name, values in self.factors.items()}
        object.__setattr__(self, "factors", columns)

    def __len__(self) -> int:
        """How many images."""
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        height, width, channels = self.pixels.shape[1:]
        return height, width, channels

    @property
    def labelled(self) -> bool:
        """Whether the class of any image is known."""
        return bool((self.labels != UNKNOWN).any())

    def batch(self, index: npt.ArrayLike) -> Pixels:
        """The pixels of some images, read without touching the others."""
        picked: Pixels = self.pixels[np.asarray(index)]
        return picked

    def subset(self, index: npt.ArrayLike) -> Images:
        """Some of the images, in the order of `index`.

        A run of neighbours is a view. Anything else is gathered only when its `pixels` are asked
        for; `batch` never gathers more than the batch.
        """
        rows = _rows(index, len(self))
        labels = self.labels[rows]
        factors = {name: column[rows] for name, column in self.factors.items()}
        return self._pick(rows, labels, factors)

    def without_labels(self) -> Images:
        """The same images with every label unknown and no further columns."""
        return self.relabelled(np.full(len(self), UNKNOWN, np.int64))

    def relabelled(self, labels: Integers) -> Images:
        """The same images with other labels and no further columns."""
        return Images(self.pixels, labels)

    def _pick(self, rows: Integers, labels: Integers, factors: Mapping[str, Integers]) -> Images:
        if len(rows) and (np.diff(rows) == 1).all():
            return Images(self.pixels[rows[0] : rows[-1] + 1], labels, factors)
        return _Picked(self.pixels, rows, labels, factors)


class _Picked(Images):
    """Scattered rows of a larger array, which it refers to and does not copy until it must."""

    def __init__(
        self, store: Pixels, rows: Integers, labels: Integers, factors: Mapping[str, Integers]
    ) -> None:
        # The base is frozen, so the fields are laid down past its guard.
        self.__dict__.update(_store=store, _rows=rows, labels=labels, factors=dict(factors))

    _store: Pixels
    _rows: Integers

    @cached_property
    def pixels(self) -> Pixels:
        """The gathered pixels, kept from the first time they are asked for."""
        return self._store[self._rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self._store.shape[1:]
        return height, width, channels

    def batch(self, index: npt.ArrayLike) -> Pixels:
        picked: Pixels = self._store[self._rows[np.asarray(index)]]
        return picked

    def relabelled(self, labels: Integers) -> Images:
        return _Picked(self._store, self._rows, _column("labels", labels, len(self)), {})

    def _pick(self, rows: Integers, labels: Integers, factors: Mapping[str, Integers]) -> Images:
        return _Picked(self._store, self._rows[rows], labels, factors)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: three parts that share no image."""

    name: str
    train: Images
    validation: Images  # kept apart from the clients, for choosing settings
    test: Images
    classes: tuple[str, ...]  # the name of each label; empty where nothing is labelled
    digest: str  # sha256 over the content and over which images were selected
    notes: tuple[str, ...] = ()  # what a reader of the results should know, e.g. skipped files
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a factor's values
    labelled: Images | None = None  # held out of the training part with labels; see `labels`
    key: str = ""  # under which it lies decoded; `DataSpec.load` takes it


def check_pixels(pixels: npt.NDArray[Any], what: str) -> None:
    """Refuse anything but (n, height, width, 1 or 3) bytes."""
    if pixels.dtype != np.uint8:
        raise DataError(
            f"{what} are {pixels.dtype}, but images are uint8 from 0 to 255: convert them first, "
            "e.g. (x * 255).round().astype('uint8') where x lies between 0 and 1"
        )
    if pixels.ndim != 4 or pixels.shape[3] not in (1, 3):
        raise DataError(
            f"{what} have shape {pixels.shape}, but should be (n, height, width, channels) "
            "with 1 or 3 channels"
        )


def _column(name: str, values: npt.NDArray[Any], count: int) -> Integers:
    """`values` as int64, or an error that names the column."""
    values = np.asarray(values)
    if values.shape != (count,):
        raise DataError(f"{name} have shape {values.shape}, but there are {count} images")
    if values.dtype.kind not in "iu":
        raise DataError(f"{name} are {values.dtype}, but should be integers")
    return values.astype(np.int64, copy=False)


def _rows(index: npt.ArrayLike, count: int) -> Integers:
    """`index` as row numbers within range; masks are refused rather than read as numbers."""
    rows = np.asarray(index)
    if rows.size == 0:
        return np.empty(0, np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise DataError(
            f"a subset needs a list of integers, not {rows.dtype} of shape {rows.shape}"
        )
    if rows.min() < 0 or rows.max() >= count:
        raise DataError(f"a subset asks for image {rows.max()} or {rows.min()} of {count}")
    return rows.astype(np.int64, copy=False)
