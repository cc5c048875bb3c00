"""What settings and images of a view must be like, and normalisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, DataError


def within(name: str, value: Any, least: float, greatest: float, whole: bool = False) -> None:
    """Refuse a setting that is not a number from `least` to `greatest`."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= greatest:
        kind = "a whole number" if whole else "a number"
        upper = f" to {greatest:g}" if greatest < math.inf else " up"
        raise ConfigError(f"views.{name} is {value!r}: give {kind} from {least:g}{upper}")


def ordered(name: str, pair: Any, greatest: float = math.inf) -> None:
    """Refuse a pair that is not 0 < least <= greatest."""
    numbers = isinstance(pair, tuple) and all(isinstance(value, int | float) for value in pair)
    if not numbers or len(pair) != 2 or not 0 < pair[0] <= pair[1] <= greatest:
        limit = f", the second at most {greatest:g}" if greatest < math.inf else ""
        raise ConfigError(f"views.{name}: {pair!r}: give two numbers, 0 < first <= second{limit}")


def check_normalisation(mean: Any, std: Any) -> None:
    """Refuse means and deviations that do not belong together."""
    if mean is None and std is None:
        return
    for name, value in (("mean", mean), ("std", std)):
        numbers = isinstance(value, tuple) and all(isinstance(one, int | float) for one in value)
        if not numbers or len(value) not in (1, 3):
            raise ConfigError(
                f"views.{name} is {value!r}: give 1 or 3 numbers, or none for both mean and std"
            )
    if min(std) <= 0:
        raise ConfigError(f"views.std is {std!r}: give numbers above 0")


def check_pixels(pixels: Tensor) -> tuple[int, int, int, int]:
    """The shape of a batch of images, or an error that says what a batch looks like."""
    shape = tuple(pixels.shape)
    if pixels.dtype != torch.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape[1:3]:
        raise DataError(
            f"images are {pixels.dtype} of shape {shape}: views need torch.uint8 of shape "
            "(n, height, width, channels) with 1 or 3 channels"
        )
    return shape


def for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """The numbers of `mean` or `std` for images of 1 or 3 channels; grey takes colour's mean.

    >>> for_channels((0.25, 0.5, 0.75), 1), for_channels((0.5,), 3)
    ((0.5,), (0.5,))
    """
    return values if len(values) in (1, channels) else (math.fsum(values) / len(values),)


def normalise(made: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    """Subtract and divide, `(n, height, width, channels)`, in place."""
    if mean is None or std is None:
        return
    mean, std = (for_channels(value, made.shape[3]) for value in (mean, std))
    if len(mean) == len(std) == 1:
        made.sub_(mean[0]).div_(std[0])
    else:
        made.sub_(made.new_tensor(mean)).div_(made.new_tensor(std))
