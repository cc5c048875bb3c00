"""Data sets: decoding, selection, cache, and refusals that say what would be right."""

import json
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from harmonium.data import cifar10, store
from harmonium.data.archive import Npz
from harmonium.data.cifar10 import Cifar10, Content
from harmonium.data.datasets import DataSpec, Digits, datasets
from harmonium.data.folder import Folder, read_picture
from harmonium.data.images import Images
from harmonium.errors import ConfigError, DataError, StoreError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def numbered(count, height=4, width=5, channels=3):
    """Pictures that can be told apart: picture i is filled with i."""
    pixels = np.empty((count, height, width, channels), np.uint8)
    pixels[:] = np.arange(count).reshape(-1, 1, 1, 1)
    return pixels


def which(images):
    """The numbers of numbered pictures."""
    return images.pixels[:, 0, 0, 0].tolist()


# ---- Images --------------------------------------------------------------------------------------


def test_a_run_of_neighbours_is_a_view():
    whole = Images(numbered(10), np.arange(10))
    part = whole.subset(range(3, 7))
    assert which(part) == [3, 4, 5, 6] and np.shares_memory(part.pixels, whole.pixels)


def test_scattered_pictures_are_not_gathered_until_asked_for():
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


def test_a_message_carries_only_the_rows_picked():
    whole = Images(numbered(200), np.arange(200))
    sent = pickle.dumps(whole.subset([150, 3]))
    assert len(sent) < whole.pixels.nbytes / 10
    assert which(pickle.loads(sent)) == [150, 3]


@pytest.mark.parametrize(
    ("pixels", "labels", "says"),
    [
        (np.zeros((2, 4, 4, 3)), [0, 1], r"float64.*astype\('uint8'\)"),
        (np.zeros((2, 4, 4, 2), np.uint8), [0, 1], "1 or 3 channels"),
        (np.zeros((2, 4, 4), np.uint8), [0, 1], "1 or 3 channels"),
        (np.zeros((2, 4, 4, 1), np.uint8), [0], "2 pictures"),
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
    """100 training and 20 test pictures."""
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
        (95, 0.1, 90, 10),  # round(9.5) is 10, and 90 are left for training
        (100, 0.25, 75, 25),
        (1, 0.1, 1, 0),
    ],
)
def test_limit_and_validation(hundred, limit, validation, train, held):
    data = Npz(path=hundred, limit=limit, validation=validation).load()
    assert (len(data.train), len(data.validation), len(data.test)) == (train, held, 20)
    assert not set(which(data.train)) & set(which(data.validation))
    assert data.train.labels.tolist() == [i % 7 for i in which(data.train)]


def test_a_smaller_limit_keeps_the_first_pictures(hundred):
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
        ({"limit": 101}, DataError, "limit=101, but npz has 100 training pictures.*limit=100"),
        ({"limit": 0}, ConfigError, "limit=0"),
        ({"validation": 1.0}, ConfigError, "validation=1.0"),
        ({"validation": -0.1}, ConfigError, "validation=-0.1"),
        ({"validation": float("nan")}, ConfigError, "validation=nan"),
        ({"validation": 0.999}, DataError, "no training picture is left"),
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


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_a_damaged_cache_is_made_again(hundred, home, damage):
    digest = Npz(path=hundred).load().digest
    folder = home / "cache" / folders(home)[0]
    if damage == "cut":
        os.truncate(folder / "train-pixels.npy", 500)
    elif damage == "gone":
        (folder / "test-column-0.npy").unlink()
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


# ---- npz -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(8, 6, 7), (8, 6, 7, 1), (8, 1, 6, 7), (8, 6, 7, 3), (8, 3, 6, 7)], ids=str
)
def test_npz_orders_of_axes(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = Npz(path=archive(tmp_path / "x.npz", x=pixels), validation=0, test=0).load()
    channels = 3 if 3 in shape else 1
    assert data.train.shape == (6, 7, channels)
    found = {picture.tobytes() for picture in data.train.pixels}
    if len(shape) == 4 and shape[1] in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    assert found == {picture.tobytes() for picture in pixels}


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
        ({"x": np.zeros((3, 4, 4, 5), np.uint8)}, "1 or 3 channels"),
        ({"x": numbered(3), "y": np.zeros(2, int)}, "labels 'y'.*each of the 3"),
        ({"x": numbered(3), "y": np.zeros((3, 14), int)}, r"shape \(3, 14\)"),
        ({"x": numbered(3), "y": np.zeros(3)}, "labels 'y'"),
        ({"x": numbered(3), "y": np.arange(3), "classes": np.array(["a"])}, "names 1 classes"),
        ({"pictures": numbered(3)}, "holds pictures; expected train_x"),
        ({"x": np.array([{"code": 1}], dtype=object)}, "cannot be read"),
    ],
)
def test_npz_refusals(tmp_path, arrays, says):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=says):
        Npz(path=str(tmp_path / "bad.npz")).load()


