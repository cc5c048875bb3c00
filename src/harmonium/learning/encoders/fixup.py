"""Fixup: a residual network that needs no normalisation (Zhang et al., 2019).

Every block starts as its shortcut, because its last convolution starts at zero, and the other one
starts smaller by the root of the number of blocks. Learned scalars, added before every convolution
and multiplied with the branch, replace those of a normalisation. The shortcut has no parameters,
and there is no classifier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.encoders import Encoder, at_least_one, encoders


@encoders("fixup-resnet20")
@dataclass(frozen=True)
class FixupResNet20(Encoder):
    """Residual network of 20 layers without normalisation (Fixup; Zhang et al., 2019).

    With `width=8`, that is 128, 256 and 512 channels, it is what FedSC calls ResNet20.

    >>> sum(p.numel() for p in FixupResNet20(width=8).build(channels=3, side=32).parameters())
    17108399
    """

    blocks: ClassVar[int] = 3  # of each of the three stages

    width: int = 1  # times 16, 32 and 64 channels; FedSC: 8

    def __post_init__(self) -> None:
        at_least_one(self, "width")

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        return 64 * self.width

    def build(self, channels: int, side: int) -> nn.Module:
        """Stem, three stages of blocks, and the mean over what is left of the image."""
        wide = 16 * self.width
        stem = [nn.Conv2d(channels, wide, 3, 1, 1, bias=False), Shift(), nn.ReLU(inplace=True)]
        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*stem))
        for stage in (1, 2, 3):
            blocks = [FixupBlock(wide, 1 if stage == 1 else 2, 3 * self.blocks)]
            wide = blocks[0].conv2.out_channels
            blocks += [FixupBlock(wide, 1, 3 * self.blocks) for _ in range(self.blocks - 1)]
            layers[f"stage{stage}"] = nn.Sequential(*blocks)
        layers["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Shift())
        return nn.Sequential(layers)


class Shift(nn.Module):
    """One learned number that is added to everything."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x + self.bias


class FixupBlock(nn.Module):
    """relu(scale conv2(relu(conv1(x + b1a) + b1b) + b2a) + b2b + shortcut(x)).

    With stride 2 the shortcut takes every second row and column, and adds as many empty channels.
    """

    def __init__(self, channels: int, stride: int, depth: int) -> None:
        """Make a block of a network with `depth` blocks; stride 2 doubles the channels."""
        super().__init__()
        wide = channels * stride
        self.stride = stride
        self.conv1 = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.b1a, self.b1b, self.b2a, self.b2b = (nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.conv1.weight, std=(2 / (9 * wide) / depth) ** 0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, side, side) to the same, or to twice the channels and half the side."""
        shifted = x + self.b1a
        inner = torch.relu_(self.conv1(shifted) + self.b1b)
        branch = self.scale * self.conv2(inner + self.b2a) + self.b2b
        return torch.relu_(branch + (x if self.stride == 1 else thin(shifted, self.stride)))


def thin(x: Tensor, stride: int) -> Tensor:
    """Every `stride`-th row and column of `x`, and empty channels until there are twice as many."""
    return functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, x.shape[1]))
