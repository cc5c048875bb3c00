"""A trained encoder as a transformer of scikit-learn.

    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from harmonium.sklearn import Encoder

    model = make_pipeline(Encoder("runs/first"), LogisticRegression())

The encoder itself is not learned further. A transformer holds the path of its file and the digest
that the file had when it was fitted; copies and pickles of it hold no weights. The file is loaded
once in every process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from harmonium.core.devices import AUTO
from harmonium.core.errors import ConfigError, DataError, StoreError, counted
from harmonium.data.cache import printable
from harmonium.data.decoding.in_memory import Layout, channels_last, check_uint8, is_array
from harmonium.data.images import CHANNELS
from harmonium.evaluation import features as evaluation
from harmonium.runs.export import HasFolder, LoadedEncoder
from harmonium.storage.run_folder import ENCODER
from harmonium.use.embedding import Job, on_device, used_encoder
from harmonium.use.sources import file_source
from harmonium.use.tables import FEATURES

Rows = npt.NDArray[np.float32]


class Encoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Images to the features of a trained encoder, float32 `(n, features)`.

    Args:
        path: a run's folder, a bundle's folder or an `encoder.safetensors`.
        whiten: return whitened features, of a run with `evaluate.whiten=true`; a number keeps that
            many leading directions.
        batch: images of a batch.
        shape: height, width and, unless images are grey, channels of images that are given as rows
            of a table, as in `images.reshape(n, -1)`. One of them may be -1, as in `reshape`.
        value_range: least and greatest value of pixels that are not uint8, e.g. `(0, 1)`; they are
            rounded to 256 levels. Without it such pixels are refused.
        layout: the order of the axes of images, "NHWC" or "NCHW"; without it, channels are last.
        device: where to compute: auto, cpu, cuda, cuda:1 or mps.

    Attributes:
        digest_: SHA-256 of the encoder's file.
        n_features_in_: columns of images that were given as rows of a table.

    Images are an array `(n, height, width)` or `(n, height, width, channels)`, a table of one row
    for each image (see `shape`), or the names of files. Whatever their size, they are brought to
    that of training. `fit` learns nothing from them.

    >>> import harmonium
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import RidgeClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> run = harmonium.run("digits", **small).folder
    >>> X, y = load_digits(return_X_y=True)  # 64 columns, from 0 to 16
    >>> encoder = Encoder(run, shape=(8, 8), value_range=(0, 16))
    >>> model = make_pipeline(encoder, RidgeClassifier()).fit(X[:200], y[:200])
    >>> bool(model.score(X[200:400], y[200:400]) > 0.5)
    True
    """

    def __init__(
        self,
        path: str | Path | HasFolder,
        *,
        whiten: bool | int = False,
        batch: int = 256,
        shape: Sequence[int] | None = None,
        value_range: tuple[float, float] | None = None,
        layout: Layout | None = None,
        device: str = AUTO,
    ) -> None:
        self.path = path
        self.whiten = whiten
        self.batch = batch
        self.shape = shape
        self.value_range = value_range
        self.layout = layout
        self.device = device

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Load the encoder and check the images' form; nothing is learned.

        Args:
            X: images, see the class.
            y: ignored.
        """
        if type(self.batch) is not int or self.batch < 1:
            raise ConfigError(f"batch is {self.batch!r}; it must be a whole number of at least 1")
        self._read(X, reset=True)
        self.digest_ = self._encoder().digest
        return self

    def transform(self, X: Any) -> Rows:  # noqa: N803
        """The features of images, a row for each."""
        check_is_fitted(self)
        images = self._read(X, reset=False)
        encoder = self._encoder()
        if encoder.digest != self.digest_:
            raise StoreError(
                f"{self.path} is not the encoder of fit any more ({encoder.digest[:12]}, not "
                f"{self.digest_[:12]}): fit again"
            )
        with on_device(self.device, encoder):
            if isinstance(images, list):
                source = file_source(images, encoder.order().frames)
                source = replace(source, names=tuple(printable(str(path)) for path in images))
                job = Job(encoder, encoder, source, FEATURES, 0, self.batch, "refuse", remedy="")
                return job.in_memory().matrix()
            with torch.random.fork_rng(devices=[]):
                rows = evaluation.embed(encoder, images, lambda pixels: pixels, self.batch)
        features: Rows = rows.float().numpy()
        return features

    @property
    def _n_features_out(self) -> int:
        return self._encoder().features

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def _encoder(self) -> LoadedEncoder:
        """The encoder; loaded again only if its file has changed."""
        path = Path(self.path if isinstance(self.path, str | Path) else self.path.folder)
        file = (path / ENCODER if path.is_dir() else path).absolute()
        stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else (0, 0)
        return _loaded(file, stamp, self.whiten)

    # ---- images in every form ----

    def _read(self, images: Any, *, reset: bool) -> list[Path] | npt.NDArray[np.uint8]:
        """Files, or uint8 images with channels last."""
        if (names := _file_names(images)) is not None:
            return names
        if not is_array(images):
            images = np.asarray(images) if _depth(images) > 2 else images
        layout = self.layout
        if getattr(images, "ndim", 2) < 3:
            table = validate_data(self, images, reset=reset, dtype="numeric")
            images = table.reshape(len(table), *self._sides(table.shape[1]))
        elif images.ndim == 3 and images.shape[2] in CHANNELS:
            raise DataError(
                f"images have shape {tuple(images.shape)}, which may be one image: give "
                "(n, height, width) or (n, height, width, channels)"
            )
        if images.ndim == 3:  # the first axis is always that of the images
            images, layout = images[..., None], "NHWC"
        last: npt.NDArray[np.uint8] = channels_last(
            *(self._levels(np.asarray(images)), layout, "images", _FIX),
            channels=self._encoder().channels,
        )
        return last

    def _sides(self, columns: int) -> tuple[int, ...]:
        """The sides of images that are rows of a table."""
        if self.shape is None:
            raise DataError(
                f"X has {counted(columns, 'column')}, so its images have lost their form: give "
                "shape=(height, width) or (height, width, channels)"
            )
        sides = tuple(int(side) for side in self.shape)
        if len(sides) not in (2, 3) or sides.count(-1) > 1 or any(s < 1 and s != -1 for s in sides):
            raise ConfigError(f"shape is {self.shape}: give (height, width[, channels])")
        known = math.prod(side for side in sides if side != -1)
        sides = tuple(columns // known if side == -1 else side for side in sides)
        if math.prod(sides) != columns:
            raise DataError(
                f"X has {counted(columns, 'column')}, but images of shape {self.shape} have "
                f"{math.prod(sides):,} values: reshape them from (n, height, width, channels)"
            )
        return sides

    def _levels(self, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Pixels of any kind as uint8."""
        if values.dtype == np.uint8:
            return values
        if self.value_range is None:
            if values.dtype.kind in "iu":
                raise DataError(
                    f"pixels are {values.dtype}, but should be uint8 from 0 to 255: give their "
                    "range, e.g. value_range=(0, 255)"
                )
            check_uint8(values, "pixels")
        low, high = map(float, self.value_range or (0, 255))
        if not low < high:
            raise ConfigError(f"value_range is {self.value_range}: give least and greatest value")
        least, most = map(float, (values.min(), values.max()) if values.size else (low, high))
        slack = 1e-3 * (high - low)
        if not low - slack <= least <= most <= high + slack:  # also if one is not a number
            raise DataError(
                f"pixels run from {least:g} to {most:g}, but value_range is {low:g} to {high:g}"
            )
        scaled = (values.astype(np.float64) - low) * (255 / (high - low))
        return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


_FIX = 'Encoder(..., layout="NCHW")'


@lru_cache(maxsize=2)
def _loaded(file: Path, stamp: tuple[int, int], whiten: bool | int) -> LoadedEncoder:
    return used_encoder(file, whiten)


def _file_names(images: Any) -> list[Path] | None:
    """The files that are named, in a list, an array or a column of a table; None: other images."""
    if isinstance(images, str | os.PathLike):
        raise DataError(f"images are the single name {os.fspath(images)!r}: give a list of files")
    values = images.to_numpy() if hasattr(images, "to_numpy") else images
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "OUT" or values.ndim > 2 or values.shape[1:] not in ((), (1,)):
            return None
        values = values.reshape(-1).tolist()
    if not isinstance(values, list | tuple) or not values:
        return None
    if not all(isinstance(one, str | os.PathLike) for one in values):
        return None
    return [Path(one) for one in values]


def _depth(value: Any) -> int:
    """How deep lists, or arrays in lists, are nested."""
    if isinstance(value, list | tuple):
        return 1 + (_depth(value[0]) if value else 0)
    return getattr(value, "ndim", 0)
