"""The arithmetic of random views: every operation on a whole batch, one parameter per image.

Three ideas keep it fast without a compiled extension. A crop, a resize, a flip, a padding and a
blur are linear and separable, so each is one small matrix per image and axis, and all of them
together are two batched matrix products. Colour works on *planes*, `(channels, n, height, width)`,
so that every channel of the batch is one contiguous run of memory. And brightness, contrast and
saturation are one formula with three coefficients, so a random order per image needs no grouping.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

LUMA = torch.tensor((0.299, 0.587, 0.114))  # ITU-R 601: what Pillow calls 'L'
HOMES = torch.tensor((0.0, 2.0, -2.0)).view(3, 1, 1, 1)  # hue of red, green, blue in sixths
CANDIDATES = 10  # boxes a random resized crop tries before it takes the centre
CROP_DRAWS = 2 * CANDIDATES + 2  # area and aspect of each candidate, then the two positions

# (order, slot, operation): which of brightness, contrast and saturation each slot of the six
# orders holds.
ORDERS = torch.eye(3)[torch.tensor(list(itertools.permutations(range(3))))]


@lru_cache(maxsize=64)
def ramp(count: int, device: torch.device) -> Tensor:
    """0, 1, ... count - 1 as floats, made once; not to be changed."""
    return torch.arange(count, dtype=torch.float32, device=device)


# ---- where to look: crops, flips, padding --------------------------------------------------------


def crop_boxes(
    draws: Tensor,
    sides: tuple[int, int],
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Random resized crops: area uniform, aspect log-uniform, first of ten boxes that fits.

    If none fits, the largest central box whose aspect is allowed.

    Args:
        draws: uniform numbers, `(n, CROP_DRAWS)`.
        sides: height and width of the picture.
        area: least and greatest share of the picture's area.
        aspect: least and greatest width / height.

    Returns:
        Starts and lengths in whole pixels, `(2, n)` each: rows first, then columns.
    """
    height, width = sides
    low, high = math.log(aspect[0]) / 2, math.log(aspect[1]) / 2
    span = height * width * (area[1] - area[0])
    root = (draws[:, :CANDIDATES] * span).add_(height * width * area[0]).sqrt_()
    ratio = (draws[:, CANDIDATES : 2 * CANDIDATES] * (high - low)).add_(low).exp_()
    lengths = torch.stack((root / ratio, root * ratio)).round_()
    limits = torch.tensor(sides, device=draws.device)[:, None]
    fits = lengths <= limits[:, :, None]
    if height * width * area[0] < max(aspect[1], 1 / aspect[0]):
        fits &= lengths >= 1
    found, first = fits.all(0).max(1)  # on ties the first, that is the first box that fits
    chosen = lengths.gather(2, first[None, :, None].expand(2, -1, 1))[:, :, 0]

    fallback = (
        min(height, round(width / aspect[0])),
        min(width, round(height * aspect[1])),
    )
    whole = fallback == sides
    default = limits if whole else torch.tensor(fallback, device=draws.device)[:, None]
    chosen = torch.where(found, chosen, default)
    spare = limits - chosen
    starts = whole_number(draws[:, 2 * CANDIDATES :].T, spare + 1)
    return starts if whole else torch.where(found, starts, (spare / 2).floor_()), chosen


def whole_number(draws: Tensor, choices: Tensor | int) -> Tensor:
    """Uniform numbers to equally likely whole numbers below `choices`, as floats.

    A uniform number is a multiple of 2^-24 below 1, so that its product with a whole number
    never rounds up to that number.
    """
    return (draws * choices).floor_()


def crop_weights(
    start: Tensor,
    length: Tensor,
    flip: Tensor | None,
    source: int,
    target: int,
    interpolation: Literal["bilinear", "bicubic"],
) -> Tensor:
    """Matrices that cut `[start, start + length)` out of a side and resize it, as Pillow does.

    Pixels outside the box have no influence, and shrinking averages (antialiasing).

    Args:
        start: first pixel of each box, `(n,)`.
        length: pixels of each box, `(n,)`.
        flip: 1 to mirror an image, 0 not to, `(n,)`, or None.
        source: the side of the picture.
        target: the side of the result.
        interpolation: the filter.

    Returns:
        `(n, target, source)`, rows that sum to 1.
    """
    start, length = start[:, None], length[:, None]
    last = start + length - 1
    origin, signed = start, length
    if flip is not None:  # walk from the far end backwards
        origin = torch.addcmul(start, length, flip[:, None])
        signed = torch.addcmul(length, length, flip[:, None], value=-2)
    pixels = ramp(source, start.device)
    centres = torch.addcmul(origin - 0.5, signed, (ramp(target, start.device) + 0.5) / target)
    if interpolation == "bilinear" and target >= source:
        # Never shrinking: two neighbours at most, and the edge pixel repeats beyond the box.
        return hat_weights(centres.clamp_(start, last), pixels)
    scale = (length / target).clamp_(min=1)
    distance = (pixels - centres[:, :, None]).div_(scale[:, :, None]).abs_()
    weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    weights *= ((pixels >= start) & (pixels <= last))[:, None, :]
    return weights.div_(weights.sum(2, keepdim=True))


