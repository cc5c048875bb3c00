"""Images in memory: NumPy arrays, torch tensors, PIL images, and lists of these.

All of them become uint8 `(n, height, width, channels)`. The order of the axes is never guessed: an
array that could be read in two ways raises an error that says how to resolve it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from harmonium.core.errors import DataError, counted
from harmonium.data.decoding.conversion import Fit, Levels, read_image, shaped
from harmonium.data.images import CHANNELS, Pixels

Layout = Literal["NHWC", "NCHW"]
USUAL = (1, 3)  # channels that an axis of this length is taken for first
BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "RGBX": 4}  # channels by mode


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def kind(value: Any) -> str:
    """A short description of a value for error messages, without its content.

    >>> kind(np.zeros((2, 8, 8), np.float32)), kind([1, 2]), kind(None)
    ('float32 array of shape (2, 8, 8)', 'list of 2', 'NoneType')
    """
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}"
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Image.Image):
        return f"PIL image of {value.width} x {value.height} ({value.mode})"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def as_numpy(value: Any) -> npt.NDArray[Any]:
    """A tensor as an array, sharing memory if possible; an array unchanged."""
    array: npt.NDArray[Any] = value.detach().cpu().numpy() if is_tensor(value) else value
    return array


def is_float(value: Any) -> bool:
    """Whether an array or a tensor holds floating-point numbers."""
    if is_tensor(value):
        return bool(value.is_floating_point())
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def channels_last(
    value: Any, layout: Layout | None, what: str, fix: str, channels: int | None = None
) -> Any:
    """An array or a tensor of images with its axes as (n, height, width, channels).

    Args:
        value: two axes are one grey image; three are one image or several grey ones; four are
            several images.
        layout: the order of the axes; None takes channels last, and raises an error where the
            channels may be first.
        what: how a message calls the images.
        fix: what to do where the order is not the usual one, e.g. `give layout="NCHW"`.
        channels: of the images, if known; without it three axes are no image of 2 or 4 channels.

    Returns:
        A view of the same array or tensor.
    """
    shape = tuple(value.shape)
    if value.ndim not in (2, 3, 4) or 0 in shape[1:]:
        raise DataError(
            f"{what} have shape {shape}; give (n, height, width, channels), "
            "or (n, height, width) for grey images"
        )
    if value.ndim == 2:
        return value[None, ..., None]
    if value.ndim == 3:
        expected = (channels,) if channels in (2, 4) else USUAL
        if not _is_single_image(shape, expected, layout, what, fix):
            return value[..., None]
        value = value[None]
    _check_layout(shape, layout, what, fix)
    if layout != "NCHW":
        return value
    return value.permute(0, 2, 3, 1) if is_tensor(value) else value.transpose(0, 2, 3, 1)


def _is_single_image(
    shape: tuple[int, ...],
    channels: tuple[int, ...],
    layout: Layout | None,
    what: str,
    fix: str,
) -> bool:
    """Whether three axes are one image with channels, and not several grey images."""
    first, last = shape[0] in channels, shape[2] in channels
    if layout is None and first and (last or shape[0] > 1):  # (1, h, w) is the same either way
        raise DataError(
            f"{what} have shape {shape}, which may be one image or {counted(shape[0], 'image')}"
            f" without channels; give (n, height, width, channels), or {fix}"
        )
    return first if layout == "NCHW" else last


def _check_layout(shape: tuple[int, ...], layout: Layout | None, what: str, fix: str) -> None:
    """Raise an error unless the last three axes have 1 to 4 channels where `layout` says."""
    sure = layout is None and shape[-1] in USUAL  # 2 or 4 before them are the height
    first, last = shape[-3] in (USUAL if sure else CHANNELS), shape[-1] in CHANNELS
    if layout is None and first:
        order = "may have its channels first or last" if last else "has its channels first"
        raise DataError(
            f"{what} have shape {shape}, which {order}; give (n, height, width, channels), or {fix}"
        )
    if layout == "NCHW" and not first:
        raise DataError(
            f"{what} have shape {shape}; give (n, channels, height, width) with 1 to 4 channels"
        )
    if layout != "NCHW" and not last:
        raise DataError(
            f"{what} have shape {shape}; give (n, height, width, channels) with 1 to 4 channels"
        )


def image_set(value: Any, what: str, fix: str, note: Callable[[str], None] | None = None) -> Any:
    """Several images as (n, height, width, channels); a single image raises an error.

    Args:
        value: a uint8 array or tensor (n, height, width, channels) or (n, height, width).
        what: how a message calls the images.
        fix: as for `channels_last`.
        note: for archives, whose first axis always counts images. Channels that can only be first
            are then accepted and reported to `note`; without it they raise an error.

    Returns:
        A view of the same array or tensor.
    """
    check_uint8(value, what)
    shape = tuple(value.shape)
    layout: Layout | None = None
    if value.ndim < 3 or (value.ndim == 3 and shape[2] in USUAL):
        raise DataError(
            f"{what} have shape {shape}, which is not a set of images; give (n, height, width, "
            "channels), or (n, height, width) for grey images"
        )
    if note is not None and value.ndim == 3:
        return value[..., None]
    if note is not None and value.ndim == 4 and shape[1] in CHANNELS and shape[3] not in CHANNELS:
        layout = "NCHW"
        note(f"{what} have shape {shape}, which is read as (n, channels, height, width)")
    return channels_last(value, layout, what, fix)


def check_uint8(value: Any, what: str) -> None:
    """Raise an error unless an array or a tensor is uint8."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype == "uint8":
        return
    convert = "(x * 255).round().astype('uint8') where x lies between 0 and 1"
    if is_tensor(value):
        convert = "(x * 255).round().to(torch.uint8) where x lies between 0 and 1"
    if not is_float(value):
        convert = "x.astype('uint8') where x lies between 0 and 255"
    raise DataError(
        f"{what} are {dtype}, but should be uint8 from 0 to 255: convert them, e.g. {convert}"
    )


