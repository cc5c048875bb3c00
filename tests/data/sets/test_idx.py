"""MNIST and Fashion-MNIST: pixels and labels exactly, and files that are refused."""

import struct

import numpy as np
import pytest

from harmonium.data.datasets import datasets
from harmonium.data.decoding import byte_arrays

NAMES = ("mnist", "fashion-mnist")
TRAIN_X, TRAIN_Y = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_X, TEST_Y = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

rng = np.random.default_rng(0)
TRAIN = rng.integers(0, 256, (7, 28, 28), np.uint8)
TEST = rng.integers(0, 256, (3, 28, 28), np.uint8)
TRAIN_LABELS = np.array([3, 9, 0, 1, 1, 5, 2], np.uint8)
TEST_LABELS = np.array([9, 4, 0], np.uint8)


def idx(array, magic=None):
    magic = 0x0800 + array.ndim if magic is None else magic
    return struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()


def files(**changed):
    found = {TRAIN_X: TRAIN, TRAIN_Y: TRAIN_LABELS, TEST_X: TEST, TEST_Y: TEST_LABELS}
    return {name: idx(array) for name, array in found.items()} | changed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece", [1, 1600, 1 << 20])
def test_pixels_and_labels_are_those_of_the_files(fetched, monkeypatch, name, piece):
    monkeypatch.setattr(byte_arrays, "PIECE", piece)
    fetched(name, files())
    stored = datasets[name]().stored()
    for part, pixels, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        np.testing.assert_array_equal(stored.parts[part].pixels, pixels[..., None])
        np.testing.assert_array_equal(stored.parts[part].labels, labels)
    assert len(stored.classes) == 10
    assert stored.classes[9] == ("9" if name == "mnist" else "Ankle boot")


def test_it_loads_with_another_size_in_colour(fetched):
    fetched("mnist", files())
    data = datasets["mnist"](validation=0, size=32, channels=3).load()
    assert data.train.shape == (32, 32, 3) and len(data.train) == 7 and len(data.test) == 3


WRONG = {
    "cut": ({TRAIN_X: idx(TRAIN)[:-1]}, "5503 bytes; expected 5504 "),
    "too long": ({TEST_X: idx(TEST) + b"\0"}, "2369 bytes; expected 2368 "),
    "header cut": ({TRAIN_X: idx(TRAIN)[:15]}, "has 15 bytes; its header alone has 16"),
    "empty": ({TRAIN_Y: b""}, "has 0 bytes; its header alone has 8"),
    "other kind": ({TRAIN_X: idx(TRAIN, 0x0D03)}, "begins with 0x00000d03 instead of 0x00000803"),
    "labels as images": ({TRAIN_X: idx(TRAIN_LABELS.repeat(9))}, "begins with 0x00000801"),
    "text": ({TEST_Y: b"<html>not found</html>"}, "IDX file"),
    "other size": ({TEST_X: idx(TEST[:, :27])}, "expected 28x28"),
    "no images": ({TRAIN_X: idx(TRAIN[:0]), TRAIN_Y: idx(TRAIN_LABELS[:0])}, "empty array"),
    "too few labels": ({TRAIN_Y: idx(TRAIN_LABELS[:6])}, "7 train images, but 6 labels"),
    "label 10": ({TEST_Y: idx(TEST_LABELS + 1)}, "run from 1 to 10; expected 0 to 9"),
}


@pytest.mark.parametrize(("changed", "says"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(fetched, refused, changed, says):
    folder = fetched("mnist", files(**changed))
    message = refused("mnist")
    assert says in message
    assert "labels" in says or str(folder) in message


def test_a_missing_file_is_refused(fetched, refused):
    fetched("mnist", {name: body for name, body in files().items() if name != TEST_Y})
    assert f"{TEST_Y} cannot be read: No such file" in refused("mnist")


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_get_it_brings_every_file(name):
    source = datasets[name].source
    (layout,), (package,) = source.layouts, source.packages
    assert set(layout) == {TRAIN_X, TRAIN_Y, TEST_X, TEST_Y}
    assert {remote.name.removesuffix(".gz") for remote in source.remotes} == set(layout)
    assert {member.rpartition("/")[2].removesuffix(".gz") for member in package.members} == set(
        layout
    )
    sums = [*layout.values(), *(remote.md5 for remote in source.remotes)]
    assert len(set(sums)) == 8 and all(len(md5) == 32 for md5 in sums)
    for remote in source.remotes:
        assert len(remote.urls) > 1 and all(url.endswith(f"/{remote.name}") for url in remote.urls)
