"""Several sets as styles of one."""

import numpy as np
import pytest

from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.picture import shaped
from harmonium.data.sets.styles import Styles
from harmonium.errors import ConfigError, DataError


def member(name, shape, count, classes=("0", "1", "2")):
    """A registered data set of random pictures."""
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


def test_members_keep_their_pictures_labels_and_style(sets):
    data = Styles(sets=("small", "large"), size=8, validation=0.0).load()
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
    data = Styles(sets=("small", "large"), size=8, validation=0.5).load()
    assert set(data.validation.factors["style"]) == {0, 1}
    assert len(data.validation) + len(data.train) == 39


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (("small",), ConfigError, "at least two"),
        (("small", "small"), ConfigError, "at least two"),
        (("small", "large", "small"), ConfigError, "at least two different"),
        (("small", "others"), DataError, "others has 2 .*cat, dog.*same classes"),
        (("small", "lage"), ConfigError, "unknown data set 'lage': did you mean 'large'"),
    ],
)
def test_sets_that_are_no_styles_of_each_other(sets, names, error, says):
    with pytest.raises(error, match=says):
        Styles(sets=names, size=8).load()


def test_digit_is_the_default():
    assert Styles().sets == ("mnist", "usps", "svhn")
    assert (Styles().size, Styles().channels) == (32, 3)
