"""The arithmetic of views: every operation on a whole batch, with one parameter per image.

Three ideas keep it fast without a compiled extension. A crop, a resize, a flip, a padding and a
blur are linear and separable, so each is one small matrix per image and axis, and all of them
together are two batched matrix products. Colour works on *planes*, `(channels, n, height, width)`,
so that every channel of the batch is one contiguous run of memory. And brightness, contrast and
saturation are one formula with three coefficients, so a random order per image needs no grouping.

Functions that end in "in place" change the planes they are given.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from harmonium.core.devices import constant, to_device
from harmonium.data.augment import parameters

LUMA = parameters.LUMA
HUE_SIDE = (-1.0, 1.0, 1.0)  # green + blue - red


@lru_cache(maxsize=64)
def ramp(count: int, device: torch.device) -> Tensor:
    """0, 1, ... count - 1 as floats, made once; not to be changed."""
    return torch.arange(count, dtype=torch.float32, device=device)


# ---- matrices of one axis ------------------------------------------------------------------------


def crop_weights(
    points: Tensor,
    start: Tensor,
    length: Tensor,
    source: int,
    interpolation: Literal["bilinear", "bicubic"],
) -> Tensor:
    """Matrices that resize `[start, start + length)` of a side, as Pillow does.

    Pixels outside the box have no influence, and shrinking averages (antialiasing).

    Args:
        points: where the pixels of the result lie in the image, `(n, target)`.
        start: first pixel of each box, `(n, 1)`.
        length: pixels of each box, `(n, 1)`.
        source: the side of the image.
        interpolation: the filter.

    Returns:
        `(n, target, source)`, rows that sum to 1.
    """
    target = points.shape[1]
    last = start + length - 1
    if interpolation == "bilinear" and target >= source:
        # Never shrinking: two neighbours at most, and the edge pixel repeats beyond the box.
        return hat_weights(points.clamp(start, last), source)
    pixels = ramp(source, points.device)
    scale = (length / target).clamp_(min=1)
    distance = (pixels - points[:, :, None]).div_(scale[:, :, None]).abs_()
    weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    weights *= ((pixels >= start) & (pixels <= last))[:, None, :]
    return weights.div_(weights.sum(2, keepdim=True))


def hat_weights(points: Tensor, source: int) -> Tensor:
    """Linear interpolation at `points`, `(n, target)`: `(n, target, source)`, zero outside."""
    pixels = ramp(source, points.device)
    return (1 - (points[:, :, None] - pixels).abs_()).clamp_(min=0)


def blur_weights(kernels: Tensor, side: int) -> Tensor:
    """Matrices that convolve a side with a kernel per image, `(n, taps)`, mirrored at the edges.

    Returns:
        `(n, side, side)`.
    """
    spread = _blur_spread(side, kernels.shape[1], kernels.device)
    return (kernels @ spread).view(-1, side, side)


@lru_cache(maxsize=8)
def _blur_spread(side: int, taps: int, device: torch.device) -> Tensor:
    """Which pixel each tap of each pixel reads, as ones: `(taps, side * side)`, made once."""
    index = ramp(side, device)
    places = (index + ramp(taps, device)[:, None] - taps // 2).abs_()
    places = (side - 1) - ((side - 1) - places).abs_()
    return (places[:, :, None] == index).float().view(taps, -1)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, Pillow's choice (torch's own is -0.75)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


# ---- moving pixels -------------------------------------------------------------------------------


def to_planes(pixels: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Bytes to numbers in [0, 1], resampled by one matrix per image and axis if given.

    Args:
        pixels: uint8 `(n, height, width, channels)`.
        rows: `(n, new height, height)` or None.
        columns: `(n, new width, width)` or None.

    Returns:
        Planes, `(channels, n, new height, new width)`.
    """
    # Reordering bytes and widening them afterwards is ten times faster than doing both at once.
    if rows is None or columns is None:
        return pixels.permute(3, 0, 1, 2).contiguous().float().div_(255)
    return resample(pixels.permute(0, 3, 1, 2).contiguous().float().div_(255), rows, columns)


def resample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply `rows` and `columns` to images `(n, channels, height, width)`; returns planes."""
    count, channels, height, width = images.shape
    wide = torch.bmm(images.view(count, channels * height, width), columns.transpose(1, 2))
    wide = wide.view(count, channels, height, columns.shape[1])
    planes = images.new_empty(channels, count, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, wide[:, channel], out=planes[channel])
    return planes


def flip_planes(planes: Tensor, chosen: Tensor) -> None:
    """Mirror the images with the indices `chosen`, in place."""
    planes.index_copy_(1, chosen, planes.index_select(1, chosen).flip(3))


def rotate_planes(planes: Tensor, degrees: Tensor) -> Tensor:
    """Turn each image about its centre, nearest pixel, black where nothing was.

    Args:
        planes: `(channels, n, height, width)`.
        degrees: counter-clockwise, `(n,)`.

    Returns:
        Planes of the same shape.
    """
    height, width = planes.shape[2:]
    angle = torch.deg2rad(degrees)[:, None, None]
    cosine, sine = angle.cos(), angle.sin()
    down = ramp(height, planes.device)[:, None] - (height - 1) / 2
    across = ramp(width, planes.device) - (width - 1) / 2
    x, y = across * cosine - down * sine, across * sine + down * cosine
    grid = torch.stack((x * (2 / width), y * (2 / height)), dim=3)
    turned = torch.nn.functional.grid_sample(
        planes.transpose(0, 1), grid, mode="nearest", align_corners=False
    )
    return turned.transpose(0, 1).contiguous()


def quarter_turns(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each square image by a whole number of quarter turns, counter-clockwise and exactly.

    Args:
        images: `(n, channels, side, side)`.
        turns: whole numbers 0 to 3, `(n,)`, on the CPU.

    Returns:
        The same shape and memory format.
    """
    turned = images.clone()
    for quarter in (1, 2, 3):
        chosen = to_device((turns == quarter).nonzero()[:, 0], images.device)
        turned[chosen] = torch.rot90(images[chosen], quarter, (2, 3))
    return turned


