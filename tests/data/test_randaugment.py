"""RandAugment: each operation as Pillow defines it, known images, and chance."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from harmonium.core.errors import ConfigError
from harmonium.data.augment import randaugment as module
from harmonium.data.augment.randaugment import OPERATIONS, randaugment
from harmonium.data.augment.views import PRESETS, View, Views, plain, preset

OFF = {"crop_min": 1.0, "flip": 0.0, "jitter": 0.0, "gray": 0.0, "mean": None, "std": None}
BLENDED = {"colour", "contrast", "brightness", "sharpness", "autocontrast"}
SIGNED = {"rotate", "colour", "contrast", "brightness", "sharpness"}
SIGNED |= {"shear_x", "shear_y", "translate_x", "translate_y"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_images(count: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    coarse = torch.rand(count, channels, 5, 5, generator=rng(1))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (smooth.clamp(0.1, 0.9) * 255).round().byte().permute(0, 2, 3, 1).contiguous()


def draws_of(name: str, sign: int, count: int) -> np.ndarray:
    """The numbers that make every image do one thing."""
    which = (list(OPERATIONS).index(name) + 0.5) / len(OPERATIONS)
    return np.tile(np.float32([which, 0.75 if sign > 0 else 0.25]), (count, 1))


def done(pixels: torch.Tensor, name: str, magnitude: int, sign: int = 1) -> torch.Tensor:
    return randaugment(pixels, draws_of(name, sign, len(pixels)), magnitude)


def pillow(pixels: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one) for one in pixels.numpy()]


def reference(image: Image.Image, name: str, magnitude: int, sign: int) -> Image.Image:
    """The operation by Pillow, as AutoAugment's ranges read."""
    share, (width, height) = magnitude / 30, image.size
    factor = 1 + 0.9 * share * sign
    moves = {
        "shear_x": (1, 0.3 * share * sign, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * share * sign, 1, 0),
        "translate_x": (1, 0, int(150 / 331 * width * share) * sign, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, int(150 / 331 * height * share) * sign),
    }
    if name in moves:
        return image.transform(image.size, Image.Transform.AFFINE, moves[name])
    enhancers = {
        "brightness": ImageEnhance.Brightness,
        "colour": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name in enhancers:
        return enhancers[name](image).enhance(factor)
    return {
        "identity": lambda: image,
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalise": lambda: ImageOps.equalize(image),
        "rotate": lambda: image.rotate(30 * share * sign),
        "solarise": lambda: ImageOps.solarize(image, 255 * (30 - magnitude) / 30),
        "posterise": lambda: ImageOps.posterize(image, 8 - round(4 * share)),
    }[name]()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 20)])
def test_every_operation_is_pillows(name: str, channels: int, height: int, width: int) -> None:
    pixels = make_images(3, height, width, channels)
    for magnitude in (0, 10, 17, 30):
        for sign in (1, -1):
            made = done(pixels, name, magnitude, sign)
            assert made.dtype == torch.uint8
            assert made.shape == pixels.shape
            for got, image in zip(pillow(made), pillow(pixels), strict=True):
                want = np.asarray(reference(image, name, magnitude, sign), np.float32)
                apart = np.abs(np.asarray(got, np.float32) - want)
                if name == "rotate":  # a point between two pixels may be read from either
                    assert (apart == 0).mean() > 0.98
                elif name in BLENDED:  # Pillow cuts where we round
                    assert apart.max() <= (1 if magnitude < 30 else 2), (magnitude, sign)
                else:
                    assert apart.max() == 0, (magnitude, sign)


