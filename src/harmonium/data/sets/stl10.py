"""STL-10 (Coates et al., 2011): few labelled images and many without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from harmonium.core.errors import DataError, Key
from harmonium.data.cache import Writer
from harmonium.data.datasets import About, datasets, no_labels
from harmonium.data.decoding.byte_arrays import append, check_labels, map_bytes, size_of
from harmonium.data.images import Integers, Pixels
from harmonium.data.published_datasets import Published, Remote, Source

SIDE, CHANNELS = 96, 3
IMAGE = SIDE * SIDE * CHANNELS  # bytes
CLASSES = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)

_FOLDER = "stl10_binary"
_UNLABELLED = f"{_FOLDER}/unlabeled_X.bin"
_LABELLED = {
    f"{_FOLDER}/train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
    f"{_FOLDER}/train_y.bin": "5a34089d4802c674881badbb80307741",
    f"{_FOLDER}/test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
    f"{_FOLDER}/test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
}


@datasets("stl10")
@dataclass(frozen=True)
class Stl10(Published):
    """STL-10: 5,000 training, 8,000 test and 100,000 unlabelled images, 96x96 in colour.

    With `use=unlabelled` the 5,000 are the labelled part, from which probes learn.
    """

    use: Literal["labelled", "unlabelled", "both"] = "labelled"  # of the training images

    choice: ClassVar[str] = "use"
    about: ClassVar[About] = About(
        (SIDE, SIDE, CHANNELS), 10, 5_000, 8_000, "not stated; the images are from ImageNet"
    )
    source: ClassVar[Source] = Source(
        page="https://cs.stanford.edu/~acoates/stl10/",
        layouts=(
            {**_LABELLED, _UNLABELLED: "5242ba1fed5e4be9e1e742405eb56ca4"},
            _LABELLED,  # enough where the unlabelled images are not used
        ),
        remotes=(
            Remote(
                "stl10_binary.tar.gz",
                ("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",),
                "91f7769df0f17e558f3565bffb0c7dfb",
            ),
        ),
        most_bytes=3 << 30,
    )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Map the files and copy them piece by piece."""
        labels = _labels(folder / _FOLDER / "train_y.bin")
        part = (
            "labelled" if self.use == "unlabelled" else "train"
        )  # the labelled images train probes in either case
        append(writer, part, _images(folder / _FOLDER / "train_X.bin", labels), labels)
        if self.use != "labelled":
            path = folder / _UNLABELLED
            if not path.is_file():
                raise DataError(
                    Key("data", "use"),
                    f"={self.use} needs {path}: run `harmonium data fetch stl10`",
                )
            labels = no_labels(max(1, size_of(path) // IMAGE))
            append(writer, "train", _images(path, labels), labels)
        labels = _labels(folder / _FOLDER / "test_y.bin")
        append(writer, "test", _images(folder / _FOLDER / "test_X.bin", labels), labels)
        return CLASSES


def _labels(path: Path) -> Integers:
    """The classes (n,), which start from 1 in the file."""
    labels = map_bytes(path, (size_of(path),))
    check_labels(labels, 1, len(CLASSES), path)
    return labels.astype(np.int64) - 1


def _images(path: Path, labels: Integers) -> Pixels:
    """As many images as labels; on disk each is three planes in column-major order."""
    planes = map_bytes(path, (len(labels), CHANNELS, SIDE, SIDE))
    return planes.transpose(0, 3, 2, 1)
