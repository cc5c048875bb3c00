"""Conversion of images of any mode and size to uint8 arrays of one size and number of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.core.errors import DataError, counted
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

Fit = Literal["cut", "resize", "pad"]
"""How an image of another shape comes to a size: see `fitted`."""

RESIZED = {
    "cut": "bicubic, scaled to cover, centre cut out",
    "resize": "bicubic, stretched",
    "pad": "bicubic, scaled to fit inside, black around",
}
"""Each way to fit in words, for the metadata of encoders."""


# ---- more than 8 bits ----------------------------------------------------------------------------


class Levels(NamedTuple):
    """How values of more than 8 bits become bytes: by window, else percentiles, else depth."""

    depth: int = 16  # bits that 16-bit grey files use; brighter values become white
    window: Sequence[float] | None = None  # centre and width, in the values' own unit
    percentiles: Sequence[float] | None = None  # of an image: what becomes black, what white


def stretched(values: npt.NDArray[Any], low: float, high: float) -> Pixels:
    """Values as bytes: `low` and below are black, `high` and above white, linear in between.

    >>> stretched(np.array([-5, 0, 5, 10, 99]), 0, 10).tolist()
    [0, 0, 128, 255, 255]
    """
    if not high > low:
        return np.where(values > low, 255, 0).astype(np.uint8)
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.clip(np.floor(scaled + 0.5), 0, 255).astype(np.uint8)


def windowed(values: npt.NDArray[Any], centre: float, width: float) -> Pixels:
    """A window as DICOM defines it (PS3.3, C.11.2.1.2.1).

    >>> windowed(np.array([-1000, -160, 40, 239, 3000]), 40, 400).tolist()
    [0, 0, 128, 255, 255]
    """
    middle, half = centre - 0.5, (width - 1) / 2
    return stretched(values, middle - half, middle + half)


def levelled(
    values: npt.NDArray[Any], levels: Levels, among: npt.NDArray[np.bool_] | None = None
) -> Pixels | None:
    """Values as bytes by the window or the percentiles of `levels`; None if it has neither.

    `among` says which values the percentiles are taken over, if not all.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError("pixels that are not numbers")
    if levels.window is not None:
        return windowed(values, *levels.window)
    if levels.percentiles is None:
        return None
    some = values if among is None or not among.any() else values[among]
    low, high = np.percentile(some, levels.percentiles)
    return stretched(values, float(low), float(high))


def of_depth(values: npt.NDArray[Any], depth: int) -> Pixels:
    """Whole numbers of `depth` bits as bytes; larger ones are white.

    >>> of_depth(np.array([0, 2048, 4095, 9999]), 12).tolist()
    [0, 128, 255, 255]
    """
    most = (1 << depth) - 1
    wide = np.clip(values.astype(np.int64), 0, most)
    return ((wide * 255 + most // 2) // most).astype(np.uint8)


# ---- reading -------------------------------------------------------------------------------------


def read_image(
    image: Image.Image,
    size: Size,
    channels: int,
    levels: Levels = Levels(),  # noqa: B008  (immutable)
    fit: Fit = "cut",
) -> Pixels:
    """An image of any mode as uint8 (height, width, channels), brought to `size`.

    Args:
        image: read by Pillow.
        size: see `Size`.
        channels: 1 (grey), 3 (colour), 2 (grey and transparency) or 4 (colour and transparency, or
            the four inks of CMYK).
        levels: what becomes of more than 8 bits.
        fit: how an image of another shape comes to `size`; see `fitted`.
    """
    image = upright(image)
    if image.mode in _WIDE or image.mode == "F":
        values = np.asarray(image)
        grey = levelled(values, levels)
        if grey is None and image.mode == "F":
            raise DataError("floating-point pixels, whose range is unknown: set data.window")
        image = Image.fromarray(of_depth(values, levels.depth) if grey is None else grey)
    image = _of_channels(image, channels)
    # Each channel by itself where there are 2 or 4: Pillow would weight colours by the last one.
    bands = [image] if channels in (1, 3) else image.split()
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        bands = [fitted(band, height, width, fit) for band in bands]
    planes = [np.asarray(band) for band in bands]
    return planes[0] if channels == 3 else np.stack(planes, 2)


def _of_channels(image: Image.Image, channels: int) -> Image.Image:
    """The image in a mode with so many channels; transparency becomes white if it is not kept."""
    kept = {2: ("LA",), 4: ("RGBA", "CMYK", "RGBX")}.get(channels, ())
    if image.mode in kept:
        return image
    if channels == 4 and image.mode in ("RGB", "L", "LA", "P", "PA", "1"):
        return image.convert("RGBA")
    if channels == 2 and image.mode in ("L", "1"):
        return image.convert("LA")
    if channels in (2, 4):
        raise DataError(f"{kind_of(image)}, which cannot have {channels} channels")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return image.convert("L" if channels == 1 else "RGB")


def fitted(image: Image.Image, height: int, width: int, fit: Fit = "cut") -> Image.Image:
    """The image in another size, resampled once, bicubically.

    `cut` scales it to cover height and width and cuts the centre out, `resize` stretches it, and
    `pad` scales it to fit inside, centred on black.
    """
    if image.size == (width, height):
        return image
    across, down = image.size
    if fit == "resize":
        return image.resize((width, height), Image.Resampling.BICUBIC)
    narrow = across * height <= down * width
    if fit == "pad":
        long = max(1, round(across * height / down)) if narrow else width
        high = height if narrow else max(1, round(down * width / across))
        canvas = Image.new(image.mode, (width, height))
        inner = image.resize((long, high), Image.Resampling.BICUBIC)
        canvas.paste(inner, ((width - long) // 2, (height - high) // 2))
        return canvas
    size = (across, across * height / width) if narrow else (down * width / height, down)
    left, top = (across - size[0]) / 2, (down - size[1]) / 2
    box = (left, top, left + size[0], top + size[1])
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


def shaped(pixels: Pixels, size: Size, channels: int | None, fit: Fit = "cut") -> Pixels:
    """Images (n, height, width, channels) converted to this size and number of channels.

    Grey and colour become each other; 2 and 4 channels stay as many.

    >>> shaped(np.zeros((2, 28, 20, 1), np.uint8), 32, 3).shape
    (2, 32, 32, 3)
    >>> shaped(np.zeros((2, 28, 20, 3), np.uint8), (16, 24), 1).shape
    (2, 16, 24, 1)
    """
    sides = (size, size) if isinstance(size, int) else size and tuple(size)
    size_fits = sides is None or pixels.shape[1:3] == sides
    native = pixels.shape[3]
    if size_fits and channels in (None, native):
        return pixels
    channels = channels or native
    if channels != native and not {channels, native} <= {1, 3}:
        raise DataError(
            f"images of {counted(native, 'channel')} cannot have {channels}: only grey (1) and "
            "colour (3) become each other"
        )
    height, width = sides or pixels.shape[1:3]
    converted = np.empty((len(pixels), height, width, channels), np.uint8)
    squeezed = pixels[..., 0] if native == 1 else pixels
    for row, image in enumerate(squeezed):
        if channels in (2, 4):
            bands = [Image.fromarray(np.ascontiguousarray(image[..., k])) for k in range(channels)]
            planes = [np.asarray(fitted(band, height, width, fit)) for band in bands]
            converted[row] = np.stack(planes, 2)
        else:
            converted[row] = read_image(Image.fromarray(image), sides, channels, fit=fit)
    return converted
