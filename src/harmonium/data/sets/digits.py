"""The handwritten digits that are included in scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

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
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
        writer.append("train", pixels, digits.target)
        return tuple(str(digit) for digit in range(10))
