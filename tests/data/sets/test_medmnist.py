"""MedMNIST: twelve sets from one table, findings as factors, archives that are refused."""

import io

import numpy as np
import pytest

from harmonium.core.registry import recipe_name
from harmonium.data.datasets import datasets
from harmonium.data.sets.medmnist import FACTS

COUNTS = {"train": 24, "val": 5, "test": 7}


def content(name):
    """Few images in the form of this set; the last class is missing."""
    row, rng = FACTS[name], np.random.default_rng(0)
    arrays = {}
    for part, count in COUNTS.items():
        shape = (count, 28, 28, 3) if row.channels == 3 else (count, 28, 28)
        arrays[f"{part}_images"] = rng.integers(0, 256, shape, np.uint8)
        columns, values = (len(row.findings), 2) if row.findings else (1, len(row.classes) - 1)
        arrays[f"{part}_labels"] = rng.integers(0, values, (count, columns), np.uint8)
    return arrays


def packed(arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def lay(fetched, name, arrays):
    return fetched(name, {f"{name}.npz": packed(arrays)})


@pytest.mark.parametrize("name", FACTS)
def test_pixels_and_labels_are_those_of_the_archive(fetched, name):
    arrays, row = content(name), FACTS[name]
    lay(fetched, name, arrays)
    stored = datasets[name]().stored()
    assert stored.classes == row.classes
    for part, prefix in (("train", "train"), ("validation", "val"), ("test", "test")):
        found, labels = stored.parts[part], arrays[f"{prefix}_labels"]
        pixels = arrays[f"{prefix}_images"].reshape(-1, 28, 28, row.channels)
        np.testing.assert_array_equal(found.pixels, pixels)
        if row.findings:
            assert not found.labelled and set(found.factors) == set(row.findings)
            for number, finding in enumerate(row.findings):
                np.testing.assert_array_equal(found.factors[finding], labels[:, number])
        else:
            np.testing.assert_array_equal(found.labels, labels[:, 0])


def test_the_validation_part_is_the_archives_own(fetched):
    lay(fetched, "breastmnist", content("breastmnist"))
    data = datasets["breastmnist"](validation=0.5).load()
    assert [len(data.train), len(data.validation), len(data.test)] == [24, 5, 7]


def test_findings_have_names_and_a_note(fetched):
    lay(fetched, "chestmnist", content("chestmnist"))
    data = datasets["chestmnist"]().load()
    assert data.classes == () and data.names["hernia"] == ("absent", "present")
    assert "14 findings are factors" in data.notes[0]


def test_every_row_is_a_data_set_of_its_own():
    assert len(FACTS) == 12
    for name, row in FACTS.items():
        made = datasets[name]
        assert recipe_name(made) == name and made.__name__ == row.title
        assert made.about.shape == (28, 28, row.channels) and made.about.train == row.counts[0]
        (layout,), (remote,) = made.source.layouts, made.source.remotes
        assert layout == {f"{name}.npz": remote.md5} and len(remote.md5) == 32
        assert f"/{name}.npz" in remote.urls[0]
        assert row.title in made.__doc__ and f"{row.counts[1]:,} validation" in made.__doc__
    assert len({row.md5 for row in FACTS.values()}) == 12
    assert [n for n, row in FACTS.items() if "NC" in row.licence] == ["dermamnist"]


BLOOD = content("bloodmnist")
WRONG = {
    "grey": ({"val_images": BLOOD["val_images"][..., 0]}, "'val_images' of "),
    "real": ({"test_images": BLOOD["test_images"] / 255}, "is float64 (7, 28, 28, 3)"),
    "larger": ({"train_images": np.zeros((24, 64, 64, 3), np.uint8)}, "expected uint8 ('n', 28,"),
    "no images": ({"train_images": BLOOD["train_images"][:0]}, "(0, 28, 28, 3)"),
    "fewer labels": ({"test_labels": BLOOD["test_labels"][1:]}, "(6, 1); expected integers (7, 1)"),
    "many labels": ({"test_labels": np.zeros((7, 14), np.uint8)}, "is uint8 (7, 14)"),
    "real labels": ({"test_labels": np.zeros((7, 1))}, "is float64 (7, 1)"),
    "label 8": ({"val_labels": np.full((5, 1), 8)}, "run from 8 to 8; expected 0 to 7"),
    "label -1": ({"val_labels": np.full((5, 1), -1)}, "run from -1 to -1"),
    "no part": ({"val_images": None}, "val_images is not a file in the archive"),
    "objects": ({"val_labels": np.array([{}] * 5)[:, None]}, "cannot be read: Object arrays"),
}


@pytest.mark.parametrize(("changed", "says"), WRONG.values(), ids=WRONG)
def test_wrong_archives_are_refused(fetched, refused, changed, says):
    arrays = {key: array for key, array in (BLOOD | changed).items() if array is not None}
    folder = lay(fetched, "bloodmnist", arrays)
    message = refused("bloodmnist")
    assert says in message and str(folder / "bloodmnist.npz") in message


def test_damaged_archives_are_refused(fetched, refused):
    whole = packed(BLOOD)
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 0xFF
    for body in (whole[:-100], bytes(changed), b"", b"<html>not found</html>"):
        fetched("bloodmnist", {"bloodmnist.npz": body})
        assert "bloodmnist.npz" in refused("bloodmnist")
