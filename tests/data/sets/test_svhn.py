"""SVHN: MATLAB files as SciPy and as we write them, and damaged ones of every kind."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
import scipy.io

from harmonium.core.errors import DataError
from harmonium.data.datasets import datasets
from harmonium.data.sets import svhn

rng = np.random.default_rng(0)
TRAIN = rng.integers(0, 256, (7, 32, 32, 3), np.uint8)
TEST = rng.integers(0, 256, (3, 32, 32, 3), np.uint8)  # three labels lie in their tag
TRAIN_DIGITS = np.array([1, 0, 9, 2, 3, 0, 5])
TEST_DIGITS = np.array([0, 7, 9])


def variables(pixels, digits):
    return {
        "X": np.asfortranarray(pixels.transpose(1, 2, 3, 0)),
        "y": np.where(digits == 0, 10, digits).astype(np.uint8)[:, None],
    }


def by_scipy(pixels, digits, *, packed=True, **changed):
    file = io.BytesIO()
    scipy.io.savemat(file, {**variables(pixels, digits), **changed}, do_compression=packed)
    return file.getvalue()


def by_hand(pixels, digits, order="<", flags=9, longer="", seal=bytes):
    """The same file written byte by byte, in either order of bytes, and not always right."""

    def element(kind, content):
        if len(content) <= 4:
            word = len(content) << 16 | kind
            return struct.pack(f"{order}I", word) + content.ljust(4, b"\0")
        tag = struct.pack(f"{order}2I", kind, len(content))
        return tag + content + b"\0" * (-len(content) % 8)

    version = struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
    made = b"MATLAB 5.0 MAT-file".ljust(124) + version
    for name, array in variables(pixels, digits).items():
        inside = element(6, struct.pack(f"{order}2I", flags, 0))
        inside += element(5, struct.pack(f"{order}{array.ndim}i", *array.shape))
        inside += element(1, (name + longer).encode()) + element(2, array.tobytes("F"))
        packed = seal(zlib.compress(struct.pack(f"{order}2I", 14, len(inside)) + inside))
        made += struct.pack(f"{order}2I", 15, len(packed)) + packed
    return made


def files(make=by_scipy, **changed):
    return {
        "train_32x32.mat": make(TRAIN, TRAIN_DIGITS),
        "test_32x32.mat": make(TEST, TEST_DIGITS, **changed),
    }


@pytest.mark.parametrize(
    "make",
    [by_scipy, by_hand, lambda *what: by_hand(*what, ">")],
    ids=["scipy", "little", "big"],
)
@pytest.mark.parametrize("piece", [svhn.IMAGE, 3 * svhn.IMAGE, 1 << 20])
def test_pixels_and_labels_are_those_of_the_files(fetched, monkeypatch, make, piece):
    monkeypatch.setattr(svhn, "PIECE", piece)
    fetched("svhn", files(make))
    stored = datasets["svhn"]().stored()
    for part, pixels, digits in (("train", TRAIN, TRAIN_DIGITS), ("test", TEST, TEST_DIGITS)):
        np.testing.assert_array_equal(stored.parts[part].pixels, pixels)
        np.testing.assert_array_equal(stored.parts[part].labels, digits)
    assert stored.classes == tuple("0123456789")


def test_what_is_written_by_hand_is_what_scipy_reads():
    found = scipy.io.loadmat(io.BytesIO(by_hand(TRAIN, TRAIN_DIGITS)))
    for name, array in variables(TRAIN, TRAIN_DIGITS).items():
        np.testing.assert_array_equal(found[name], array)


X, Y = variables(TEST, TEST_DIGITS).values()
WRONG = {
    "more labels": ({"y": np.ones((4, 1), np.uint8)}, "(32, 32, 3, 3); expected (32, 32, 3, 4)"),
    "label 0": ({"y": np.array([[0], [1], [2]], np.uint8)}, "run from 0 to 2; expected 1 to 10"),
    "labels in a row": ({"y": Y.T}, "'y' has shape (1, 3); expected (n, 1)"),
    "labels as words": ({"y": np.array(["a", "b", "c"])}, "'y' is not an array of bytes"),
    "real labels": ({"y": Y + 0.5}, "'y' is not an array of bytes"),
    "complex labels": ({"y": Y + 1j}, "'y' is not an array of bytes"),
    "wide pixels": ({"X": X.astype(np.uint16)}, "'X' is not an array of bytes"),
    "grey": ({"X": X[:, :, :1]}, "'X' has shape (32, 32, 1, 3)"),
    "not packed": ({"packed": False}, "no compressed variable 'y'"),
}


@pytest.mark.parametrize(("changed", "says"), WRONG.values(), ids=WRONG)
def test_wrong_content_is_refused(fetched, refused, changed, says):
    folder = fetched("svhn", files(**changed))
    message = refused("svhn")
    assert says in message and str(folder / "test_32x32.mat") in message


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"flags": 0x809}, "'y' is not an array of bytes"),  # complex
        ({"flags": 4}, "'y' is not an array of bytes"),  # letters
        ({"longer": "x" * 100}, "a name or shape of 101 bytes"),
        ({"seal": lambda packed: packed[:-4]}, "'y' does not end where it should"),
        ({"seal": lambda packed: packed[:-1] + b"!"}, "incorrect data check"),
        ({"seal": lambda packed: packed[:20]}, "bytes instead of"),
    ],
    ids=["complex", "letters", "long name", "no sum", "wrong sum", "cut"],
)
def test_wrong_bytes_are_refused(fetched, refused, wrong, says):
    folder = fetched("svhn", files() | {"test_32x32.mat": by_hand(TEST, TEST_DIGITS, **wrong)})
    message = refused("svhn")
    assert says in message and str(folder / "test_32x32.mat") in message


def test_a_missing_variable_is_named(fetched, refused):
    file = io.BytesIO()
    scipy.io.savemat(file, {"X": X}, do_compression=True)
    fetched("svhn", files() | {"test_32x32.mat": file.getvalue()})
    assert "no compressed variable 'y'" in refused("svhn")


def test_a_cut_file_says_how_long_it_should_be(fetched, refused):
    whole = by_scipy(TEST, TEST_DIGITS)
    fetched("svhn", files() | {"test_32x32.mat": whole[:-1]})
    assert f"has {len(whole) - 1} bytes; expected {len(whole)} " in refused("svhn")


@pytest.mark.parametrize("content", [b"", b"MATLAB", b"\0" * 200, b"<html>" * 100])
def test_what_is_no_matlab_file_is_refused(fetched, refused, content):
    fetched("svhn", files() | {"train_32x32.mat": content})
    assert "MATLAB file of version 5" in refused("svhn")


class Collected:
    """In the place of a writer."""

    def __init__(self):
        self.pixels, self.labels = [], []

    def append(self, part, pixels, labels):
        self.pixels.append(pixels)
        self.labels.append(labels)


def test_any_damage_is_one_error_or_none(tmp_path):
    """Cut anywhere, or a few bytes changed: never a crash, never other images."""
    whole, dice, refused = by_scipy(TEST, TEST_DIGITS), random.Random(0), 0
    (tmp_path / "train_32x32.mat").write_bytes(whole)
    for turn in range(400):
        damaged = bytearray(whole)
        if turn % 4 == 0:
            del damaged[dice.randrange(len(damaged)) :]
        else:
            for _ in range(dice.choice((1, 3))):
                early = dice.random() < 0.7  # where the sizes and kinds are
                damaged[dice.randrange(180 if early else len(damaged))] = dice.randrange(256)
        (tmp_path / "test_32x32.mat").write_bytes(damaged)
        found = Collected()
        try:
            datasets["svhn"]().read(tmp_path, found)
        except DataError:
            refused += 1
        else:
            np.testing.assert_array_equal(np.concatenate(found.pixels), [*TEST, *TEST])
            np.testing.assert_array_equal(np.concatenate(found.labels), [*TEST_DIGITS] * 2)
    assert refused > 200
