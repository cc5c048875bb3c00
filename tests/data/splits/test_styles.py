"""FedStyle's clients: one style each, equal totals, repeats only within a client."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.partition import make_split
from harmonium.data.splits.styles import StyleSplit, supplied


@pytest.fixture
def digits(make_images):
    """A hundredth of MNIST, USPS and SVHN: 600, 73 and 733 images; SVHN's ones are many."""
    labels = [np.arange(600) % 10, np.arange(73) % 10]
    labels.append(np.repeat(np.arange(10), [49, 139, 106, 85, 75, 69, 57, 56, 50, 47]))
    style = np.repeat([0, 1, 2], [600, 73, 733])
    order = np.random.default_rng(0).permutation(1406)
    return make_images(np.concatenate(labels)[order], style=style[order])


def repeats(own):
    return np.unique(own, return_counts=True)[1]


@pytest.mark.parametrize(
    "rule", [StyleSplit(), StyleSplit(beta=0.2), StyleSplit(equalise=False)], ids=str
)
def test_clients_never_mix_styles(digits, rule):
    split = make_split(rule, digits, "d", 6, 0)
    for client, own in enumerate(split.indices):
        assert np.unique(digits.factors["style"][own]).tolist() == [client // 2]


@pytest.mark.parametrize("beta", [None, 0.2, 0.8])
def test_every_style_is_brought_to_the_mean(digits, beta):
    split = make_split(StyleSplit(beta=beta), digits, "d", 6, 0)
    assert [len(own) for own in split.indices] == [1406 // 6] * 6
    distinct = [len(np.unique(own)) for own in split.indices]
    assert max(distinct[2:4]) <= 73 and sum(distinct[2:4]) <= 73
    held = np.concatenate([np.unique(own) for own in split.indices])
    assert len(np.unique(held)) == len(held)  # no two clients hold the same image
    assert f"{1404 - sum(distinct)} of 1404 images are repeats" in split.notes[0]
    assert f"{1406 - sum(distinct)} of 1406 training images are held by no client" in split.notes[1]


def test_iid_is_the_same_number_of_every_class_for_every_client(digits):
    split = make_split(StyleSplit(), digits, "d", 6, 0)
    counts = np.stack([np.bincount(digits.labels[own], minlength=10) for own in split.indices])
    assert (counts == counts[0]).all() and np.ptp(counts[0]) <= 1  # USPS repeats, SVHN is even
    for own in split.indices[2:4]:  # 3 or 4 images of a class for 23 or 24 places
        assert set(repeats(own)) <= {5, 6, 7, 8}
    assert sum(len(np.unique(own)) for own in split.indices[2:4]) == 73  # all there are


@pytest.mark.parametrize("beta", [1e-3, 0.2, 0.8, 1e4])
@pytest.mark.parametrize("short", [False, True])
def test_class_weights_are_drawn_for_each_client(make_images, beta, short):
    """The mean sum of squared shares of Dir(beta) of 10 is known; repeats change nothing of it."""
    sizes = [16_000, 16_000, 7_000, 1_000] if short else [10_000] * 4
    images = make_images(np.arange(40_000) % 10, style=np.repeat(np.arange(4), sizes))
    split = make_split(StyleSplit(beta=beta), images, "d", 200, 0)
    counts = [np.bincount(images.labels[own]) / len(own) for own in split.indices]
    wanted = (beta + 1) / (10 * beta + 1)
    assert np.mean([(shares**2).sum() for shares in counts]) == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize("seed", range(30))
def test_everyone_is_supplied_however_scarce_the_images(seed):
    rng = np.random.default_rng(seed)
    clients, classes, each = int(rng.integers(1, 9)), int(rng.integers(1, 5)), 6
    sizes = rng.integers(1, 4, classes)
    sizes[0] += max(0, clients - sizes.sum())
    wanted = rng.multinomial(each, np.ones(classes) / classes, clients)
    wanted[:, 1:] *= rng.integers(0, 2)  # often all want the same class
    wanted[:, 0] = each - wanted[:, 1:].sum(1)
    got, distinct = supplied(wanted, sizes)
    assert (distinct.sum(0) <= sizes).all() and (distinct.sum(1) >= 1).all()
    assert (got.sum(1) == each).all() and (distinct <= got).all() and (distinct >= 0).all()
    assert ((got > 0) == (distinct > 0)).all()


def test_as_they_are_nothing_repeats(digits):
    split = make_split(StyleSplit(equalise=False), digits, "d", 6, 0)
    assert [len(own) for own in split.indices] == [300, 300, 36, 36, 366, 366]
    assert all(len(np.unique(own)) == len(own) for own in split.indices)
    assert split.notes == ("2 of 1406 training images are held by no client",)


def test_one_client_for_each_style(digits):
    split = make_split(StyleSplit(), digits, "d", 3, 0)
    assert [len(own) for own in split.indices] == [468] * 3
    assert len(np.unique(split.indices[1])) == 73


def test_another_column_can_be_the_style(make_images):
    images = make_images(np.full(90, -1), domain=np.arange(90) % 3 + 5)
    split = make_split(StyleSplit("domain"), images, "d", 9, 0)
    assert [np.unique(images.factors["domain"][own]).tolist() for own in split.indices] == [
        [5 + client // 3] for client in range(9)
    ]


@pytest.mark.parametrize(
    ("clients", "settings", "says"),
    [
        (7, {}, "clients=7, .* has 3 styles.*: use 6 or 9 clients"),
        (2, {}, "has 3 styles.*: use 3 clients"),
        (300, {}, "style 1 .* has 73 images for 100 clients: use at most 219 clients"),
        (6, {"column": "domain"}, "split.column=domain.*choose split.column from: style"),
    ],
)
def test_what_cannot_be_done_is_refused(digits, clients, settings, says):
    with pytest.raises(DataError, match=says):
        make_split(StyleSplit(**settings), digits, "d", clients, 0)


def test_images_without_a_style_or_a_label_are_refused(make_images):
    with pytest.raises(DataError, match="2 of 6 images"):
        make_split(StyleSplit(), make_images([0] * 6, style=[0, 1, -1, 0, 1, -1]), "d", 2, 0)
    with pytest.raises(DataError, match=r"split.beta=0.2 needs .* 3 of 6 have none: leave split.b"):
        images = make_images([0, 1, 2, -1, -1, -1], style=[0, 1, 0, 1, 0, 1])
        make_split(StyleSplit(beta=0.2), images, "d", 2, 0)
    with pytest.raises(ConfigError, match="split.beta is 0"):
        StyleSplit(beta=0.0)
