"""Plain convolutional networks: one for CPUs, and the five-layer one of FedCA."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.learning.encoders import Convolutional, at_least_one, encoders


@dataclass(frozen=True)
class Plain(Convolutional):
    """Convolutions that end in a linear layer."""

    out: int = 256  # size of a feature

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "out")

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        return self.out


@encoders("cnn-small")
@dataclass(frozen=True)
class CnnSmall(Plain):
    """Four 3x3 convolutions, average pooling and one linear layer; made for CPUs.

    The default width has 0.45 million parameters; any image side from 1 pixel up works.

    >>> sum(p.numel() for p in CnnSmall().build(channels=3, side=32).parameters())
    454688
    """

    width: int = 32  # channels of the first layer; each further layer doubles them

    def network(self, channels: int, side: int) -> nn.Module:
        """Strides 1, 2, 2, 2, so a 32-pixel image ends as a 4x4 map before pooling."""
        layers: list[nn.Module] = []
        for depth, stride in enumerate((1, 2, 2, 2)):
            wide = self.width * 2**depth
            layers += [*self.convolution(channels, wide, 3, stride), nn.ReLU(inplace=True)]
            channels = wide
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.out)]
        return nn.Sequential(*layers, *pool)


@encoders("cnn5")
@dataclass(frozen=True)
class Cnn5(Plain):
    """Five 3x3 convolutions and one linear layer with ReLU, after FedCA (Zhang et al., 2020).

    FedCA says no more than "5-layer CNN" with 2,048 features, so widths and pooling are ours:
    64-128-256-256-256 channels, max-pooling after the first, the second and the fifth, then a
    2x2 map for images of any side from 8 pixels.

    >>> sum(p.numel() for p in Cnn5().build(channels=3, side=32).parameters())
    3651136
    """

    out: int = 2048  # size of a feature

    def network(self, channels: int, side: int) -> nn.Module:
        """A 32-pixel image ends as a 4x4 map, which is averaged to 2x2."""
        if side < 8:
            raise ConfigError(f"encoder=cnn5 needs images of 8 pixels or more; these have {side}")
        layers: list[nn.Module] = []
        for depth, times in enumerate((1, 2, 4, 4, 4)):
            wide = self.width * times
            layers += [*self.convolution(channels, wide, 3), nn.ReLU(inplace=True)]
            if depth in (0, 1, 4):
                layers.append(nn.MaxPool2d(2))
            channels = wide
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(4 * channels, self.out), nn.ReLU())
