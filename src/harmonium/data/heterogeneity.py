"""Measures of heterogeneity of a split: how clients differ in size, labels, styles and pixels.

Clients are compared with "the whole", the images of all clients together; an image that is held
twice counts twice. Label statistics are over the images whose label is known, and leave out clients
without any. Means over clients are unweighted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.progress import work
from harmonium.core.seeds import numpy_rng
from harmonium.data.images import Dataset, Images, Integers, Pixels
from harmonium.data.partition import Split
from harmonium.data.shift import turned

Floats = npt.NDArray[np.float64]
Figures = dict[str, float | int]
Columns = dict[str, Any]  # a masked array each: one value a client, masked where it has none

STYLE_FACTORS = ("style", "domain")  # columns that hold the style; the first present is used
ANGLE_BINS = 10  # of a full turn, if the split has no setting `bins`
PER_CLIENT, IN_ALL = 300, 20_000  # images sampled for the style distance, at most
MOST_BYTES = 1 << 28  # bytes of these images at most, but at least one image of each client
CHUNK_BYTES = 1 << 24  # bytes of images processed at once

_SPREAD = ("min", "mean", "max")
_SUMMARY: Mapping[str, tuple[str, ...]] = {  # the summaries of each column over all clients
    "size": _SPREAD,
    "classes": _SPREAD,
    "classes_1_percent": _SPREAD,
    "dominant_share": ("mean",),
    "label_entropy_bits": ("mean",),
    "label_js": ("mean", "max"),
    "label_emd": ("mean", "max"),
    "styles": _SPREAD,
    "style_js": ("mean", "max"),
    "angle_bins": _SPREAD,
}


@dataclass(frozen=True)
class Heterogeneity:
    """The heterogeneity of a split."""

    figures: Figures  # of the whole split
    columns: Columns  # one value for each client
    classes: Integers | None  # number of images of each class at each client (clients, classes)
    styles: Integers | None  # number of images of each style at each client (clients, styles)

    def rows(self) -> list[dict[str, float | int | None]]:
        """One mapping for each client; None where a client has no such value."""
        values = [column.tolist() for column in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*values, strict=True)]


def heterogeneity(split: Split, dataset: Dataset) -> Heterogeneity:
    """All measures of a split; reads a sample of the pixels."""
    images, classes, styles = dataset.train, None, None
    columns = size_columns(split)
    if images.labelled:
        classes = counts(split, images.labels, len(dataset.classes) or None)
        columns |= label_columns(classes)
    if factor := style_factor(images):
        known = dataset.names.get(factor, ())
        styles = counts(split, images.factors[factor], len(known) or None)
        columns |= style_columns(styles)
        styles = styles if styles.any() else None
    if split.angles is not None:
        columns |= angle_columns(split)
    figures = _of_all(split, images.labels) | _summarised(columns)
    more, style_distances = style_distance(split, images)
    return Heterogeneity(figures | more, columns | style_distances, classes, styles)


def summary(split: Split, labels: Integers, classes: int | None = None) -> Figures:
    """The measures of sizes, and of labels if any is known."""
    columns = size_columns(split) | label_columns(counts(split, labels, classes))
    return _of_all(split, labels) | _summarised(columns)


def _of_all(split: Split, labels: Integers) -> Figures:
    """Counts over all clients together.

    `pictures` is the number of images held, `repeated` how many of them are copies, and `dropped`
    how many images no client holds. `size_gini` is the Gini coefficient of the sizes: 0 if all are
    equal, towards 1 if one client holds nearly everything.
    """
    rows = np.concatenate(split.indices)
    distinct = len(np.unique(rows))
    sizes = np.sort([len(own) for own in split.indices])
    rank = np.arange(1, len(sizes) + 1)
    return {
        "clients": len(split),
        "pictures": len(rows),
        "dropped": len(labels) - distinct,
        "repeated": len(rows) - distinct,
        "unlabelled": int((labels[rows] < 0).sum()),
        "size_gini": float(((2 * rank - len(sizes) - 1) @ sizes) / (len(sizes) * len(rows))),
    }


def _summarised(columns: Columns) -> Figures:
    figures: Figures = {}
    for name, column in columns.items():
        ways = _SUMMARY[name]
        for way in ways:
            key = name if ways == ("mean",) else f"{name}_{way}"
            figures[key] = getattr(column, way)().item()
    return figures


# ---- labels and styles ---------------------------------------------------------------------------


def counts(split: Split, values: Integers, width: int | None = None) -> Integers:
    """Number of images of each class or style at each client (clients, width); -1 is unknown."""
    return _tally(split, values[np.concatenate(split.indices)], width)


def _tally(split: Split, values: Integers, width: int | None) -> Integers:
    """Count each value at each client, from the values of all clients' images in order."""
    width = max(width or 0, int(values.max(initial=-1)) + 1)
    owner = np.repeat(np.arange(len(split)), [len(own) for own in split.indices])
    known = values >= 0
    flat = np.bincount(owner[known] * width + values[known], minlength=len(split) * width)
    return flat.reshape(len(split), width)