def hat_weights(centres: Tensor, pixels: Tensor) -> Tensor:
    """Linear interpolation at `centres`, `(n, target)`: `(n, target, source)`, zero outside."""
    return (centres[:, :, None] - pixels).abs_().neg_().add_(1).clamp_(min=0)


def pad_crop_weights(
    draws: Tensor, flip: Tensor | None, source: int, target: int, pad: int, reflect: bool
) -> Tensor:
    """Matrices that pad a side by `pad` pixels and cut a random window of `target` out of it.

    Args:
        draws: uniform numbers, `(n,)`.
        flip: 1 to mirror an image, 0 not to, `(n,)`, or None.
        source: the side of the picture.
        target: the side of the window.
        pad: pixels added at either end.
        reflect: mirror the picture beyond its edge; otherwise it is black there.

    Returns:
        `(n, target, source)`, at most one 1 in each row.
    """
    start = whole_number(draws, source + 2 * pad - target + 1).sub_(pad)
    places = start[:, None] + ramp(target, draws.device)
    if flip is not None:
        places = torch.where(flip[:, None] > 0, places.flip(1), places)
    if reflect:
        places = (source - 1) - ((source - 1) - places.abs_()).abs_()
    return hat_weights(places, ramp(source, draws.device))


def blur_weights(sigma: Tensor, side: int, taps: int) -> Tensor:
    """Matrices that blur a side by a Gaussian of `taps` taps, mirrored at the edges.

    Args:
        sigma: standard deviation in pixels of each image, `(n,)`; a tiny one is the identity.
        side: pixels.
        taps: odd width of the kernel.

    Returns:
        `(n, side, side)`.
    """
    offsets = ramp(taps, sigma.device) - taps // 2
    kernel = (offsets / sigma[:, None]).square_().mul_(-0.5).exp_()
    kernel /= kernel.sum(1, keepdim=True)
    index = ramp(side, sigma.device)
    places = (index + offsets[:, None]).abs_()
    places = (side - 1) - ((side - 1) - places).abs_()
    spread = (places[:, :, None] == index).float()  # (taps, side, side)
    return (kernel @ spread.view(taps, -1)).view(-1, side, side)


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
    wide = torch.bmm(images.reshape(count, channels * height, width), columns.transpose(1, 2))
    wide = wide.view(count, channels, height, -1)
    planes = images.new_empty(channels, count, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, wide[:, channel], out=planes[channel])
    return planes


def flip_planes(planes: Tensor, flip: Tensor) -> None:
    """Mirror the images where `flip`, in place."""
    chosen = flip.nonzero()[:, 0]
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
    grid = torch.stack(
        (
            (across * cosine - down * sine) * (2 / width),
            (across * sine + down * cosine) * (2 / height),
        ),
        dim=3,
    )
    turned = torch.nn.functional.grid_sample(
        planes.transpose(0, 1), grid, mode="nearest", align_corners=False
    )
    return turned.transpose(0, 1).contiguous()


