"""The descriptors of an image: its content alone, and a coarse copy of the whole image.

Content is what stays when an image is turned, mirrored, or changed in colour, brightness or
contrast; sharpness and grain change it little. Small filters stand on circles around the centre.
Rotating an image moves their responses along the circles, so the magnitudes of the Fourier
coefficients along each circle do not change. Responses of light filters and of edge filters are
each divided by their own size: contrast scales both, blur mainly the second. Nothing here is
learned or random: the same images give the same numbers everywhere.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.data.augment.operations import luma, to_planes

SIDE = 32  # pixels; larger images are averaged down to it
RINGS = (0.15, 0.4, 0.65)  # radii of the circles; 1 is half the shorter side of the image
TURNS = 32  # filters on each circle
HARMONICS = 5  # Fourier coefficients of each circle, the mean included
WIDTH = 0.13, 1.3  # standard deviation of a light filter: in radii, and the least in pixels
WAVE = 0.4, 5.0  # wavelength of an edge filter; likewise, because rotation blurs finer detail
KINDS = 4  # responses at each place: light, and edges along, across and oblique to the radius
CONTENT = KINDS * len(RINGS) * HARMONICS  # numbers that describe an image's content
FIELDS = 3  # fields along each side of the coarse copy
FAINT = 1e-4  # contrast that counts as none; 1 is black against white
CHUNK = 1024  # images described at once


def described(pixels: Tensor) -> Tensor:
    """Content and then the coarse copy of images.

    Args:
        pixels: uint8 `(n, height, width, channels)`.

    Returns:
        `(n, CONTENT + FIELDS * FIELDS * (channels + 2))`.
    """
    with torch.no_grad():
        some = [_small(to_planes(part, None, None)) for part in torch.split(pixels, CHUNK)]
        return torch.cat([torch.cat([content(luma(p)), coarse(p)], 1) for p in some])


def content(light: Tensor) -> Tensor:
    """Descriptors that rotation, mirroring, brightness and contrast do not change.

    Args:
        light: grey images, `(n, height, width)`.

    Returns:
        `(n, CONTENT)`.
    """
    disc, real, imaginary = _filters(*light.shape[1:], light.device)
    mean = (light * disc).sum((1, 2), keepdim=True) / disc.sum()
    seen = ((light - mean) * disc).flatten(1)
    lights, places = len(RINGS) * TURNS, (len(RINGS), TURNS)
    shade = (seen @ real[:, :lights]).view(-1, 1, *places)
    shade = shade / (shade.square().mean((1, 2, 3), keepdim=True).sqrt() + FAINT)
    edges = torch.hypot(seen @ real[:, lights:], seen @ imaginary[:, lights:]).view(-1, 4, *places)
    edges = edges / (edges.mean((1, 2, 3), keepdim=True) + FAINT)
    around = torch.cat([shade, edges], 1)
    sizes = torch.fft.rfft(around)[..., :HARMONICS].abs() / TURNS
    # Mirroring swaps the two oblique kinds: their mean does not change.
    oblique = (sizes[:, 2] + sizes[:, 4]) / 2
    kept = torch.stack([sizes[:, 0], sizes[:, 1], oblique, sizes[:, 3]], 1)
    return kept.flatten(1)


def coarse(planes: Tensor) -> Tensor:
    """A coarse copy: mean colour, and mean steps across and down, of fields of the image.

    Args:
        planes: `(channels, n, height, width)`.

    Returns:
        `(n, FIELDS * FIELDS * (channels + 2))`.
    """
    light = luma(planes)
    across = F.pad((light[:, :, 1:] - light[:, :, :-1]).abs(), (0, 1))
    down = F.pad((light[:, 1:] - light[:, :-1]).abs(), (0, 0, 0, 1))
    stacked = torch.stack([*planes, across, down], 1)
    return F.adaptive_avg_pool2d(stacked, FIELDS).flatten(1)


def _small(planes: Tensor) -> Tensor:
    height, width = planes.shape[2:]
    shorter = min(height, width)
    if shorter <= SIDE:
        return planes
    return F.adaptive_avg_pool2d(planes, (SIDE * height // shorter, SIDE * width // shorter))


@lru_cache(maxsize=8)
def _filters(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The disc of pixels that counts, and the filters as two real matrices.

    Returns:
        `(height, width)`, and twice `(height * width, 5 * len(RINGS) * TURNS)`.
    """
    pixel = 2 / min(height, width)
    down = (torch.arange(height, dtype=torch.float64) + 0.5 - height / 2)[:, None] * pixel
    across = (torch.arange(width, dtype=torch.float64) + 0.5 - width / 2)[None, :] * pixel
    disc = ((1 - torch.hypot(across, down)) / pixel).clamp(0, 1)  # rotation brings in no corners
    wide, wave = (max(size, least * pixel) for size, least in (WIDTH, WAVE))
    spots = [(r, 2 * math.pi * k / TURNS) for r in RINGS for k in range(TURNS)]
    columns = []
    for kind in range(5):
        for radius, angle in spots:
            x, y = across - radius * math.cos(angle), down - radius * math.sin(angle)
            spread = wide if kind == 0 else 0.45 * wave
            window = torch.exp(-(x.square() + y.square()) / (2 * spread**2)) * disc
            window = window / window.sum()
            if kind == 0:
                columns.append(window.to(torch.complex128))
                continue
            way = angle + math.pi * (kind - 1) / 4  # the first is along the radius
            phase = (x * math.cos(way) + y * math.sin(way)) * (2 * math.pi / wave)
            ripple = window * torch.polar(torch.ones_like(phase), phase)
            columns.append(ripple - window * ripple.sum())  # uniform light is no edge
    filters = torch.stack([column.flatten() for column in columns], 1)
    real, imaginary = filters.real.float().contiguous(), filters.imag.float().contiguous()
    return to_device(disc.float(), device), to_device(real, device), to_device(imaginary, device)
