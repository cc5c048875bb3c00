"""FedStyle's clients: one style each, equal totals, repeats only within a client."""

import numpy as np
import pytest

from harmonium.data.partition import make_split
from harmonium.data.splits.styles import Styles
from harmonium.errors import ConfigError, DataError


@pytest.fixture
def digits(pictures):
    """A hundredth of MNIST, USPS and SVHN: 600, 73 and 733 pictures; SVHN's ones are many."""
    labels = [np.arange(600) % 10, np.arange(73) % 10]
    labels.append(np.repeat(np.arange(10), [49, 139, 106, 85, 75, 69, 57, 56, 50, 47]))
    style = np.repeat([0, 1, 2], [600, 73, 733])
    order = np.random.default_rng(0).permutation(1406)
    return pictures(np.concatenate(labels)[order], style=style[order])


def repeats(own):
    return np.unique(own, return_counts=True)[1]


@pytest.mark.parametrize("rule", [Styles(), Styles(beta=0.2), Styles(equalise=False)], ids=str)
def test_clients_never_mix_styles(digits, rule):
    split = make_split(rule, digits, "d", 6, 0)
    for client, own in enumerate(split.indices):
        assert np.unique(digits.factors["style"][own]).tolist() == [client // 2]


@pytest.mark.parametrize("beta", [None, 0.2, 0.8])
def test_every_style_is_brought_to_the_mean(digits, beta):
    split = make_split(Styles(beta=beta), digits, "d", 6, 0)
    assert [len(own) for own in split.indices] == [468 // 2] * 6
    for own in split.indices[2:4]:  # 36 pictures of USPS each, six or seven times
        assert len(np.unique(own)) == 36 and set(repeats(own)) == {6, 7}
    for own in (*split.indices[:2], *split.indices[4:]):
        assert len(np.unique(own)) == len(own)
    lost = 1406 - 4 * 234 - 2 * 36
    assert split.notes == (
        "396 of 1404 pictures are repeats: their styles are smaller than others",
        f"{lost} of 1406 training pictures are held by nobody",
    )


def test_without_labels_in_the_way_every_client_has_the_same_of_each_class(digits):
    split = make_split(Styles(), digits, "d", 6, 0)
    counts = np.stack([np.bincount(digits.labels[own], minlength=10) for own in split.indices])
    for style in range(3):
        one, other = counts[2 * style : 2 * style + 2]
        assert np.abs(one - other).max() <= (7 if style == 1 else 1)  # a repeat weighs up to 7
    assert np.ptp(counts[[0, 1, 4, 5]]) <= 1  # enough pictures: all classes alike, SVHN's too


@pytest.mark.parametrize("beta", [1e-3, 0.2, 0.8, 1e4])
def test_class_weights_are_drawn_for_each_client(pictures, beta):
    """The mean sum of squared shares of 100 draws, whose weights are Dir(beta) of 10, is known."""
    images = pictures(np.arange(40_000) % 10, style=np.repeat(np.arange(4), 10_000))
    split = make_split(Styles(beta=beta), images, "d", 400, 0)
    early = [k for k in range(400) if k % 100 < 20]  # before the classes of a style run out
    counts = [np.bincount(images.labels[split.indices[k]]) / 100 for k in early]
    wanted = 0.01 + 0.99 * (beta + 1) / (10 * beta + 1)
    assert np.mean([(shares**2).sum() for shares in counts]) == pytest.approx(wanted, abs=0.05)


def test_as_they_are_nothing_repeats(digits):
    split = make_split(Styles(equalise=False), digits, "d", 6, 0)
    assert [len(own) for own in split.indices] == [300, 300, 36, 36, 366, 366]
    assert all(len(np.unique(own)) == len(own) for own in split.indices)
    assert split.notes == ("2 of 1406 training pictures are held by nobody",)


def test_one_client_for_each_style(digits):
    split = make_split(Styles(), digits, "d", 3, 0)
    assert [len(own) for own in split.indices] == [468] * 3
    assert len(np.unique(split.indices[1])) == 73


def test_another_column_can_be_the_style(pictures):
    images = pictures(np.full(90, -1), domain=np.arange(90) % 3 + 5)
    split = make_split(Styles("domain"), images, "d", 9, 0)
    assert [np.unique(images.factors["domain"][own]).tolist() for own in split.indices] == [
        [5 + client // 3] for client in range(9)
    ]


@pytest.mark.parametrize(
    ("clients", "settings", "says"),
    [
        (7, {}, "clients=7, .* has 3 styles.*: use 6 or 9 clients"),
        (2, {}, "has 3 styles.*: use 3 clients"),
        (300, {}, "style 1 .* has 73 pictures for 100 clients: use at most 219 clients"),
        (6, {"column": "domain"}, "split.column=domain.*choose split.column from: style"),
    ],
)
def test_what_cannot_be_done_is_refused(digits, clients, settings, says):
    with pytest.raises(DataError, match=says):
        make_split(Styles(**settings), digits, "d", clients, 0)


def test_pictures_without_a_style_or_a_label_are_refused(pictures):
    with pytest.raises(DataError, match="2 of 6 pictures have no value there"):
        make_split(Styles(), pictures([0] * 6, style=[0, 1, -1, 0, 1, -1]), "d", 2, 0)
    with pytest.raises(DataError, match=r"split.beta=0.2 needs .* 3 of 6 have none: leave split.b"):
        images = pictures([0, 1, 2, -1, -1, -1], style=[0, 1, 0, 1, 0, 1])
        make_split(Styles(beta=0.2), images, "d", 2, 0)
    with pytest.raises(ConfigError, match="split.beta is 0"):
        Styles(beta=0.0)
