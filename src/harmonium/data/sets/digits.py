"""The handwritten digits that are included in scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from harmonium.data.cache import Writer
from harmonium.data.datasets import About, UnsplitSpec, datasets


@datasets("digits")
@dataclass(frozen=True)
class Digits(UnsplitSpec):
    """The 1,797 handwritten digits of scikit-learn, 8x8 grey: small enough for a first try."""

    about: ClassVar[About] = About((8, 8, 1), 10, 1797, 0, "CC BY 4.0 (UCI repository)")

    def identity(self) -> dict[str, Any]:
        """Empty, as the data set never changes."""
        return {}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Scale the 17 grey levels to 0 to 255."""
        levels, labels = _included()
        pixels = np.rint(levels * (255 / 16)).astype(np.uint8)[..., None]
        writer.append("train", pixels, labels)
        return tuple(str(digit) for digit in range(10))


def _included() -> tuple[NDArray[Any], NDArray[Any]]:
    """Grey levels `(1797, 8, 8)` and labels, as `load_digits` of scikit-learn returns them.

    They are read from its file, because importing it takes far longer than that.
    """
    found = find_spec("sklearn")
    places = found.submodule_search_locations if found else None
    for place in places or ():
        file = Path(place, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
            return rows[:, :-1].reshape(-1, 8, 8).astype(np.float64), rows[:, -1]
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target
