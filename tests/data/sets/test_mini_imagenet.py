"""mini-ImageNet: both layouts that are handed round give the same images."""

import io

import pytest
from PIL import Image

from harmonium.data.datasets import datasets
from harmonium.data.decoding import pool

CLASSES = {"train": ("n01532829", "n01558993"), "val": ("n01855672",), "test": ("n01930112",)}


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(pool, "_cores", lambda: 0)


def photo(value):
    """Wider than high, as most of ImageNet."""
    file = io.BytesIO()
    Image.new("RGB", (100, 90), (value,) * 3).save(file, "JPEG", quality=95)
    return file.getvalue()


def image_files():
    """Part, class, file name and content of six images of each of the four classes."""
    names = [(part, name) for part, some in CLASSES.items() for name in some]
    for row, (part, name) in enumerate(names):
        for number in range(6):
            yield part, name, f"{name}{number + 5:08d}.jpg", photo(60 * row + 8 * number)


def with_tables(gap=","):
    files = {f"{part}.csv": f"filename{gap}label\n".encode() for part in CLASSES}
    for part, name, file, content in image_files():
        files[f"images/{file}"] = content
        files[f"{part}.csv"] += f"{file}{gap}{name}\n".encode()
    return files


def with_folders():
    return {f"{part}/{name}/{file}": content for part, name, file, content in image_files()}


@pytest.mark.parametrize("files", [with_tables(), with_tables(", "), with_folders()])
def test_the_parts_are_joined_and_a_sixth_is_held_out(fetched, files):
    fetched("mini-imagenet", files)
    data = datasets["mini-imagenet"](validation=0).load()
    assert data.classes == ("n01532829", "n01558993", "n01855672", "n01930112")
    assert data.train.shape == (84, 84, 3)
    assert (len(data.train), len(data.test)) == (20, 4)
    for part in (data.train, data.test):
        values = part.pixels[:, 0, 0, 0]
        assert part.labels.tolist() == (values // 60).tolist()
    assert data.notes == ()


def test_the_size_can_be_chosen(fetched):
    fetched("mini-imagenet", with_folders())
    assert datasets["mini-imagenet"](size=32, test=0).load().train.shape == (32, 32, 3)
    assert datasets["mini-imagenet"](size=None).load().train.shape == (90, 100, 3)


def test_what_is_not_there(fetched, refused):
    files = with_tables()
    del files["images/n0153282900000005.jpg"]
    fetched("mini-imagenet", files)
    assert "images/n0153282900000005.jpg (no such file" in refused("mini-imagenet")
    fetched("mini-imagenet", {"train.csv": b"name,label\na.jpg,n01532829\n"})
    said = refused("mini-imagenet")
    assert said.endswith("train.csv has no column 'filename', only name, label")


@pytest.mark.parametrize("name", ["../../../outside.png", "/etc/outside.png", "a/../../../b.png"])
def test_names_that_lead_out_are_refused(fetched, refused, home, name):
    (home / "outside.png").parent.mkdir(parents=True, exist_ok=True)
    (home / "outside.png").write_bytes(photo(1))
    fetched("mini-imagenet", with_tables() | {"val.csv": f"filename,label\n{name},n01\n".encode()})
    assert f"lists '{name}', which lies outside" in refused("mini-imagenet")
