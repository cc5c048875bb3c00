"""How unlike each other the clients of a split are: in size, labels, style and looks.

"The whole" is what all clients hold together; an image that is held twice counts twice. Figures
of labels are over the images whose label is known, and a client without any is left out of them.
In a mean over clients each weighs the same, however many images it holds.
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

STYLE_FACTORS = ("style", "domain")  # the first of these that the data have is their style
ANGLE_BINS = 10  # of a full turn, where the split does not say
PER_CLIENT, IN_ALL = 300, 20_000  # images looked at for the style distance, at most
MOST_BYTES = 1 << 28  # and so many bytes of them, but one image of each client at least
CHUNK_BYTES = 1 << 24  # looked at together

_SPREAD = ("min", "mean", "max")
_SUMMARY: Mapping[str, tuple[str, ...]] = {  # what is said of a column for the split as a whole
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
    """What is known of a split's clients."""

    figures: Figures  # of the split as a whole
    columns: Columns  # of each client
    classes: Integers | None  # images of each class at each client (clients, classes)
    styles: Integers | None  # likewise of each style

    def rows(self) -> list[dict[str, float | int | None]]:
        """One mapping a client; None where a client has no such figure."""
        values = [column.tolist() for column in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*values, strict=True)]


def heterogeneity(split: Split, dataset: Dataset) -> Heterogeneity:
    """Every figure of a split; of the pixels no more than a sample is read."""
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
    more, looks = style_distance(split, images)
    return Heterogeneity(figures | more, columns | looks, classes, styles)


def summary(split: Split, labels: Integers, classes: int | None = None) -> Figures:
    """The figures of sizes, and of labels where any is known."""
    columns = size_columns(split) | label_columns(counts(split, labels, classes))
    return _of_all(split, labels) | _summarised(columns)


