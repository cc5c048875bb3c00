"""Splits that are known already: named by a column of the data, or saved in a file."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.images import Dataset
from harmonium.data.partition import Split, _digest, make_split
from harmonium.data.splits.column import Column
from harmonium.data.splits.file import SavedSplit
from harmonium.data.splits.iid import IID
from harmonium.data.splits.rotation import Joint

# ---- column --------------------------------------------------------------------------------------


def test_every_value_is_a_client(make_images):
    images = make_images([-1] * 6, client=[30, 7, 30, 12, 7, 7])
    split = make_split(Column(), images, "d", 3, 0)
    assert [own.tolist() for own in split.indices] == [[1, 4, 5], [3], [0, 2]]
    assert split.notes == ()


def test_another_number_of_clients_is_refused(make_images):
    images = make_images(np.zeros(20), writer=np.arange(20) % 7)
    with pytest.raises(
        DataError, match="^split.column=writer names 7 clients among .*: set clients=7$"
    ):
        make_split(Column("writer"), images, "d", 5, 0)
    with pytest.raises(DataError, match="clients times split.merge must be 7"):
        make_split(Column("writer", merge=2), images, "d", 3, 0)
    with pytest.raises(DataError, match="split.column=client, but .* choose .* writer"):
        make_split(Column(), images, "d", 7, 0)


def test_images_of_nobody_are_refused_or_dropped(make_images):
    images = make_images(np.zeros(5), client=[1, -1, 0, 1, -1])
    with pytest.raises(DataError, match=r"2 of 5 images.*split.missing="):
        make_split(Column(), images, "d", 2, 0)
    split = make_split(Column(missing="drop"), images, "d", 2, 0)
    assert [own.tolist() for own in split.indices] == [[2], [0, 3]]
    assert split.notes == ("2 of 5 training images are held by no client",)


# ---- file ----------------------------------------------------------------------------------------


@pytest.fixture
def images(make_images):
    return make_images(np.arange(60) % 3)


@pytest.fixture
def saved(images, tmp_path):
    path = tmp_path / "split.npz"
    make_split(Joint(0.5, labels=0.2), images, "abc", 5, 8).save(path)
    return path


def same(one, other):
    return all(map(np.array_equal, one, other))


def test_a_saved_split_comes_back_with_all_it_has(images, saved):
    before = Split.load(saved)
    split = make_split(SavedSplit(str(saved)), images, "abc", 5, 99)
    assert same(split.indices, before.indices)
    assert same(split.angles, before.angles)
    assert same(split.labelled, before.labelled)
    assert split.notes == ("read from a file, made by split=joint with seed=8",)
    assert split.spec["name"] == "file" and split.spec["path"] == str(saved)


def test_a_saved_split_can_be_saved_again_and_merged(images, saved, tmp_path):
    split = make_split(SavedSplit(str(saved)), images, "abc", 5, 0)
    split.save(tmp_path / "again.npz")
    assert same(Split.load(tmp_path / "again.npz").indices, split.indices)
    together = make_split(SavedSplit(str(saved), merge=5), images, "abc", 1, 0)
    assert np.array_equal(together.indices[0], np.sort(np.concatenate(split.indices)))


def test_labels_may_be_chosen_where_the_file_does_not(images, saved, tmp_path):
    with pytest.raises(ConfigError, match="split.labels"):
        make_split(SavedSplit(str(saved), labels=0.5), images, "abc", 5, 0)
    make_split(IID(), images, "abc", 5, 0).save(tmp_path / "plain.npz")
    split = make_split(SavedSplit(str(tmp_path / "plain.npz"), labels=0.5), images, "abc", 5, 0)
    assert {len(own) for own in split.labelled} <= {5, 6, 7}


def test_other_data_and_other_clients_are_refused(images, make_images, saved):
    rule = SavedSplit(str(saved))
    with pytest.raises(DataError, match=r"split.path=.* holds 5 clients: set clients=5$"):
        make_split(rule, images, "abc", 4, 0)
    with pytest.raises(DataError, match=r"clients times split.merge must be 5$"):
        make_split(SavedSplit(str(saved), merge=2), images, "abc", 2, 0)
    with pytest.raises(DataError, match="20 training images"):
        make_split(rule, make_images(np.zeros(20)), "abc", 5, 0)
    with pytest.raises(DataError, match="abc"):
        make_split(rule, images, "other", 5, 0)
    dataset = Dataset("holiday", images, images, images, (), "xyz")
    with pytest.raises(DataError, match="abc, but holiday .* xyz"):
        make_split(rule, dataset, None, 5, 0)


def test_a_file_that_is_none_is_refused(images, tmp_path):
    with pytest.raises(ConfigError, match="needs split.path=FILE.npz"):
        SavedSplit()
    with pytest.raises(DataError, match="there is no split"):
        make_split(SavedSplit(str(tmp_path / "none.npz")), images, "abc", 5, 0)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="split file"):
        make_split(SavedSplit(str(tmp_path / "broken.npz")), images, "abc", 5, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"indices": [[-1, 3], [4, 5]]}, "split is damaged"),
        ({"indices": [[3, 1], [4, 5]]}, "split is damaged"),
        ({"indices": [[], [4, 5]]}, "split is damaged"),
        ({"indices": [[1, 4], [4, 5]]}, "two clients hold the same image"),
        ({"angles": [[1.0], [2.0, 3.0]]}, "split is damaged"),
        ({"angles": [[1.0, np.nan], [2.0, 3.0]]}, "split is damaged"),
        ({"labelled": [[2], [0]]}, "split is damaged"),
        ({"labelled": [[1, 0], [0]]}, "split is damaged"),
        ({"labelled": [[1]]}, "split is damaged"),
    ],
)
def test_a_file_that_is_whole_but_wrong_is_refused(images, tmp_path, change, says):
    """The digest guards against accidents; whoever writes a file can write a digest, too."""
    right = {"indices": [[1, 3], [4, 5]], "angles": [[0.0, 1.0], [2.0, 3.0]], "labelled": None}
    kinds = {"indices": np.int64, "angles": np.float32, "labelled": np.int64}
    held = {
        name: each and tuple(np.array(one, kinds[name]) for one in each)
        for name, each in (right | change).items()
    }
    digest = _digest(held["indices"], held["angles"], held["labelled"], {}, "abc", ())
    made = Split(held["indices"], {}, "abc", digest, held["angles"], held["labelled"])
    made.save(tmp_path / "wrong.npz")
    with pytest.raises(DataError, match=says):
        make_split(SavedSplit(str(tmp_path / "wrong.npz")), images, "abc", 2, 0)
