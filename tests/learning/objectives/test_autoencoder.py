import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.autoencoder import Autoencoder, decoder
from harmonium.learning.world import World


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [*range(1, 34), 64, 84, 96, 99, 224])
def test_a_decoder_rebuilds_images_of_any_side(channels: int, side: int) -> None:
    made = decoder(5, channels, side, width=2)(torch.randn(2, 5))
    assert made.shape == (2, channels, side, side)
    assert made.min() >= 0 and made.max() <= 1


def test_it_mirrors_an_encoder_of_strided_convolutions() -> None:
    """Maps of the same sides in reverse: 28 pixels are halved to 14, 7 and 4."""
    sides, network = [], decoder(8, 3, 28, width=16)
    for layer in network:
        if isinstance(layer, nn.Unflatten | nn.ConvTranspose2d):
            layer.register_forward_hook(lambda _, __, out: sides.append(tuple(out.shape[1:])))
    network(torch.zeros(1, 8))
    assert sides == [(64, 4, 4), (32, 7, 7), (16, 14, 14), (3, 28, 28)]
    x, halved = torch.zeros(1, 1, 28, 28), []
    for _ in range(3):
        x = nn.Conv2d(1, 1, 3, 2, 1)(x)
        halved.append(x.shape[2])
    assert halved == [14, 7, 4]


def test_large_images_do_not_need_a_large_decoder() -> None:
    sizes = [sum(p.numel() for p in decoder(256, 3, s, 32).parameters()) for s in (32, 224)]
    assert sizes[0] < 700_000 and sizes[1] < 3_000_000


def test_every_pixel_depends_on_the_features() -> None:
    made = decoder(4, 1, 13, width=8)(torch.randn(64, 4))
    assert made.std(0).min() > 1e-4


def test_the_loss_is_the_squared_error_over_plain_pixels(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Autoencoder(width=4))
    seen, parts = practice.see(), practice.parts
    pixels = practice.client.examples.pixels().double() / 255
    made = parts["decoder"](parts["encoder"](seen.batch.plain)).detach().double()
    total, count = 0.0, 0
    for picture, rebuilt in zip(pixels, made, strict=True):
        for channel in range(1):
            total += float(((picture[:, :, channel] - rebuilt[channel]) ** 2).sum())
            count += 64
    loss = practice.method.objective.score(parts, seen, Context(me=0))
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert "views" not in vars(seen.batch)


def test_what_is_rebuilt_is_resized_like_what_is_seen() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 20, 14, 3), dtype=np.uint8)
    examples = Examples(Images(pixels, np.zeros(2, int)), np.arange(2))
    batch = Batch(torch.arange(2), examples, preset("simclr", size=10), torch.Generator())
    objective = Autoencoder(width=2)

    class Memory(nn.Module):
        """Rebuilds what Pillow makes of the images."""

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            small = [Image.fromarray(p).resize((10, 10), Image.Resampling.BILINEAR) for p in pixels]
            return (
                torch.stack([torch.from_numpy(np.array(s)).permute(2, 0, 1) for s in small]) / 255
            )

    parts = nn.ModuleDict({"encoder": nn.Flatten(), "decoder": Memory()})
    seen = objective.see(parts, batch)  # type: ignore[arg-type]
    assert seen.h[0].shape == (2, 300)
    rounding = objective.score(parts, seen, Context(me=0)).item() ** 0.5  # type: ignore[arg-type]
    assert rounding < 1 / 255


def test_images_that_are_not_square_are_refused(practise) -> None:  # type: ignore[no-untyped-def]
    practice = practise(Autoencoder(width=2))
    wide = Examples(Images(np.zeros((3, 8, 12, 1), np.uint8), np.zeros(3, int)), np.arange(3))
    batch = Batch(torch.arange(3), wide, preset("none"), torch.Generator())
    seen = practice.method.objective.see(practice.parts, batch)
    with pytest.raises(ConfigError, match="these are 8 x 12: set views.size"):
        practice.method.objective.score(practice.parts, seen, Context(me=0))


def test_training_moves_everything_and_beats_the_mean_image(practise) -> None:  # type: ignore[no-untyped-def]
    """What collapsed features can do at best is to show the mean image."""
    settings = {"optimiser": "adam", "lr": 0.01, "schedule": "constant", "epochs": 40}
    practice = practise(Autoencoder(width=8), encoder=CnnSmall(width=4, norm="none"), **settings)
    assert math.isfinite(practice.learn())
    assert practice.moved() == {"encoder", "decoder"}
    assert practice.parts.rules == {"encoder": "mean", "decoder": "mean"}
    pixels = practice.client.examples.pixels().double() / 255
    mean_image = (pixels - pixels.mean(0)).square().mean()
    assert (
        practice.method.objective.score(practice.parts, practice.see(), Context(me=0))
        < 0.6 * mean_image
    )


def test_the_decoder_follows_the_world() -> None:
    part = Autoencoder(width=2).build({}, 7, World(channels=1, side=12))["decoder"]
    assert part.module(torch.zeros(3, 7)).shape == (3, 1, 12, 12)


def test_no_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective.width is 0"):
        Autoencoder(width=0)
