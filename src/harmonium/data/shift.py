"""Images as clients hold them: a split may turn each image by an angle of its own, once."""

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

CHUNK = 4096  # images turned at once


def as_held(dataset: Dataset, split: Split) -> Dataset:
    """The data set with its training images as their holders see them.

    They are turned once, before training, and written beside the decoded data; validation and test
    images stay upright, as Federated SimCLR judges on such. Without angles this is the data set.
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
    """Each image turned counter-clockwise by its angle: bilinear, black corners, same canvas.

    >>> bar = np.zeros((1, 3, 3, 1), np.uint8)
    >>> bar[0, 1] = 200
    >>> turned(bar, np.float32([90]))[0, :, 1, 0].tolist()
    [200, 200, 200]
    """
    made = np.empty_like(pixels)
    for row, (picture, angle) in enumerate(zip(pixels, degrees, strict=True)):
        image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
        spun = np.asarray(image.rotate(float(angle), Image.Resampling.BILINEAR))
        made[row] = spun.reshape(picture.shape)
    return made
