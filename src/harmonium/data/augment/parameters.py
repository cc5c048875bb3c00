"""From uniform numbers to the parameters of a view: boxes, sampling points, colour coefficients.

These arrays hold a few numbers per image. NumPy needs a fifth of torch's time to call, and for a
batch of sixteen images calling is most of the cost, so chance is turned into parameters here and
`operations` turns parameters into pixels. One row is one image throughout.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: what Pillow calls 'L'
HOMES = np.array((0.0, 2.0, -2.0), np.float32)  # hue of red, green and blue in sixths of a turn
CANDIDATES = 10  # boxes a random resized crop tries before it takes the centre
CROP_DRAWS = 2 * CANDIDATES + 2  # area and aspect of each candidate, then the two positions

# (order, slot, operation): which of brightness, contrast and saturation each slot of the six
# orders holds.
ORDERS = np.eye(3, dtype=np.float32)[list(itertools.permutations(range(3)))]


def whole_number(draws: Floats, choices: Floats | int) -> Floats:
    """Equally likely whole numbers below `choices`, as floats.

    A uniform number is a multiple of 2^-24 below 1, so that its product with a whole number
    never rounds up to that number.

    >>> whole_number(np.float32([0, 0.25, 1 - 2**-24]), 3).tolist()
    [0.0, 0.0, 2.0]
    """
    numbers: Floats = np.floor(draws * choices)
    return numbers


def crop_boxes(
    draws: Floats,
    sides: tuple[int, int],
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[Floats, Floats]:
    """Random resized crops: area uniform, aspect log-uniform, first of ten boxes that fits.

    If none fits, the largest central box whose aspect is allowed.

    Args:
        draws: uniform numbers, `(n, CROP_DRAWS)`.
        sides: height and width of the image.
        area: least and greatest share of the image's area.
        aspect: least and greatest width / height.

    Returns:
        Starts and lengths in whole pixels, `(2, n)` each: rows first, then columns.
    """
    height, width = sides
    low, high = math.log(aspect[0]) / 2, math.log(aspect[1]) / 2
    least, span = height * width * area[0], height * width * (area[1] - area[0])
    root = np.sqrt(draws[:, :CANDIDATES] * span + least)
    ratio = np.exp(draws[:, CANDIDATES : 2 * CANDIDATES] * (high - low) + low)
    down, across = np.rint(root / ratio), np.rint(root * ratio)
    fits = (down <= height) & (across <= width) & (down >= 1) & (across >= 1)
    every = np.arange(len(draws))
    first = fits.argmax(1)  # of equals the first, that is the first box that fits
    any_fits = fits[every, first]
    lengths = np.array((down[every, first], across[every, first]))
    spare = np.array(((height,), (width,)), np.float32) - lengths
    starts = whole_number(draws[:, 2 * CANDIDATES :].T, spare + 1)
    if not any_fits.all():
        central = min(height, round(width / aspect[0])), min(width, round(height * aspect[1]))
        for axis, length in enumerate(central):
            lengths[axis, ~any_fits] = length
            starts[axis, ~any_fits] = (sides[axis] - length) // 2
    return starts, lengths


def crop_points(start: Floats, length: Floats, flip: NDArray[Any], target: int) -> Floats:
    """Where the pixels of a resized crop lie in the image: `(n, target)`.

    Args:
        start: first pixel of each box, `(n,)`.
        length: pixels of each box, `(n,)`.
        flip: which images to walk through from the far end, bool `(n,)`.
        target: pixels of the result.
    """
    origin = np.where(flip, start + length, start) - np.float32(0.5)
    signed = np.where(flip, -length, length) / np.float32(target)
    half_steps = np.arange(target, dtype=np.float32) + np.float32(0.5)
    points: Floats = origin[:, None] + signed[:, None] * half_steps
    return points


def pad_points(
    draws: Floats, flip: NDArray[Any], source: int, target: int, pad: int, reflect: bool
) -> Floats:
    """Where the pixels of a random window of a padded image lie: whole numbers, `(n, target)`.

    Args:
        draws: uniform numbers, `(n,)`.
        flip: which images to walk through from the far end, bool `(n,)`.
        source: the side of the image.
        target: the side of the window.
        pad: pixels added at either end.
        reflect: mirror the image beyond its edge; otherwise the points lie outside it.
    """
    start = whole_number(draws, source + 2 * pad - target + 1) - pad
    places: Floats = np.add(start[:, None], np.arange(target, dtype=np.float32))
    places[flip] = places[flip, ::-1]
    if reflect:
        last = source - 1
        np.subtract(last, np.abs(last - np.abs(places)), out=places)
    return places


def blur_kernels(sigma: Floats, taps: int) -> Floats:
    """Gaussians of `taps` taps that sum to 1, `(n, taps)`; a tiny sigma, `(n,)`, is no blur."""
    offsets = np.arange(taps, dtype=np.float32) - taps // 2
    kernels: Floats = np.exp(np.square(offsets / sigma[:, None]) / -2)
    # Without visible effect, but their products would be denormal numbers, which are slow.
    kernels[kernels < 1e-9] = 0
    kernels /= kernels.sum(1, keepdims=True)
    return kernels


def factors(draws: Floats, strengths: tuple[float, float, float, float]) -> Floats:
    """Brightness, contrast, saturation within 1 -+ strength, hue in turns within -+ strength.

    Args:
        draws: uniform numbers, `(n, 4)`.
        strengths: of the four.

    Returns:
        `(n, 4)`.
    """
    low, width = _ranges(strengths)
    return draws * width + low


@lru_cache(maxsize=64)
def _ranges(strengths: tuple[float, float, float, float]) -> tuple[Floats, Floats]:
    """Least value and width of the range of each factor, made once."""
    low = np.array(
        [max(0.0, 1 - strength) for strength in strengths[:3]] + [-strengths[3]], np.float32
    )
    high = np.array([1 + strength for strength in strengths[:3]] + [strengths[3]], np.float32)
    return low, high - low


def slot_shares(scales: Floats, order: Floats) -> Floats:
    """What brightness, contrast and saturation do in each slot of a random order.

    Each moves an image x away from (or towards) another one: black, its mean luma, or its luma.
    So all three are `scale * x + mean_share * mean luma(x) + luma_share * luma(x)`.

    Args:
        scales: brightness, contrast and saturation of each image, `(n, 3)`.
        order: a row of `ORDERS` for each image, `(n,)`.

    Returns:
        Scale, mean share and luma share of the operation in each slot: `(slot, 3, n, 1, 1)`.
    """
    shares = ORDERS[order.astype(np.intp)] * (1 - scales)[:, None]  # (n, slot, operation)
    shares[:, :, 0] = 1 - shares.sum(2)
    return shares.transpose(1, 2, 0)[..., None, None]


def hue_offsets(turns: Floats) -> Floats:
    """The hue of each pure channel after the shift, in sixths of a turn within -+3: `(3, n, 1, 1)`.

    Kept within half a circle so that its distance from any hue is at most one circle.
    """
    offsets = HOMES[:, None] - 6 * turns
    offsets -= 6 * np.rint(offsets / 6)
    return offsets[..., None, None]


def colour_matrices(factors: Floats) -> tuple[Floats, Floats]:
    """Brightness, contrast, saturation and a hue rotation in YIQ, in this order, as one matrix.

    Grey is saturation 0, and nothing is clamped in between.

    Args:
        factors: brightness, contrast, saturation, and hue in turns, `(n, 4)`.

    Returns:
        Matrices `(to, from, n, 1, 1)`, and the share of the mean luma to add, `(n, 1, 1)`.
    """
    brightness, contrast, saturation, hue = factors.T
    gain = brightness * contrast
    angle, colour = hue * np.float32(math.tau), gain * saturation
    mix = np.stack((gain, colour * np.cos(angle), colour * np.sin(angle)))
    matrices = (HUE_BASIS @ mix).reshape(3, 3, -1, 1, 1)
    return matrices, (brightness - gain)[:, None, None]


def _hue_basis() -> Floats:
    """Luma, chroma, and chroma turned by 90 degrees in the YIQ plane, as columns: `(9, 3)`."""
    yiq = np.array((LUMA, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)))
    # The sign makes red turn towards yellow, as growing HSV hue does.
    quarter = np.array(((0, 0, 0), (0, 0, 1), (0, -1, 0)))
    light = np.tile(yiq[0], (3, 1))
    turned = np.linalg.inv(yiq) @ quarter @ yiq
    return np.stack((light, np.eye(3) - light, turned)).reshape(3, 9).T.astype(np.float32)


HUE_BASIS = _hue_basis()
