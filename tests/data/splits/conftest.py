import numpy as np
import pytest

from harmonium.data.images import Images


@pytest.fixture(scope="session")
def make_images():
    """Images of no size worth mentioning: splits look at labels and columns only."""

    def make(labels, **factors):
        labels = np.asarray(labels, np.int64)
        pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (len(labels), 1, 1, 1))
        return Images(pixels, labels, {name: np.asarray(of) for name, of in factors.items()})

    return make
