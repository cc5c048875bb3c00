"""USPS handwritten digits (Hull, 1994), in either of its two common formats.

LIBSVM's text files hold values from -1 to 1 and the classes 1 to 10; `usps.h5` holds the same
values scaled to 0 to 1 and the digits themselves. Both are decoded to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets
from harmonium.data.decoding.byte_arrays import DIGITS, append, check_labels
from harmonium.data.images import Pixels
from harmonium.data.published_datasets import Published, Remote, Source

SIDE = 16
MOST = 100_000  # images in one part: an HDF5 file can claim any number without holding them
SLACK = 1e-4  # how far a value may lie outside its range: far less than half a byte

_PLACE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/"
_TEXT = {"train": "usps.bz2", "test": "usps.t.bz2"}
_HDF5 = "usps.h5"
_MD5 = {
    "usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197",
    "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118",
}

Floats = npt.NDArray[np.float64]
_Part = tuple[str, Floats, npt.NDArray[Any]]  # name, values (n, 256) from 0 to 1, digits (n,)


@datasets("usps")
@dataclass(frozen=True)
class Usps(Published):
    """USPS: 7,291 training and 2,007 test images of handwritten digits, 16x16 grey."""

    about: ClassVar[About] = About((SIDE, SIDE, 1), 10, 7_291, 2_007, "not stated")
    source: ClassVar[Source] = Source(
        page=f"{_PLACE}multiclass.html#usps",
        layouts=(_MD5, {_HDF5: None}),
        remotes=tuple(
            Remote(name, (f"{_PLACE}multiclass/{name}",), md5) for name, md5 in _MD5.items()
        ),
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Read whichever format is present."""
        parts = _hdf5(folder / _HDF5) if (folder / _HDF5).is_file() else _text(folder)
        for part, values, digits in parts:
            append(writer, part, _pixels(values), digits)
        return DIGITS


def _pixels(values: Floats) -> Pixels:
    """Values from 0 to 1 as bytes, rounded half up.

    Many values lie exactly between two bytes. Rounding to thousandths first makes them go up in
    both formats, whatever their precision.
    """
    scaled = np.floor(np.round(values * 255, 3) + 0.5).astype(np.uint8)
    return scaled.reshape(-1, SIDE, SIDE, 1)


def _checked(
    path: Path, part: str, values: Floats, classes: npt.NDArray[Any], lowest: int, first: int
) -> _Part:
    """Check values from `lowest` to 1 and classes from `first`; scale to 0 to 1, classes from 0."""
    if not ((values >= lowest - SLACK) & (values <= 1 + SLACK)).all():
        raise DataError(f"{path} has values that are not numbers between {lowest} and 1")
    if (classes != np.rint(classes)).any():
        raise DataError(f"{path} has a class that is not a whole number")
    check_labels(classes, first, 10, path)
    return part, (values - lowest) / (1 - lowest), classes.astype(np.int64) - first


def _text(folder: Path) -> Iterator[_Part]:
    from sklearn.datasets import load_svmlight_file

    for part, name in _TEXT.items():
        path = folder / name
        try:
            rows, classes = load_svmlight_file(str(path), n_features=SIDE**2, zero_based=False)
        except (OSError, EOFError, ValueError, OverflowError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if not len(classes) or (np.diff(rows.indptr) != SIDE**2).any():
            raise DataError(f"{path} should hold lines of a class and 256 values, 1:… to 256:…")
        yield _checked(path, part, rows.toarray(), classes, -1, 1)


def _hdf5(path: Path) -> Iterator[_Part]:
    try:
        import h5py
    except ImportError:
        raise DataError(f"reading {path} needs h5py: run `pip install 'harmonium[hdf5]'`") from None
    try:
        with h5py.File(path, "r") as file:
            for part in ("train", "test"):
                values, digits = file[f"{part}/data"], file[f"{part}/target"]
                count = len(digits)
                fits = values.shape == (count, SIDE**2) and digits.shape == (count,)
                if not fits or values.dtype.kind != "f" or digits.dtype.kind not in "iuf":
                    raise DataError(
                        f"{path} should hold {part}/data (n, 256) and {part}/target (n,) as "
                        f"numbers; it has {values.shape} and {digits.shape}"
                    )
                if not 0 < count <= MOST:
                    raise DataError(f"{path} claims to hold {count} {part} images")
                yield _checked(path, part, values[:].astype(np.float64), digits[:], 0, 0)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
