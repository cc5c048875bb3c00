"""Several sets as styles of one."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.decoding.conversion import shaped
from harmonium.data.sets.styles import StyledImages


def member(name, shape, count, classes=("0", "1", "2")):
    """A registered data set of random images."""
    rng = np.random.default_rng(count)
    train = rng.integers(0, 256, (count, *shape), np.uint8)
    test = rng.integers(0, 256, (4, *shape), np.uint8)

    class Member(DataSpec):
        def identity(self):
            return {"count": count}

        def decode(self, writer):
            writer.append("train", train, np.arange(count) % len(classes))
            writer.append("test", test, np.arange(4) % len(classes))
            return classes

    Member.name = name
    return Member, train, test


@pytest.fixture
def sets(monkeypatch, home):
    """Two sets of different size, shape and colour, and one with other classes."""
    made = {
        "small": member("small", (6, 6, 1), 9),
        "large": member("large", (10, 10, 3), 30),
        "others": member("others", (8, 8, 3), 10, ("cat", "dog")),
    }
    table = {**datasets.table(), **{name: found[0] for name, found in made.items()}}
    monkeypatch.setattr(datasets, "_table", table)
    return made


def test_members_keep_their_images_labels_and_style(sets):
    data = StyledImages(sets=("small", "large"), size=8, validation=0.0).load()
    assert data.names == {"style": ("small", "large")}
    assert data.classes == ("0", "1", "2")
    assert data.train.shape == (8, 8, 3)
    for style, name in enumerate(("small", "large")):
        _, train, test = sets[name]
        for part, pixels in ((data.train, train), (data.test, test)):
            rows = np.flatnonzero(part.factors["style"] == style)
            order = {p.tobytes(): k for k, p in enumerate(shaped(pixels, 8, 3))}
            found = [order[part.pixels[row].tobytes()] for row in rows]
            assert sorted(found) == list(range(len(pixels)))
            np.testing.assert_array_equal(part.labels[rows], np.array(found) % 3)


def test_validation_is_taken_from_all_styles_alike(sets):
    data = StyledImages(sets=("small", "large"), size=8, validation=0.5).load()
    assert set(data.validation.factors["style"]) == {0, 1}
    assert len(data.validation) + len(data.train) == 39


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (("small",), ConfigError, "at least two"),
        (("small", "small"), ConfigError, "at least two"),
        (("small", "large", "small"), ConfigError, "at least two data sets of different"),
        (("small", "others"), DataError, "others has 2 .*cat, dog.*same classes"),
        (("small", "lage"), ConfigError, "unknown data set 'lage': did you mean 'large'"),
        (("small", "gone/small.npz"), ConfigError, "of different names"),
        (("small", "gone/file.npz"), DataError, "data.sets=gone/file.npz"),
    ],
)
def test_sets_that_are_no_styles_of_each_other(sets, names, error, says):
    with pytest.raises(error, match=says):
        StyledImages(sets=names, size=8).load()


def test_digit_is_the_default():
    assert StyledImages().sets == ("mnist", "usps", "svhn")
    assert (StyledImages().size, StyledImages().channels) == (32, 3)


def archive(folder, name, count=12, labels=3, shade=0):
    """A file of grey images whose classes are numbers."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(shade)
    parts = {"train": count, "test": 6}
    arrays = {f"{part}_x": rng.integers(0, 256, (n, 5, 5), np.uint8) for part, n in parts.items()}
    arrays |= {f"{part}_y": np.arange(n) % labels for part, n in parts.items()}
    np.savez(folder / name, **arrays)
    return str(folder / name), arrays


def test_an_archive_is_a_style_called_as_its_file(sets, tmp_path):
    path, arrays = archive(tmp_path / "a", "post.npz")
    data = StyledImages(sets=("small", path), size=8, validation=0.0).load()
    assert data.names == {"style": ("small", "post")}
    assert data.classes == ("0", "1", "2")
    rows = np.flatnonzero(data.train.factors["style"] == 1)
    order = {p.tobytes(): k for k, p in enumerate(shaped(arrays["train_x"][..., None], 8, 3))}
    found = [order[data.train.pixels[row].tobytes()] for row in rows]
    assert sorted(found) == list(range(12))
    np.testing.assert_array_equal(data.train.labels[rows], np.array(found) % 3)
    assert (data.test.factors["style"] == 1).sum() == 6


def test_what_an_archive_holds_counts_and_not_where_it_lies(sets, tmp_path):
    here, _ = archive(tmp_path / "a", "post.npz")
    there, _ = archive(tmp_path / "b", "post.npz")
    other, _ = archive(tmp_path / "c", "post.npz", shade=1)
    renamed, _ = archive(tmp_path / "d", "mail.npz")
    loaded = [StyledImages(sets=("small", path)).load() for path in (here, there, other, renamed)]
    assert loaded[0].digest == loaded[1].digest and loaded[0].key == loaded[1].key
    assert len({one.digest for one in loaded}) == 3
    assert loaded[3].names["style"] == ("small", "mail")


def test_an_archive_with_other_classes_is_no_style(sets, tmp_path):
    path, _ = archive(tmp_path / "a", "post.npz", labels=4)
    with pytest.raises(DataError, match="small has 3 classes.*but post has 4"):
        StyledImages(sets=("small", path)).load()


def test_as_many_images_of_every_style_and_class_as_are_asked_for(sets, tmp_path):
    path, _ = archive(tmp_path / "a", "post.npz", count=15)
    wanted = {"sets": ("large", path), "each": 7, "test_each": 3, "size": 8, "validation": 0.0}
    data, again, moved = (StyledImages(**wanted, seed=seed).load() for seed in (0, 0, 1))
    for part, most in ((data.train, 3), (data.test, 1)):
        for style, count in enumerate((7, 7) if part is data.train else (3, 3)):
            labels = part.labels[part.factors["style"] == style]
            assert len(labels) == count
            assert np.bincount(labels, minlength=3).max() == most
    assert data.digest == again.digest != moved.digest
    assert len(StyledImages(**wanted, limit=5).load().train) == 5
    assert len(StyledImages(**{**wanted, "each": None}).load().train) == 45
    assert len(StyledImages(**{**wanted, "test_each": None}).load().test) == 10


@pytest.mark.parametrize(
    ("limits", "error", "says"),
    [
        ({"each": 10}, DataError, "data.each=10, but small has 9 training images: use 9 or less"),
        ({"test_each": 5}, DataError, "data.test_each=5, but large has 4 test images"),
        ({"each": 0}, ConfigError, "data.each=0: at least 1"),
    ],
)
def test_more_of_a_style_than_there_are(sets, limits, error, says):
    with pytest.raises(error, match=says):
        StyledImages(sets=("large", "small"), **limits).load()
