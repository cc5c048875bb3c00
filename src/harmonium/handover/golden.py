"""Golden images: synthetic images of several sizes and modes, and the features they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.core import files
from harmonium.core.seeds import numpy_rng
from harmonium.core.threads import single_thread
from harmonium.data.images import Pixels
from harmonium.runs.export import LoadedEncoder

Floats = npt.NDArray[np.float32]

TOLERANCE = 1e-4  # of features, in units of the largest, or of 1 if that is larger
_BLOCK = 3  # pixels of equal colour side by side, which keeps the file small


def golden_images(size: tuple[int, int], channels: int) -> list[Pixels]:
    """Synthetic images for an encoder, `(n, height, width, channels)` each, no user's among them.

    They have five sizes: that of training (three images, to have a batch), smaller, larger, tall
    and wide. For encoders of 1 and 3 channels each is grey, colour, and colour with transparency.

    >>> [images.shape for images in golden_images((8, 8), 2)]
    [(3, 8, 8, 2), (1, 5, 5, 2), (1, 12, 13, 2), (1, 17, 11, 2), (1, 10, 21, 2)]
    """
    height, width = size
    sizes = [
        size,
        (height // 2 + 1, width // 2 + 1),
        (height + height // 4 + 2, width + width // 2 + 1),
        (2 * height + 1, width + 3),
        (height + 2, 2 * width + 5),
    ]
    modes = (1, 3, 4) if channels in (1, 3) else (channels,)
    rng = numpy_rng(0, "golden images")
    return [
        _blocks(rng, (3 if (high, wide) == size else 1, high, wide, bands))
        for high, wide in sizes
        for bands in modes
    ]


def _blocks(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> Pixels:
    """Images of random blocks: edges everywhere, and hardly more bytes than blocks."""
    count, height, width, channels = shape
    coarse = (count, -(-height // _BLOCK), -(-width // _BLOCK), channels)
    blocks = rng.integers(0, 256, coarse, dtype=np.uint8)
    return blocks.repeat(_BLOCK, 1).repeat(_BLOCK, 2)[:, :height, :width]


def features_of(encoder: LoadedEncoder, images: Pixels) -> Floats:
    """The features of golden images by PyTorch; transparency is for Pillow to remove."""
    given: Any = np.ascontiguousarray(images)
    if images.shape[3] != encoder.channels and images.shape[3] == 4:
        given = [Image.fromarray(image, "RGBA") for image in given]
    with single_thread():
        features: Floats = encoder.embed(given).numpy()
    return features


def golden_arrays(encoder: LoadedEncoder) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `golden.npz`: images, their features, and the first images prepared."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, images in enumerate(golden_images(encoder.size, encoder.channels)):
        arrays[f"images_{number:02d}"] = images
        arrays[f"features_{number:02d}"] = features_of(encoder, images)
    first = next(images for images in pairs(arrays) if images[0].shape[3] == encoder.channels)
    arrays["prepared"] = encoder.prepare(first[0]).numpy()
    arrays["prepared_features"] = first[1]
    return arrays


def pairs(arrays: Mapping[str, npt.NDArray[Any]]) -> list[tuple[Pixels, Floats]]:
    """The golden images, each with its features."""
    numbers = sorted(key.partition("_")[2] for key in arrays if key.startswith("images_"))
    return [(arrays[f"images_{number}"], arrays[f"features_{number}"]) for number in numbers]


def read_golden(path: Path) -> tuple[list[tuple[Pixels, Floats]], tuple[Floats, Floats]]:
    """Images with their features, and prepared images with theirs."""
    with files.reading(path, "get the bundle again"), np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
        return pairs(arrays), (arrays["prepared"], arrays["prepared_features"])


def difference(found: Sequence[Floats], wanted: Sequence[Floats]) -> float:
    """The largest difference between features, in units of the largest wanted, or of 1.

    >>> difference([np.float32([[1.0, 5.0]])], [np.float32([[1.0, 4.0]])])
    0.25
    """
    worst = [0.0]
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            return float("inf")
        unit = max(1.0, float(np.abs(other).max(initial=0)))
        worst.append(float(np.abs(one.astype(np.float64) - other).max(initial=0)) / unit)
    return max(worst) if np.isfinite(worst).all() else float("inf")