def test_known_images() -> None:
    line = torch.tensor([0, 63, 64, 127, 128, 200, 254, 255], dtype=torch.uint8)
    image = line.view(1, 1, 8, 1).expand(1, 8, 8, 1).contiguous()
    row = lambda *known: done(image, *known)[0, 0, :, 0].tolist()  # noqa: E731
    assert row("posterise", 30) == [0, 48, 64, 112, 128, 192, 240, 240]
    assert row("solarise", 15) == [0, 63, 64, 127, 127, 55, 1, 0]
    assert row("solarise", 30) == [255 - v for v in line.tolist()]
    assert row("translate_x", 30) == [127, 128, 200, 254, 255, 0, 0, 0]  # int(150 / 331 * 8) = 3
    assert row("translate_x", 30, -1) == [0, 0, 0, 0, 63, 64, 127, 128]
    assert row("brightness", 30, -1) == [0, 6, 6, 13, 13, 20, 25, 26]  # a tenth, rounded
    assert row("translate_y", 30) == line.tolist()
    down = done(image, "translate_y", 30)[0, :, 7, 0].tolist()
    assert down == [255] * 5 + [0] * 3
    half = (image // 2 + 10).contiguous()
    assert done(half, "autocontrast", 3)[0, 0, [0, 4, 7], 0].tolist() == [0, 129, 255]
    flat = torch.full_like(image, 77)
    for name in ("autocontrast", "equalise", "contrast", "sharpness", "colour"):
        assert torch.equal(done(flat, name, 30), flat)


def test_shear_moves_each_row_by_its_height() -> None:
    image = torch.zeros(1, 20, 20, 1, dtype=torch.uint8)
    image[:, :, 10] = 255
    made = done(image, "shear_x", 30)[0, :, :, 0]
    where = made.argmax(1)
    assert where.tolist() == [10 - math.floor(0.3 * (row + 0.5) + 0.5) for row in range(20)]
    turned = done(image.transpose(1, 2).contiguous(), "shear_y", 30)[0, :, :, 0]
    assert torch.equal(turned.T, made)


def test_equalise_spreads_the_values_evenly() -> None:
    dark = (torch.rand(1, 64, 64, 1, generator=rng()) ** 3 * 120).byte()
    made = done(dark, "equalise", 10).float()
    assert made.mean() == pytest.approx(127, abs=12)
    assert made.max() == 255
    assert done(dark, "equalise", 10, -1).equal(done(dark, "equalise", 30))  # no strength, no sign


def test_a_grey_image_has_no_colour_to_change() -> None:
    grey = make_images(3, 8, 8, 1)
    assert torch.equal(done(grey, "colour", 30), grey)
    rgb = grey.expand(-1, -1, -1, 3).contiguous()
    for name in OPERATIONS:
        as_rgb = done(rgb, name, 20, -1).float()
        assert (as_rgb - done(grey, name, 20, -1).float()).abs().max() <= 1, name


@pytest.mark.parametrize("name", OPERATIONS)
def test_signs_matter_where_there_are_two_directions(name: str) -> None:
    pixels = make_images(2)
    same = torch.equal(done(pixels, name, 20, 1), done(pixels, name, 20, -1))
    assert same == (name not in SIGNED)


def test_the_fourteen_are_equally_likely_and_so_are_the_signs(monkeypatch) -> None:
    seen: dict[str, list[float]] = {}

    def note(name: str):
        def operation(planes, strength, signs):
            seen.setdefault(name, []).extend(signs.tolist())
            assert strength == pytest.approx(10 / 30)
            return planes.clone()

        return operation

    monkeypatch.setattr(module, "OPERATIONS", {name: note(name) for name in OPERATIONS})
    monkeypatch.setattr("harmonium.data.augment.pipeline.PIECE_PIXELS", 10**9)
    View(**OFF, randaugment=2)(torch.zeros(7000, 2, 2, 3, dtype=torch.uint8), rng())
    assert len(OPERATIONS) == 14
    counts = {name: len(signs) for name, signs in seen.items()}
    assert sum(counts.values()) == 14000
    assert all(abs(count - 1000) < 120 for count in counts.values()), counts
    assert all(abs(sum(signs)) < 130 for signs in seen.values())


@pytest.mark.parametrize("mode", ["faithful", "fast"])
@pytest.mark.parametrize("channels", [1, 3])
def test_same_chance_same_bits_and_every_image_has_its_own(mode, channels) -> None:
    same = make_images(1, channels=channels).expand(60, -1, -1, -1).contiguous()
    view = View(mode=mode, **OFF, randaugment=2)
    made = view(same, rng(4))
    assert torch.equal(made, view(same, rng(4)))
    assert not torch.equal(made, view(same, rng(5)))
    assert torch.equal(view(same[:7], rng(4)), made[:7])  # whatever else is in the batch
    assert len({one.numpy().tobytes() for one in made}) > 30
    assert made.min() >= 0
    assert made.max() <= 1
    whole = View(mode=mode, randaugment=2)(same, rng(4))
    assert whole.isfinite().all()


def test_it_comes_before_everything_else() -> None:
    pixels = make_images(20)
    changed = View(**OFF, randaugment=3, randaugment_magnitude=25)(pixels, rng(2))
    bytes_ = (changed * 255).round().byte().permute(0, 2, 3, 1).contiguous()
    mirrored = View(**OFF | {"flip": 1.0}, randaugment=3, randaugment_magnitude=25)
    columns = torch.rand(20, 7, generator=rng(2))[:, 1:].numpy()  # the flip draws the first
    want = plain(randaugment(pixels, columns, 25).flip(2), None, None)
    assert torch.equal(mirrored(pixels, rng(2)), want)
    assert torch.equal(bytes_, randaugment(pixels, torch.rand(20, 6, generator=rng(2)).numpy(), 25))


def test_none_of_it_leaves_views_as_they_were() -> None:
    """Bits of before there was RandAugment."""
    pixels = (torch.arange(6 * 16 * 16 * 3).view(6, 16, 16, 3) * 7 % 251).byte()
    known = hashlib.sha256()
    for mode in ("faithful", "fast"):
        generator = rng(3)
        for view in preset("orchestra_turned", mode=mode)(pixels, generator):
            known.update((view * 1000).round().short().contiguous().numpy().tobytes())
        known.update(generator.get_state().numpy().tobytes())
    assert known.hexdigest()[:16] == "3e128bfc7921c6e6"
    assert torch.equal(
        View(randaugment=0, randaugment_magnitude=30)(pixels, rng()), View()(pixels, rng())
    )


def test_the_preset_of_semifed() -> None:
    first, second, strong = PRESETS["semifed"]
    assert (first, second) == PRESETS["fedsimclr"]
    assert strong == View(randaugment=2, randaugment_magnitude=10)
    pixels = make_images(8)
    three = preset("semifed")(pixels, rng())
    two = Views(PRESETS["fedsimclr"])(pixels, rng())
    assert len(three) == 3
    assert all(torch.equal(a, b) for a, b in zip(three, two, strict=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"randaugment": -1}, "views.randaugment is -1"),
        ({"randaugment": 1.5}, "views.randaugment is 1.5"),
        ({"randaugment_magnitude": 31}, "randaugment_magnitude is 31"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError) as caught:
        View(**settings)
    assert message in str(caught.value)
