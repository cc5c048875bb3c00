"""Encoders: networks from images to feature vectors, built from settings and found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from harmonium.core.errors import ConfigError, undefined
from harmonium.core.registry import Registry

Norm = Literal["group", "batch", "none"]
LEAST = 16  # values in a group of GroupNorm


@dataclass(frozen=True)
class Encoder:
    """Settings of an encoder; `build` makes the network, `features` is its output size."""

    name: ClassVar[str] = ""
    in_process: ClassVar[bool] = False  # whether only this process can build it
    any_shape: ClassVar[bool] = True  # whether it takes images of any size and channels

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        raise undefined(self, "features")

    def features_for(self, channels: int, side: int) -> int:
        """Size of a feature vector for such images, for encoders where it depends on them."""
        return self.features

    @property
    def channels_last(self) -> bool:
        """Whether the network trains faster on CPUs with its channels last in memory.

        Measured by benchmarks/encoders.py on one core at 32 pixels: `cct-4-3x2` is 1.2 times as
        fast, `fixup-resnet20` and `cnn5` 1.1, `resnet18` and larger about equal, and `cnn-small`
        0.92 with GroupNorm, though 1.2 with BatchNorm.
        """
        return True

    def build(self, channels: int, side: int) -> nn.Module:
        """A network from (n, channels, side, side) to (n, features)."""
        raise undefined(self, "build")


def _adapt(builder: Any, name: str) -> type[Encoder] | None:
    from harmonium.learning.encoders.given import adapt  # which extends Encoder

    return adapt(builder, name)


encoders: Registry[Encoder] = Registry(
    "encoder",
    "harmonium.learning.encoders",
    Encoder,
    _adapt,
    ", or a function `def build(channels: int, side: int) -> nn.Module`",
)


@dataclass(frozen=True)
class Convolutional(Encoder):
    """Settings that convolutional encoders share: how wide they are and how they normalise.

    GroupNorm is the default because it is safe in a federation: it normalises one image at a time
    and keeps no running statistics, which would differ between clients with different images.
    """

    width: int = 64  # channels of the first layer
    norm: Norm = "group"  # group is safe in a federation; batch keeps running statistics
    groups: int | None = None  # of GroupNorm; none: up to 32, each of 2 channels and 16 values

    def __post_init__(self) -> None:
        at_least_one(self, "width")
        if self.groups is None:
            return
        if self.norm != "group":
            raise ConfigError(f"encoder.groups is {self.groups}; it needs encoder.norm=group")
        if self.groups < 1 or self.width % self.groups:
            raise ConfigError(
                f"encoder.groups is {self.groups}; it must divide encoder.width, {self.width}"
            )

    def build(self, channels: int, side: int) -> nn.Module:
        """The network, with groups of GroupNorm large enough for small images."""
        network = self.network(channels, side)
        if self.norm == "group" and self.groups is None:
            _widen_groups(network, torch.zeros(1, channels, side, side))
        return network

    def network(self, channels: int, side: int) -> nn.Module:
        """A network from (n, channels, side, side) to (n, features)."""
        raise undefined(self, "network")

    def convolution(
        self, channels: int, wide: int, kernel: int, stride: int = 1
    ) -> tuple[nn.Conv2d, nn.Module]:
        """A convolution and its normalisation; it has a bias only if nothing normalises it."""
        bias = self.norm == "none"
        filters = nn.Conv2d(channels, wide, kernel, stride, kernel // 2, bias=bias)
        return filters, normalise(self.norm, wide, self.groups)


def normalise(kind: Norm, channels: int, groups: int | None = None) -> nn.Module:
    """The normalisation layer of a feature map; `groups` defaults to `groups_of(channels)`.

    >>> normalise("group", 16).num_groups
    8
    """
    if kind == "group":
        return nn.GroupNorm(groups or groups_of(channels), channels)
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.Identity()


def groups_of(channels: int, pixels: int = 64) -> int:
    """Groups for GroupNorm: the largest divisor up to 32 that leaves 2 channels and 16 values each.

    If a small image is reduced to one pixel, a group of 2 channels would have two values, and
    normalising two values leaves only their order.

    >>> [groups_of(c) for c in (512, 64, 32, 16)]
    [32, 32, 16, 8]
    >>> [groups_of(64, pixels) for pixels in (16, 4, 1)]
    [32, 16, 4]
    """
    for groups in range(min(32, channels), 1, -1):
        each, rest = divmod(channels, groups)
        if rest == 0 and each >= 2 and each * pixels >= LEAST:
            return groups
    return 1


@torch.no_grad()
def _widen_groups(network: nn.Module, image: Tensor) -> None:
    """Set the groups of every GroupNorm by the pixels of its input, for images of this shape."""

    def set_groups(norm: nn.GroupNorm, inputs: tuple[Tensor, ...]) -> None:
        norm.num_groups = groups_of(norm.num_channels, inputs[0].shape[2:].numel())

    hooks = [
        module.register_forward_pre_hook(set_groups)
        for module in network.modules()
        if isinstance(module, nn.GroupNorm)
    ]
    network(image)
    for hook in hooks:
        hook.remove()


def at_least_one(encoder: Encoder, *names: str) -> None:
    """Raise an error for settings below 1."""
    for name in names:
        if (value := getattr(encoder, name)) < 1:
            raise ConfigError(f"encoder.{name} is {value}; it must be at least 1")