def size_columns(split: Split) -> Columns:
    """`size`: number of images of each client."""
    return {"size": np.ma.array([len(own) for own in split.indices])}


def label_columns(counts: Integers) -> Columns:
    """How each client's classes differ from the whole, from `counts` (clients, classes).

    - `classes`: number of classes of which it holds any image, and `classes_1_percent`: number of
      classes that make up at least 1 % of its images;
    - `dominant_share`: the share of its commonest class;
    - `label_entropy_bits`: 0 for one class, log2 of the number of classes if they are even;
    - `label_js`: Jensen-Shannon distance to the whole, 0 to 1;
    - `label_emd`: earth mover's distance to the whole as in Zhao et al. (2018): sum over classes
      of |share at the client - share in the whole|, 0 to 2.

    A client with few images differs from the whole by chance alone.
    """
    if not counts.any():
        return {}
    shares, whole = _shares(counts), _shares(counts.sum(0))
    columns: Columns = {
        "classes": (counts > 0).sum(1),
        "classes_1_percent": (shares >= 0.01).sum(1),
        "dominant_share": shares.max(1),
        "label_entropy_bits": entropy_bits(shares),
        "label_js": js_distance(shares, whole),
        "label_emd": np.abs(shares - whole).sum(1),
    }
    return _masked(columns, counts)


def style_columns(counts: Integers) -> Columns:
    """`styles`: number of styles of a client; `style_js`: Jensen-Shannon distance to the whole."""
    if not counts.any():
        return {}
    distance = js_distance(_shares(counts), _shares(counts.sum(0)))
    return _masked({"styles": (counts > 0).sum(1), "style_js": distance}, counts)


def style_factor(images: Images) -> str | None:
    """The name of the column that holds the style of an image, if there is one."""
    return next((name for name in STYLE_FACTORS if name in images.factors), None)


def angle_columns(split: Split) -> Columns:
    """`angle_bins`: number of bins of the full turn into which a client's images are rotated."""
    bins = int(split.spec.get("bins", ANGLE_BINS))
    turns = np.concatenate(split.angles or ()) % 360 / 360
    numbers = np.minimum((turns * bins).astype(np.int64), bins - 1)
    return {"angle_bins": np.ma.array((_tally(split, numbers, bins) > 0).sum(1))}


def entropy_bits(shares: Floats) -> Floats:
    """Entropy of each row of `shares` (…, values), in bits.

    >>> entropy_bits(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.0, 1.0]
    """
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(0 - (shares * logs).sum(-1))


def js_distance(shares: Floats, whole: Floats) -> Floats:
    """Jensen-Shannon distance (root of the divergence in bits) of each row to `whole`, 0 to 1.

    >>> js_distance(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.0, 1.0])).tolist()
    [1.0, 0.0]
    """
    mixed, separate = entropy_bits((shares + whole) / 2), entropy_bits(shares) + entropy_bits(whole)
    return np.asarray(np.sqrt(np.maximum(mixed - separate / 2, 0)))


def _shares(counts: Integers) -> Floats:
    return np.asarray(counts / np.maximum(counts.sum(-1, keepdims=True), 1))


def _masked(columns: Columns, counts: Integers) -> Columns:
    """The columns with clients masked for which nothing is known."""
    return {name: np.ma.array(column, mask=~counts.any(1)) for name, column in columns.items()}


