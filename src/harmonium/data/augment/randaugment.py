"""RandAugment: a few random operations of one common strength, on a whole batch of images.

Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced Search Space, 2020.
Each image draws its own operations, with repetition, out of fourteen, and a sign for those that
have two directions. A magnitude of 30 is the end of AutoAugment's range of every operation. All of
them work on bytes, as Pillow defines them: whole numbers from 0 to 255 go in and come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.data.augment import operations as ops
from harmonium.data.augment import parameters as draw

GREATEST = 30  # the scale of magnitudes
DRAWS = 2  # uniform numbers that one operation takes: which, and the sign

Operation = Callable[[Tensor, float, Tensor], Tensor]
"""From planes `(channels, n, height, width)` of bytes as floats, a strength from 0 to 1, and signs
-1 or 1 `(n,)` to new planes, not yet rounded."""


def randaugment(pixels: Tensor, draws: draw.Floats, magnitude: int) -> Tensor:
    """Apply the operations that each image drew, one after the other.

    Args:
        pixels: uint8 `(n, height, width, channels)`.
        draws: uniform numbers, `(n, DRAWS * operations)`.
        magnitude: strength of all operations, 0 to 30.

    Returns:
        The same shape and type.
    """
    planes = pixels.permute(3, 0, 1, 2).contiguous().float()
    operations, strength = list(OPERATIONS.values()), magnitude / GREATEST
    for column in range(0, draws.shape[1], DRAWS):
        which = draw.whole_number(draws[:, column], len(operations))
        drawn = np.where(draws[:, column + 1] < 0.5, -1, 1).astype(np.float32)
        signs = to_device(torch.from_numpy(drawn), planes.device)
        for number in np.unique(which).astype(int):
            chosen = to_device(torch.from_numpy(np.flatnonzero(which == number)), planes.device)
            changed = operations[number](planes.index_select(1, chosen), strength, signs[chosen])
            planes.index_copy_(1, chosen, changed.round_().clamp_(0, 255))
    return planes.byte().permute(1, 2, 3, 0).contiguous()


# ---- moving pixels -------------------------------------------------------------------------------


def affine(planes: Tensor, matrices: Tensor) -> Tensor:
    """Read each pixel at another place: the nearest one, black where nothing was.

    Args:
        planes: `(channels, n, height, width)`.
        matrices: `(n, 2, 3)`, from (x, y, 1) of the result to (x, y) of the source, in pixels;
            a pixel's own place is its middle, half a pixel from its corner.
    """
    channels, count, height, width = planes.shape
    across, down = (ops.ramp(side, planes.device) + 0.5 for side in (width, height))
    a, b, c, d, e, f = matrices.reshape(count, 6).T[:, :, None, None]
    x = (a * across + b * down[:, None] + c).floor()
    y = (d * across + e * down[:, None] + f).floor()
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    place = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).long().view(1, count, -1)
    moved = planes.reshape(channels, count, -1).gather(2, place.expand(channels, -1, -1))
    return moved.view(planes.shape).mul_(inside)


def _still(signs: Tensor) -> Tensor:
    """Matrices that move nothing, `(n, 2, 3)`."""
    return torch.eye(2, 3, device=signs.device).repeat(len(signs), 1, 1)


def shear_x(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Rows shift by up to 0.3 pixels for each row below the upper edge."""
    matrices = _still(signs)
    matrices[:, 0, 1] = 0.3 * strength * signs
    return affine(planes, matrices)


def shear_y(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Columns shift by up to 0.3 pixels for each column right of the left edge."""
    matrices = _still(signs)
    matrices[:, 1, 0] = 0.3 * strength * signs
    return affine(planes, matrices)


def translate_x(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """A shift of up to 150 / 331 of the width, in whole pixels."""
    matrices = _still(signs)
    matrices[:, 0, 2] = int(150 / 331 * planes.shape[3] * strength) * signs
    return affine(planes, matrices)


def translate_y(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """A shift of up to 150 / 331 of the height, in whole pixels."""
    matrices = _still(signs)
    matrices[:, 1, 2] = int(150 / 331 * planes.shape[2] * strength) * signs
    return affine(planes, matrices)


def rotate(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """A turn about the middle by up to 30 degrees."""
    angle = math.radians(30 * strength) * signs
    cosine, sine = angle.cos(), angle.sin()
    x, y = planes.shape[3] / 2, planes.shape[2] / 2
    rows = (cosine, -sine, x - x * cosine + y * sine, sine, cosine, y - x * sine - y * cosine)
    return affine(planes, torch.stack(rows, dim=1).view(-1, 2, 3))


# ---- colour --------------------------------------------------------------------------------------


def _blend(planes: Tensor, other: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Away from `other` by a factor of up to 1.9, or towards it, down to 0.1."""
    factor = (1 + 0.9 * strength * signs)[:, None, None]
    return other + factor * (planes - other)


def brightness(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """From or towards black."""
    return _blend(planes, planes.new_zeros(()), strength, signs)


def colour(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """From or towards grey; an image without colours keeps its bytes."""
    if planes.shape[0] != 3:
        return planes.clone()
    return _blend(planes, ops.luma(planes).round(), strength, signs)


def contrast(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """From or towards the mean luma of the image."""
    mean = ops.luma(planes).round().mean((1, 2), keepdim=True).round()
    return _blend(planes, mean, strength, signs)


def sharpness(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """From or towards the image smoothed over 3 x 3 pixels; its border stays."""
    smooth = planes.clone()
    kernel = planes.new_ones(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 5
    if min(planes.shape[2:]) > 2:
        single = planes.reshape(-1, 1, *planes.shape[2:])
        inner = torch.nn.functional.conv2d(single, kernel / 13).round_()
        smooth[:, :, 1:-1, 1:-1] = inner.view(*planes.shape[:2], *inner.shape[2:])
    return _blend(planes, smooth, strength, signs)


def posterise(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Up to four of a byte's eight bits become zero."""
    step: int = 2 ** round(4 * strength)
    return (planes / step).floor_().mul_(step)


def solarise(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Invert what is at least as bright as a threshold, which falls from 255 to 0."""
    return torch.where(planes < 255 - 255 * strength, planes, 255 - planes)


def autocontrast(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Stretch every channel to the whole range; a channel of one value stays unchanged."""
    low, high = planes.amin((2, 3), keepdim=True), planes.amax((2, 3), keepdim=True)
    stretched = (planes - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, stretched, planes)


def equalise(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Equalise the histogram of every channel; a channel that is too uniform stays unchanged."""
    channels, count, height, width = planes.shape
    values = planes.reshape(channels * count, height * width).long()
    counts = values.new_zeros(channels * count, 256)
    counts.scatter_add_(1, values, torch.ones_like(values))
    below = counts.cumsum(1) - counts
    brightest = counts.gather(1, values.amax(1, keepdim=True))
    step = (height * width - brightest) // 255
    spread = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255)
    equalised = torch.where(step > 0, spread.gather(1, values), values)
    return equalised.view(planes.shape).to(planes)


def identity(planes: Tensor, strength: float, signs: Tensor) -> Tensor:
    """The image unchanged."""
    return planes.clone()


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        *(identity, autocontrast, equalise, rotate, solarise, colour, posterise),
        *(contrast, brightness, sharpness, shear_x, shear_y, translate_x, translate_y),
    )
}
