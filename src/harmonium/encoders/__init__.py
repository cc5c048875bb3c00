"""Networks from a picture to a feature: settings with a `build`, found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from harmonium.registry import Registry


@dataclass(frozen=True)
class Encoder:
    """Settings of a network; `features` is the size of what it puts out."""

    name: ClassVar[str] = ""

    @property
    def features(self) -> int:
        """Size of a feature vector."""
        raise TypeError(f"{type(self).__name__} must define `features`")

    def build(self, channels: int, side: int) -> nn.Module:
        """A network from (n, channels, side, side) to (n, features)."""
        raise TypeError(f"{type(self).__name__} must define `build`")


encoders: Registry[Encoder] = Registry("encoder", "harmonium.encoders", Encoder)


def groups_of(channels: int) -> int:
    """Groups for GroupNorm: the largest divisor up to 32 that leaves at least 2 channels each.

    >>> [groups_of(c) for c in (512, 64, 32, 16)]
    [32, 32, 16, 8]
    """
    return max(g for g in range(1, 33) if channels % g == 0 and (channels // g >= 2 or g == 1))
