"""STL-10: planes by columns, the three choices of training images, files that are refused."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError
from harmonium.core.settings import make
from harmonium.data.datasets import datasets
from harmonium.data.decoding import byte_arrays

rng = np.random.default_rng(0)
COUNTS = {"train": 3, "test": 2, "unlabeled": 4}
IMAGES = {part: rng.integers(0, 256, (n, 96, 96, 3), np.uint8) for part, n in COUNTS.items()}
LABELS = {"train": np.array([0, 9, 4]), "test": np.array([7, 1])}


def binary(images):
    """One channel after the other, each column by column."""
    return b"".join(
        image[:, column, channel].tobytes()
        for image in images
        for channel in range(3)
        for column in range(96)
    )


def files(**changed):
    found = {f"{part}_X": binary(images) for part, images in IMAGES.items()}
    found |= {f"{part}_y": bytes(int(n) + 1 for n in labels) for part, labels in LABELS.items()}
    found |= changed
    return {f"stl10_binary/{name}.bin": body for name, body in found.items() if body is not None}


@pytest.mark.parametrize("use", ["labelled", "unlabelled", "both"])
@pytest.mark.parametrize("piece", [1, 60_000, 1 << 24])
def test_pixels_and_labels_are_those_of_the_files(fetched, monkeypatch, use, piece):
    monkeypatch.setattr(byte_arrays, "PIECE", piece)
    fetched("stl10", files())
    stored = datasets["stl10"](use=use).stored()
    names = {"labelled": ("train",), "unlabelled": ("unlabeled",)}.get(use, ("train", "unlabeled"))
    labels = [n for name in names for n in LABELS.get(name, [-1] * COUNTS[name])]
    pixels = np.concatenate([IMAGES[name] for name in names])
    np.testing.assert_array_equal(stored.parts["train"].pixels, pixels)
    np.testing.assert_array_equal(stored.parts["train"].labels, labels)
    np.testing.assert_array_equal(stored.parts["test"].pixels, IMAGES["test"])
    np.testing.assert_array_equal(stored.parts["test"].labels, LABELS["test"])
    assert stored.classes[0] == "airplane" and stored.classes[7] == "monkey"


def test_each_choice_is_kept_apart_from_the_others(fetched):
    fetched("stl10", files())
    sizes = {
        use: len(datasets["stl10"](use=use, validation=0).load().train)
        for use in ("labelled", "unlabelled", "both")
    }
    assert sizes == {"labelled": 3, "unlabelled": 4, "both": 7}


def test_probes_learn_from_the_labelled_images_where_clients_hold_the_others(fetched):
    fetched("stl10", files())
    data = datasets["stl10"](use="unlabelled").load()
    np.testing.assert_array_equal(data.labelled.pixels, IMAGES["train"])
    np.testing.assert_array_equal(data.labelled.labels, LABELS["train"])
    assert not data.train.labelled
    assert datasets["stl10"]().load().labelled is None


def test_labelled_images_do_not_need_the_others(fetched, refused):
    folder = fetched("stl10", files(unlabeled_X=None))
    assert len(datasets["stl10"](validation=0).load().train) == 3
    message = refused("stl10", use="both")
    assert f"data.use=both needs {folder / 'stl10_binary/unlabeled_X.bin'}" in message


def test_another_choice_is_refused():
    with pytest.raises(ConfigError, match="data.use=all"):
        make(datasets["stl10"], {"use": "all"}, "data")


WRONG = {
    "cut": ({"train_X": binary(IMAGES["train"])[:-1]}, "X.bin has 82943 bytes; expected 82944"),
    "more labels": ({"test_y": b"\1\2\3"}, "test_X.bin has 55296 bytes; expected 82944"),
    "label 0": ({"test_y": b"\0\2"}, "test_y.bin run from 0 to 2; expected 1 to 10"),
    "label 11": ({"train_y": b"\1\2\x0b"}, "train_y.bin run from 1 to 11"),
    "no labels": ({"train_y": b""}, "train_y.bin holds an empty array"),
    "no label file": ({"test_y": None}, "test_y.bin cannot be read"),
    "unlabelled cut": (
        {"unlabeled_X": binary(IMAGES["unlabeled"])[:-5]},
        "unlabeled_X.bin has 110587 bytes; expected 82944",
    ),
    "unlabelled empty": ({"unlabeled_X": b""}, "unlabeled_X.bin has 0 bytes; expected 27648"),
}


@pytest.mark.parametrize(("changed", "says"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(fetched, refused, changed, says):
    fetched("stl10", files(**changed))
    assert says in refused("stl10", use="both")


def test_an_archive_in_its_place_has_no_such_choice(fetched, refused, tmp_path):
    np.savez(tmp_path / "x.npz", train_x=IMAGES["train"], train_y=LABELS["train"])
    fetched("stl10", {"given.npz": (tmp_path / "x.npz").read_bytes()})
    assert "leave data.use out" in refused("stl10", use="unlabelled")
    assert len(datasets["stl10"](validation=0).stored().parts["train"]) == 3


def test_the_archive_may_be_as_large_as_it_is():
    source = datasets["stl10"].source
    assert source.most_bytes > 100_000 * 96 * 96 * 3  # the largest member