def test_npz_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="needs path"):
        Npz().load()
    with pytest.raises(DataError, match="no such file"):
        Npz(path=str(tmp_path / "none.npz")).load()
    np.save(tmp_path / "one.npy", numbered(3))
    with pytest.raises(DataError, match="not an .npz"):
        Npz(path=str(tmp_path / "one.npy")).load()


# ---- folder --------------------------------------------------------------------------------------


def paint(path, colour, size=(6, 6), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for number in range(10):
        paint(root / "cat" / f"{number}.png", (number, 0, 0))
        paint(root / "dog" / "deep" / f"{number}.png", (100 + number, 0, 0))
    (root / "cat" / "notes.txt").write_text("not a picture")
    paint(root / "cat" / ".hidden.png", (50, 0, 0))
    return root


def test_folder_of_classes(photos):
    data = Folder(path=str(photos)).load()
    assert data.classes == ("cat", "dog") and data.train.shape == (6, 6, 3)
    parts = (data.train, data.validation, data.test)
    numbers = sum((which(part) for part in parts), [])
    assert sorted(numbers) == [*range(10), *range(100, 110)]
    assert all(part.labels.tolist() == [i // 100 for i in which(part)] for part in parts)


def test_flat_folder_has_no_labels(tmp_path):
    for number in range(5):
        paint(tmp_path / "flat" / f"{number}.png", (number, 0, 0))
    data = Folder(path=str(tmp_path / "flat"), validation=0, test=0).load()
    assert sorted(which(data.train)) == list(range(5))
    assert data.classes == () and not data.train.labelled


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("train", "test"), (4, 1, 3)),
        (("train", "val"), (4, 1, 3)),
        (("train", "val", "test"), (5, 3, 3)),
    ],
)
def test_folder_with_parts(tmp_path, names, sizes):
    for name in names:
        for number in range(5 if name == "train" else 3):
            paint(tmp_path / "set" / name / "cat" / f"{number}.png", (number, 0, 0))
    data = Folder(path=str(tmp_path / "set"), validation=0.2).load()
    assert tuple(len(part) for part in (data.train, data.validation, data.test)) == sizes
    assert data.classes == ("cat",)


def test_folder_of_different_sizes_needs_a_size(tmp_path):
    root = tmp_path / "mixed"
    paint(root / "a.png", "red", (8, 6))
    paint(root / "b.png", "red", (12, 20))
    with pytest.raises(DataError, match=r"a.png 8x6 and b.png 12x20\): set size, e.g. size=6"):
        Folder(path=str(root)).load()
    data = Folder(path=str(root), size=4, validation=0, test=0).load()
    assert data.train.shape == (4, 4, 3)


def test_the_middle_is_cut_out():
    image = Image.new("RGB", (30, 10), "red")
    image.paste((0, 0, 255), (10, 0, 20, 10))
    assert (read_picture(image, 10, 3) == [0, 0, 255]).all()
    assert (read_picture(image, 5, 3)[:, 1:-1] == [0, 0, 255]).all()
    assert read_picture(image, None, 3).shape == (10, 30, 3)


def test_modes_of_picture_files(tmp_path):
    root = tmp_path / "modes"
    paint(root / "grey.png", 128, mode="L")
    paint(root / "bit.png", 1, mode="1")
    paint(root / "wide.png", 0x8080, mode="I;16")
    paint(root / "print.jpg", (0, 0, 0, 127), mode="CMYK")
    paint(root / "clear.png", (10, 10, 10, 0), mode="RGBA")
    paint(root / "half.png", (128, 0), mode="LA")
    palette = Image.new("P", (6, 6), 1)
    palette.putpalette([0, 0, 0, 128, 128, 128])
    palette.save(root / "palette.png")
    palette.save(root / "ghost.gif", transparency=1)
    for channels in (1, 3):
        data = Folder(path=str(root), channels=channels, validation=0, test=0).load()
        assert data.train.shape == (6, 6, channels)
        means = sorted(data.train.pixels.mean((1, 2, 3)).tolist())
        assert means == pytest.approx([128] * 4 + [255] * 4, abs=1.5)


