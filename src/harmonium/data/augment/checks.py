"""Checks of the settings and images of views, and normalisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harmonium.core.devices import constant
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.images import CHANNELS


def within(name: str, value: Any, least: float, greatest: float, whole: bool = False) -> None:
    """Raise an error unless a setting is a number from `least` to `greatest`."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= greatest:
        kind = "a whole number" if whole else "a number"
        upper = f" to {greatest:g}" if greatest < math.inf else " up"
        raise ConfigError(f"views.{name} is {value!r}: give {kind} from {least:g}{upper}")


def ordered(name: str, pair: Any, greatest: float = math.inf) -> None:
    """Raise an error unless a pair is 0 < first <= second <= greatest."""
    numbers = isinstance(pair, tuple) and all(isinstance(value, int | float) for value in pair)
    if not numbers or len(pair) != 2 or not 0 < pair[0] <= pair[1] <= greatest:
        limit = f", the second at most {greatest:g}" if greatest < math.inf else ""
        raise ConfigError(f"views.{name}: {pair!r}: give two numbers, 0 < first <= second{limit}")


def check_normalisation(mean: Any, std: Any) -> None:
    """Raise an error unless mean and std are both None or both valid."""
    if mean is None and std is None:
        return
    for name, value in (("mean", mean), ("std", std)):
        numbers = isinstance(value, tuple) and all(
            isinstance(number, int | float) for number in value
        )
        if not numbers or len(value) not in CHANNELS:
            raise ConfigError(
                f"views.{name} is {value!r}: give 1 to 4 numbers, or none for both mean and std"
            )
    if min(std) <= 0:
        raise ConfigError(f"views.std is {std!r}: give numbers above 0")


def check_pixels(pixels: Tensor) -> tuple[int, int, int, int]:
    """The shape of a batch of images; raises DataError unless it is a uint8 batch."""
    shape = tuple(pixels.shape)
    if (
        pixels.dtype != torch.uint8
        or len(shape) != 4
        or shape[3] not in CHANNELS
        or 0 in shape[1:3]
    ):
        raise DataError(
            f"images are {pixels.dtype} of shape {shape}: views need torch.uint8 of shape "
            "(n, height, width, channels) with 1 to 4 channels"
        )
    return shape


def for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """The numbers of `mean` or `std` for images of so many channels; others take their mean.

    >>> for_channels((0.25, 0.5, 0.75), 1), for_channels((0.5,), 3)
    ((0.5,), (0.5,))
    """
    return values if len(values) in (1, channels) else (math.fsum(values) / len(values),)


def normalise(
    images: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> None:
    """Subtract and divide, `(n, height, width, channels)`, in place."""
    if mean is None or std is None:
        return
    mean, std = (for_channels(value, images.shape[3]) for value in (mean, std))
    if len(mean) == len(std) == 1:
        images.sub_(mean[0]).div_(std[0])
    else:
        images.sub_(constant(mean, images.device)).div_(constant(std, images.device))
