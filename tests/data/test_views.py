"""Views: exact against Pillow and colorsys where a definition exists, else right on average."""

from __future__ import annotations

import colorsys
import dataclasses
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.augment import operations as ops
from harmonium.data.augment import parameters as draw
from harmonium.data.augment.views import PRESETS, View, Views, plain, preset, quarter_turns

OFF = {"crop_min": 1.0, "flip": 0.0, "jitter": 0.0, "gray": 0.0, "mean": None, "std": None}
MODES = ("faithful", "fast")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_images(count: int, height: int = 32, width: int = 32, channels: int = 3, seed: int = 1):
    """Smooth images with every colour in them."""
    coarse = torch.rand(count, channels, 5, 5, generator=rng(seed))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (smooth.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous()


def ramps(count: int, side: int = 64) -> torch.Tensor:
    """Red grows to the right, green downwards, blue is a half: a view tells where it looked."""
    line = torch.arange(side)
    image = torch.stack(
        (line.expand(side, side), line[:, None].expand(side, side), torch.full((side, side), 128)),
        dim=2,
    )
    return image.byte().expand(count, -1, -1, -1).contiguous()


def planes_of(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.permute(3, 0, 1, 2).float().div(255).contiguous()


def pillow(pixels: torch.Tensor) -> list[Image.Image]:
    arrays = pixels.numpy()
    return [Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one) for one in arrays]


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (32, 3)])
def test_identity_settings_reproduce_the_image(mode, side, channels):
    pixels = make_images(5, side, side, channels)
    made = View(mode=mode, **OFF)(pixels, rng())
    assert torch.equal(made, pixels.permute(0, 3, 1, 2).float() / 255)
    normalised = View(**OFF | {"mean": (0.5,), "std": (0.25,)}, mode=mode)(pixels, rng())
    assert torch.equal(normalised, plain(pixels, (0.5,), (0.25,)))


@pytest.mark.parametrize("mode", MODES)
def test_always_flipping_is_the_mirror_image_with_and_without_crop(mode):
    pixels = make_images(4)
    mirrored = plain(pixels.flip(2), None, None)
    assert torch.equal(View(mode=mode, **OFF | {"flip": 1.0})(pixels, rng()), mirrored)
    padded = View(mode=mode, **OFF | {"flip": 1.0, "pad_crop": 1, "size": 34})
    assert torch.equal(padded(pixels, rng())[:, :, 1:-1, 1:-1], mirrored)
    nearly_whole = {"flip": 1.0, "crop_min": 0.999, "aspect": (1.0, 1.0)}
    made = View(mode=mode, **OFF | nearly_whole)(pixels, rng())
    assert torch.allclose(made, mirrored, atol=1e-5)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [32, 48, 9])
def test_crop_and_resize_as_pillow_growing_and_shrinking(interpolation, size):
    pixels = make_images(6, 40, 32)
    boxes = [(0, 0, 32, 40), (3, 5, 20, 30), (10, 0, 32, 17), (7, 7, 8, 9), (0, 1, 5, 40)]
    boxes.append((30, 38, 32, 40))
    corners = torch.tensor(boxes, dtype=torch.float32)
    weights = []
    for axis, side in ((1, 40), (0, 32)):
        start, length = corners[:, axis], corners[:, axis + 2] - corners[:, axis]
        points = draw.crop_points(start.numpy(), length.numpy(), np.zeros(6, bool), size)
        weights.append(
            ops.crop_weights(
                torch.from_numpy(points), start[:, None], length[:, None], side, interpolation
            )
        )
    made = ops.to_planes(pixels, *weights).clamp_(0, 1) * 255
    method = Image.Resampling[interpolation.upper()]
    for index, (image, box) in enumerate(zip(pillow(pixels), boxes, strict=True)):
        want = np.asarray(image.crop(box).resize((size, size), method), np.float32)
        got = made[:, index].permute(1, 2, 0).numpy()
        assert np.abs(got - want).max() < 1.6  # Pillow rounds to bytes between the axes


