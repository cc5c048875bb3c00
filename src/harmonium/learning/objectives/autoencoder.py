"""Autoencoder: a decoder rebuilds the image from its features.

FedCA's baseline FedAE (Zhang et al., Federated Unsupervised Representation Learning, 2020) averages
an encoder and its mirror image made of transposed convolutions. The paper says no more, so these
are ours: the mean squared error over unaugmented images with values in [0, 1], and a decoder
that doubles a small map until it has the image's side and ends within these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import plain
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.encoders import groups_of
from harmonium.learning.objectives import Objective, Seen, check, objectives
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

SMALLEST = 4  # side of the map that the decoder starts from, at most
WIDEST = 8  # channels of its widest layer, in multiples of `width`


@objectives("autoencoder")
@dataclass(frozen=True)
class Autoencoder(Objective):
    """Reconstruction of images from their features.

    >>> Autoencoder(width=16).width
    16
    """

    paper = "Zhang et al., 2020"

    width: int = 32  # channels of the last hidden layer; each one before has twice as many

    def __post_init__(self) -> None:
        check(self, "at least 1", lambda size: size >= 1, "width")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """The decoder, averaged like the encoder."""
        return {"decoder": Part(decoder(dim, world.channels, world.side, self.width))}

    def alone(self) -> bool:
        """True: the loss of an image does not depend on other images."""
        return True

    def projections(self, views: int) -> int:
        """None: the loss uses features."""
        return 0

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Features of the images without augmentation."""
        return Seen(batch, [parts["encoder"](batch.plain)], [])

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Mean squared error over all images, channels and pixels."""
        wanted = plain(seen.batch.pixels, None, None, seen.batch.make.pipelines[0].size)
        rebuilt = parts["decoder"](seen.h[0])
        if rebuilt.shape != wanted.shape:
            height, width = wanted.shape[2:]
            raise ConfigError(
                f"objective=autoencoder rebuilds square images but these are {height} x {width}: "
                "set views.size"
            )
        return functional.mse_loss(rebuilt, wanted)


def decoder(dim: int, channels: int, side: int, width: int) -> nn.Sequential:
    """A network from features (n, dim) to images (n, channels, side, side) of any side.

    It mirrors an encoder whose strided convolutions halve the side, rounding up.

    >>> import torch
    >>> decoder(16, 3, 28, width=4)(torch.zeros(2, 16)).shape
    torch.Size([2, 3, 28, 28])
    """
    sides, widths = [side], [channels]
    while sides[-1] > SMALLEST:
        widths.append(width * min(2 ** (len(sides) - 1), WIDEST))
        sides.append((sides[-1] + 1) // 2)
    start = (widths[-1], sides[-1], sides[-1])
    layers: list[nn.Module] = [nn.Linear(dim, start[0] * start[1] ** 2), nn.Unflatten(1, start)]
    for depth in range(len(sides) - 1, 0, -1):
        wide, wider = widths[depth - 1], widths[depth]
        layers += [nn.GroupNorm(groups_of(wider), wider), nn.ReLU(inplace=True)]
        # From s pixels to 2 s - 1, or to 2 s if a last row and column are added.
        even = int(sides[depth - 1] % 2 == 0)
        layers.append(nn.ConvTranspose2d(wider, wide, 3, 2, 1, output_padding=even))
    return nn.Sequential(*layers, nn.Sigmoid())
