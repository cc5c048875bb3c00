"""USPS: two forms of the same images that give the same bytes, and files that are refused."""

import bz2
import math
import sys
from decimal import Decimal
from fractions import Fraction

import h5py
import numpy as np
import pytest

from harmonium.data.datasets import datasets

rng = np.random.default_rng(0)
# Thousandths from -1 to 1, as in the original files; among them all that lie between two bytes.
TRAIN = rng.integers(-1000, 1001, (9, 256))
TRAIN[0, :9] = [-1000, -800, -400, 0, 400, 800, 1000, 999, -999]
TEST = rng.integers(-1000, 1001, (4, 256))
TRAIN_DIGITS, TEST_DIGITS = np.array([0, 9, 5, 1, 2, 3, 4, 6, 7]), np.array([8, 0, 9, 1])


def text(values, digits):
    """Lines of LIBSVM: class, then index:value."""
    lines = (
        " ".join(
            [str(digit + 1)] + [f"{k}:{Decimal(int(v)) / 1000:f}" for k, v in enumerate(row, 1)]
        )
        for row, digit in zip(values, digits, strict=True)
    )
    return bz2.compress("".join(f"{line} \n" for line in lines).encode())


def as_text(**changed):
    return {
        "usps.bz2": text(TRAIN, TRAIN_DIGITS),
        "usps.t.bz2": text(TEST, TEST_DIGITS),
    } | changed


def as_hdf5(path, **changed):
    with h5py.File(path, "w") as file:
        for part, values, digits in (("train", TRAIN, TRAIN_DIGITS), ("test", TEST, TEST_DIGITS)):
            held = {
                f"{part}/data": (values.astype(np.float32) / 1000 + 1) / 2,
                f"{part}/target": digits,
            }
            for key, content in (held | {k: v for k, v in changed.items() if k in held}).items():
                if content is not None:
                    file[key] = content
    return {"usps.h5": path.read_bytes()}


def exact(values):
    """The nearest bytes, halves up, without any rounding on the way."""
    made = [math.floor(Fraction(int(v) + 1000, 2000) * 255 + Fraction(1, 2)) for v in values.flat]
    return np.array(made, np.uint8).reshape(-1, 16, 16, 1)


@pytest.mark.parametrize("form", ["text", "hdf5"])
def test_both_forms_give_the_same_bytes(fetched, tmp_path, form):
    fetched("usps", as_text() if form == "text" else as_hdf5(tmp_path / "x.h5"))
    stored = datasets["usps"]().stored()
    for part, values, digits in (("train", TRAIN, TRAIN_DIGITS), ("test", TEST, TEST_DIGITS)):
        np.testing.assert_array_equal(stored.parts[part].pixels, exact(values))
        np.testing.assert_array_equal(stored.parts[part].labels, digits)
    assert stored.classes == tuple("0123456789")


def test_between_two_bytes_goes_up():
    found = exact(TRAIN)[0].reshape(-1)[:7]
    assert found.tolist() == [0, 26, 77, 128, 179, 230, 255]


ROW = " ".join(f"{k}:0.5" for k in range(1, 257))
WRONG_TEXT = {
    "cut": (text(TRAIN, TRAIN_DIGITS)[:-20], "ended before the end"),
    "not packed": (b"1 1:0.5\n", "Invalid data stream"),
    "empty": (bz2.compress(b""), "256 values"),
    "too few values": (bz2.compress(f"1 {ROW.rpartition(' ')[0]}\n".encode()), "256 values"),
    "too many values": (bz2.compress(f"1 {ROW} 257:1\n".encode()), "257"),
    "no number": (bz2.compress(f"1 {ROW}x\n".encode()), "could not convert"),
    "nan": (bz2.compress(f"1 {ROW[:-3]}nan\n".encode()), "not numbers between -1 and 1"),
    "above 1": (bz2.compress(f"1 {ROW[:-3]}1.1\n".encode()), "not numbers between -1 and 1"),
    "class 0": (bz2.compress(f"0 {ROW}\n".encode()), "run from 0.0 to 0.0; expected 1 to 10"),
    "class 1.5": (bz2.compress(f"1.5 {ROW}\n".encode()), "not a whole number"),
}


@pytest.mark.parametrize(("content", "says"), WRONG_TEXT.values(), ids=WRONG_TEXT)
def test_wrong_text_is_refused(fetched, refused, content, says):
    folder = fetched("usps", as_text(**{"usps.t.bz2": content}))
    message = refused("usps")
    assert says in message and str(folder / "usps.t.bz2") in message


WRONG_HDF5 = {
    "no target": ({"test/target": None}, "cannot be read"),
    "other shape": ({"train/data": np.zeros((9, 255), np.float32)}, "it has (9, 255) and (9,)"),
    "other count": ({"train/data": np.zeros((8, 256), np.float32)}, "it has (8, 256) and (9,)"),
    "bytes": ({"train/data": np.zeros((9, 256), np.uint8)}, "should hold train/data"),
    "one number": ({"train/data": 3.0}, "should hold train/data"),
    "negative": ({"train/data": np.full((9, 256), -0.1, np.float32)}, "between 0 and 1"),
    "digit 10": ({"test/target": np.array([10, 0, 1, 2])}, "run from 0 to 10; expected 0 to 9"),
    "names": ({"test/target": np.array([b"a", b"b", b"c", b"d"])}, "should hold test/data"),
}


@pytest.mark.parametrize(("changed", "says"), WRONG_HDF5.values(), ids=WRONG_HDF5)
def test_wrong_hdf5_is_refused(fetched, refused, tmp_path, changed, says):
    folder = fetched("usps", as_hdf5(tmp_path / "x.h5", **changed))
    message = refused("usps")
    assert says in message and str(folder / "usps.h5") in message


def test_hdf5_that_only_claims_to_hold_images_is_refused(fetched, refused, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train/data", (1 << 40, 256), "f4", chunks=(16, 256))
        file.create_dataset("train/target", (1 << 40,), "i8", chunks=(16,))
    fetched("usps", {"usps.h5": (tmp_path / "x.h5").read_bytes()})
    assert "claims to hold 1099511627776" in refused("usps")


def test_damaged_hdf5_is_refused(fetched, refused, tmp_path):
    whole = as_hdf5(tmp_path / "x.h5")["usps.h5"]
    for content in (whole[: len(whole) // 2], b"no HDF5", b""):
        fetched("usps", {"usps.h5": content})
        assert "cannot be read" in refused("usps")


def test_without_h5py_it_says_what_to_install(fetched, refused, tmp_path, monkeypatch):
    fetched("usps", as_hdf5(tmp_path / "x.h5"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "pip install 'harmonium[hdf5]'" in refused("usps")