def _of_all(split: Split, labels: Integers) -> Figures:
    """What is counted over all clients together.

    `pictures` counts an image as often as it is held and `repeated` how often beyond the first;
    `dropped` are held by nobody. `size_gini` is Gini's coefficient of the sizes: 0 where all hold
    as many, towards 1 where one client holds nearly everything.
    """
    held = np.concatenate(split.indices)
    distinct = len(np.unique(held))
    sizes = np.sort([len(own) for own in split.indices])
    rank = np.arange(1, len(sizes) + 1)
    return {
        "clients": len(split),
        "pictures": len(held),
        "dropped": len(labels) - distinct,
        "repeated": len(held) - distinct,
        "unlabelled": int((labels[held] < 0).sum()),
        "size_gini": float(((2 * rank - len(sizes) - 1) @ sizes) / (len(sizes) * len(held))),
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
    """Images of each value (a class, a style) at each client (clients, width); -1 is none."""
    return _tally(split, values[np.concatenate(split.indices)], width)


def _tally(split: Split, held: Integers, width: int | None) -> Integers:
    """How often each value occurs at each client, of the values of one client after another."""
    width = max(width or 0, int(held.max(initial=-1)) + 1)
    owner = np.repeat(np.arange(len(split)), [len(own) for own in split.indices])
    known = held >= 0
    flat = np.bincount(owner[known] * width + held[known], minlength=len(split) * width)
    return flat.reshape(len(split), width)


def size_columns(split: Split) -> Columns:
    """`size`: how many images a client holds."""
    return {"size": np.ma.array([len(own) for own in split.indices])}


def label_columns(counts: Integers) -> Columns:
    """How unlike the whole each client is in its classes, from `counts` (clients, classes).

    - `classes`: classes of which it holds at least one image, and `classes_1_percent`: those
      that make up at least a hundredth of its images;
    - `dominant_share`: the share of its commonest class;
    - `label_entropy_bits`: 0 for one class, log2 of the classes where they are even;
    - `label_js`: Jensen-Shannon distance to the whole, 0 to 1;
    - `label_emd`: earth mover's distance to the whole as Zhao et al. (2018) count it: the sum over
      classes of |share at the client - share in the whole|, 0 to 2.

    A client with few images is some way from the whole by chance alone.
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
    """`styles` that a client holds any image of, and their Jensen-Shannon distance `style_js`."""
    if not counts.any():
        return {}
    distance = js_distance(_shares(counts), _shares(counts.sum(0)))
    return _masked({"styles": (counts > 0).sum(1), "style_js": distance}, counts)


def style_factor(images: Images) -> str | None:
    """The column that says how an image is made rather than what it shows, if there is one."""
    return next((name for name in STYLE_FACTORS if name in images.factors), None)


def angle_columns(split: Split) -> Columns:
    """`angle_bins`: equal parts of the full turn to which any of a client's images is turned."""
    bins = int(split.spec.get("bins", ANGLE_BINS))
    turns = np.concatenate(split.angles or ()) % 360 / 360
    held = np.minimum((turns * bins).astype(np.int64), bins - 1)
    return {"angle_bins": np.ma.array((_tally(split, held, bins) > 0).sum(1))}


def entropy_bits(shares: Floats) -> Floats:
    """Entropy of each row of `shares` (…, values), in bits.

    >>> entropy_bits(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.0, 1.0]
    """
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(0 - (shares * logs).sum(-1))


def js_distance(shares: Floats, whole: Floats) -> Floats:
    """Root of the Jensen-Shannon divergence in bits between each row and `whole`: 0 to 1.

    >>> js_distance(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.0, 1.0])).tolist()
    [1.0, 0.0]
    """
    apart = entropy_bits((shares + whole) / 2) - (entropy_bits(shares) + entropy_bits(whole)) / 2
    return np.asarray(np.sqrt(np.maximum(apart, 0)))


def _shares(counts: Integers) -> Floats:
    return np.asarray(counts / np.maximum(counts.sum(-1, keepdims=True), 1))


def _masked(columns: Columns, counts: Integers) -> Columns:
    """Clients of which nothing is known have no figures."""
    return {name: np.ma.array(column, mask=~counts.any(1)) for name, column in columns.items()}


# ---- looks, without any label --------------------------------------------------------------------


def style_distance(split: Split, images: Images) -> tuple[Figures, Columns]:
    """How unlike the whole each client's images look, whatever they show, with no label.

    Each image is described by `looks`, standardised over the whole. A client's distance d is the
    root mean square over these of its mean, which is 1 for clients a standard deviation away. Even
    n images drawn from the whole have about d = 1/sqrt(n), the `style_chance`. So what is
    given is `style_distance` = sqrt(d² - chance²), or 0 where that is negative; over all clients
    the root of the mean of the differences, which is about 0 where style is shared out at random.

    Classes differ in their looks as well: clients of different classes are some way apart.
    """
    owner, described = _sampled(split, images)
    taken = np.bincount(owner, minlength=len(split))
    share = np.array([len(own) for own in split.indices]) / sum(map(len, split.indices))
    per_image = share / np.maximum(taken, 1)  # so that large clients weigh more in the whole
    centred = described - per_image[owner] @ described
    deviation = np.sqrt(per_image[owner] @ centred**2)
    differing = deviation > 1e-6  # a statistic that all images share tells nothing
    means = np.zeros((len(split), int(differing.sum())))
    np.add.at(means, owner, centred[:, differing] / deviation[differing])
    means /= np.maximum(taken, 1)[:, None]
    # Variance of a client's mean less the whole's, where every image is an independent draw.
    chance = (1 - 2 * share) / np.maximum(taken, 1) + per_image @ share
    chance = np.maximum(chance, 0) * differing.any()
    beyond = (means**2).sum(1) / max(1, means.shape[1]) - chance
    held = taken > 0
    columns: Columns = {
        "style_distance": np.ma.array(np.sqrt(np.maximum(beyond, 0)), mask=~held),
        "style_chance": np.ma.array(np.sqrt(chance), mask=~held),
    }
    figures: Figures = {
        "style_distance": float(np.sqrt(max(0.0, beyond[held].mean()))),
        "style_distance_max": float(columns["style_distance"].max()),
        "style_chance": float(np.sqrt(chance[held].mean())),
    }
    return figures, columns


def looks(pixels: Pixels) -> Floats:
    """Low-level statistics of each image (n, statistics): what a style changes at once.

    Brightness and contrast of every channel (mean and standard deviation), and how much
    neighbouring pixels differ down and across (mean absolute differences).
    """
    values = pixels.astype(np.float32) / 255
    columns = [values.mean((1, 2)), values.std((1, 2))]
    for axis in (1, 2):
        steps = np.abs(np.diff(values, axis=axis))
        columns.append(steps.sum((1, 2, 3))[:, None] / max(1, steps[0].size))
    return np.concatenate(columns, 1, dtype=np.float64)


def _sampled(split: Split, images: Images) -> tuple[Integers, Floats]:
    """Some images of each client, drawn with a fixed seed: their holders and their looks."""
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
    order = np.argsort(rows, kind="stable")  # as they lie on disk
    described = []
    step = max(1, CHUNK_BYTES // bytes_each)
    with work("styles of clients", len(order), "images") as at:
        for start in range(0, len(order), step):
            at(start)
            piece = order[start : start + step]
            pixels = images.batch(rows[piece])
            described.append(looks(pixels if degrees is None else turned(pixels, degrees[piece])))
    return owner[order], np.concatenate(described)