@pytest.mark.parametrize(
    ("slot", "enhance"),
    [(0, ImageEnhance.Brightness), (1, ImageEnhance.Contrast), (2, ImageEnhance.Color)],
)
def test_brightness_contrast_saturation_as_pillow(slot, enhance):
    pixels = make_images(8)
    scales = np.ones((8, 3), np.float32)
    scales[:, slot] = np.linspace(0.2, 1.8, 8)
    shares = torch.from_numpy(draw.slot_shares(scales, np.zeros(8, np.float32)))
    planes = planes_of(pixels)
    for turn in range(3):  # the other two slots have factor 1 and must do nothing
        ops.adjust(planes, shares[turn])
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(enhance(image).enhance(float(scales[index, slot])), np.float32)
        got = planes[:, index].permute(1, 2, 0).numpy() * 255
        assert np.abs(got - want).max() < 1.6


def test_every_order_of_the_three_is_used_and_clamps_in_between():
    pixels = make_images(1).expand(6, -1, -1, -1)
    factors = np.tile(np.array((1.7, 0.4, 1.8), np.float32), (6, 1))
    shares = torch.from_numpy(draw.slot_shares(factors, np.arange(6, dtype=np.float32)))
    planes = planes_of(pixels)
    for slot in range(3):
        ops.adjust(planes, shares[slot])
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    wants = []
    for order in orders:
        image = pillow(pixels[:1])[0]
        for which in order:
            image = enhancers[which](image).enhance(float(factors[0, which]))
        wants.append(torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 255)
    # Pillow cuts to bytes three times, and each factor enlarges what was cut before.
    distances = torch.cdist(planes.transpose(0, 1).flatten(1), torch.stack(wants).flatten(1))
    assert distances.argmin(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert (planes.transpose(0, 1) - torch.stack(wants)).abs().max() < 7 / 255


@pytest.mark.parametrize("turn", [-0.5, -0.4, -0.1, 0.0, 0.07, 1 / 3, 0.5])
def test_hue_as_colorsys(turn):
    levels = (0, 1, 80, 128, 200, 255)
    colours = torch.tensor([(r, g, b) for r in levels for g in levels for b in levels])
    planes = planes_of(colours.byte()[None, :, None, :])
    ops.shift_hue(planes, torch.from_numpy(draw.hue_offsets(np.float32([turn]))))
    got = planes[:, 0, :, 0].T
    for colour, new in zip(colours.tolist(), got.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(level / 255 for level in colour))
        want = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        assert new == pytest.approx(want, abs=2e-6)


def test_hue_as_pillow():
    pixels = make_images(1)
    planes = planes_of(pixels)
    ops.shift_hue(planes, torch.from_numpy(draw.hue_offsets(np.float32([25 / 255]))))
    hsv = np.array(pillow(pixels)[0].convert("HSV"))
    hsv[:, :, 0] += 25
    want = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"), np.float32)
    got = planes[:, 0].permute(1, 2, 0).numpy() * 255
    assert np.abs(got - want).max() < 8  # Pillow's hue has 256 steps: 6 levels a step
    assert np.abs(got - want).mean() < 1.5


@pytest.mark.parametrize("mode", MODES)
def test_gray_as_pillow(mode):
    pixels = make_images(4)
    made = View(mode=mode, **OFF | {"gray": 1.0})(pixels, rng()) * 255
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(image.convert("L"), np.float32)
        for channel in made[index].numpy():
            assert np.abs(channel - want).max() < 1.01


@pytest.mark.parametrize("mode", MODES)
def test_solarise_as_pillow(mode):
    pixels = make_images(4)
    made = View(mode=mode, **OFF | {"solarise": 1.0})(pixels, rng()) * 255
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(ImageOps.solarize(image, 128), np.float32)
        assert np.abs(made[index].permute(1, 2, 0).numpy() - want).max() < 0.01


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("height", "width", "taps"), [(32, 32, 3), (40, 32, 7)])
def test_blur_is_the_gaussian_of_the_drawn_sigma(mode, height, width, taps):
    pixels = make_images(3, height, width)
    sigma = 1.3
    view = View(mode=mode, **OFF | {"blur": 1.0, "blur_sigma": (sigma, sigma)}, blur_kernel=taps)
    line = torch.arange(taps) - taps // 2
    kernel = torch.exp(-0.5 * (line / sigma) ** 2)
    kernel /= kernel.sum()
    padded = torch.nn.functional.pad(plain(pixels, None, None), (taps // 2,) * 4, mode="reflect")
    square = torch.outer(kernel, kernel).expand(3, 1, -1, -1)
    want = torch.nn.functional.conv2d(padded, square, groups=3)
    assert torch.allclose(view(pixels, rng()), want, atol=1e-5)


def test_blur_width_follows_the_side():
    widths = {side: View()._taps((side, side)) for side in (8, 28, 32, 64, 96, 224)}
    assert widths == {8: 3, 28: 3, 32: 3, 64: 7, 96: 9, 224: 23}


def test_quarter_turns_are_exact_and_equally_likely():
    pixels = make_images(1).expand(400, -1, -1, -1).contiguous()
    made = View(**OFF | {"quarter_turn": True})(pixels, rng())
    turned = [torch.rot90(plain(pixels[:1], None, None), k, (2, 3)) for k in range(4)]
    counts = [int((made == one).flatten(1).all(1).sum()) for one in turned]
    assert sum(counts) == 400
    assert min(counts) > 70
    assert made.is_contiguous(memory_format=torch.channels_last)
    again = quarter_turns(plain(pixels[:4], None, None), torch.arange(4))
    assert all(torch.equal(again[k : k + 1], turned[k]) for k in range(4))


def test_rotation_turns_counter_clockwise_with_black_corners():
    pixels = make_images(2)
    planes = planes_of(pixels)
    turned = ops.rotate_planes(planes, torch.tensor([90.0, 0.0]))
    assert torch.equal(turned[:, 0], torch.rot90(planes[:, 0], 1, (1, 2)))
    assert torch.equal(turned[:, 1], planes[:, 1])
    white = torch.full((64, 32, 32, 3), 255, dtype=torch.uint8)
    made = View(**OFF | {"rotate": 15.0})(white, rng())
    black = (made[:, 0, 0, 0] == 0).float().mean()
    assert 0.4 < black <= 1
    assert (made[:, :, 8:-8, 8:-8] == 1).all()


@pytest.mark.parametrize("pad_mode", ["reflect", "zero"])
def test_pad_and_crop_cuts_windows_of_the_padded_image(pad_mode):
    pixels = make_images(1).expand(600, -1, -1, -1).contiguous()
    mode = "reflect" if pad_mode == "reflect" else "constant"
    padded = torch.nn.functional.pad(plain(pixels[:1], None, None), (4,) * 4, mode=mode)[0]
    made = View(**OFF | {"pad_crop": 4, "pad_mode": pad_mode})(pixels, rng())
    windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(81, -1)
    found = torch.cdist(made.flatten(1), windows).min(1)
    assert found.values.max() < 0.05
    assert torch.equal(made.flatten(1), windows[found.indices])
    assert len(found.indices.unique()) == 81


@pytest.mark.parametrize("mode", MODES)
def test_flip_quarter_turn_and_padding_as_pillow(mode):
    pixels = make_images(3)
    flipped = View(mode=mode, **OFF | {"flip": 1.0})(pixels, rng()).permute(0, 2, 3, 1) * 255
    turned = quarter_turns(plain(pixels, None, None), torch.tensor([1, 2, 3])) * 255
    turns = (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
    padded = View(mode=mode, **OFF | {"pad_crop": 4, "pad_mode": "zero", "size": 40})(pixels, rng())
    for index, image in enumerate(pillow(pixels)):
        assert np.array_equal(flipped[index].round().numpy(), np.asarray(ImageOps.mirror(image)))
        want = np.asarray(image.transpose(turns[index]))
        assert np.array_equal(turned[index].permute(1, 2, 0).round().numpy(), want)
        want = np.asarray(ImageOps.expand(image, 4))
        assert np.array_equal((padded[index] * 255).permute(1, 2, 0).round().numpy(), want)


def test_rotation_as_pillow():
    """Nearest pixels; where a point falls between two, rounding may pick the other one."""
    pixels = make_images(12)
    degrees = torch.linspace(-15, 15, 12)
    turned = ops.rotate_planes(planes_of(pixels), degrees) * 255
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(image.rotate(float(degrees[index])), np.float32)
        apart = np.abs(turned[:, index].permute(1, 2, 0).numpy() - want).max(2)
        assert (apart < 0.01).mean() > 0.98
        assert (apart[4:-4, 4:-4] < 40).all()  # a neighbour's value, never one from elsewhere


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_blur_as_pillow(sigma):
    """Pillow approximates the Gaussian by three boxes: within 5 of 255 inside, 1 on average."""
    pixels = make_images(3, 64, 64)
    wide = {"blur": 1.0, "blur_sigma": (sigma, sigma), "blur_kernel": 23}
    made = View(**OFF | wide)(pixels, rng()).permute(0, 2, 3, 1) * 255
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(image.filter(ImageFilter.GaussianBlur(sigma)), np.float32)
        assert np.abs(made[index].numpy() - want)[8:-8, 8:-8].max() < 5
        assert np.abs(made[index].numpy() - want)[8:-8, 8:-8].mean() < 1


# ---- statistics ----------------------------------------------------------------------------------


def slope_boxes(made: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed width and height of the boxes that views of `ramps` looked at."""
    middle = slice(side // 4, 3 * side // 4 + 1)
    across = made[:, 0, side // 2, middle] * 255
    down = made[:, 1, middle, side // 2] * 255
    steps = side // 2
    return (across[:, -1] - across[:, 0]) / steps * side, (down[:, -1] - down[:, 0]) / steps * side


def reference_boxes(count: int, side: int, low: float, seed: int = 3) -> np.ndarray:
    """Widths and heights of random resized crops, written as the definition reads."""
    dice = np.random.default_rng(seed)
    boxes = []
    for _ in range(count):
        box = (side, side)
        for _ in range(10):
            area = side * side * dice.uniform(low, 1)
            ratio = math.exp(dice.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= side and 0 < height <= side:
                box = (width, height)
                break
        boxes.append(box)
    return np.array(boxes, float)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("low", [0.08, 0.2, 0.5])
def test_crop_area_and_aspect_have_the_defined_distribution(mode, low):
    made = View(mode=mode, **OFF | {"crop_min": low})(ramps(2000), rng())
    width, height = slope_boxes(made, 64)
    assert torch.allclose(width, width.round(), atol=0.02)  # whole pixels
    want = reference_boxes(20000, 64, low)
    area, ratio = (width * height / 64**2).numpy(), torch.log(width / height).numpy()
    want_area, want_ratio = want.prod(1) / 64**2, np.log(want[:, 0] / want[:, 1])
    assert area.mean() == pytest.approx(want_area.mean(), abs=0.02)
    assert area.std() == pytest.approx(want_area.std(), abs=0.015)
    assert np.quantile(area, [0.1, 0.5, 0.9]) == pytest.approx(
        np.quantile(want_area, [0.1, 0.5, 0.9]), abs=0.04
    )
    assert ratio.mean() == pytest.approx(0, abs=0.012)
    assert ratio.std() == pytest.approx(want_ratio.std(), abs=0.01)


def test_crops_lie_anywhere():
    draws = torch.rand(5000, draw.CROP_DRAWS, generator=rng()).numpy()
    starts, lengths = draw.crop_boxes(draws, (32, 48), (0.2, 1.0), (3 / 4, 4 / 3))
    for axis, side in enumerate((32, 48)):
        assert starts[axis].min() >= 0
        assert (starts[axis] + lengths[axis]).max() == side
        spare = side - lengths[axis]
        moved = spare >= 5
        assert (starts[axis][moved] / spare[moved]).mean() == pytest.approx(0.5, abs=0.02)
        assert (starts[axis][moved] == 0).any()
        assert (starts[axis][moved] == spare[moved]).any()


def test_a_crop_that_never_fits_is_central():
    draws = torch.rand(50, draw.CROP_DRAWS, generator=rng()).numpy()
    starts, lengths = draw.crop_boxes(draws, (20, 100), (1.0, 1.0), (3 / 4, 4 / 3))
    assert (lengths == [[20], [27]]).all()
    assert (starts == [[0], [36]]).all()


@pytest.mark.parametrize("mode", MODES)
def test_how_often_each_operation_happens(mode):
    count = 4000
    pixels = ramps(count, 8)
    flipped, _ = slope_boxes(View(mode=mode, **OFF | {"flip": 0.3})(pixels, rng()), 8)
    assert (flipped < 0).float().mean() == pytest.approx(0.3, abs=0.025)
    for name, share in (("gray", 0.2), ("blur", 0.4), ("solarise", 0.15), ("jitter", 0.8)):
        settings = {name: share, "blur_sigma": (1.0, 2.0), "brightness": 0.5}
        made = View(mode=mode, **OFF | settings)(pixels, rng())
        changed = (made - plain(pixels, None, None)).abs().flatten(1).amax(1) > 1e-5
        assert changed.float().mean() == pytest.approx(share, abs=0.025), name


@pytest.mark.parametrize("mode", MODES)
def test_jitter_factors_are_uniform_within_their_range(mode):
    dull = torch.full((3000, 4, 4, 3), 100, dtype=torch.uint8)
    only = {"contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    view = View(mode=mode, **OFF | only | {"jitter": 1.0, "brightness": 0.4})
    factor = view(dull, rng())[:, 0, 0, 0] / (100 / 255)
    assert factor.min() == pytest.approx(0.6, abs=0.01)
    assert factor.max() == pytest.approx(1.4, abs=0.01)
    assert factor.mean() == pytest.approx(1.0, abs=0.015)
    assert factor.std() == pytest.approx(0.8 / math.sqrt(12), abs=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_hue_alone_spreads_both_ways_and_keeps_grey_grey(mode):
    red = torch.tensor((200, 40, 40), dtype=torch.uint8).expand(2000, 2, 2, 3).contiguous()
    only = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.1}
    view = View(mode=mode, **OFF | only | {"jitter": 1.0})
    made = view(red, rng())[:, :, 0, 0]
    lean = made[:, 1] - made[:, 2]  # green above blue: towards yellow
    # A circle in YIQ is not quite one in HSV: the same angle goes further towards violet.
    assert lean.mean() == pytest.approx(0, abs=0.02 if mode == "faithful" else 0.06)
    assert lean.std() > 0.15
    gray = torch.full((50, 4, 4, 3), 90, dtype=torch.uint8)
    assert torch.allclose(view(gray, rng()), torch.tensor(90 / 255), atol=1e-5)


def test_both_modes_turn_the_hue_the_same_way():
    red = torch.tensor((200, 40, 40), dtype=torch.uint8).expand(500, 2, 2, 3).contiguous()
    only = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "jitter": 1.0}
    # The same numbers are drawn, so image for image the same turn.
    both = [View(mode=mode, **OFF | only)(red, rng())[:, :, 0, 0] for mode in MODES]
    leans = [made[:, 1] - made[:, 2] for made in both]
    assert torch.corrcoef(torch.stack(leans))[0, 1] > 0.98


def test_the_twenty_four_orders_are_equally_likely():
    """With the next test, which shows that an image follows the order that it drew."""
    chance = torch.rand(4800, View()._needs(3)["jitter"], generator=rng()).numpy()
    place, order = draw.whole_number(chance[:, 1], 4), draw.whole_number(chance[:, 2], 6)
    counts = np.bincount((place * 6 + order).astype(int), minlength=24)
    assert len(counts) == 24
    assert counts.min() > 150
    assert counts.max() < 250


def test_faithful_jitter_follows_the_drawn_order():
    """A batch against the operations done one image at a time in the order it drew."""
    pixels = make_images(64)
    view = View(**OFF | {"jitter": 0.8, "hue": 0.3, "brightness": 0.8, "contrast": 0.8})
    made = view(pixels, rng(5))
    chance = torch.rand(64, 7, generator=rng(5)).numpy()
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for index in range(64):
        planes = planes_of(pixels[index : index + 1])
        if chance[index, 0] < 0.8:
            factors = draw.factors(chance[index : index + 1, 3:], (0.8, 0.8, 0.4, 0.3))
            todo: list[int] = list(orders[int(chance[index, 2] * 6)])
            todo.insert(int(chance[index, 1] * 4), 3)
            for which in todo:
                if which == 3:
                    turn = draw.hue_offsets(factors[:, 3])
                    ops.shift_hue(planes, torch.from_numpy(turn))
                    continue
                other = (
                    torch.zeros(1),
                    (planes[:, 0] * torch.tensor(ops.LUMA)[:, None, None]).sum(0).mean(),
                    (planes[:, 0] * torch.tensor(ops.LUMA)[:, None, None]).sum(0),
                )[which]
                factor = float(factors[0, which])
                planes = (factor * planes + (1 - factor) * other).clamp(0, 1)
        assert torch.allclose(made[index], planes[:, 0], atol=2e-5)


def test_faithful_and_fast_agree_in_distribution():
    pixels = make_images(1500)
    for settings in ({}, {"blur": 0.5}, {"saturation": 0.2, "crop_min": 0.5, "solarise": 0.2}):
        one, two = (View(mode=mode, **settings)(pixels, rng()) for mode in MODES)
        assert one.mean((0, 2, 3)).tolist() == pytest.approx(
            two.mean((0, 2, 3)).tolist(), abs=0.015
        )
        assert one.std((0, 2, 3)).tolist() == pytest.approx(two.std((0, 2, 3)).tolist(), abs=0.03)
        inside = [made.std((2, 3)).mean().item() for made in (one, two)]
        assert inside[0] == pytest.approx(inside[1], rel=0.05)
        colourful = [made.std(1).mean().item() for made in (one, two)]
        assert colourful[0] == pytest.approx(colourful[1], rel=0.1)


# ---- chance and layout ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mode", MODES)
def test_presets_give_same_bits_for_same_chance_in_the_promised_layout(name, mode):
    pixels = make_images(6)
    views = preset(name, mode=mode)
    state = torch.get_rng_state()
    first, second = views(pixels, rng(7)), views(pixels, rng(7))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched
    assert len(first) == len(views.pipelines)
    for view, one, two in zip(views.pipelines, first, second, strict=True):
        side = view.size or 32
        assert torch.equal(one, two)
        assert one.dtype == torch.float32
        assert one.shape == (6, 3, side, side)
        assert one.is_contiguous(memory_format=torch.channels_last)
        extremes = torch.tensor((0, 255), dtype=torch.uint8)[:, None, None, None]
        black, white = plain(extremes.expand(2, 1, 1, 3), view.mean, view.std)
        assert (one >= black - 1e-5).all()
        assert (one <= white + 1e-5).all()
    if name not in ("none", "orch_rot"):
        assert not torch.equal(first[0], views(pixels, rng(8))[0])
        assert not torch.equal(first[0][:, :, :8, :8], first[1][:, :, :8, :8])


@pytest.mark.parametrize("mode", MODES)
def test_images_of_a_batch_have_their_own_parameters(mode):
    same = make_images(1).expand(40, -1, -1, -1).contiguous()
    made = View(mode=mode, blur=0.5)(same, rng()).flatten(1)
    assert torch.cdist(made, made).fill_diagonal_(1).min() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_an_image_is_the_same_in_any_batch(mode):
    pixels = make_images(24)
    view = View(mode=mode, blur=0.5, solarise=0.2)
    whole = view(pixels, rng())
    assert torch.allclose(view(pixels[:5], rng())[:5], whole[:5], atol=1e-5)
    other = torch.cat((pixels[:5], 255 - pixels[5:]))
    assert torch.allclose(view(other, rng())[:5], whole[:5], atol=1e-5)
    pair = Views((view, view))(pixels, rng())
    generator = rng()
    apart = [view(pixels, generator), view(pixels, generator)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(pair, apart, strict=True))


def test_large_batches_are_worked_on_in_pieces_without_a_seam(monkeypatch):
    pixels = make_images(30)
    view = View(blur=0.5, quarter_turn=True)
    whole = view(pixels, rng())
    monkeypatch.setattr("harmonium.data.augment.pipeline.PIECE_PIXELS", 7 * 32 * 32)
    assert torch.allclose(view(pixels, rng()), whole, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_how_much_is_drawn_does_not_depend_on_the_images(mode):
    view = View(mode=mode, blur=0.5)
    after = []
    for pixels in (make_images(9), torch.zeros(9, 32, 32, 3, dtype=torch.uint8)):
        generator = rng()
        view(pixels, generator)
        after.append(generator.get_state())
    assert torch.equal(*after)


def test_an_operation_that_never_happens_draws_nothing():
    generator = rng()
    before = generator.get_state()
    View(**OFF)(make_images(3), generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(
    ("height", "width", "channels"), [(8, 8, 1), (28, 28, 1), (40, 24, 3), (224, 224, 3)]
)
def test_sizes_from_digits_to_photographs(mode, count, height, width, channels):
    pixels = make_images(max(count, 1), height, width, channels)[:count]
    views = preset("fedca", mode=mode, solarise=0.3, rotate=10.0)
    for made in views(pixels, rng()):
        assert made.shape == (count, channels, height, width)
        assert made.isfinite().all()
    small = View(mode=mode, size=16)(pixels, rng())
    assert small.shape == (count, channels, 16, 16)


@pytest.mark.parametrize("mode", MODES)
def test_grey_images_change_brightness_and_contrast_only(mode):
    pixels = make_images(500, 8, 8, 1)
    colour = {"brightness": 0.0, "contrast": 0.0, "jitter": 1.0, "gray": 1.0}
    untouched = View(mode=mode, **OFF | colour)(pixels, rng())
    assert torch.equal(untouched, plain(pixels, None, None))
    made = View(mode=mode, **OFF | {"jitter": 1.0})(pixels, rng())
    gain = made.std((1, 2, 3)) / plain(pixels, None, None).std((1, 2, 3))
    assert gain.std() > 0.15
    rgb = View(mode=mode, **OFF | {"jitter": 1.0, "hue": 0.0, "saturation": 0.0})(
        pixels.expand(-1, -1, -1, 3).contiguous(), rng()
    )
    assert torch.allclose(rgb, made.expand(-1, 3, -1, -1), atol=1e-5)


def test_plain_normalises_and_resizes():
    pixels = make_images(2, 64, 64)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    made = plain(pixels, mean, std)
    want = pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean)[:, None, None]
    assert torch.allclose(made, want / torch.tensor(std)[:, None, None])
    assert made.is_contiguous(memory_format=torch.channels_last)
    small = plain(pixels, None, None, size=16) * 255
    for index, image in enumerate(pillow(pixels)):
        want = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR), np.float32)
        assert np.abs(small[index].permute(1, 2, 0).numpy() - want).max() < 1.6


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fats"}, "views.mode is 'fats': did you mean 'fast'?"),
        ({"flip": 1.5}, "views.flip is 1.5"),
        ({"flip": "yes"}, "views.flip is 'yes'"),
        ({"hue": 0.6}, "views.hue is 0.6"),
        ({"brightness": -1}, "views.brightness is -1"),
        ({"brightness": math.nan}, "views.brightness is nan"),
        ({"crop_min": 0}, "views.crop_min and crop_max: (0, 1.0): give two numbers, 0 < first"),
        ({"crop_min": 0.9, "crop_max": 0.5}, "0 < first <= second, the second at most 1"),
        ({"aspect": (2, 1)}, "views.aspect: (2, 1): give two numbers, 0 < first <= second"),
        ({"aspect": 1}, "views.aspect: 1: give two numbers"),
        ({"blur_kernel": 4}, "views.blur_kernel is 4"),
        ({"size": 3.5}, "views.size is 3.5"),
        ({"mean": None}, "views.mean is None: give 1 to 4 numbers, or none for both"),
        ({"std": (0.0,)}, "views.std is (0.0,): give numbers above 0"),
        ({"interpolation": "cubic"}, "did you mean 'bicubic'?"),
    ],
)
def test_wrong_settings_are_named_with_what_would_be_right(settings, message):
    with pytest.raises(ConfigError) as caught:
        View(**settings)
    assert message in str(caught.value)


def test_unknown_presets_and_settings_name_the_nearest():
    with pytest.raises(ConfigError, match="'orchestr'.*'orchestra'"):
        preset("orchestr")
    with pytest.raises(ConfigError, match="'blurr'.*'blur'"):
        preset("simclr", blurr=1)
    with pytest.raises(ConfigError, match="views.blur is 2"):
        preset("simclr", blur=2)


def test_settings_that_do_not_fit_the_images():
    with pytest.raises(ConfigError, match="quarter_turn needs square views .* set view.size"):
        View(quarter_turn=True)(make_images(1, 20, 30), rng())
    with pytest.raises(ConfigError, match="pad_crop is 8 but images are 8 x 8"):
        View(pad_crop=8)(make_images(1, 8, 8), rng())
    with pytest.raises(ConfigError, match="size is 60 .* padded by 4"):
        View(pad_crop=4, size=60)(make_images(1), rng())
    with pytest.raises(ConfigError, match="blur_kernel is 17"):
        View(blur=1, blur_kernel=17)(make_images(1, 8, 8), rng())
    for wrong in (make_images(1).float(), make_images(1)[0], make_images(1).permute(0, 3, 1, 2)):
        with pytest.raises(DataError, match="views need torch.uint8 of shape"):
            View()(wrong, rng())
        with pytest.raises(DataError, match="views need torch.uint8 of shape"):
            plain(wrong)


def test_grey_images_take_the_mean_of_numbers_for_colours():
    mean, std = (0.3, 0.4, 0.8), (0.2, 0.2, 0.5)
    grey = make_images(2, 8, 8, 1)
    torch.testing.assert_close(plain(grey, mean, std), plain(grey, (0.5,), (0.3,)))
    sized = plain(grey, mean, std, size=6)
    torch.testing.assert_close(sized, plain(grey, (0.5,), (0.3,), size=6))
    for name in PRESETS:
        assert all(view.shape[1] == 1 for view in preset(name, pad_crop=0)(grey, rng())), name


def test_lists_from_a_recipe_become_tuples_and_changes_reach_every_pipeline():
    views = preset("orchestra", mean=[0.1, 0.2, 0.3], std=[1, 1, 1], mode="fast")
    assert [view.mean for view in views.pipelines] == [(0.1, 0.2, 0.3)] * 2
    assert [view.blur for view in views.pipelines] == [0.5, 0.1]
    assert hash(views) == hash(dataclasses.replace(views))


def test_every_published_recipe_has_its_preset():
    published = "fedsimclr fedstyle fedstyle_224 fedca fedsc orchestra orchestra_turned orch_simclr"
    published += " orch_byol orch_spec orch_rot easyfl fedx fedx_svhn hao"
    assert set(published.split()) <= set(PRESETS)
    turned = PRESETS["orchestra_turned"]
    assert turned[:2] == PRESETS["orchestra"]
    assert turned[2] == dataclasses.replace(turned[0], quarter_turn=True)
    assert PRESETS["fedstyle_224"][0].size == 224
    assert PRESETS["fedsc"][0].mean == (0.4914, 0.4822, 0.4465)
    assert not any(view.blur for view in PRESETS["fedsimclr"] + PRESETS["hao"] + PRESETS["easyfl"])


def test_presets_say_what_the_papers_say():
    assert PRESETS["simclr"] == (View(),) * 2
    first, second = PRESETS["orchestra"]
    assert (first.crop_min, first.saturation, first.interpolation) == (0.5, 0.2, "bicubic")
    assert (second.blur, second.solarise) == (0.1, 0.2)
    assert [view.blur for view in PRESETS["orch_byol"]] == [1, 0.1]
    assert [view.crop_min for view in PRESETS["orch_spec"]] == [0.08, 0.2]
    assert (PRESETS["easyfl"][0].hue, PRESETS["easyfl"][0].mean) == (0.2, None)
    assert (PRESETS["fedx"][0].pad_crop, PRESETS["fedx"][0].jitter) == (4, 0)
    assert (PRESETS["fedx_svhn"][0].rotate, PRESETS["fedx_svhn"][0].flip) == (15, 0)
    assert PRESETS["fedca"][0].blur == 0.5
    assert PRESETS["digits"][0].flip == 0
