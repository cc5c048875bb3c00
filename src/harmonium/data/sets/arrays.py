"""The data set of arrays passed from Python, e.g. `harmonium.run("fedavg", data=images)`.

The arrays are stored in `HARMONIUM_HOME` under the digest of their content, and the recipe names
that digest, so that workers, resumed runs and later commands use exactly the same images.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError, DataError, counted
from harmonium.data.cache import (
    PIECE_BYTES,
    Stored,
    Writer,
    building,
    fetched_folder,
    stored_in,
)
from harmonium.data.datasets import UnsplitSpec, datasets
from harmonium.data.decoding.in_memory import as_numpy, image_set, is_array, kind
from harmonium.data.sets.npz import read_arrays

Array = npt.NDArray[Any]

FORMS = (
    "a uint8 array (n, height, width, channels) or (n, height, width), (images, labels), or a "
    "dict with train, validation and test"
)
_PARTS = {"train": "train_", "validation": "val_", "test": "test_"}
_COLUMNS = {"clients": "client", "domains": "domain"}  # names of the columns for splits


@datasets("arrays")
@dataclass(frozen=True)
class Arrays(UnsplitSpec):
    """Images given from Python as NumPy arrays or tensors.

    `data=images`, `data=(images, labels)` or `data={"train": (images, labels), "test": ...}` store
    the arrays in HARMONIUM_HOME by the digest of their content.
    """

    digest: str = ""  # SHA-256 of arrays given from Python

    def check(self) -> None:
        """Check that the digest is one."""
        super().check()
        if not self.digest:
            raise ConfigError(
                "data set 'arrays' is given from Python: harmonium.run(\"fedavg\", data=images)"
            )
        if len(self.digest) != 64 or not set(self.digest) <= set(string.hexdigits.lower()):
            raise ConfigError(
                f"data.digest={self.digest}: expected the 64 hexadecimal digits of a SHA-256"
            )

    @classmethod
    def column_way(cls, column: str) -> str:
        """Columns are further keys of the dict."""
        key = next((key for key, name in _COLUMNS.items() if name == column), column)
        return (
            "give one value for each training image with them, "
            f'data={{"images": images, "labels": labels, "{key}": {key}}}'
        )

    def identity(self) -> dict[str, Any]:
        """The content itself."""
        return {"digest": self.digest}

    def stored(self) -> Stored:
        """The stored arrays, or a copy with another size or other channels."""
        self.check()
        if self.size is None and self.channels is None:
            return self._originals()
        return super().stored()

    def decode(self, writer: Writer) -> Sequence[str]:
        """Write the stored images, which the writer converts to another shape."""
        originals = self._originals()
        writer.names |= originals.names
        writer.notes += originals.notes
        for part, images in originals.parts.items():
            step = max(1, PIECE_BYTES // max(1, images.pixels[:1].size))
            for start in range(0, len(images), step):
                some = images.subset(np.arange(start, min(start + step, len(images))))
                writer.append(part, some.pixels, some.labels, some.factors)
        return originals.classes

    def _originals(self) -> Stored:
        stored = stored_in(_folder(self.digest), self.digest)
        if stored is None:
            raise DataError(
                f"the arrays {self.digest[:16]} are not in {_folder(self.digest).parent}: give "
                "the same arrays again, e.g. harmonium.resume(RUN, data=images)"
            )
        return stored


def keep_arrays(value: Any, section: str = "data") -> dict[str, Any]:
    """Store arrays by the digest of their content; returns the settings that name them.

    Args:
        value: an array or a tensor of images, `(images, labels)`, or a mapping with `train`,
            `validation` and `test`, each of which is one of these; instead of `train` the mapping
            may have `images` and `labels`. `clients`, `domains` and any other key are columns with
            a value for each training image; `classes` names the labels.
        section: the name of the setting in messages.
    """
    arrays = _gathered(value, section)
    digest = _digest(arrays)
    folder = _folder(digest)
    if stored_in(folder, digest) is None:
        with building(folder, replace=folder.exists()) as temporary:
            writer = Writer(temporary, name=Arrays.name)
            try:
                writer.classes = tuple(read_arrays(section, arrays, writer))
                writer.finish({"name": Arrays.name, "key": digest})
            finally:
                writer.close()
    return {"name": Arrays.name, "digest": digest}


def holds_arrays(value: Any) -> bool:
    """Whether a value contains arrays and so is meant for `keep_arrays`."""
    if isinstance(value, Mapping):
        return any(holds_arrays(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(is_array(item) for item in value)
    return is_array(value)


def _folder(digest: str) -> Path:
    return fetched_folder(Arrays.name) / digest[:16]


def _digest(arrays: Mapping[str, Array]) -> str:
    """SHA-256 over names, shapes and values, independent of the memory layout."""
    total = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        dtype = array.dtype.newbyteorder("<")
        total.update(json.dumps([key, dtype.str, array.shape]).encode())
        step = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), step):
            total.update(np.ascontiguousarray(array[start : start + step], dtype).tobytes())
    return total.hexdigest()


def _gathered(value: Any, section: str) -> dict[str, Array]:
    """All arrays under their names in an `.npz` archive: train_x, train_y, test_x, ..."""
    if not isinstance(value, Mapping):
        return dict(_part(value, section, ""))
    rest = {str(key): item for key, item in value.items()}
    arrays: dict[str, Array] = {}
    if "classes" in rest:
        arrays["classes"] = np.asarray(rest.pop("classes")).astype(str)
    if "train" in rest and "images" in rest:
        raise DataError(f"{section} has both train and images, which are the same: leave one out")
    parts = {name: rest.pop(name) for name in _PARTS if name in rest}
    if "train" not in parts:
        if "images" not in rest:
            raise DataError(f"{section} is a dict with {', '.join(value)}; give {FORMS}")
        parts["train"], rest = rest, {}
    if rest:
        train = parts["train"]
        extra = dict(train) if isinstance(train, Mapping) else _pair(train, f"{section}.train")
        if both := sorted({*extra} & {*rest}):
            raise DataError(f"{section}.{both[0]} is given twice: leave one out")
        parts["train"] = extra | rest
    for name, part in parts.items():
        arrays |= _part(part, f"{section}.{name}", _PARTS[name])
    return arrays


def _pair(value: Any, what: str) -> dict[str, Any]:
    """An array or a pair of arrays as a mapping with `images` and perhaps `labels`."""
    if is_array(value):
        return {"images": value}
    if isinstance(value, list | tuple) and len(value) == 2 and is_array(value[0]):
        return {"images": value[0], "labels": value[1]}
    raise DataError(f"{what} is a {kind(value)}; give {FORMS}")


def _part(value: Any, what: str, prefix: str) -> Iterator[tuple[str, Array]]:
    """The arrays of one part, checked, under their names in an archive."""
    columns = dict(value) if isinstance(value, Mapping) else _pair(value, what)
    if "images" not in columns:
        raise DataError(f"{what} has {', '.join(columns) or 'nothing'}, but no images")
    images = _images(columns.pop("images"), what)
    yield f"{prefix}x", images
    for name, column in columns.items():
        called = "y" if name == "labels" else _COLUMNS.get(name, name)
        if called in ("x", "images"):
            raise DataError(f"{what}.{name} cannot be a column: use another name")
        yield f"{prefix}{called}", _column(column, f"{what}.{name}", len(images))


def _images(value: Any, what: str) -> Array:
    if not is_array(value):
        raise DataError(f"{what} is a {kind(value)}; give {FORMS}")
    pixels = as_numpy(image_set(value, what, "turn them with .transpose(0, 2, 3, 1)"))
    if not len(pixels):
        raise DataError(f"{what} holds no images")
    return pixels


def _column(value: Any, what: str, count: int) -> Array:
    """A column as an array with one whole number or text for each image."""
    try:
        column = as_numpy(value) if is_array(value) else np.asarray(value)
    except ValueError:  # lists of different lengths
        column = np.empty(0, object)
    if column.dtype.kind == "O" and all(isinstance(item, str) for item in column.flat):
        column = column.astype(str)  # text columns of pandas
    if column.dtype.kind not in "iuU" or column.shape not in ((count,), (count, 1)):
        raise DataError(
            f"{what} is a {kind(value)}; give one whole number or text for each of the "
            f"{counted(count, 'image')}"
        )
    return column.reshape(count).copy()  # labels are renumbered in place
