"""CIFAR-10 and CIFAR-100: official records, the package that holds the same, and refusals."""

import dataclasses
import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from harmonium.core.errors import DataError
from harmonium.data.datasets import datasets
from harmonium.data.sets.cifar import CLASSES, COARSE, FAMILIES, FINE, Cifar10, Cifar100
from harmonium.data.sources.fetch import fetch

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (12, 32, 32, 3), np.uint8)
LABELS = rng.integers(0, 10, 12).astype(np.uint8)
STEMS = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
LABELS_100 = np.array([[3, 99], [19, 0], [0, 7], [11, 50], [2, 2], [4, 98]], np.uint8)


def records(labels, pixels):
    """Label bytes, then all red, all green, all blue bytes."""
    return b"".join(
        np.array(label, np.uint8).tobytes() + image.transpose(2, 0, 1).tobytes()
        for label, image in zip(labels, pixels, strict=True)
    )


def cifar10():
    """Two images a file, ten for training."""
    return {
        f"cifar-10-batches-bin/{stem}.bin": records(LABELS[2 * n : 2 * n + 2], PIXELS[2 * n :][:2])
        for n, stem in enumerate(STEMS)
    }


def cifar100():
    """Four images for training, two for testing."""
    return {
        "cifar-100-binary/train.bin": records(LABELS_100[:4], PIXELS[:4]),
        "cifar-100-binary/test.bin": records(LABELS_100[4:], PIXELS[4:6]),
    }


def package():
    """The same images as PNG files of one image a row, as the package has them."""
    files = {"package/package.json": b"{}"}
    for n, stem in enumerate(STEMS):
        png = io.BytesIO()
        Image.fromarray(PIXELS[2 * n :][:2].reshape(2, 1024, 3)).save(png, "PNG")
        files[f"package/{stem}.png"] = png.getvalue()
    for part, rows in (("train", slice(10)), ("test", slice(10, 12))):
        files[f"package/{part}_lables.json"] = json.dumps(LABELS[rows].tolist()).encode()
    return files


def packed(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return path


@pytest.fixture
def small(monkeypatch, home):
    """The sets with the sums of the small files above in place of the official ones."""
    for cls, files in ((Cifar10, cifar10()), (Cifar100, cifar100())):
        sums = {name: hashlib.md5(body).hexdigest() for name, body in files.items()}
        assert sums.keys() == cls.source.layouts[0].keys()
        monkeypatch.setattr(cls, "source", dataclasses.replace(cls.source, layouts=(sums,)))


def order(images):
    """Which images they are."""
    known = {image.tobytes(): number for number, image in enumerate(PIXELS)}
    return [known[image.tobytes()] for image in images.pixels]


def test_cifar10_reads_the_official_records(fetched):
    fetched("cifar10", cifar10())
    data = Cifar10(validation=0).load()
    assert sorted(order(data.train)) == list(range(10)) and order(data.test) == [10, 11]
    assert data.train.labels.tolist() == LABELS[order(data.train)].tolist()
    assert data.test.labels.tolist() == LABELS[10:].tolist()
    assert data.classes == CLASSES and data.classes[0] == "airplane" and data.classes[9] == "truck"


@pytest.mark.parametrize("target", ["fine", "coarse"])
def test_cifar100_has_two_labels(fetched, target):
    fetched("cifar100", cifar100())
    data = Cifar100(validation=0, target=target).load()
    coarse, fine = LABELS_100[order(data.train)].T.tolist()
    if target == "fine":
        assert (
            data.train.labels.tolist() == fine and data.train.factors["coarse"].tolist() == coarse
        )
        assert data.classes == FINE and data.names == {"coarse": COARSE}
    else:
        assert data.train.labels.tolist() == coarse and data.train.factors["fine"].tolist() == fine
        assert data.classes == COARSE and data.names == {"fine": FINE}
    assert sorted(order(data.train)) == [0, 1, 2, 3] and order(data.test) == [4, 5]


def test_the_classes_of_cifar100():
    assert len(FINE) == len(set(FINE)) == 100 and len(COARSE) == 20
    assert all(len(names.split()) == 5 for names in FAMILIES.values())
    # Known places in the official list.
    places = {0: "apple", 19: "cattle", 47: "maple_tree", 58: "pickup_truck", 99: "worm"}
    assert {place: FINE[place] for place in places} == places
    assert COARSE[0] == "aquatic_mammals" and COARSE[19] == "vehicles_2"


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("cifar10", {"cifar-10-batches-bin/test_batch.bin": b"short"}, "5 bytes; expected 3073"),
        (
            "cifar10",
            {"cifar-10-batches-bin/test_batch.bin": records([10], PIXELS[:1])},
            "from 10 to 10; expected 0 to 9",
        ),
        (
            "cifar100",
            {"cifar-100-binary/test.bin": records([[20, 3]], PIXELS[:1])},
            "from 20 to 20; expected 0 to 19",
        ),
        (
            "cifar100",
            {"cifar-100-binary/test.bin": records([[3, 100]], PIXELS[:1])},
            "from 100 to 100; expected 0 to 99",
        ),
    ],
)
def test_records_that_are_refused(fetched, refused, name, files, says):
    fetched(name, (cifar10() if name == "cifar10" else cifar100()) | files)
    assert says in refused(name)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_what_was_never_fetched_says_how(home, refused, name):
    assert f"run `harmonium data fetch {name}`" in refused(name)


