"""Small convolutional networks meant for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from harmonium.encoders import Encoder, encoders, groups_of
from harmonium.errors import ConfigError


@encoders("cnn-small")
@dataclass(frozen=True)
class CnnSmall(Encoder):
    """Four 3x3 convolutions with GroupNorm and ReLU, average pooling, one linear layer.

    The default width has 0.45 million parameters; any picture side from 1 pixel up works.

    >>> sum(p.numel() for p in CnnSmall().build(channels=3, side=32).parameters())
    454688
    """

    width: int = 32  # channels of the first layer; each further layer doubles them
    out: int = 256  # size of a feature

    def __post_init__(self) -> None:
        for name in ("width", "out"):
            if getattr(self, name) < 1:
                raise ConfigError(f"encoder.{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        return self.out

    def build(self, channels: int, side: int) -> nn.Module:
        """Strides 1, 2, 2, 2, so a 32-pixel picture ends as a 4x4 map before pooling."""
        layers: list[nn.Module] = []
        for depth, stride in enumerate((1, 2, 2, 2)):
            wide = self.width * 2**depth
            layers += [
                nn.Conv2d(channels, wide, 3, stride, 1, bias=False),
                nn.GroupNorm(groups_of(wide), wide),
                nn.ReLU(inplace=True),
            ]
            channels = wide
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.out)]
        return nn.Sequential(*layers, *pool)
