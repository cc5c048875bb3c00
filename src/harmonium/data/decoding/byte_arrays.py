"""Reading data sets that are stored as raw arrays of bytes: mapping files, checking labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.images import Pixels

PIECE = 16 << 20  # bytes passed to the writer at once

DIGITS = tuple(str(digit) for digit in range(10))
"""The classes of every set of digits."""


def size_of(path: Path) -> int:
    """The size of a file in bytes; raises DataError if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def map_bytes(path: Path, shape: tuple[int, ...], *, offset: int = 0) -> Pixels:
    """A memory map of the bytes from `offset` on, which must fill the shape exactly."""
    size, expected = size_of(path), offset + math.prod(shape)
    if size != expected:
        raise DataError(f"{path} has {size} bytes; expected {expected} for an array of {shape}")
    if expected == offset:
        raise DataError(f"{path} holds an empty array of {shape}")
    return np.memmap(path, np.uint8, "r", offset, shape)


def check_labels(labels: npt.NDArray[Any], least: int, classes: int, path: Path) -> None:
    """Raise an error for labels outside least, least + 1, …, least + classes - 1."""
    if labels.min() < least or labels.max() >= least + classes:
        raise DataError(
            f"the labels of {path} run from {labels.min()} to {labels.max()}; "
            f"expected {least} to {least + classes - 1}"
        )


def append(
    writer: Writer,
    part: str,
    pixels: Pixels,
    labels: npt.NDArray[Any],
    factors: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write many images (n, height, width, channels), a few megabytes at a time."""
    if len(pixels) != len(labels):
        raise DataError(f"there are {len(pixels)} {part} images, but {len(labels)} labels")
    step = max(1, PIECE // math.prod(pixels.shape[1:]))
    for start in range(0, len(pixels), step):
        rows = slice(start, start + step)
        columns = {name: column[rows] for name, column in (factors or {}).items()}
        writer.append(part, pixels[rows], labels[rows], columns)
