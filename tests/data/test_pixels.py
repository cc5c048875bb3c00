"""Levels beyond 8 bits, 1 to 4 channels, and images that are not square, in training and in use."""

import json

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image

import harmonium
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.augment.operations import luma
from harmonium.data.augment.randaugment import colour
from harmonium.data.augment.sobel import sobel
from harmonium.data.augment.views import preset
from harmonium.data.decoding import pool
from harmonium.data.decoding.conversion import Levels, read_image, shaped
from harmonium.data.decoding.in_memory import channels_last
from harmonium.data.images import Images
from harmonium.data.sets.folder import Folder
from harmonium.data.sets.npz import Npz
from harmonium.data.shift import turned
from harmonium.report.contact_sheets import ContactSheet, mosaic
from harmonium.report.split_plots import contact_sheet

SMALL = {"encoder.width": 4, "rounds": 1, "clients": 2, "engine.workers": 0}


@pytest.fixture(autouse=True)
def surroundings(home, undrawn, monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def random(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---- levels --------------------------------------------------------------------------------------


def test_sixteen_bits_by_depth_window_or_percentiles(tmp_path):
    values = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    Image.fromarray(values).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        for levels, low, high in (
            (Levels(12), 0, 4095),
            (Levels(16), 0, 65535),
            (Levels(16, (1000.5, 201)), 900, 1100),
            (Levels(16, None, (25, 75)), np.percentile(values, 25), np.percentile(values, 75)),
        ):
            expected = np.clip((values.astype(float) - low) * 255.0 / (high - low), 0, 255)
            assert np.abs(read_image(image, None, 1, levels)[..., 0] - expected).max() <= 0.51


def test_floating_point_images_need_a_range(tmp_path):
    values = np.linspace(-1000, 1000, 64, dtype=np.float32).reshape(8, 8)
    for number in range(4):
        Image.fromarray(values).save(tmp_path / f"{number}.tif")
    folder = {"path": str(tmp_path), "channels": 1, "validation": 0, "test": 0}
    with pytest.raises(DataError, match="range is unknown: set data.window"):
        Folder(**folder).load()
    pixels = Folder(**folder, window=(0, 2001)).load().train.pixels[0, ..., 0]
    assert np.abs(pixels - np.linspace(0, 255, 64).reshape(8, 8)).max() <= 0.6
    values[0, 0] = np.nan
    with pytest.raises(DataError, match="not numbers"):
        read_image(Image.fromarray(values), None, 1, Levels(window=(0, 10)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"window": (40, 0)}, r"data.window=\[40,0\]"),
        ({"percentiles": (99, 1)}, r"data.percentiles=\[99,1\]"),
        ({"percentiles": (0, 101)}, "data.percentiles"),
        ({"window": (1, 2), "percentiles": (1, 99)}, "data.window and data.percentiles"),
        ({"fit": "squeeze"}, "data.fit=squeeze"),
    ],
)
def test_settings_that_cannot_be_right(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        Folder(path=str(tmp_path), **settings).check()


def test_defaults_change_no_cache_key_and_no_digest(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    known = {"path", "files", "corrupt", "mixed", "depth", "size", "channels"}
    assert set(Folder(path=str(tmp_path), size=8)._whole_identity()) == known
    named = Folder(path=str(tmp_path), size=8, fit="pad", window=(1, 2))._whole_identity()
    assert set(named) == known | {"fit", "window"}


# ---- shapes --------------------------------------------------------------------------------------


def test_every_fit_of_a_tall_image():
    tall = np.zeros((40, 20, 3), np.uint8)
    tall[10:30] = (0, 0, 255)
    image = Image.fromarray(tall)
    assert (read_image(image, 20, 3) == (0, 0, 255)).all()
    stretched = read_image(image, 20, 3, fit="resize")
    assert (stretched[6:14] == (0, 0, 255)).all() and (stretched[[0, -1]] == 0).all()
    padded = read_image(image, 20, 3, fit="pad")
    assert (padded[:, :5] == 0).all() and (padded[:, 15:] == 0).all()
    assert (padded[7:13, 6:14] == (0, 0, 255)).all()
    assert np.array_equal(
        read_image(image.transpose(Image.Transpose.TRANSPOSE), 20, 3, fit="pad"),
        padded.transpose(1, 0, 2),
    )


@pytest.mark.parametrize("fit", ["cut", "resize", "pad"])
def test_the_encoder_fits_images_as_training_did(tmp_path, fit):
    wide = random(24, 9, 20, 3)
    np.savez(tmp_path / "a.npz", x=wide)
    data = {"name": "npz", "path": str(tmp_path / "a.npz"), "size": 12, "fit": fit}
    data |= {"validation": 0, "test": 0}
    run = harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **SMALL)
    encoder = harmonium.load_encoder(run)
    stored = Npz(**{k: v for k, v in data.items() if k != "name"}).load().train.pixels
    assert np.array_equal(np.sort(stored, 0), np.sort(shaped(wide, 12, 3, fit), 0))
    prepared = encoder.prepare(wide)
    assert torch.equal(prepared, encoder.prepare(shaped(wide, 12, 3, fit)))
    for number, image in enumerate(wide[:2]):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = encoder.embed([tmp_path / "0.png", tmp_path / "1.png"])
    assert torch.allclose(files, encoder.embed(wide[:2]), atol=1e-6)
    with safetensors.safe_open(tmp_path / "run" / "encoder.safetensors", "pt") as file:
        about = json.loads(file.metadata()["harmonium"])
    keys = ("fit", "window", "percentiles", "depth", "frames", "channels", "size")
    assert [about[key] for key in keys] == [fit, None, None, 16, "all", 3, [12, 12]]


# ---- channels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [2, 4])
def test_channels_are_resized_each_by_itself(channels):
    pixels = random(3, 20, 30, channels)
    pixels[..., -1] = 0  # as transparency it would hide all others
    small = shaped(pixels, 10, None)
    for channel in range(channels):
        assert np.array_equal(small[..., [channel]], shaped(pixels[..., [channel]], 10, None))
    assert np.array_equal(turned(pixels, np.zeros(3, np.float32)), pixels)
    with pytest.raises(DataError, match=f"{channels} channels cannot have 3"):
        shaped(pixels, 10, 3)


def test_files_with_four_channels(tmp_path):
    for mode in ("RGBA", "CMYK"):
        for number in range(3):
            path = tmp_path / mode / f"{number}.tif"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(random(8, 8, 4, seed=number), mode).save(path)
    settings = {"channels": 4, "validation": 0, "test": 0}
    for mode in ("RGBA", "CMYK"):
        data = Folder(path=str(tmp_path / mode), **settings).load()
        assert data.train.shape == (8, 8, 4)
        wanted = {random(8, 8, 4, seed=number).tobytes() for number in range(3)}
        assert {image.tobytes() for image in data.train.pixels} == wanted
    Image.fromarray(random(8, 8, 3)).save(tmp_path / "RGBA" / "opaque.png")
    data = Folder(path=str(tmp_path / "RGBA"), **settings).load()
    assert sorted(data.train.pixels[..., 3].min((1, 2)).tolist())[-1] == 255
    with pytest.raises(DataError, match="3 of 7 images are CMYK.*data.channels=3"):
        Folder(path=str(tmp_path), **settings).load()
    Image.fromarray(random(8, 8, 2), "LA").save(tmp_path / "two.png")
    with Image.open(tmp_path / "two.png") as image:
        assert np.array_equal(read_image(image, None, 2), random(8, 8, 2))


@pytest.mark.parametrize("mode", ["faithful", "fast"])
@pytest.mark.parametrize("channels", [2, 4])
def test_views_change_brightness_and_contrast_of_all_channels(mode, channels):
    pixels = torch.from_numpy(random(64, 8, 8, channels))
    rng = torch.Generator().manual_seed(0)
    still = {"crop_min": 1.0, "flip": 0.0, "mode": mode, "mean": None, "std": None, "blur": 0.0}
    view = preset("simclr", **still, jitter=1.0, brightness=0.3, contrast=0.0, gray=1.0)
    bright = view(pixels, rng)[0]
    ratio = bright / (pixels.permute(0, 3, 1, 2) / 255).clamp(min=1e-6)
    inside = (pixels.permute(0, 3, 1, 2) > 0) & (bright < 1)
    for image, seen in zip(ratio, inside, strict=True):
        assert image[seen].std() < 1e-4  # one factor for all channels
    flat = torch.full((4, 8, 8, channels), 90, dtype=torch.uint8)
    contrast = preset("simclr", **still, jitter=1.0, brightness=0.0, contrast=0.9, gray=1.0)
    assert torch.allclose(contrast(flat, rng)[0], torch.tensor(90 / 255), atol=1e-5)
    coloured = preset("simclr", **still, jitter=1.0, brightness=0.0, contrast=0.0, hue=0.5)
    assert torch.allclose(coloured(pixels, rng)[0], pixels.permute(0, 3, 1, 2) / 255, atol=1e-6)
    everything = preset("simclr", mode=mode, randaugment=2, blur=0.5, solarise=0.5, rotate=20.0)
    assert torch.isfinite(everything(pixels, rng)[0]).all()
    planes = pixels.permute(3, 0, 1, 2).float()
    assert torch.equal(colour(planes, 1.0, torch.ones(64)), planes)
    three = preset("simclr", mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2)).plain(pixels)
    assert torch.allclose(three, (pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.2, atol=1e-5)


def test_light_and_edges_of_other_channels_are_those_of_their_mean():
    pixels = random(2, 8, 8, 4)
    planes = torch.from_numpy(pixels).permute(3, 0, 1, 2) / 255
    assert torch.allclose(luma(planes), planes.mean(0))
    same = np.repeat(pixels[..., :1], 4, 3)
    edges = sobel(torch.from_numpy(same))
    assert torch.equal(edges[..., :1], sobel(torch.from_numpy(same[..., :1])))


@pytest.mark.parametrize("channels", [2, 4])
def test_a_run_on_other_channels(tmp_path, channels):
    pixels = random(24, 10, 10, channels)
    labels = np.arange(24) % 2
    np.savez(tmp_path / "a.npz", x=pixels, y=labels)
    data = {"name": "npz", "path": str(tmp_path / "a.npz")}
    run = harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **SMALL)
    encoder = harmonium.load_encoder(run)
    features = encoder.embed(pixels)
    assert encoder.channels == channels
    for form in (list(pixels), pixels.transpose(0, 3, 1, 2)):
        layout = None if isinstance(form, list) else "NCHW"
        loaded = harmonium.load_encoder(run, layout=layout)
        assert torch.allclose(loaded.embed(form), features, atol=1e-5)
    with pytest.raises(DataError, match=f"3 channels cannot have {channels}"):
        encoder.embed(random(2, 10, 10, 3))
    contact_sheet(tmp_path / "a.png", [("a", pixels[:3])], "a")
    sheet = ContactSheet(pixels[:6].reshape(2, 3, 10, 10, channels), np.ones((2, 3), bool))
    assert mosaic(sheet).shape[2] == 3


def test_arrays_that_were_understood_before_still_are():
    shapes = {
        (5, 12, 12, 2): (5, 12, 12, 2),
        (5, 12, 12, 4): (5, 12, 12, 4),
        (5, 4, 12, 3): (5, 4, 12, 3),
        (4, 12, 12): (4, 12, 12, 1),
        (2, 12, 12): (2, 12, 12, 1),
        (12, 12, 4): (12, 12, 4, 1),
    }
    for shape, wanted in shapes.items():
        found = channels_last(np.zeros(shape, np.uint8), None, "images", "")
        assert found.shape == wanted
    assert channels_last(np.zeros((12, 12, 4), np.uint8), None, "images", "", 4).shape[0] == 1
    for shape in ((5, 4, 12, 12), (5, 2, 12, 4)):
        with pytest.raises(DataError, match="channels first"):
            channels_last(np.zeros(shape, np.uint8), None, "images", "give layout")
    assert Images(random(2, 8, 8, 2), np.zeros(2, np.int64)).shape == (8, 8, 2)
