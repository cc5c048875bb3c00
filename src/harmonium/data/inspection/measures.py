"""What is measured of a sample of images: the numbers that kinds and advice follow from.

No label is used. Every number is a share or a correlation, so it does not depend on how large the
images are; `docs/your-images.md` says what each is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from harmonium.core.seeds import numpy_rng
from harmonium.data.images import Pixels

Floats = npt.NDArray[np.float64]

LUMA = np.array((0.299, 0.587, 0.114))
COLOURLESS = 0.03  # mean difference of an image's channels below which it counts as grey
SKETCH = 32  # side at which ink and background are told apart
THICK = 7  # pixels of SKETCH: what is left where ink is as wide as that in both directions
PALM = 12  # side at which images are compared with turned ones
AREAS = (0.2, 0.35, 0.5, 0.7, 0.9)  # least areas of a crop that are tried
CROPS = 8  # of each image and area
BARE = 0.1  # of its fair share of what stands out: a crop with less shows nothing
STANDS_OUT = 0.25  # of the greatest distance from an image's background
SIZES = (32, 64, 96, 128, 224)  # sides that are tried
FEWEST = 100  # images below which orientation is not judged


@dataclass(frozen=True)
class Measures:
    """Statistics of a sample of images; None where the images do not allow them."""

    sampled: int  # images
    side: int  # pixels, of the sample
    grey: float  # share of images without colours
    saturation: float  # mean difference of a pixel's channels, 0 to 1
    one_hue: float  # 0: all hues alike; 1: one hue; weighted by how colourful pixels are
    background: float  # share of an image within a tenth of its darkest or its lightest level
    thick: float  # share of the ink that is left where strokes are taken away
    mirrored: float | None  # share of mirrored images that are told from the others; 0.5: none
    turned: float | None  # the same of images turned by a quarter
    upside_down: float | None  # the same of images turned by a half
    bare_crops: dict[float, float]  # by least area: share of crops that show nearly nothing
    blurred: float  # share of the variation that is left after blur by one pixel
    sizes: dict[int, float]  # by side: share of the variation that is left at that size
    blank: float  # share of images of one colour


def measured(some: Pixels, large: Pixels) -> Measures:
    """The statistics of a sample, and of fewer images with more detail."""
    images = some.astype(np.float64)
    light = images @ LUMA
    varied = light.var((1, 2)) > 1
    light = light[varied] if varied.any() else light
    pose = _scaled(some, PALM)[varied] if varied.any() else _scaled(some, PALM)
    ink, background = _ink(_scaled(some, SKETCH))
    left = ndimage.binary_opening(ink, np.ones((1, THICK, THICK), bool)).sum() / max(1, ink.sum())
    saturation, one_hue, grey = _colours(images)
    return Measures(
        sampled=len(some),
        side=some.shape[1],
        grey=grey,
        saturation=saturation,
        one_hue=one_hue,
        background=background,
        thick=float(left),
        mirrored=told(pose, lambda x: x[:, :, ::-1]),
        turned=told(pose, lambda x: np.rot90(x, 1, (1, 2))),
        upside_down=told(pose, lambda x: x[:, ::-1, ::-1]),
        bare_crops=_bare_crops(images),
        blurred=_kept(light, ndimage.gaussian_filter(light, (0, 1, 1))),
        sizes=_sizes(large),
        blank=float(1 - varied.mean()) if len(varied) else 0.0,
    )


def _scaled(images: Pixels, side: int) -> Floats:
    """Grey images of one side, `(n, side, side)`, as floats."""
    scaled = np.empty((len(images), side, side))
    for row, image in enumerate(images):
        grey = Image.fromarray(image).convert("L")
        scaled[row] = np.asarray(grey.resize((side, side), Image.Resampling.BICUBIC))
    return scaled


# ---- colour --------------------------------------------------------------------------------------


def _colours(images: Floats) -> tuple[float, float, float]:
    """Mean saturation, how much all hues are one, and the share of grey images."""
    spread = (images.max(3) - images.min(3)) / 255
    red, green, blue = np.moveaxis(images, 3, 0)
    across, along = red - (green + blue) / 2, (green - blue) * np.sqrt(0.75)  # the plane of hues
    strength = np.hypot(across, along).sum()
    one = np.hypot(across.sum(), along.sum()) / strength if strength else 0.0
    grey = (spread.mean((1, 2)) < COLOURLESS).mean()
    return float(spread.mean()), float(one), float(grey)


# ---- ink and background --------------------------------------------------------------------------


def _ink(light: Floats) -> tuple[npt.NDArray[np.bool_], float]:
    """The half of each image's levels that covers less of it, and the share of plain background."""
    low, high = np.percentile(light, (2, 98), axis=(1, 2))[:, :, None, None]
    level = np.clip((light - low) / np.maximum(high - low, 1), 0, 1)
    is_light = (level > 0.5).mean((1, 2)) > 0.5  # the paper is light and the ink dark
    level[is_light] = 1 - level[is_light]
    return level > 0.5, float((level < 0.1).mean())


