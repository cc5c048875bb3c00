"""Covariate shift by rotation: training images rotated by the angles of their split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.data.cache import Writer, decoded
from harmonium.data.images import Dataset, Pixels
from harmonium.data.partition import Split

BILINEAR = Image.Resampling.BILINEAR
CHUNK = 4096  # images rotated at once


def with_split_angles(dataset: Dataset, split: Split) -> Dataset:
    """The data set with its training images rotated by the angles of the split.

    Images are rotated once, before training, and written to the cache. Validation and test images
    stay upright, as in Federated SimCLR. Without angles this is the data set itself.
    """
    if split.angles is None:
        return dataset
    angles = np.zeros(len(dataset.train), np.float32)
    for rows, own in zip(split.indices, split.angles, strict=True):
        angles[rows] = own

    def decode(writer: Writer) -> Sequence[str]:
        train = dataset.train
        for start in range(0, len(train), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(train)))
            factors = {name: column[rows] for name, column in train.factors.items()}
            writer.append(
                "train", turned(train.batch(rows), angles[rows]), train.labels[rows], factors
            )
        return dataset.classes

    sums = {
        "data": dataset.digest,
        "angles": hashlib.sha256(angles.astype("<f4").tobytes()).hexdigest(),
    }
    stored = decoded(f"{dataset.name}-turned", sums, decode)
    return replace(dataset, train=stored.parts["train"])


def turned(pixels: Pixels, degrees: npt.NDArray[np.float32]) -> Pixels:
    """Each image rotated counter-clockwise by its angle: bilinear, black corners, same size.

    >>> bar = np.zeros((1, 3, 3, 1), np.uint8)
    >>> bar[0, 1] = 200
    >>> turned(bar, np.float32([90]))[0, :, 1, 0].tolist()
    [200, 200, 200]
    """
    rotated = np.empty_like(pixels)
    for row, (array, angle) in enumerate(zip(pixels, degrees, strict=True)):
        # Each channel by itself but for RGB: Pillow would weight colours by the last of 2 or 4.
        planes = [array] if array.shape[2] == 3 else np.ascontiguousarray(array.transpose(2, 0, 1))
        images = [Image.fromarray(plane).rotate(float(angle), BILINEAR) for plane in planes]
        rotated[row] = np.dstack([np.asarray(image) for image in images])
    return rotated
