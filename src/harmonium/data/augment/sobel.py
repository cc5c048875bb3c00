"""Sobel's filter: images reduced to their edges, a style that all images can have."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.devices import to_double
from harmonium.data.augment.checks import check_pixels

Edges = Literal["luminance", "channels"]
_LUMA = (299.0, 587.0, 114.0)  # thousandths, so that sums are whole numbers and exact


def sobel(pixels: Tensor, of: Edges = "luminance") -> Tensor:
    """The gradient magnitude of every image, divided by its maximum, as bytes.

    Gradients are computed by Sobel's 3 x 3 kernels, with pixels repeated beyond the border. An
    image without edges is black. Results are the same bits on every machine, because all sums are
    whole numbers.

    Args:
        pixels: uint8 `(n, height, width, channels)`, 1 to 4 channels.
        of: luminance gives all channels the same edges; channels computes them for each channel and
            divides by the maximum of all.

    >>> step = torch.tensor([0, 0, 200, 200], dtype=torch.uint8).expand(1, 3, 4)[..., None]
    >>> sobel(step)[0, 1, :, 0].tolist()
    [0, 255, 255, 0]
    """
    check_pixels(pixels)
    planes = pixels.permute(0, 3, 1, 2).float()
    if of == "luminance" and planes.shape[1] == 3:
        red, green, blue = planes.chunk(3, dim=1)
        planes = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
    elif of == "luminance":
        planes = planes.sum(1, keepdim=True)
    padded = functional.pad(planes, (1, 1, 1, 1), mode="replicate")
    across = _smoothed(padded[..., 2:] - padded[..., :-2], dim=2)
    down = _smoothed(padded[..., 2:, :] - padded[..., :-2, :], dim=3)
    steep = (to_double(across).square() + to_double(down).square()).sqrt()
    most = steep.amax((1, 2, 3), keepdim=True)
    edges = (steep * 255 / most.where(most > 0, 1.0)).round().to(pixels.device, torch.uint8)
    return edges.permute(0, 2, 3, 1).expand_as(pixels).contiguous()


def _smoothed(rows: Tensor, dim: int) -> Tensor:
    """Sums of three neighbours along a side, the middle one twice."""
    inner = rows.shape[dim] - 2
    first, middle, last = (rows.narrow(dim, start, inner) for start in range(3))
    return first + 2 * middle + last