# ---- orientation ---------------------------------------------------------------------------------


def told(images: Floats, change: Callable[[Any], Any]) -> float | None:
    """How often the nearest neighbour tells a changed image from one as it is.

    Half of the images, as they are and changed, are the neighbours, the other half the questions.
    0.5 means that changed images look like any others; near 1, no image ever looks like that.

    Args:
        images: grey, `(n, side, side)`.
        change: what is done to images.

    Returns:
        A share, or None if there are too few images to say.
    """
    half = len(images) // 2
    if len(images) < FEWEST:
        return None
    order = numpy_rng(0, "inspection", "told").permutation(len(images))
    known, asked = images[order[:half]], images[order[half : 2 * half]]
    plain, changed = _directions(known), _directions(change(known))
    as_is, other = _directions(asked), _directions(change(asked))

    def nearer(to: Floats, than: Floats, questions: Floats) -> float:
        first, second = (questions @ to.T).max(1), (questions @ than.T).max(1)
        return float((first > second).mean() + (first == second).mean() / 2)

    return (nearer(plain, changed, as_is) + nearer(changed, plain, other)) / 2


def _directions(images: Floats) -> Floats:
    """Images as unit vectors without their mean: brightness and contrast do not matter."""
    rows = images.reshape(len(images), -1)
    rows = rows - rows.mean(1, keepdims=True)
    unit: Floats = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return unit


# ---- crops ---------------------------------------------------------------------------------------


def _bare_crops(images: Floats) -> dict[float, float]:
    """How many random crops show nearly nothing of what stands out from the background."""
    rng = numpy_rng(0, "inspection", "crops")
    count, side = len(images), images.shape[1]
    paper = np.median(images.reshape(count, -1, 3), axis=1)[:, None, None]
    squared = ((images - paper) ** 2).sum(3)
    most = squared.max((1, 2), keepdims=True)
    squared[squared <= STANDS_OUT**2 * most] = 0
    total = squared.sum((1, 2))
    squared, total = squared[total > 0], total[total > 0]
    if not len(total):
        return dict.fromkeys(AREAS, 0.0)
    sums = np.pad(squared.cumsum(1).cumsum(2), ((0, 0), (1, 0), (1, 0)))
    rows = np.arange(len(total))
    shares = {}
    for area in AREAS:
        width = max(1, round(side * area**0.5))
        bare = 0.0
        for _ in range(CROPS):
            top, left = rng.integers(0, side - width + 1, (2, len(rows)))
            below, right = top + width, left + width
            inside = sums[rows, below, right] - sums[rows, top, right]
            inside += sums[rows, top, left] - sums[rows, below, left]
            bare += float((inside < BARE * area * total).mean())
        shares[area] = bare / CROPS
    return shares


# ---- detail --------------------------------------------------------------------------------------


def _kept(before: Floats, after: Floats) -> float:
    """Share of the variation within images that is left."""
    variation = before.var((1, 2)).sum()
    return float(after.var((1, 2)).sum() / variation) if variation else 1.0


def _sizes(large: Pixels) -> dict[int, float]:
    """How much of the images' variation a smaller size can show; of typical images."""
    own = large.shape[1]
    shares = {}
    for side in SIZES:
        if side >= own:
            break
        kept = []
        for image in large:
            grey = Image.fromarray(image).convert("L")
            small = grey.resize((side, side), Image.Resampling.BICUBIC)
            back = np.asarray(small.resize((own, own), Image.Resampling.BICUBIC), np.float64)
            light = np.asarray(grey, np.float64)
            if (variation := light.var()) > 1:
                kept.append(1 - ((light - back) ** 2).mean() / variation)
        shares[side] = float(np.median(kept)) if kept else 1.0
    return shares
