"""ResNet: residual networks for small and for large images (He et al., 2016).

Two families of the paper: 18, 34 and 50 layers with four stages from 64 channels on, and 20 layers
with three stages from 16 channels on, plus a smaller one of 8 layers. Departures, all usual today:
small images have a stem that keeps their side, every shortcut that changes the shape is a 1x1
convolution, bottlenecks halve the side in their 3x3 convolution, and GroupNorm is the default.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from harmonium.learning.encoders import Convolutional, encoders

LARGE = 128  # pixels


@dataclass(frozen=True)
class ResNet(Convolutional):
    """A residual network; each depth is a subclass that sets how many blocks its stages have."""

    blocks: ClassVar[tuple[int, ...]] = ()  # of each stage; each stage halves the side
    growth: ClassVar[int] = 1  # channels a block puts out for each it works on; 4: bottlenecks

    width: int = 64  # channels of the first stage; each further stage doubles them
    stem: Literal["auto", "small", "large"] = "auto"  # large quarters the side; auto: from 128 on

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        return int(self.width * 2 ** (len(self.blocks) - 1) * self.growth)

    @property
    def channels_last(self) -> bool:
        """Not with GroupNorm on few channels, which is slow in that layout.

        Measured for `resnet8` and `resnet20`: 0.87 times as fast, though 1.2 with BatchNorm.
        Never below 8 channels: there oneDNN, as torch 2.13 ships it, writes beyond its buffers in
        the backward pass of a strided 1x1 convolution (the shortcut) on CPUs without AVX-512.
        """
        return self.width >= (64 if self.norm == "group" else 8)

    def network(self, channels: int, side: int) -> nn.Module:
        """Stem, stages of blocks, and the mean over what is left of the image."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if not self.channels_last:
            layers["layout"] = ChannelsFirst()
        layers["stem"] = self._stem(channels, side)
        channels = self.width
        for stage, count in enumerate(self.blocks):
            wide = self.width * 2**stage
            stride = 1 if stage == 0 else 2
            blocks = [self._block(channels, wide, stride)]
            channels = wide * self.growth
            blocks += [self._block(channels, wide) for _ in range(count - 1)]
            layers[f"stage{stage + 1}"] = nn.Sequential(*blocks)
        layers["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(layers)

    def convolution(
        self, channels: int, wide: int, kernel: int, stride: int = 1
    ) -> tuple[nn.Conv2d, nn.Module]:
        """A convolution and its normalisation, with Kaiming's normal initialisation."""
        filters, norm = super().convolution(channels, wide, kernel, stride)
        nn.init.kaiming_normal_(filters.weight, mode="fan_out", nonlinearity="relu")
        if filters.bias is not None:
            nn.init.zeros_(filters.bias)
        return filters, norm

    def _stem(self, channels: int, side: int) -> nn.Sequential:
        large = side >= LARGE if self.stem == "auto" else self.stem == "large"
        kernel, stride = (7, 2) if large else (3, 1)
        layers = [*self.convolution(channels, self.width, kernel, stride), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, *([nn.MaxPool2d(3, 2, 1)] if large else []))

    def _block(self, channels: int, wide: int, stride: int = 1) -> Residual:
        out = wide * self.growth
        shapes = [(channels, wide, 3, stride), (wide, out, 3, 1)]
        if self.growth > 1:
            shapes = [(channels, wide, 1, 1), (wide, wide, 3, stride), (wide, out, 1, 1)]
        layers: list[nn.Module] = []
        for shape in shapes:
            last, norm = self.convolution(*shape)
            layers += [last, norm, nn.ReLU(inplace=True)]
        if self.norm == "none":  # else every block would double the variance
            with torch.no_grad():
                last.weight.mul_(sum(self.blocks) ** -0.5)
        same = stride == 1 and channels == out
        shortcut = [] if same else self.convolution(channels, out, 1, stride)
        return Residual(nn.Sequential(*layers[:-1]), nn.Sequential(*shortcut))


class ChannelsFirst(nn.Module):
    """Puts the channels first in memory, because layers keep the layout of the views."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        # Always a copy: grey images are in both layouts at once.
        return x.clone(memory_format=torch.contiguous_format)


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, side, side) to the channels and the side of the branch's output."""
        return torch.relu_(self.branch(x) + self.shortcut(x))


@encoders("resnet8")
@dataclass(frozen=True)
class ResNet8(ResNet):
    """Residual network of 8 layers for small images, after He et al. (2016); made for CPUs.

    >>> sum(p.numel() for p in ResNet8().build(channels=3, side=32).parameters())
    77392
    """

    blocks = (1, 1, 1)

    width: int = 16  # channels of the first stage; each further stage doubles them


@encoders("resnet20")
@dataclass(frozen=True)
class ResNet20(ResNet):
    """Residual network of 20 layers for small images (He et al., 2016).

    What FedSC calls ResNet20 is another network: `fixup-resnet20` with `width=8`.

    >>> sum(p.numel() for p in ResNet20().build(channels=3, side=32).parameters())
    271824
    """

    blocks = (3, 3, 3)

    width: int = 16  # channels of the first stage; each further stage doubles them


@encoders("resnet18")
@dataclass(frozen=True)
class ResNet18(ResNet):
    """Residual network of 18 layers (He et al., 2016), the encoder of most published systems.

    Federated SimCLR uses it with GroupNorm; Orchestra, FedU, FedEMA and FedX with `norm=batch`;
    FedStyle with the large stem on images of 224 pixels.

    >>> sum(p.numel() for p in ResNet18().build(channels=3, side=32).parameters())
    11168832
    """

    blocks = (2, 2, 2, 2)


@encoders("resnet34")
@dataclass(frozen=True)
class ResNet34(ResNet):
    """Residual network of 34 layers (He et al., 2016); what FedSC calls ResNet50.

    >>> sum(p.numel() for p in ResNet34().build(channels=3, side=32).parameters())
    21276992
    """

    blocks = (3, 4, 6, 3)


@encoders("resnet50")
@dataclass(frozen=True)
class ResNet50(ResNet):
    """Residual network of 50 layers with bottlenecks (He et al., 2016), the large one of FedCA.

    >>> sum(p.numel() for p in ResNet50().build(channels=3, side=32).parameters())
    23500352
    """

    blocks = (3, 4, 6, 3)
    growth = 4