# ---- colour --------------------------------------------------------------------------------------


def mixed(planes: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Sum of three planes times `weights`, `(3,)`: `(n, height, width)`."""
    return torch.mv(planes.view(3, -1).T, constant(weights, planes.device)).view(planes.shape[1:])


def luma(planes: Tensor) -> Tensor:
    """Perceived brightness of planes, `(n, height, width)`; the mean of 2 or 4 channels."""
    if planes.shape[0] == 3:
        return mixed(planes, LUMA)
    return planes[0] if planes.shape[0] == 1 else planes.mean(0)


def adjust(planes: Tensor, shares: Tensor) -> None:
    """One slot of `parameters.slot_shares`, `(3, n, 1, 1)`, clamped to [0, 1], in place."""
    if planes.shape[1] == 0:
        return
    scale, mean_share, luma_share = shares
    light = luma(planes)
    mean = light.mean((1, 2), keepdim=True).mul_(mean_share)
    # One number per image in each step, not two: with two, torch leaves its vector code.
    other = (light * luma_share).add_(mean)
    torch.addcmul(other, planes, scale, out=planes).clamp_(0, 1)


def shift_hue(planes: Tensor, offsets: Tensor) -> None:
    """Turn the hue of RGB planes in HSV space, in place.

    HSV keeps the largest and the smallest channel, so the conversion there and back shortens to:
    hue = +-(1 + (g + b - r - min) / chroma) in sixths of a turn, signed like g - b, and every new
    channel = min + chroma * clamp(2 - distance of the hue from that channel's home, 0, 1).

    Args:
        planes: `(3, n, height, width)`.
        offsets: the channels' homes after the turn, `parameters.hue_offsets`, `(3, n, 1, 1)`.
    """
    if planes.shape[1] == 0:
        return
    low = planes.amin(0)
    chroma = planes.amax(0).sub_(low)
    base = low.sub_(chroma)
    hue = mixed(planes, HUE_SIDE).sub_(base).div_(chroma.clamp(min=1e-12))
    hue.copysign_(planes[1] - planes[2])
    # ||d| - 3| - 1 is 2 minus the distance on a circle of length 6; the 1 is part of `base`.
    share = (hue - offsets).abs_().sub_(3).abs_().clamp_(1, 2)
    torch.addcmul(base, chroma, share, out=planes)


def to_gray(planes: Tensor, chosen: Tensor) -> None:
    """Replace the channels of RGB planes by their luma at the indices `chosen`, in place."""
    light = luma(planes.index_select(1, chosen))
    planes.index_copy_(1, chosen, light.expand(3, -1, -1, -1))


def blur_planes(planes: Tensor, chosen: Tensor, kernels: Tensor) -> None:
    """Convolve the images with the indices `chosen`, `(m,)`, with `kernels`, in place."""
    height, width = planes.shape[2:]
    rows = blur_weights(kernels, height)
    columns = rows if height == width else blur_weights(kernels, width)
    images = planes.index_select(1, chosen).transpose(0, 1).contiguous()
    planes.index_copy_(1, chosen, resample(images, rows, columns))


def solarise_planes(planes: Tensor, chosen: Tensor, threshold: float) -> None:
    """Invert what is at least as bright as `threshold` at the indices `chosen`, in place."""
    some = planes.index_select(1, chosen)
    planes.index_copy_(1, chosen, torch.where(some < threshold, some, 1 - some))


def recolour(planes: Tensor, matrices: Tensor, mean_share: Tensor) -> Tensor:
    """All colour changes at once: one 3 x 3 matrix per image and a share of its mean luma.

    Args:
        planes: `(channels, n, height, width)`; other than 3 channels take the brightness alone.
        matrices: `(to, from, n, 1, 1)`.
        mean_share: `(n, 1, 1)`.

    Returns:
        Planes of the same shape, clamped to [0, 1].
    """
    means = planes.mean((2, 3))  # (channels, n)
    if planes.shape[0] != 3:
        gain = matrices[0].sum(0)
        light = means[0] if planes.shape[0] == 1 else means.mean(0)
        changed = (planes * gain).add_(mean_share * light[:, None, None])
    else:
        light = constant(LUMA, planes.device) @ means
        changed = (planes[0] * matrices[:, 0]).add_(mean_share * light[:, None, None])
        changed.addcmul_(planes[1], matrices[:, 1]).addcmul_(planes[2], matrices[:, 2])
    return changed.clamp_(0, 1)