def read_images(
    images: Any,
    shape: tuple[int, int, int],
    layout: Layout | None,
    strict: bool,
    levels: Levels = Levels(),  # noqa: B008  (immutable)
    fit: Fit = "cut",
) -> Pixels:
    """Images of any size as uint8 of one shape, scaled like the images of data sets.

    Args:
        images: an array, a tensor, a PIL image, or a list of these, one image each.
        shape: height, width and channels of the result.
        layout: of arrays and tensors; see `channels_last`.
        strict: raise an error for images of another size or with other channels.
        levels: how 16-bit grey and floating-point PIL images become bytes.
        fit: how images of another shape come to this one.
    """
    if isinstance(images, Sequence) and not isinstance(images, str):
        pixels = np.empty((len(images), *shape), np.uint8)
        for row, image in enumerate(images):
            single = read_images(image, shape, layout, strict, levels, fit)
            if len(single) != 1 or (is_array(image) and image.ndim > 3):
                raise DataError(
                    f"image {row} of the list is a {kind(image)}: give one image each, "
                    "or one array for all"
                )
            pixels[row] = single[0]
        return pixels
    height, width, channels = shape
    if isinstance(images, Image.Image):
        bands = BANDS.get(images.mode, 0)
        check_strict(strict, (images.height, images.width, bands or channels), shape)
        return read_image(images, (height, width), channels, levels, fit)[None]
    if not is_array(images):
        raise DataError(
            f"images are {kind(images)}: give a uint8 array or tensor (n, height, width, "
            "channels), a PIL image, or a list of images"
        )
    check_uint8(images, "images")
    fix = 'load_encoder(..., layout="NCHW")'
    pixels = as_numpy(channels_last(images, layout, "images", fix, channels))
    check_strict(strict, pixels.shape[1:], shape)
    return shaped(pixels, (height, width), channels, fit)


def check_strict(strict: bool, seen: Sequence[int], shape: Sequence[int]) -> None:
    """If `strict`, raise an error unless `seen` is the shape that an encoder was trained on."""
    if strict and tuple(seen) != tuple(shape):
        steps = ["resize them"] if tuple(seen[:2]) != tuple(shape[:2]) else []
        if seen[2] != shape[2]:
            kinds = {1: "grey", 3: "RGB"}
            steps.append(f"convert them to {kinds.get(shape[2], f'{shape[2]} channels')}")
        raise DataError(
            f"images are {_named(seen)}, but this encoder was trained on {_named(shape)}: "
            f"{' and '.join(steps)}, or load it without strict=True, which does so as in training"
        )


def _named(shape: Sequence[int]) -> str:
    height, width, channels = shape
    return f"{height} x {width} with {counted(channels, 'channel')}"