def test_the_cameras_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (8, 4), "red")
    image.paste((0, 0, 255), (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    (tmp_path / "turned").mkdir()
    image.save(tmp_path / "turned" / "a.png", exif=exif)
    pixels = Folder(path=str(tmp_path / "turned"), validation=0, test=0).load().train.pixels[0]
    assert pixels.shape == (8, 4, 3) and pixels[0, 0].tolist() == [0, 0, 255]


@pytest.fixture
def damaged(photos):
    whole = (photos / "cat" / "3.png").read_bytes()
    (photos / "cat" / "3.png").write_bytes(whole[:40])
    (photos / "dog" / "text.jpg").write_text("hello")
    return photos


def test_corrupt_files_are_named_and_counted(damaged):
    with pytest.raises(DataError) as caught:
        Folder(path=str(damaged)).load()
    said = str(caught.value)
    assert "2 of 21 pictures cannot be read" in said and "corrupt=skip" in said
    assert "cat/3.png" in said and "dog/text.jpg" in said and "\n" not in said


def test_corrupt_files_are_skipped_if_asked(damaged):
    for _ in range(2):  # from the files, then from the cache
        data = Folder(path=str(damaged), corrupt="skip", validation=0, test=0).load()
        numbers = which(data.train)
        assert sorted(numbers) == [0, 1, 2, *range(4, 10), *range(100, 110)]
        assert data.train.labels.tolist() == [number // 100 for number in numbers]
        assert len(data.notes) == 1 and "2 of 21" in data.notes[0]


def test_a_folder_changed_is_decoded_again(photos):
    one = Folder(path=str(photos)).load()
    paint(photos / "dog" / "new.png", (200, 0, 0))
    other = Folder(path=str(photos)).load()
    assert one.digest != other.digest
    paint(photos / "dog" / "new.png", (201, 0, 0))
    os.utime(photos / "dog" / "new.png", ns=(1, 1))
    assert Folder(path=str(photos)).load().digest not in (one.digest, other.digest)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"path": ""}, ConfigError, "needs path"),
        ({"path": "nowhere"}, DataError, "no such folder"),
        ({"size": 0}, ConfigError, "size=0"),
        ({"channels": 4}, ConfigError, "channels=4"),
        ({"corrupt": "ignore"}, ConfigError, "refuse or skip"),
    ],
)
def test_folder_refusals(photos, settings, error, says):
    with pytest.raises(error, match=says):
        Folder(**{"path": str(photos), **settings}).load()


def test_folder_with_nothing_or_too_much(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no pictures"):
        Folder(path=str(tmp_path / "empty")).load()
    paint(photos / "stray.png", "red")
    with pytest.raises(DataError, match="stray.png.*subfolders"):
        Folder(path=str(photos)).load()


# ---- CIFAR-10 ------------------------------------------------------------------------------------


@pytest.fixture
def tiny(home, monkeypatch):
    """CIFAR-10 in the official layout, with four pictures a file."""
    import hashlib

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 3, 32, 32), np.uint8)
    labels = rng.integers(0, 10, 24).astype(np.uint8)
    folder = home / "data" / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    records = np.concatenate([labels[:, None], pixels.reshape(24, -1)], 1)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records[number * 4 : number * 4 + 4].tofile(folder / f"{name}.bin")
    shown = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    sums = {
        f"{part} {what}": hashlib.sha256(array[rows].tobytes()).hexdigest()
        for part, rows in (("train", slice(20)), ("test", slice(20, 24)))
        for what, array in (("pixels", shown), ("labels", labels))
    }
    monkeypatch.setattr(cifar10, "OFFICIAL", Content(4, sums))
    return folder, shown, labels


def test_cifar10_reads_the_official_layout(tiny):
    _, pixels, labels = tiny
    data = Cifar10(validation=0.1).load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [18, 2, 4]
    np.testing.assert_array_equal(data.test.pixels, pixels[20:])
    np.testing.assert_array_equal(data.test.labels, labels[20:])
    assert data.classes[0] == "airplane" and data.classes[9] == "truck"


def test_cifar10_with_one_wrong_byte_is_refused(tiny):
    folder, _, _ = tiny
    for position, what in ((0, "train labels"), (100, "train pixels")):
        whole = (folder / "data_batch_2.bin").read_bytes()
        changed = bytearray(whole)
        changed[position] ^= 1
        (folder / "data_batch_2.bin").write_bytes(changed)
        with pytest.raises(DataError, match=f"the {what} of CIFAR-10 .* not the official"):
            Cifar10().load()
        (folder / "data_batch_2.bin").write_bytes(whole)
    (folder / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="5 bytes; expected 12292"):
        Cifar10().load()


def test_cifar10_that_was_never_fetched_says_how():
    with pytest.raises(DataError, match="run `harmonium data fetch cifar10`"):
        Cifar10().load()
