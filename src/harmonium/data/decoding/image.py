"""One image as bytes: any mode, any size, brought to what a data set asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from harmonium.core.errors import DataError
from harmonium.data.images import Pixels

_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # grey with 16 bits; `I` is how some arrive
_ORIENTATION = 0x0112  # in the notes of a camera (EXIF)
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
    """The image as the camera was held; damaged notes of a camera count as none."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  (Pillow raises many kinds of error for them)
        return image
    return image if turn is None else image.transpose(turn)


def kind_of(image: Image.Image) -> str:
    """What sort of image it is, in words, known before its pixels are read."""
    if image.has_transparency_data:
        return "with transparency"
    words = {"RGB": "colour", "RGBX": "colour", "L": "grey", "1": "black and white"}
    words |= {"P": "with a palette", **dict.fromkeys(_WIDE, "16-bit grey")}
    return words.get(image.mode, image.mode)


Size = int | Sequence[int] | None
"""What an image is scaled to: a square's side, height and width, or None for as it is."""


def read_image(image: Image.Image, size: Size, channels: int, depth: int = 16) -> Pixels:
    """An image of any mode as (height, width, channels) bytes, scaled and cropped if asked.

    Grey with 16 bits uses the lowest `depth` of them; what is brighter is white.
    """
    image = upright(image)
    if image.mode in _WIDE:
        most = (1 << depth) - 1
        wide = np.clip(np.asarray(image).astype(np.int64), 0, most)
        image = Image.fromarray(((wide * 255 + most // 2) // most).astype(np.uint8))
    if image.mode == "F":
        raise DataError("its values are floating point, whose range is not known")
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
    """Scaled until it just covers height and width, then the middle; one resampling for both."""
    if image.size == (width, height):
        return image
    across, down = image.size
    narrow = across * height <= down * width
    long, high = (across, across * height / width) if narrow else (down * width / height, down)
    left, top = (across - long) / 2, (down - high) / 2
    box = (left, top, left + long, top + high)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def shaped(pixels: Pixels, size: Size, channels: int | None) -> Pixels:
    """Many images (n, height, width, channels) with this size and these channels.

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
    made = np.empty((len(pixels), height, width, channels), np.uint8)
    for row, one in enumerate(squeezed):
        made[row] = read_image(Image.fromarray(one), sides, channels)
    return made
