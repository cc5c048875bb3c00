"""The list of data sets and the view of one of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from harmonium.data.cache import fetched_folder
from harmonium.data.catalogue import catalogue, channel_figures, examples, overview
from harmonium.data.datasets import datasets
from harmonium.data.images import Dataset, Images
from harmonium.data.published_datasets import RECORD, Published


def images(count, seed=0, shape=(3, 2, 3), **factors):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = factors.pop("labels", np.full(count, -1))
    return Images(pixels, np.asarray(labels), {k: np.asarray(v) for k, v in factors.items()})


# ---- all of them ---------------------------------------------------------------------------------


def test_every_data_set_is_there_with_what_is_known_of_it():
    found = catalogue()
    assert set(found) == set(datasets.table())
    assert json.loads(json.dumps(found)) is not None
    digits = found["digits"]
    assert (digits["shape"], digits["classes"], digits["train"]) == ((8, 8, 1), 10, 1797)
    assert "scikit-learn" in digits["what"] and digits["licence"].startswith("CC BY 4.0")
    assert digits["here"] == "made here" and digits["source"] is None
    assert found["folder"]["here"] == found["npz"]["here"] == "needs a path"
    assert found["folder"]["shape"] is None


def published():
    return [name for name, cls in datasets.table().items() if issubclass(cls, Published)]


def test_published_sets_say_where_they_come_from():
    found = catalogue()
    assert published()
    for name in published():
        source = found[name]["source"]
        assert source["page"].startswith("http")
        for remote in source["remotes"]:
            assert len(remote["md5"]) == 32 and remote["urls"]
        for layout in source["files_md5"]:
            assert all(md5 is None or len(md5) == 32 for md5 in layout.values())


def test_whether_a_set_is_here_follows_the_files(home: Path):
    name = published()[0]
    assert catalogue()[name]["here"] == "not here"
    cache = home / "cache" / f"{name}-turned-0123456789abcdef"  # another set's
    cache.mkdir(parents=True)
    (cache / "meta.json").touch()
    assert catalogue()[name]["here"] == "not here"
    cache.rename(home / "cache" / f"{name}-0123456789abcdef")
    assert catalogue()[name]["here"] == "decoded"
    fetched_folder(name).mkdir(parents=True)
    (fetched_folder(name) / RECORD).touch()
    assert catalogue()[name]["here"] == "fetched, decoded"


# ---- one of them ---------------------------------------------------------------------------------


def test_an_overview_counts_every_part():
    train = images(4, labels=[0, 0, 1, -1], style=[0, 1, 1, 1])
    held, test = images(2, 1, labels=[1, 1], style=[0, 0]), images(1, 2, labels=[0], style=[1])
    dataset = Dataset(
        "d", train, held, test, ("cat", "dog"), "abc", ("a note",), {"style": ("ink",)}
    )
    found = overview(dataset)
    assert found["parts"] == {"train": 4, "validation": 2, "test": 1}
    assert found["unlabelled"] == {"train": 1, "validation": 0, "test": 0}
    assert found["classes"] == [
        {"name": "cat", "train": 2, "validation": 0, "test": 1},
        {"name": "dog", "train": 1, "validation": 2, "test": 0},
    ]
    assert found["styles"][0] == {"name": "ink", "train": 1, "validation": 2, "test": 0}
    assert found["styles"][1]["name"] == "1"  # it has no name
    assert (found["shape"], found["notes"], found["digest"]) == ([3, 2, 3], ["a note"], "abc")
    pixels = np.concatenate([train.pixels, held.pixels]).reshape(-1, 3) / 255
    for channel, column in zip(found["channels"], pixels.T, strict=True):
        assert channel == pytest.approx({"mean": column.mean(), "std": column.std()})
    json.dumps(found)


def test_channels_are_the_same_in_pieces(monkeypatch):
    whole = channel_figures([images(50)])
    monkeypatch.setattr("harmonium.data.catalogue.CHUNK_BYTES", 7 * 18)
    assert channel_figures([images(50)]) == whole
    assert (
        channel_figures([images(50).subset(range(20)), images(50).subset(range(20, 50))]) == whole
    )


def sheet(train, rows=20, names=None, classes=()):
    return examples(Dataset("d", train, train, train, classes, "x", names=names or {}), rows, 3)


def test_examples_are_of_each_class():
    train = images(40, labels=np.arange(40) % 4, style=[0] * 40)
    rows, note = sheet(train, classes=("a", "b", "c", "d"))
    assert [name for name, _ in rows] == ["a", "b", "c", "d"] and note == ""
    np.testing.assert_array_equal(rows[1][1], train.pixels[[1, 5, 9]])
    rows, note = sheet(train, 2, classes=("a", "b", "c", "d"))
    assert [name for name, _ in rows] == ["a", "d"] and note == "2 of 4 classes"


def test_examples_without_labels_are_of_each_style_or_of_all():
    rows, _ = sheet(images(10, style=[1, 0] * 5), names={"style": ("ink", "oil")})
    assert [name for name, _ in rows] == ["ink", "oil"]
    rows, _ = sheet(images(7))
    assert [len(some) for _, some in rows] == [3, 3, 1]
    assert {name for name, _ in rows} == {""}
    assert sum(len(some) for _, some in sheet(images(100), 4)[0]) == 6
