"""Conversion of images of any mode and size to uint8 arrays of one size and number of channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from harmonium.core.errors import DataError
from harmonium.data.images import Pixels

_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # 16-bit grey; Pillow opens some such files as `I`
_ORIENTATION = 0x0112  # EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def upright(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF orientation; damaged EXIF data are ignored."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  (Pillow raises many kinds of error here)
        return image
    return image if turn is None else image.transpose(turn)


def kind_of(image: Image.Image) -> str:
    """The kind of an image in words, known without reading its pixels."""
    if image.has_transparency_data:
        return "with transparency"
    words = {"RGB": "colour", "RGBX": "colour", "L": "grey", "1": "black and white"}
    words |= {"P": "with a palette", **dict.fromkeys(_WIDE, "16-bit grey")}
    return words.get(image.mode, image.mode)


Size = int | Sequence[int] | None
"""The size to scale to: the side of a square, (height, width), or None to keep the size."""


def read_image(image: Image.Image, size: Size, channels: int, depth: int = 16) -> Pixels:
    """An image of any mode as uint8 (height, width, channels), scaled and cropped to `size`.

    16-bit grey uses the lowest `depth` bits; brighter values become white.
    """
    image = upright(image)
    if image.mode in _WIDE:
        most = (1 << depth) - 1
        wide = np.clip(np.asarray(image).astype(np.int64), 0, most)
        image = Image.fromarray(((wide * 255 + most // 2) // most).astype(np.uint8))
    if image.mode == "F":
        raise DataError("floating-point pixels, whose range is unknown")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    image = image.convert("L" if channels == 1 else "RGB")
    if size is not None:
        image = _fitted(image, *((size, size) if isinstance(size, int) else size))
    pixels = np.asarray(image)
    return pixels[..., None] if channels == 1 else pixels


def _fitted(image: Image.Image, height: int, width: int) -> Image.Image:
    """The image scaled to cover height and width and centre-cropped, in one resampling step."""
    if image.size == (width, height):
        return image
    across, down = image.size
    narrow = across * height <= down * width
    long, high = (across, across * height / width) if narrow else (down * width / height, down)
    left, top = (across - long) / 2, (down - high) / 2
    box = (left, top, left + long, top + high)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def shaped(pixels: Pixels, size: Size, channels: int | None) -> Pixels:
    """Images (n, height, width, channels) converted to this size and number of channels.

    >>> shaped(np.zeros((2, 28, 20, 1), np.uint8), 32, 3).shape
    (2, 32, 32, 3)
    >>> shaped(np.zeros((2, 28, 20, 3), np.uint8), (16, 24), 1).shape
    (2, 16, 24, 1)
    """
    sides = (size, size) if isinstance(size, int) else size and tuple(size)
    size_fits = sides is None or pixels.shape[1:3] == sides
    if size_fits and channels in (None, pixels.shape[3]):
        return pixels
    channels = channels or pixels.shape[3]
    squeezed = pixels[..., 0] if pixels.shape[3] == 1 else pixels
    height, width = sides or pixels.shape[1:3]
    converted = np.empty((len(pixels), height, width, channels), np.uint8)
    for row, image in enumerate(squeezed):
        converted[row] = read_image(Image.fromarray(image), sides, channels)
    return converted
