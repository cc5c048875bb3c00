"""SimCLR's views of one Pillow image: the usual transforms, and the same with the fewest calls.

Resized crop of 20 to 100 % of the area, mirror, brightness, contrast, saturation and hue in a
random order with a probability of 0.8, grey with 0.2, normalised with mean and deviation 0.5.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from PIL import Image, ImageChops, ImageEnhance
from torch import Tensor

MEAN, DEVIATION = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
LEAST, MOST = math.log(3 / 4), math.log(4 / 3)


# ---- as the transforms of torchvision do it: draws by torch, one small step after the other ------


def usual_view(image: Image.Image) -> Tensor:
    """One view as a user composes it of the usual transforms, float (3, side, side)."""
    image = _resized_crop(image)
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if torch.rand(1) < 0.8:
        image = _jitter(image)
    if torch.rand(1) < 0.2:
        grey = np.array(image.convert("L"), dtype=np.uint8)
        image = Image.fromarray(np.dstack([grey, grey, grey]))
    return _normalised(_to_tensor(image))


def _uniform(low: float, high: float) -> float:
    return torch.empty(1).uniform_(low, high).item()


def _resized_crop(image: Image.Image) -> Image.Image:
    width, height = image.size
    for _ in range(10):
        area = width * height * _uniform(0.2, 1.0)
        aspect = math.exp(_uniform(LEAST, MOST))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,)).item())
            left = int(torch.randint(0, width - w + 1, (1,)).item())
            break
    else:
        left, top, w, h = 0, 0, width, height
    cut = image.crop((left, top, left + w, top + h))
    return cut.resize((width, height), Image.Resampling.BILINEAR)


def _jitter(image: Image.Image) -> Image.Image:
    order = torch.randperm(4)
    bright, contrast, colour = (_uniform(0.6, 1.4) for _ in range(3))
    hue = _uniform(-0.1, 0.1)
    for step in order:
        if step == 0:
            image = ImageEnhance.Brightness(image).enhance(bright)
        elif step == 1:
            image = ImageEnhance.Contrast(image).enhance(contrast)
        elif step == 2:
            image = ImageEnhance.Color(image).enhance(colour)
        else:
            h, s, v = image.convert("HSV").split()
            turned = np.array(h, dtype=np.uint8)
            turned += np.array(hue * 255).astype(np.uint8)
            image = Image.merge("HSV", (Image.fromarray(turned), s, v)).convert("RGB")
    return image


def _to_tensor(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8, copy=True))
    return pixels.permute(2, 0, 1).contiguous().float().div(255)


def _normalised(pixels: Tensor) -> Tensor:
    mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
    return pixels.clone().sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))


# ---- the same views with the fewest calls --------------------------------------------------------


def lean_view(image: Image.Image, rng: random.Random) -> Image.Image:
    """One view of an image, all in Pillow's own code."""
    size = image.size
    image = image.resize(size, Image.Resampling.BILINEAR, box=_box(size, rng))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.8:
        order = [0, 1, 2, 3]
        rng.shuffle(order)
        for operation in order:
            factor = rng.uniform(0.6, 1.4)
            if operation == 0:
                image = Image.blend(Image.new("RGB", size, 0), image, factor)
            elif operation == 1:
                mean = image.convert("L").reduce(size).getpixel((0, 0))
                image = Image.blend(Image.new("RGB", size, (mean, mean, mean)), image, factor)
            elif operation == 2:
                image = Image.blend(image.convert("L").convert("RGB"), image, factor)
            else:
                hue, saturation, value = image.convert("HSV").split()
                shift = Image.new("L", size, round(255 * rng.uniform(-0.1, 0.1)) % 256)
                hue = ImageChops.add_modulo(hue, shift)
                image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
    if rng.random() < 0.2:
        image = image.convert("L").convert("RGB")
    return image


def lean_views(arrays: np.ndarray, rng: random.Random) -> Tensor:
    """Two views of every image, float (2n, 3, side, side); bytes become floats once for all."""
    views = np.empty((2 * len(arrays), *arrays.shape[1:]), np.uint8)
    for index, array in enumerate(arrays):
        image = Image.fromarray(array)
        views[index] = np.asarray(lean_view(image, rng))
        views[len(arrays) + index] = np.asarray(lean_view(image, rng))
    return torch.from_numpy(views).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def _box(size: tuple[int, int], rng: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random resized crop."""
    wide, high = size
    for _ in range(10):
        area, aspect = wide * high * rng.uniform(0.2, 1), math.exp(rng.uniform(LEAST, MOST))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= wide and 0 < height <= high:
            left, top = rng.randint(0, wide - width), rng.randint(0, high - height)
            return left, top, left + width, top + height
    return 0, 0, wide, high
