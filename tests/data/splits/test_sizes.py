"""Unequal sizes: `lda` with its least size, `quantity`, and the arithmetic below them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.partition import make_split
from harmonium.data.splits.lda import Lda, _topped_up
from harmonium.data.splits.quantity import Quantity
from harmonium.data.splits.sampling import levelled, rounded


def sizes_of(split):
    return np.array([len(own) for own in split.indices])


def counts_of(split, labels):
    return np.stack([np.bincount(labels[own], minlength=labels.max() + 1) for own in split.indices])


# ---- lda -----------------------------------------------------------------------------------------


def test_who_holds_enough_gets_nothing_of_the_classes_after(make_images):
    labels = np.repeat(np.arange(10), 500)
    split = make_split(Lda(0.5), make_images(labels), "d", 10, 0)
    assert not split.notes
    before = np.zeros(10)
    passed_over = 0
    for column in counts_of(split, labels).T:
        assert (column[before >= 500] == 0).all()
        passed_over += (before >= 500).sum()
        before += column
    assert passed_over > 5 and before.sum() == 5000


def test_proportions_of_a_first_class_are_a_dirichlet_draw(make_images):
    """Of the first class nobody is passed over: the variance of Dir(a) shares is known."""
    labels, alpha, clients = np.repeat([0, 1], [4000, 4000]), 0.8, 8
    splits = [make_split(Lda(alpha, 1), make_images(labels), "d", clients, s) for s in range(200)]
    shares = np.stack([counts_of(split, labels)[:, 0] for split in splits]) / 4000
    wanted = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean() == pytest.approx(1 / clients)
    assert shares.var() == pytest.approx(wanted, rel=0.15)


def test_too_few_in_every_draw_is_mended_and_told(make_images):
    labels = np.repeat(np.arange(3), 400)
    split = make_split(Lda(1e-4, 20), make_images(labels), "d", 40, 0)
    sizes = sizes_of(split)
    assert sizes.min() == 20 and sizes.sum() == 1200
    (note,) = split.notes
    assert "of 40 clients were below split.min_size=20" in note and "from the largest" in note


def test_the_largest_give_until_nobody_is_short():
    indices = np.split(np.arange(33), np.cumsum([20, 1, 9]))
    made = _topped_up(indices, 4, np.random.default_rng(0))
    assert [len(own) for own in made.indices] == [16, 4, 9, 4]
    assert np.array_equal(np.sort(np.concatenate(made.indices)), np.arange(33))
    assert set(made.indices[0]) < set(range(20)) and 20 in made.indices[1]
    assert all((np.diff(own) > 0).all() for own in made.indices)
    assert "2 of 4 clients" in made.notes[0] and "took 4 images" in made.notes[0]


def test_what_is_given_is_drawn_from_all_that_the_giver_holds():
    made = _topped_up([np.arange(1000), np.arange(1000, 1001)], 400, np.random.default_rng(0))
    given = made.indices[1][:-1]  # the last is its own
    assert len(given) == 399 and abs(given.mean() - 500) < 60


def test_a_bad_draw_is_drawn_again(make_images):
    """One draw of these is short more often than not, twenty hardly ever."""
    images = make_images(np.arange(1000) % 10)
    made = [make_split(Lda(0.05), images, "d", 10, seed) for seed in range(20)]
    assert not any(split.notes for split in made)


def test_a_tight_least_size_is_still_possible(make_images):
    split = make_split(Lda(1e-4, 25), make_images(np.arange(1000) % 7), "d", 40, 0)
    assert sizes_of(split).tolist() == [25] * 40


# ---- quantity ------------------------------------------------------------------------------------


def test_small_is_one_large_client_and_large_is_equal(make_images):
    images = make_images(np.full(10_000, -1))
    lopsided = sizes_of(make_split(Quantity(1e-6), images, "d", 20, 0))
    assert sorted(lopsided) == [10] * 19 + [9810]
    even = sizes_of(make_split(Quantity(1e6), images, "d", 20, 0))
    assert np.abs(even - 500).max() < 10


def test_sizes_vary_as_the_distribution_says(make_images):
    images, alpha, clients = make_images(np.full(20_000, -1)), 2.0, 50
    made = [sizes_of(make_split(Quantity(alpha, 1), images, "d", clients, s)) for s in range(60)]
    wanted = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert (np.stack(made) / 20_000).var() == pytest.approx(wanted, rel=0.1)


def test_images_are_drawn_at_random(make_images):
    labels = np.repeat([0, 1], 5000)
    counts = counts_of(make_split(Quantity(5.0), make_images(labels), "d", 4, 0), labels)
    np.testing.assert_allclose(counts[:, 0] / counts.sum(1), 0.5, atol=0.05)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Lda(), Quantity()], ids=["lda", "quantity"])
def test_too_many_clients_for_the_least_size_are_refused(make_images, rule):
    says = (
        "^clients=300 with split.min_size=10 need 3000 images, but this data set has 1437: "
        "use at most 143 clients$"
    )
    with pytest.raises(DataError, match=says):
        make_split(rule, make_images(np.arange(1437) % 10), "d", 300, 0)
    with pytest.raises(DataError, match="has 7: use split.min_size=3"):
        make_split(rule, make_images(np.arange(7) % 2), "d", 2, 0)


@pytest.mark.parametrize("rule", [Lda, Quantity])
def test_settings_that_cannot_be_right_are_refused(rule):
    with pytest.raises(ConfigError, match="split.min_size is 0"):
        rule(min_size=0)
    with pytest.raises(ConfigError, match="split.alpha is inf"):
        rule(alpha=float("inf"))


# ---- arithmetic ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 400))
def test_levelling_takes_from_the_largest_only(sizes, total):
    sizes = np.array(sizes)
    made = levelled(sizes, total)
    assert made.sum() == min(total, sizes.sum())
    assert (made <= sizes).all()
    lowered = made[made < sizes]
    assert not len(lowered) or made.max() - lowered.min() <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 1000))
def test_rounding_keeps_the_sum_and_is_never_off_by_one(shares, total):
    shares = np.array(shares) + 1e-9
    values = shares / shares.sum() * total
    made = rounded(values, total)
    assert made.sum() == total and (np.abs(made - values) < 1 + 1e-9).all()
    up, down = values[made > values] % 1, values[made <= values] % 1
    assert not len(up) or not len(down) or up.min() >= down.max() - 1e-9
