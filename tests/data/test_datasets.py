"""Data sets: decoding, selection, cache, and refusals that say what would be right."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError, StoreError
from harmonium.data import cache as store
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.images import Images
from harmonium.data.sets import digits
from harmonium.data.sets.digits import Digits
from harmonium.data.sets.npz import Npz


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def numbered(count, height=4, width=5, channels=3):
    """Images that can be told apart: image i is filled with i."""
    pixels = np.empty((count, height, width, channels), np.uint8)
    pixels[:] = np.arange(count).reshape(-1, 1, 1, 1)
    return pixels


def which(images):
    """The numbers of numbered images."""
    return images.pixels[:, 0, 0, 0].tolist()


# ---- Images --------------------------------------------------------------------------------------


def test_a_run_of_neighbours_is_a_view():
    whole = Images(numbered(10), np.arange(10))
    part = whole.subset(range(3, 7))
    assert which(part) == [3, 4, 5, 6] and np.shares_memory(part.pixels, whole.pixels)


def test_scattered_images_are_not_gathered_until_asked_for():
    whole = Images(numbered(10), np.arange(10), {"twice": np.arange(10) * 2})
    part = whole.subset([7, 1, 4])
    again = part.subset([2, 0])
    assert again.batch([1, 0])[:, 0, 0, 0].tolist() == [7, 4]
    assert "pixels" not in vars(part) and "pixels" not in vars(again)
    assert again.shape == (4, 5, 3) and len(again) == 2
    assert which(again) == [4, 7] and again.labels.tolist() == [4, 7]
    assert again.factors["twice"].tolist() == [8, 14]
    assert np.shares_memory(again.without_labels()._store, whole.pixels)


def test_hidden_labels_are_gone():
    part = Images(numbered(6), np.arange(6), {"f": np.arange(6)}).subset([5, 0])
    hidden = part.without_labels()
    assert part.labelled and not hidden.labelled and not hidden.factors
    assert which(hidden) == [5, 0] and hidden.labels.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("pixels", "labels", "says"),
    [
        (np.zeros((2, 4, 4, 3)), [0, 1], r"float64.*astype\('uint8'\)"),
        (np.zeros((2, 4, 4, 5), np.uint8), [0, 1], "1 to 4 channels"),
        (np.zeros((2, 4, 4), np.uint8), [0, 1], "1 to 4 channels"),
        (np.zeros((2, 4, 4, 1), np.uint8), [0], "2 images"),
        (np.zeros((2, 4, 4, 1), np.uint8), [0.5, 1.0], "integers"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(pixels, labels, says):
    with pytest.raises(DataError, match=says):
        Images(pixels, np.array(labels))


@pytest.mark.parametrize("index", [[0, 3], [-1], [True, False, True], [[0], [1]]])
def test_a_subset_out_of_range_is_refused(index):
    with pytest.raises(DataError, match="subset"):
        Images(numbered(3), np.arange(3)).subset(index)


# ---- selection -----------------------------------------------------------------------------------


def archive(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def hundred(tmp_path):
    """100 training and 20 test images."""
    return archive(
        tmp_path / "hundred.npz",
        **{"train_x": numbered(100), "train_y": np.arange(100) % 7},
        **{"test_x": numbered(20), "test_y": np.arange(20) % 7},
    )


@pytest.mark.parametrize(
    ("limit", "validation", "train", "held"),
    [
        (None, 0.1, 90, 10),
        (None, 0.0, 100, 0),
        (40, 0.1, 40, 4),
        (80, 0.25, 80, 20),
        (1, 0.1, 1, 0),
    ],
)
def test_limit_and_validation(hundred, limit, validation, train, held):
    data = Npz(path=hundred, limit=limit, validation=validation).load()
    assert (len(data.train), len(data.validation), len(data.test)) == (train, held, 20)
    assert not set(which(data.train)) & set(which(data.validation))
    assert data.train.labels.tolist() == [i % 7 for i in which(data.train)]


def test_a_smaller_limit_keeps_the_first_images(hundred):
    """A learning curve grows the training part; it does not draw it anew."""
    few, many = (Npz(path=hundred, limit=limit, validation=0.0).load() for limit in (10, 50))
    assert which(many.train)[:10] == which(few.train)
    assert which(few.train) != list(range(10))


def test_the_seed_says_which_are_held_out(hundred):
    one, same, other = (Npz(path=hundred, seed=seed).load() for seed in (0, 0, 1))
    assert one.digest == same.digest != other.digest
    assert set(which(one.validation)) != set(which(other.validation))


def test_digest_follows_content_and_selection(hundred, tmp_path):
    base = Npz(path=hundred).load().digest
    assert Npz(path=hundred, limit=50).load().digest != base
    assert Npz(path=hundred, validation=0.2).load().digest != base
    with np.load(hundred) as file:
        arrays = dict(file)
    moved = archive(tmp_path / "moved.npz", **arrays)
    assert Npz(path=moved).load().digest == base
    arrays["test_y"][0] = 3
    assert Npz(path=archive(tmp_path / "edited.npz", **arrays)).load().digest != base


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"limit": 101}, DataError, "limit=101, but npz has 100 training images.*limit=90 or"),
        (
            {"limit": 95},
            DataError,
            "limit=95, .*data.validation=0.1 .*.*limit=90 or",
        ),
        ({"limit": 0}, ConfigError, "limit=0"),
        ({"validation": 1.0}, ConfigError, "validation=1.0"),
        ({"validation": -0.1}, ConfigError, "validation=-0.1"),
        ({"validation": float("nan")}, ConfigError, "validation=nan"),
        ({"validation": 0.999}, DataError, "no training image is left"),
        ({"test": 1.5}, ConfigError, "test=1.5"),
    ],
)
def test_impossible_settings_are_refused(hundred, settings, error, says):
    with pytest.raises(error, match=says):
        Npz(path=hundred, **settings).load()


def test_data_without_a_test_part_hold_one_out(tmp_path):
    path = archive(tmp_path / "plain.npz", x=numbered(50))
    data = Npz(path=path, test=0.3).load()
    numbers = [which(part) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in numbers] == [31, 4, 15]  # round(0.1 * 35) is 4
    assert sorted(sum(numbers, [])) == list(range(50))
    assert data.classes == () and not data.train.labelled


# ---- digits --------------------------------------------------------------------------------------


def test_digits():
    data = Digits().load()
    assert data.train.shape == (8, 8, 1) and data.classes == tuple("0123456789")
    assert len(data.train) + len(data.validation) + len(data.test) == 1797
    pixels = np.concatenate([part.pixels for part in (data.train, data.validation, data.test)])
    assert len(np.unique(pixels)) == 17 and pixels.max() == 255
    assert isinstance(data.train._store, np.memmap) and not data.train._store.flags.writeable


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(monkeypatch):
    from sklearn.datasets import load_digits

    wanted = load_digits()
    for found in (digits.find_spec, lambda name: None):  # its file, and its own function
        monkeypatch.setattr(digits, "find_spec", found)
        levels, labels = digits._included()
        np.testing.assert_array_equal(levels, wanted.images)
        np.testing.assert_array_equal(labels, wanted.target)
    code = "import sys; from harmonium.data.sets.digits import Digits; Digits().load()"
    code += "; print('sklearn' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout == "False\n", told.stderr


def test_importing_data_is_light():
    code = (
        "import sys, harmonium.data, harmonium.data.datasets; "
        "print([m for m in ('torch', 'sklearn', 'scipy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_data_set_has_a_name_and_says_what_it_is():
    for name, spec in datasets.table().items():
        assert spec.name == name and spec.__doc__ and issubclass(spec, DataSpec)
    assert {"digits", "shapes", "npz", "folder", "cifar10"} <= set(datasets.table())


# ---- cache ---------------------------------------------------------------------------------------


def folders(home):
    return sorted(entry.name for entry in (home / "cache").iterdir())


def test_decoded_once(hundred, home, monkeypatch):
    Npz(path=hundred).load()
    monkeypatch.setattr(Npz, "decode", lambda self, writer: pytest.fail("decoded again"))
    Npz(path=hundred, limit=20, seed=5).load()
    assert len(folders(home)) == 1 and folders(home)[0].startswith("npz-")


def test_changed_data_are_decoded_again(tmp_path):
    path = tmp_path / "data.npz"
    one = Npz(path=archive(path, x=numbered(10))).load()
    archive(path, x=numbered(10) + 100)
    os.utime(path, ns=(1, 1))
    other = Npz(path=str(path)).load()
    assert one.digest != other.digest and min(which(other.train)) >= 100


@pytest.mark.parametrize("damage", ["cut", "gone", "meta", "other"])
def test_a_damaged_cache_is_made_again(hundred, home, damage):
    digest = Npz(path=hundred).load().digest
    folder = home / "cache" / folders(home)[0]
    if damage == "cut":
        os.truncate(folder / "train-pixels.npy", 500)
    elif damage == "gone":
        (folder / "test-column-0.npy").unlink()
    elif damage == "other":
        np.save(folder / "train-pixels.npy", np.zeros((100, 9, 9, 3), np.uint8))
    else:
        (folder / "meta.json").write_text('{"key": ')
    again = Npz(path=hundred).load()
    assert again.digest == digest and len(set(which(again.train))) == 90
    assert len(folders(home)) == 1


def test_a_failed_decode_leaves_nothing(tmp_path, home):
    path = archive(tmp_path / "bad.npz", train_x=numbered(5), test_x=numbered(5, height=9))
    with pytest.raises(DataError, match="different shapes"):
        Npz(path=path).load()
    assert folders(home) == []


def test_racing_decoders_agree(hundred, home):
    start = threading.Barrier(4)
    digests = []

    def load():
        start.wait()
        digests.append(Npz(path=hundred).load().digest)

    threads = [threading.Thread(target=load) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(digests) == 4 and len(set(digests)) == 1 and len(folders(home)) == 1


def test_old_leftovers_are_swept_and_nothing_else(hundred, home):
    cache = home / "cache"
    for name in (".npz-1.building-old", ".npz-1.building-new", ".other"):
        (cache / name).mkdir(parents=True)
    for name in (".npz-1.building-old", ".other"):
        os.utime(cache / name, (0, 0))
    Npz(path=hundred).load()
    assert folders(home)[:2] == [".npz-1.building-new", ".other"] and len(folders(home)) == 3


def test_a_home_that_cannot_be_written_is_named(hundred, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="HARMONIUM_HOME"):
        Npz(path=hundred).load()


def test_a_full_disk_is_a_store_error(hundred, home, monkeypatch):
    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._Part, "append", full)
    with pytest.raises(StoreError, match="No space left"):
        Npz(path=hundred).load()
    assert folders(home) == []


def test_meta_says_what_is_inside(hundred, home):
    Npz(path=hundred).load()
    meta = json.loads((home / "cache" / folders(home)[0] / "meta.json").read_text())
    assert meta["parts"]["train"]["shape"] == [100, 4, 5, 3]
    assert meta["identity"]["path"] == hundred


def test_images_that_grow_are_written_in_small_pieces(home, monkeypatch):
    """As large as they become: a piece of thousands would not fit in memory."""
    sizes = []
    shaped = store.shaped
    monkeypatch.setattr(store, "PIECE_BYTES", 3 * 64 * 64 * 10)

    def watched(pixels, *words):
        sizes.append(len(pixels))
        return shaped(pixels, *words)

    monkeypatch.setattr(store, "shaped", watched)
    data = Digits(size=64, channels=3).load()
    assert data.train.shape == (64, 64, 3) and max(sizes) == 10 and sum(sizes) == 1797
    monkeypatch.undo()
    monkeypatch.setenv("HARMONIUM_HOME", str(home / "other"))
    assert Digits(size=64, channels=3).load().digest == data.digest


@pytest.mark.parametrize("size", [0, 5000])
def test_sizes_that_are_slips_are_refused(size):
    with pytest.raises(ConfigError, match=f"data.size={size}: between 1 and 4096"):
        Digits(size=size).load()
