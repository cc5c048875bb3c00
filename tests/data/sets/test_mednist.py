"""MedNIST: a folder for each kind, small grey images."""

import io

import pytest
from PIL import Image

from harmonium.data.datasets import datasets
from harmonium.data.decoding import pool

CLASSES = ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def scan(value, mode="L", side=64):
    file = io.BytesIO()
    Image.new(mode, (side, side), value).save(file, "JPEG", quality=95)
    return file.getvalue()


def tree():
    files = {
        f"{name}/{number:06d}.jpeg": scan(40 * row + 5 * number)
        for row, name in enumerate(CLASSES)
        for number in range(5)
    }
    return {**files, "README.md": b"# MedNIST\n"}


def test_the_tree_is_read(fetched):
    fetched("mednist", tree())
    data = datasets["mednist"](validation=0).load()
    assert data.classes == CLASSES and data.train.shape == (64, 64, 1)
    assert (len(data.train), len(data.test)) == (24, 6)
    for part in (data.train, data.test):
        assert part.labels.tolist() == (part.pixels[:, 0, 0, 0] // 40).tolist()
    assert data.notes == ()
    assert datasets["mednist"](size=28, channels=3).load().train.shape == (28, 28, 3)


def test_odd_images(fetched, refused):
    odd = {"CXR/000009.jpeg": scan(0, side=32), "Hand/000009.jpeg": scan((9, 9, 9), "RGB")}
    fetched("mednist", {**tree(), **odd})
    assert "1 of 32 images differ in size from most, which are 64x64: CXR/0" in refused("mednist")
    data = datasets["mednist"](mixed="skip", validation=0, test=0).load()
    assert len(data.train) == 30
    assert "1 of 32" in refused("mednist")  # also now that the others are decoded
    assert ["size" in data.notes[0], "mode" in data.notes[1], len(data.notes)] == [True, True, 2]


def test_a_missing_class(fetched, refused):
    fetched("mednist", {name: content for name, content in tree().items() if name[:4] != "Hand"})
    assert "Hand cannot be read: No such file" in refused("mednist")
