"""A trained encoder takes images as a program holds them, and never misreads them in silence."""

import copy
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from PIL import Image

import harmonium
from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.data.decoding.conversion import read_image
from harmonium.data.decoding.in_memory import channels_last, check_strict
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import LoadedEncoder, load_encoder

SMALL: dict[str, Any] = {
    "rounds": 1,
    "clients": 2,
    "encoder": {"name": "cnn-small", "width": 4, "out": 8},
    "evaluate": {"k": 2, "health": 16, "labels_per_class": []},
    "engine": {"workers": 0},
}
Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A run on colour images of 12 x 12."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    data = {"name": "shapes", "size": 12, "limit": 120}
    harmonium.run("fedavg", data=data, out=folder, **SMALL)
    return folder


@pytest.fixture
def encoder(trained: Path) -> LoadedEncoder:
    return load_encoder(trained)


def random(*shape: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_metadata_says_what_the_encoder_takes(encoder: LoadedEncoder, trained: Path) -> None:
    assert (encoder.size, encoder.channels, encoder.features) == ((12, 12), 3, 8)
    assert encoder.mean and encoder.std and len(encoder.digest) == 64
    assert encoder.method == "fedavg" and encoder.data == "shapes"
    recorded = json.loads((trained / "about.json").read_text())["recipe"]
    assert encoder.recipe == recorded
    assert "12 x 12" in repr(encoder) and "\n" not in repr(encoder)


def test_every_form_of_the_same_images_gives_the_same_features(trained: Path) -> None:
    pixels, plain = random(5, 12, 12, 3), load_encoder(trained)
    wanted = plain(torch.from_numpy(pixels))
    pillow = [Image.fromarray(one) for one in pixels]
    for form in (pixels, list(pixels), pillow, [pillow[0], *pixels[1:]]):
        torch.testing.assert_close(plain(form), wanted, rtol=0, atol=0)
    assert torch.equal(plain(pillow[2]), plain(pixels[2])) and plain(pillow[2]).shape == (1, 8)
    first = load_encoder(trained, layout="NCHW")
    for form in (pixels.transpose(0, 3, 1, 2), torch.from_numpy(pixels).permute(0, 3, 1, 2)):
        torch.testing.assert_close(first(form), wanted)
    assert torch.equal(first(pixels[0].transpose(2, 0, 1)), plain(pixels[:1]))


@pytest.mark.parametrize("sides", [(11, 12), (28, 20), (13, 13), (6, 40)])
def test_images_of_another_size_are_resized_as_in_training(
    encoder: LoadedEncoder, trained: Path, sides: tuple[int, int]
) -> None:
    one = random(*sides, 3)
    decoded = read_image(Image.fromarray(one), 12, 3)
    assert torch.equal(encoder(one), encoder(decoded))
    assert torch.equal(encoder(torch.from_numpy(one)[None]), encoder(decoded))
    assert torch.equal(encoder([one, Image.fromarray(one)]), encoder(np.stack([decoded] * 2)))
    strict = load_encoder(trained, strict=True)
    for form in (one, one[None], torch.from_numpy(one)[None], Image.fromarray(one), [one]):
        with pytest.raises(DataError, match="12 x 12"):
            strict(form)
    assert torch.equal(strict(decoded), encoder(decoded))


def test_grey_images_become_colour_and_strict_refuses_them(
    encoder: LoadedEncoder, trained: Path
) -> None:
    grey = random(4, 12, 12)
    wanted = encoder(np.repeat(grey[..., None], 3, 3))
    for form in (grey, grey[..., None], [Image.fromarray(one) for one in grey], list(grey)):
        assert torch.equal(encoder(form), wanted)
    for form in (grey, Image.fromarray(grey[0])):
        with pytest.raises(DataError, match="3 channels: convert them to RGB, or load") as error:
            load_encoder(trained, strict=True)(form)
        assert "resize" not in str(error.value)
    with pytest.raises(DataError, match="3 channels.*RGB"):
        load_encoder(trained, strict=True)(grey[:, :9])
    with pytest.raises(DataError, match="1 channel.*grey"):
        check_strict(True, (12, 12, 3), (12, 12, 1))


@pytest.mark.parametrize("shape", [(5, 3, 12, 12), (5, 1, 12, 12), (3, 12, 12), (5, 3, 12, 3)])
def test_axes_in_doubt_are_refused_with_the_way_out(
    encoder: LoadedEncoder, shape: tuple[int, ...]
) -> None:
    for form in (random(*shape), torch.from_numpy(random(*shape))):
        with pytest.raises(DataError, match="layout="):
            encoder(form)
        with pytest.raises(DataError, match="layout="):
            encoder.embed(form)


def test_an_explicit_layout_leaves_no_doubt() -> None:
    shapes = {
        ("NHWC", (3, 12, 12)): (3, 12, 12, 1),
        ("NCHW", (3, 12, 12)): (1, 12, 12, 3),
        ("NHWC", (12, 12, 3)): (1, 12, 12, 3),
        ("NCHW", (12, 14, 3)): (12, 14, 3, 1),
        ("NCHW", (2, 3, 5, 3)): (2, 5, 3, 3),
        ("NHWC", (2, 3, 5, 3)): (2, 3, 5, 3),
        (None, (1, 12, 12)): (1, 12, 12, 1),
        (None, (7, 12, 12)): (7, 12, 12, 1),
    }
    for (layout, shape), wanted in shapes.items():
        found = channels_last(np.zeros(shape, np.uint8), layout, "images", "")  # type: ignore[arg-type]
        assert found.shape == wanted, (layout, shape)


@pytest.mark.parametrize(
    "images",
    [
        random(5, 12, 12, 4),
        random(5, 2, 12, 12),
        random(2, 2, 12, 12, 3),
        random(7),
        random(2, 12, 12, 3).astype(np.int64),
        random(2, 12, 12, 3).astype(bool),
        np.array([object()] * 3),
        "text",
        None,
        7,
        [random(2, 12, 12, 3)],
        [random(12, 12, 3), "text"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_in_one_line(encoder: LoadedEncoder, images: Any) -> None:
    with pytest.raises(DataError) as refused:
        encoder(images)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_floats_need_their_range_and_the_right_size(encoder: LoadedEncoder, trained: Path) -> None:
    pixels = random(4, 12, 12, 3)
    for form in (pixels / 255, torch.from_numpy(pixels).float() / 255):
        with pytest.raises(DataError, match="value_range"):
            encoder(form)
    scaled = load_encoder(trained, value_range=(0, 1))
    torch.testing.assert_close(scaled(pixels / 255), encoder(pixels))
    torch.testing.assert_close(scaled(pixels), encoder(pixels), rtol=0, atol=0)
    wide = load_encoder(trained, value_range=(-1, 1), layout="NCHW")
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1).requires_grad_()
    wide(images).sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    torch.testing.assert_close(wide(images), encoder(pixels))
    with pytest.raises(DataError, match="value_range"):
        scaled(pixels.astype(np.float32))  # 0 to 255
    with pytest.raises(DataError, match="value_range"):
        scaled(np.full((1, 12, 12, 3), np.nan))
    with pytest.raises(DataError, match="12 x 12"):
        scaled(np.zeros((1, 13, 13, 3)))


@pytest.mark.parametrize(
    "wrong", [{"layout": "HWC"}, {"value_range": 1}, {"value_range": (1, 0)}], ids=str
)
def test_wrong_arguments_are_refused(trained: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load_encoder(trained, **wrong)


def test_embedding_is_the_same_for_any_batch_and_source(
    encoder: LoadedEncoder, tmp_path: Path
) -> None:
    pixels = random(7, 16, 16, 3)
    wanted = encoder(pixels).detach()
    np.save(tmp_path / "mapped.npy", pixels)
    (tmp_path / "files" / "sub").mkdir(parents=True)
    for number, one in enumerate(pixels):
        place = tmp_path / "files" / ("sub" if number > 4 else "")
        Image.fromarray(one).save(place / f"{number}.png")
    files = sorted((tmp_path / "files").rglob("*.png"))
    sources = [
        *(pixels, np.load(tmp_path / "mapped.npy", mmap_mode="r"), torch.from_numpy(pixels)),
        *(list(pixels), (Image.fromarray(one) for one in pixels)),
        *(tmp_path / "files", str(tmp_path / "files"), files),
    ]
    encoder.train()
    for source in sources:
        found = encoder.embed(source, batch=3)
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad and encoder.training
    assert encoder.embed(Image.fromarray(pixels[0])).shape == (1, 8)
    assert encoder.embed(pixels[..., 0], batch=3).shape == (7, 8)  # slices of 3 are not channels
    assert encoder.embed(pixels[:0]).shape == encoder.embed([]).shape == (0, 8)
    (tmp_path / "files" / "torn.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"torn\.png"):
        encoder.embed(tmp_path / "files")
    with pytest.raises(DataError, match="none"):
        encoder.embed(tmp_path / "none")
    with pytest.raises(ConfigError, match="batch"):
        encoder.embed(pixels, batch=0)


def test_strict_embedding_refuses_files_of_another_size(trained: Path, tmp_path: Path) -> None:
    Image.fromarray(random(12, 12, 3)).save(tmp_path / "a.png")
    strict = load_encoder(trained, strict=True)
    assert strict.embed(tmp_path).shape == (1, 8)
    Image.fromarray(random(13, 12, 3)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match="13 x 12"):
        strict.embed(tmp_path)


def test_it_can_be_fine_tuned(encoder: LoadedEncoder) -> None:
    model = torch.nn.Sequential(encoder, torch.nn.Linear(encoder.features, 2))
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    model(random(6, 20, 20, 3)).square().sum().backward()
    optimiser.step()
    assert any(not torch.equal(before[key], value) for key, value in encoder.state_dict().items())
    assert model.double()(random(2, 12, 12, 3)).dtype == torch.float64


@pytest.fixture(scope="module")
def whitened(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A run whose encoder has a whitening."""
    folder = tmp_path_factory.mktemp("whitened") / "run"
    evaluate = {**SMALL["evaluate"], "whiten": True}
    data = {"name": "shapes", "size": 12, "limit": 60}
    harmonium.run("fedavg", data=data, out=folder, **{**SMALL, "evaluate": evaluate})
    return folder


@pytest.mark.parametrize("whiten", [False, 3])
def test_it_is_a_module_like_any_other(whitened: Path, whiten: bool | int) -> None:
    encoder, pixels = load_encoder(whitened, whiten=whiten), random(6, 20, 16, 3)
    wanted = encoder(pixels)
    for dtype, near in ((torch.float16, 0.05), (torch.bfloat16, 0.3), (torch.float64, 1e-4)):
        other = copy.deepcopy(encoder).to(dtype)
        assert other(pixels).dtype == dtype and other.embed(pixels).dtype == torch.float32
        torch.testing.assert_close(other(pixels).float(), wanted, atol=near, rtol=near)
    twin = load_encoder(whitened, whiten=whiten)
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    assert not torch.equal(twin(pixels), wanted)
    twin.load_state_dict(encoder.state_dict())
    assert torch.equal(twin(pixels), wanted) and torch.equal(encoder(pixels), wanted)
    assert copy.deepcopy(encoder).to("meta").features == encoder.features
    encoder.requires_grad_(False)
    assert not encoder(pixels).requires_grad


def test_it_can_be_compiled_and_still_takes_images_of_any_size(encoder: LoadedEncoder) -> None:
    compiled = torch.compile(encoder, backend="eager")
    forms = (random(4, 12, 12, 3), random(4, 9, 30, 3), torch.from_numpy(random(4, 12, 12, 3)))
    for images in (*forms, [Image.fromarray(random(7, 5, 3))]):
        torch.testing.assert_close(compiled(images), encoder(images))
    with pytest.raises(DataError, match="value_range"):
        compiled(torch.zeros(2, 12, 12, 3))


def test_hidden_folders_are_no_images(encoder: LoadedEncoder, tmp_path: Path) -> None:
    for name in ("a.png", ".cache/b.png", "c/.d.png", "c/e.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(random(12, 12, 3)).save(tmp_path / name)
    assert encoder.embed(tmp_path).shape == (2, 8)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "scan.xyz").write_text("")
    with pytest.raises(DataError, match=r"1 \.xyz"):
        encoder.embed(tmp_path / "f")


def test_images_that_are_not_square_keep_their_sides(tmp_path: Path, undrawn: None) -> None:
    np.savez(tmp_path / "data.npz", x=random(40, 10, 16, 1))
    data = {"name": "npz", "path": str(tmp_path / "data.npz")}
    harmonium.run("fedavg", data=data, views="digits", out=tmp_path / "run", **SMALL)
    encoder = load_encoder(tmp_path / "run")
    assert encoder.size == (10, 16) and encoder.channels == 1
    decoded = read_image(Image.fromarray(random(30, 30, 3)), (10, 16), 1)
    assert decoded.shape == (10, 16, 1)
    assert torch.equal(encoder(random(30, 30, 3)), encoder(decoded))


def test_files_of_the_first_format_are_read(trained: Path, tmp_path: Path) -> None:
    path = trained / "encoder.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["harmonium"])
    for key in ("size", "resize", "depth", "features", "sha256"):
        del about[key]
    old = tmp_path / "encoder.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file(weights, old, {"harmonium": json.dumps({**about, "format": 1})})
    pixels = random(3, 12, 12, 3)
    assert torch.equal(load_encoder(old)(pixels), load_encoder(trained)(pixels))
    assert load_encoder(old).size == (12, 12) and load_encoder(old).features == 8


def test_a_flipped_bit_is_noticed_wherever_the_file_lies(trained: Path, tmp_path: Path) -> None:
    data = bytearray((trained / "encoder.safetensors").read_bytes())
    alone = tmp_path / "mine.safetensors"
    alone.write_bytes(data)
    load_encoder(alone)
    data[-3] ^= 1
    alone.write_bytes(data)
    with pytest.raises(StoreError, match="mine.safetensors .*not those"):
        load_encoder(alone)
    with pytest.raises(DataError, match="mine.safetensors is damaged"):
        Recipe.of("fedavg", init=str(alone))


@pytest.mark.parametrize(
    "change",
    [
        "{}",
        "[]",
        "5",
        "null",
        '"text"',
        {"encoder": {}},
        {"encoder": 5},
        {"encoder": {"name": ["x"]}},
        {"prepare": []},
        {"side": "12"},
        {"size": [10**9, 12]},
        {"side": 10**9},
        {"channels": 10**6},
        {"width": 10**8},
        {"width": 10**13},
        {"width": -1},
    ],
    ids=str,
)
def test_what_a_file_says_is_refused_before_anything_is_built(
    trained: Path, tmp_path: Path, change: Any
) -> None:
    path, bad = trained / "encoder.safetensors", tmp_path / "bad.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["harmonium"])
    del about["sha256"]
    if isinstance(change, dict) and "width" in change:
        change = {"encoder": {**about["encoder"], **change}}
    said = change if isinstance(change, str) else json.dumps({**about, **change})
    safetensors.torch.save_file(safetensors.torch.load_file(path), bad, {"harmonium": said})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError) as refused:
        load_encoder(bad)
    assert str(bad) in str(refused.value) and "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


@pytest.mark.parametrize("damage", ["weights", "side", "about", "short"])
def test_a_damaged_file_is_one_error(trained: Path, tmp_path: Path, damage: str) -> None:
    path, weights = trained / "encoder.safetensors", {"w": torch.ones(1)}
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["harmonium"])
    if damage != "weights":
        weights = safetensors.torch.load_file(path)
    if damage == "side":
        del about["side"]
    said = "[]" if damage == "about" else json.dumps(about)
    bad = tmp_path / "encoder.safetensors"
    safetensors.torch.save_file(weights, bad, {"harmonium": said})
    if damage == "short":
        bad.write_bytes(bad.read_bytes()[:-20])
    with pytest.raises(StoreError, match="encoder") as refused:
        load_encoder(bad)
    assert "\n" not in str(refused.value)
