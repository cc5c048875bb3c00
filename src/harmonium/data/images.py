"""The types `Images` (pixels, labels and further columns) and `Dataset` (its parts)."""

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

GROUP = "group"
"""The column of groups, such as patients, whose images are kept together; -1 is no group."""

UNKNOWN = -1
"""The label of an image whose class is unknown."""


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
        """Check that the arrays fit together."""
        check_pixels(self.pixels, "pixels")
        count = len(self.pixels)
        object.__setattr__(self, "labels", _column("labels", self.labels, count))
        columns = {name: _column(name, values, count) for name, values in self.factors.items()}
        object.__setattr__(self, "factors", columns)

    def __len__(self) -> int:
        """Number of images."""
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
        """The pixels of the images at `index`; the others are not read."""
        pixels: Pixels = self.pixels[np.asarray(index)]
        return pixels

    def subset(self, index: npt.ArrayLike) -> Images:
        """Some of the images, in the order of `index`.

        Consecutive images are a view of the same array. Others are copied only when `pixels` is
        read; `batch` never copies more than the batch.
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
    """Scattered rows of a larger array, which are not copied until `pixels` is read."""

    def __init__(
        self, store: Pixels, rows: Integers, labels: Integers, factors: Mapping[str, Integers]
    ) -> None:
        # The base class is frozen, so the fields are set through __dict__.
        self.__dict__.update(_store=store, _rows=rows, labels=labels, factors=dict(factors))

    _store: Pixels
    _rows: Integers

    @cached_property
    def pixels(self) -> Pixels:
        """The pixels of these rows, copied on first use."""
        return self._store[self._rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self._store.shape[1:]
        return height, width, channels

    def batch(self, index: npt.ArrayLike) -> Pixels:
        pixels: Pixels = self._store[self._rows[np.asarray(index)]]
        return pixels

    def relabelled(self, labels: Integers) -> Images:
        return _Picked(self._store, self._rows, _column("labels", labels, len(self)), {})

    def _pick(self, rows: Integers, labels: Integers, factors: Mapping[str, Integers]) -> Images:
        return _Picked(self._store, self._rows[rows], labels, factors)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: three parts that share no image."""

    name: str
    train: Images
    validation: Images  # held out from the clients, for choosing settings
    test: Images
    classes: tuple[str, ...]  # the name of each label; empty if nothing is labelled
    digest: str  # sha256 over the content and over which images were selected
    notes: tuple[str, ...] = ()  # for readers of the results, e.g. skipped files
    names: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # names of a factor's values, by factor
    labelled: Images | None = None  # held out of the training part, for probes
    key: str = ""  # of the cache; an argument of `DataSpec.load`


def check_pixels(pixels: npt.NDArray[Any], what: str) -> None:
    """Raise an error unless pixels are uint8 (n, height, width, 1 or 3)."""
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
    """`values` as int64; raises DataError if they are not one integer for each image."""
    values = np.asarray(values)
    if values.shape != (count,):
        raise DataError(f"{name} have shape {values.shape}, but there are {count} images")
    if values.dtype.kind not in "iu":
        raise DataError(f"{name} are {values.dtype}, but should be integers")
    return values.astype(np.int64, copy=False)


def _rows(index: npt.ArrayLike, count: int) -> Integers:
    """`index` as row numbers within range; boolean masks raise an error."""
    rows = np.asarray(index)
    if rows.size == 0:
        return np.empty(0, np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise DataError(
            f"a subset needs a list of integers, not {rows.dtype} of shape {rows.shape}"
        )
    if rows.min() < 0 or rows.max() >= count:
        raise DataError(
            f"a subset has indices from {rows.min()} to {rows.max()}, but there are {count} images"
        )
    return rows.astype(np.int64, copy=False)