def test_what_changed_after_fetching_is_refused(fetched, refused):
    folder = fetched("cifar10", cifar10())
    path = folder / "cifar-10-batches-bin" / "data_batch_2.bin"
    body = bytearray(path.read_bytes())
    body[100] ^= 1
    path.write_bytes(body)
    assert "data_batch_2.bin has changed since it was fetched" in refused("cifar10")


# ---- fetching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["archive", "folder", "package"])
def test_cifar10_in_every_form_gives_the_same_bytes(small, tmp_path, form):
    if form == "folder":
        path = tmp_path / "mine"
        path.mkdir()
        for name, body in cifar10().items():
            (path / name.rpartition("/")[2]).write_bytes(body)
    else:
        files = package() if form == "package" else cifar10()
        path = packed(tmp_path / "mine.tgz", files)
    folder = fetch("cifar10", from_path=path)
    for name, body in cifar10().items():
        assert (folder / name).read_bytes() == body
    assert order(Cifar10().load().test) == [10, 11]


def test_cifar100_from_its_archive(small, tmp_path):
    files = cifar100() | {"cifar-100-binary/fine_label_names.txt": b"apple\n"}
    folder = fetch("cifar100", from_path=packed(tmp_path / "cifar-100-binary.tar.gz", files))
    assert sorted(path.name for path in folder.rglob("*.*")) == [
        *("fetched.json", "test.bin", "train.bin")
    ]
    assert len(Cifar100(validation=0).load().train) == 4


def png(pixels, mode="RGB"):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


CHANGED = PIXELS[2:4].reshape(2, 1024, 3).copy()
CHANGED[1, 500, 2] ^= 1


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"data_batch_2.png": png(CHANGED)}, "data_batch_2.bin is not the official file"),
        ({"data_batch_2.png": png(CHANGED[:, :5])}, "not RGB 1024 wide"),
        ({"data_batch_2.png": png(CHANGED, "L")}, "not RGB 1024 wide"),
        ({"data_batch_2.png": b"hello"}, "data_batch_2.png cannot be read"),
        ({"test_lables.json": b"[1, 2"}, "test_lables.json is not JSON"),
        ({"test_lables.json": b'{"a": 1}'}, "should hold labels from 0 to 9"),
        ({"test_lables.json": b"[1, 10]"}, "should hold labels from 0 to 9"),
        ({"test_lables.json": b"[[1], 2]"}, "should hold labels from 0 to 9"),
        ({"test_lables.json": b"[1]"}, "too few labels"),
        (
            {"test_lables.json": json.dumps(((LABELS[10:] + 1) % 10).tolist()).encode()},
            "test_batch.bin is not the official file",
        ),
    ],
)
def test_a_package_with_other_content_is_refused(small, tmp_path, files, says):
    changed = package() | {f"package/{name}": body for name, body in files.items()}
    with pytest.raises(DataError, match=says):
        fetch("cifar10", from_path=packed(tmp_path / "bad.tgz", changed))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("cifar10", ["cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/batches.meta"]),
        ("cifar100", ["cifar-100-python/train", "cifar-100-python/meta"]),
    ],
)
@pytest.mark.parametrize("form", ["archive", "folder", "inner folder"])
def test_pickled_editions_are_refused(small, tmp_path, name, files, form):
    body = b"\x80\x02}q\x00."  # an empty dictionary
    path = packed(tmp_path / "python.tar.gz", dict.fromkeys(files, body))
    if form != "archive":
        path = tmp_path / "mine"
        for file in files:
            target = path / (file if form == "folder" else file.rpartition("/")[2])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(body)
    binary = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}[name]
    with pytest.raises(DataError, match=f"pickled.*never read.*take {binary} from https") as caught:
        fetch(name, from_path=path)
    assert "\n" not in str(caught.value)


def test_an_archive_in_place_of_cifar100_has_no_families(home, tmp_path):
    arrays = {"train_x": PIXELS[:6], "test_x": PIXELS[6:8]}
    arrays |= {"train_y": np.arange(6) * 17, "test_y": np.array([0, 17])}
    np.savez(tmp_path / "x.npz", **arrays)
    fetch("cifar100", from_path=tmp_path / "x.npz")
    assert Cifar100(validation=0).load().train.labels.max() == 85
    with pytest.raises(DataError, match="data.target=coarse.*cifar100"):
        Cifar100(target="coarse").load()


def test_the_official_sums():
    assert datasets["cifar10"] is Cifar10 and datasets["cifar100"] is Cifar100
    assert Cifar10.source.remotes[0].md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert Cifar100.source.remotes[0].md5 == "03b5dce01913d631647c71ecec9e9cb8"