# ---- pixel statistics, without any label ---------------------------------------------------------


def style_distance(split: Split, images: Images) -> tuple[Figures, Columns]:
    """How far each client's images are from the whole in low-level statistics; needs no labels.

    Each image is described by `pixel_statistics`, standardised over the whole. A client's distance
    d is the root mean square of its mean statistics: 1 for clients one standard deviation away.
    Even n images drawn from the whole have about d = 1/sqrt(n), the `style_chance`. What is
    reported is therefore `style_distance` = sqrt(d² - chance²), or 0 where that is negative; over
    all clients the root of the mean of these differences, about 0 if styles are split at random.

    Classes differ in these statistics too, so clients with different classes have some distance.
    """
    owner, described = _sampled(split, images)
    taken = np.bincount(owner, minlength=len(split))
    share = np.array([len(own) for own in split.indices]) / sum(map(len, split.indices))
    per_image = share / np.maximum(taken, 1)  # so that large clients weigh more in the whole
    centred = described - per_image[owner] @ described
    deviation = np.sqrt(per_image[owner] @ centred**2)
    differing = deviation > 1e-6  # a statistic that is constant over the images is left out
    means = np.zeros((len(split), int(differing.sum())))
    np.add.at(means, owner, centred[:, differing] / deviation[differing])
    means /= np.maximum(taken, 1)[:, None]
    # Variance of a client's mean less the whole's, where every image is an independent draw.
    chance = (1 - 2 * share) / np.maximum(taken, 1) + per_image @ share
    chance = np.maximum(chance, 0) * differing.any()
    beyond = (means**2).sum(1) / max(1, means.shape[1]) - chance
    sampled = taken > 0
    columns: Columns = {
        "style_distance": np.ma.array(np.sqrt(np.maximum(beyond, 0)), mask=~sampled),
        "style_chance": np.ma.array(np.sqrt(chance), mask=~sampled),
    }
    figures: Figures = {
        "style_distance": float(np.sqrt(max(0.0, beyond[sampled].mean()))),
        "style_distance_max": float(columns["style_distance"].max()),
        "style_chance": float(np.sqrt(chance[sampled].mean())),
    }
    return figures, columns


def pixel_statistics(pixels: Pixels) -> Floats:
    """Low-level statistics of each image (n, statistics), which depend on its style.

    Mean and standard deviation of every channel, and mean absolute differences between vertical
    and horizontal neighbours.
    """
    values = pixels.astype(np.float32) / 255
    columns = [values.mean((1, 2)), values.std((1, 2))]
    for axis in (1, 2):
        steps = np.abs(np.diff(values, axis=axis))
        columns.append(steps.sum((1, 2, 3))[:, None] / max(1, steps[0].size))
    return np.concatenate(columns, 1, dtype=np.float64)


def _sampled(split: Split, images: Images) -> tuple[Integers, Floats]:
    """A sample of each client's images, with a fixed seed: their clients and their statistics."""
    bytes_each = int(np.prod(images.shape))
    most = min(IN_ALL, MOST_BYTES // bytes_each)
    each = max(1, min(PER_CLIENT, most // len(split)))
    rng = numpy_rng(0, "heterogeneity", "looks")
    places = [rng.permutation(len(own))[:each] for own in split.indices]
    owner = np.repeat(np.arange(len(split)), [len(place) for place in places])
    rows = np.concatenate([own[p] for own, p in zip(split.indices, places, strict=True)])
    degrees = None
    if split.angles is not None:
        degrees = np.concatenate([own[p] for own, p in zip(split.angles, places, strict=True)])
    order = np.argsort(rows, kind="stable")  # the order on disk, for fast reading
    described = []
    step = max(1, CHUNK_BYTES // bytes_each)
    with work("styles of clients", len(order), "images") as at:
        for start in range(0, len(order), step):
            at(start)
            piece = order[start : start + step]
            pixels = images.batch(rows[piece])
            described.append(
                pixel_statistics(pixels if degrees is None else turned(pixels, degrees[piece]))
            )
    return owner[order], np.concatenate(described)
