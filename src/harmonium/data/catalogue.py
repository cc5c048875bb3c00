"""The list of all data sets with their state on this machine, and an overview of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from harmonium.core.paths import home
from harmonium.core.progress import work
from harmonium.data.cache import fetched_folder
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.heterogeneity import style_factor
from harmonium.data.images import Dataset, Images, Integers, Pixels
from harmonium.data.published_datasets import GIVEN, RECORD, Published, Source
from harmonium.data.sets.sites import Sites

CHUNK_BYTES = 1 << 24  # of images read at once
NOT_HERE = "not here"


# ---- all of them ---------------------------------------------------------------------------------


def catalogue() -> dict[str, dict[str, Any]]:
    """Facts about every data set by name, as JSON values, without reading any data."""
    return {name: _entry(cls) for name, cls in datasets.table().items()}


def _entry(cls: type[DataSpec]) -> dict[str, Any]:
    keys = ("shape", "classes", "train", "test", "licence")
    about = asdict(cls.about) if cls.about else dict.fromkeys(keys)
    source = cls.source if issubclass(cls, Published) else None
    return {
        "what": (cls.__doc__ or "").strip().partition("\n")[0],
        **about,
        "here": _here(cls),
        "source": source and _addresses(source),
    }


def _here(cls: type[DataSpec]) -> str:
    """Whether a data set can be used now, or what is missing, in a few words."""
    settings: dict[str, Any] = {field.name: field.default for field in fields(cls)}
    if issubclass(cls, Published):
        fetched = (fetched_folder(cls.name) / RECORD).is_file()
        cache = (home() / "cache").glob(f"{cls.name}-{'[0-9a-f]' * 16}/meta.json")
        if fetched and (fetched_folder(cls.name) / GIVEN).is_file():
            return "stand-in"
        states = [word for word, true in (("fetched", fetched), ("decoded", any(cache))) if true]
        return ", ".join(states) or NOT_HERE
    if issubclass(cls, Sites):
        return "at the sites"
    if "digest" in settings:
        return "from Python"
    if "path" in settings:
        return "needs a path"
    if "sets" in settings:
        lacking = any(_here(datasets[name]) == NOT_HERE for name in settings["sets"])
        return "needs its sets" if lacking else "made here"
    return "made here"


def _addresses(source: Source) -> dict[str, Any]:
    """Where a data set comes from, with the checksums of its files, as JSON values."""
    return {
        "page": source.page,
        "files_md5": [dict(layout) for layout in source.layouts],
        "tree": list(source.tree),
        "remotes": [asdict(remote) for remote in source.remotes],
        "packages": [
            {"client": package.client, "name": package.name, "members": list(package.members)}
            for package in source.packages
        ],
    }


# ---- one of them ---------------------------------------------------------------------------------


def overview(dataset: Dataset) -> dict[str, Any]:
    """Counts, channel statistics and notes of a data set, as JSON values.

    `channels` has the mean and the standard deviation of every channel over all pixels, 0 to 1, of
    all images except the test part.
    """
    parts = _parts(dataset)
    not_test = [images for part, images in parts.items() if part != "test"]
    factor = style_factor(dataset.train)
    styles: list[dict[str, Any]] = []
    if factor is not None:
        columns = {p: i.factors[factor] for p, i in parts.items() if factor in i.factors}
        styles = _per_value(columns, dataset.names.get(factor, ()))
    labels = {part: images.labels for part, images in parts.items()}
    return {
        "name": dataset.name,
        "digest": dataset.digest,
        "shape": list(dataset.train.shape),
        "parts": {part: len(images) for part, images in parts.items()},
        "unlabelled": {part: int((column < 0).sum()) for part, column in labels.items()},
        "classes": _per_value(labels, dataset.classes),
        "styles": styles,
        "columns": {
            name: _per_value({p: i.factors[name] for p, i in parts.items() if name in i.factors}, v)
            for name, v in dataset.names.items()
            if name != factor and name in dataset.train.factors
        },
        "channels": channel_figures(not_test),
        "notes": list(dataset.notes),
    }


def channel_figures(parts: list[Images]) -> list[dict[str, float]]:
    """Mean and standard deviation of each channel over all pixels of several parts, 0 to 1."""
    levels = np.arange(256) / 255
    counts = np.zeros((parts[0].shape[2], 256), np.int64)  # pixels of each level, by channel
    done = 0
    with work("levels of the channels", sum(map(len, parts)), "images") as at:
        for images in parts:
            step = max(1, CHUNK_BYTES // int(np.prod(images.shape)))
            for start in range(0, len(images), step):
                pixels = images.batch(np.arange(start, min(start + step, len(images))))
                for channel, row in enumerate(counts):
                    row += np.bincount(pixels[..., channel].reshape(-1), minlength=256)
                at(done := done + len(pixels))
    shares = counts / counts.sum(1, keepdims=True)
    means = shares @ levels
    deviations = np.sqrt(np.maximum(shares @ levels**2 - means**2, 0))
    return [{"mean": m, "std": s} for m, s in zip(means.tolist(), deviations.tolist(), strict=True)]


def examples(dataset: Dataset, rows: int, across: int) -> tuple[list[tuple[str, Pixels]], str]:
    """A few training images of each class, or of each style if there are no labels, or of all.

    Args:
        dataset: the data set.
        rows: number of classes or styles at most, evenly spaced; half as many rows without either.
        across: images in each row.

    Returns:
        Names and images of each row, and a note on what is left out.
    """
    train, factor = dataset.train, style_factor(dataset.train)
    if train.labelled:
        column, names, what = train.labels, dataset.classes, "classes"
    elif factor is not None:
        column, names, what = train.factors[factor], dataset.names.get(factor, ()), "styles"
    else:
        first = np.arange(min(len(train), rows // 2 * across))
        pieces = np.split(first, range(across, len(first), across))
        return [("", train.batch(piece)) for piece in pieces], ""
    values = np.unique(column[column >= 0])
    shown = values[np.linspace(0, len(values) - 1, min(rows, len(values))).astype(int)]
    examples = []
    for value in shown:
        first = np.flatnonzero(column == value)[:across]
        examples.append((name_of(names, int(value)), train.batch(first)))
    return examples, f"{len(shown)} of {len(values)} {what}" if len(shown) < len(values) else ""


def _parts(dataset: Dataset) -> dict[str, Images]:
    parts = {"train": dataset.train, "validation": dataset.validation}
    if dataset.labelled is not None and len(dataset.labelled):
        parts["labelled"] = dataset.labelled
    return {**parts, "test": dataset.test}


def _per_value(columns: dict[str, Integers], names: Sequence[str]) -> list[dict[str, Any]]:
    """Number of images of each class or style in every part."""
    width = max(len(names), 1 + max(int(column.max(initial=-1)) for column in columns.values()))
    counts = {p: np.bincount(c[c >= 0], minlength=width).tolist() for p, c in columns.items()}
    return [
        {"name": name_of(names, value), **{part: counts[part][value] for part in counts}}
        for value in range(width)
    ]


def name_of(names: Sequence[str], value: int) -> str:
    """The name of a class or a style, or its number if it has no name."""
    return names[value] if value < len(names) else str(value)
