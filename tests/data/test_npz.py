"""NumPy archives: every layout that is understood, and refusals that say what is wrong."""

import re

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.sets.npz import Npz


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))


def numbered(count, height=4, width=5, channels=3):
    """Images that can be told apart: image i is filled with i."""
    pixels = np.empty((count, height, width, channels), np.uint8)
    pixels[:] = np.arange(count).reshape(-1, 1, 1, 1)
    return pixels


def which(images):
    """The numbers of numbered images."""
    return images.pixels[:, 0, 0, 0].tolist()


def archive(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    "shape", [(8, 6, 7), (8, 6, 7, 1), (8, 1, 6, 7), (8, 6, 7, 3), (8, 3, 6, 7)], ids=str
)
def test_npz_orders_of_axes(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = Npz(path=archive(tmp_path / "x.npz", x=pixels), validation=0, test=0).load()
    channels = 3 if 3 in shape else 1
    assert data.train.shape == (6, 7, channels)
    found = {image.tobytes() for image in data.train.pixels}
    if first := len(shape) == 4 and shape[1] in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
        assert data.notes[0].endswith(f"{shape}, which is read as (n, channels, height, width)")
    assert len(data.notes) == first
    assert found == {image.tobytes() for image in pixels}


def test_npz_like_medmnist(tmp_path):
    names = [("train", 12), ("val", 3), ("test", 5)]
    arrays = {f"{part}_images": numbered(n)[..., 0] for part, n in names}
    arrays |= {f"{part}_labels": (np.arange(n) % 3)[:, None].astype(np.uint8) for part, n in names}
    data = Npz(path=archive(tmp_path / "med.npz", **arrays)).load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [12, 3, 5]
    assert data.classes == ("0", "1", "2") and data.test.labels.tolist() == [0, 1, 2, 0, 1]


def test_npz_names_maps_and_columns(tmp_path):
    path = archive(
        tmp_path / "x.npz",
        **{"x": numbered(6), "y": np.array([10, 30, 10, 30, 20, -1]), "site": np.arange(6) // 2},
        **{"scale": np.linspace(0, 1, 6), "other": np.arange(4)},
    )
    data = Npz(path=path, validation=0, test=0).load()
    assert data.classes == ("10", "20", "30")
    by_number = dict(zip(which(data.train), data.train.labels, strict=True))
    assert [int(by_number[i]) for i in range(6)] == [0, 2, 0, 2, 1, -1]
    assert list(data.train.factors) == ["site"]
    assert data.train.factors["site"].tolist() == [i // 2 for i in which(data.train)]
    named = archive(
        tmp_path / "n.npz", x=numbered(2), y=np.array([1, 0]), classes=np.array(["cat", "dog"])
    )
    assert Npz(path=named, validation=0, test=0).load().classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((3, 4, 4, 3), np.float32)}, "float32.*convert"),
        ({"x": np.zeros((3, 6, 6, 5), np.uint8)}, "1 to 4 channels"),
        (
            {"x": np.zeros((9, 3, 8, 3), np.uint8)},
            r"first or last; give .*transpose",
        ),
        ({"x": np.zeros((9, 1, 8, 1), np.uint8)}, "images 'x' of .*first or last; give"),
        ({"x": np.zeros((8, 8, 3), np.uint8)}, "set of images; give"),
        ({"x": numbered(3), "y": np.zeros(2, int)}, "labels 'y'.*each of the 3"),
        ({"x": numbered(3), "y": np.zeros((3, 14), int)}, r"shape \(3, 14\)"),
        ({"x": numbered(3), "y": np.zeros(3)}, "labels 'y'"),
        ({"x": numbered(3), "y": np.arange(3), "classes": np.array(["a"])}, "names 1 classes"),
        ({"photos": numbered(3)}, "holds photos; expected train_x"),
        ({"x": np.array([{"code": 1}], dtype=object)}, "cannot be read"),
    ],
)
def test_npz_refusals(tmp_path, arrays, says):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=says):
        Npz(path=str(tmp_path / "bad.npz")).load()


def test_npz_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="needs data.path"):
        Npz().load()
    with pytest.raises(DataError, match="no such file"):
        Npz(path=str(tmp_path / "none.npz")).load()
    np.save(tmp_path / "one.npy", numbered(3))
    with pytest.raises(DataError, match="not an .npz"):
        Npz(path=str(tmp_path / "one.npy")).load()


def test_text_columns_become_named_factors_in_every_part(tmp_path):
    sites = np.array(["north", "south", "", "east"])
    np.savez(
        tmp_path / "a.npz",
        train_x=np.zeros((4, 4, 4), np.uint8),
        train_site=sites,
        train_age=np.array([3, 1, 2, 9]),
        test_x=np.zeros((2, 4, 4), np.uint8),
        test_site=np.array(["west", "south"]),
    )
    stored = Npz(path=str(tmp_path / "a.npz")).stored()
    assert stored.names == {"site": ("east", "north", "south", "west")}
    assert stored.parts["train"].factors["site"].tolist() == [1, 2, -1, 0]
    assert stored.parts["train"].factors["age"].tolist() == [3, 1, 2, 9]
    assert stored.parts["test"].factors["site"].tolist() == [3, 2]


def test_text_labels_are_classes(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        train_x=np.zeros((4, 4, 4), np.uint8),
        train_y=np.array(["cat", "", "ant", "cat"]),
        test_x=np.zeros((2, 4, 4), np.uint8),
        test_y=np.array(["bee", "ant"]),
    )
    stored = Npz(path=str(tmp_path / "a.npz")).stored()
    assert stored.classes == ("ant", "bee", "cat")
    assert stored.parts["train"].labels.tolist() == [2, -1, 0, 2]
    assert stored.parts["test"].labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (np.array(["a"] * 6, object), "it holds Python objects; save it as text"),
        (np.array(["a"] * 5), r"its shape \(5,\) is not one value for each image"),
        (np.linspace(0, 1, 6), "it is neither whole numbers nor text"),
    ],
)
def test_arrays_that_are_left_out_are_named(tmp_path, column, says):
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 4, 4), np.uint8), site=column)
    (note,) = Npz(path=str(tmp_path / "a.npz")).stored().notes
    assert re.search(f"^'site' is left out: {says}", note)