def quarter_turns(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each square image by a whole number of quarter turns, counter-clockwise and exactly.

    Args:
        images: `(n, channels, side, side)`.
        turns: whole numbers 0 to 3, `(n,)`.

    Returns:
        The same shape and memory format.
    """
    turned = images.clone()
    for quarter in (1, 2, 3):
        chosen = (turns == quarter).nonzero()[:, 0]
        turned[chosen] = torch.rot90(images[chosen], quarter, (2, 3))
    return turned


# ---- colour --------------------------------------------------------------------------------------


def luma(planes: Tensor) -> Tensor:
    """Perceived brightness of planes, `(n, height, width)`; a copy if there is one channel."""
    if planes.shape[0] == 1:
        return planes[0].clone()
    return torch.mv(planes.view(3, -1).T, LUMA.to(planes.device)).view(planes.shape[1:])


def slot_changes(factors: Tensor, order: Tensor) -> Tensor:
    """How much brightness, contrast and saturation change in each slot of a random order.

    Args:
        factors: brightness, contrast and saturation of each image, `(n, 3)`.
        order: a row of `ORDERS` for each image, `(n,)`.

    Returns:
        Factor - 1 of the operation that has its turn and 0 of the others, and last their sum:
        `(slot, 4, n, 1, 1)`.
    """
    changes = ORDERS.to(order.device)[order] * (factors - 1)[:, None]  # (n, slot, operation)
    changes = torch.cat((changes, changes.sum(2, keepdim=True)), 2)
    return changes.permute(1, 2, 0)[..., None, None]


def adjust(planes: Tensor, changes: Tensor) -> None:
    """One slot of `slot_changes`, `(4, n, 1, 1)`, on n planes, in place, clamped to [0, 1].

    Each of the three operations moves a picture away from (or towards) another one: black,
    its mean luma, or its luma. So all three are `x + change * (x - other)`.
    """
    if planes.shape[1] == 0:
        return
    _, contrast, saturation, change = changes
    light = luma(planes)
    other = light.mean((1, 2), keepdim=True).mul_(contrast)
    planes.addcmul_(planes, change).sub_(light.mul_(saturation).add_(other)).clamp_(0, 1)


def shift_hue(planes: Tensor, turns: Tensor, greatest: float) -> None:
    """Rotate the hue of RGB planes in HSV space, in place.

    HSV keeps the largest and the smallest channel, so the conversion there and back shortens to:
    hue = +-(1 + (g + b - r - min) / chroma) in sixths of a turn, signed like g - b, and every new
    channel = min + chroma * clamp(2 - distance of the hue from that channel's own, 0, 1).

    Args:
        planes: `(3, n, height, width)`.
        turns: the rotation of each image in whole turns, `(n,)`.
        greatest: a bound of `turns`, at most 0.5.
    """
    red, green, blue = planes
    low = planes.amin(0)
    chroma = planes.amax(0).sub_(low)
    hue = (green + blue).sub_(red).sub_(low).add_(chroma).div_(chroma.clamp(min=1e-12))
    hue.copysign_(green - blue).add_(turns[:, None, None], alpha=6)
    if greatest > 1 / 3:  # up to a third of a turn the distance below is right without this
        hue.sub_(hue.div(6).round_().mul_(6))
    # ||d| - 3| - 1 is 2 minus the distance on the circle of length 6; the 1 is in `low - chroma`.
    share = (hue - HOMES.to(hue.device)).abs_().sub_(3).abs_().clamp_(1, 2)
    torch.addcmul(low.sub_(chroma), chroma, share, out=planes)


def to_gray(planes: Tensor, gray: Tensor) -> None:
    """Replace the channels of RGB planes by their luma where `gray`, in place."""
    chosen = gray.nonzero()[:, 0]
    light = luma(planes.index_select(1, chosen))
    planes.index_copy_(1, chosen, light.expand(3, -1, -1, -1))


def blur_planes(planes: Tensor, sigma: Tensor, chosen: Tensor, taps: int) -> None:
    """Blur the images with the indices `chosen`, `(m,)`, by `sigma`, `(m,)`, in place."""
    height, width = planes.shape[2:]
    rows = blur_weights(sigma, height, taps)
    columns = rows if height == width else blur_weights(sigma, width, taps)
    images = planes.index_select(1, chosen).transpose(0, 1).contiguous()
    planes.index_copy_(1, chosen, resample(images, rows, columns))


def solarise_planes(planes: Tensor, solarise: Tensor, threshold: float) -> None:
    """Invert what is at least as bright as `threshold` in the images where `solarise`, in place."""
    chosen = solarise.nonzero()[:, 0]
    some = planes.index_select(1, chosen)
    planes.index_copy_(1, chosen, torch.where(some < threshold, some, 1 - some))


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, Pillow's choice (torch's own is -0.75)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def _hue_basis() -> Tensor:
    """Luma, chroma and chroma turned by 90 degrees in the YIQ plane, as matrices: `(3, 9)`."""
    yiq = torch.tensor(
        ((0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)),
        dtype=torch.float64,
    )
    # The sign makes red turn towards yellow, as growing HSV hue does.
    quarter = torch.tensor(((0, 0, 0), (0, 0, 1), (0, -1, 0)), dtype=torch.float64)
    light = yiq[0].expand(3, 3)
    turned = torch.linalg.inv(yiq) @ quarter @ yiq
    chroma = torch.eye(3, dtype=torch.float64) - light
    return torch.stack((light, chroma, turned)).view(3, 9).float()


HUE_BASIS = _hue_basis()


def colour_matrix(planes: Tensor, factors: Tensor) -> Tensor:
    """All colour changes of an image as one 3 x 4 matrix: the `fast` alternative to the above.

    Brightness, contrast about the image's mean luma, saturation, then a hue rotation in YIQ.
    Nothing is clamped in between. Grey is saturation 0.

    Args:
        planes: `(channels, n, height, width)`.
        factors: brightness, contrast, saturation, and hue in turns, `(n, 4)`.

    Returns:
        Planes of the same shape, not clamped.
    """
    brightness, contrast, saturation, hue = factors.T
    gain = brightness * contrast
    mean = planes.mean((2, 3))  # (channels, n)
    light = mean[0] if planes.shape[0] == 1 else LUMA.to(planes.device) @ mean
    offset = ((brightness - gain) * light)[:, None, None]
    if planes.shape[0] == 1:
        return torch.addcmul(offset, planes, gain[:, None, None])
    angle, colourful = hue * math.tau, gain * saturation
    mix = torch.stack((gain, colourful * angle.cos(), colourful * angle.sin()))
    matrix = (HUE_BASIS.to(planes.device).T @ mix).view(3, 3, -1, 1, 1)  # (to, from, n, 1, 1)
    mixed = torch.addcmul(offset, matrix[:, 0], planes[0])
    return mixed.addcmul_(matrix[:, 1], planes[1]).addcmul_(matrix[:, 2], planes[2])
