"""Orchestra's split: the numbers of its Table 4, and what rounding does to the sizes."""

import numpy as np
import pytest

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.partition import make_split
from harmonium.data.splits.orchestra import OrchestraSplit, balanced, balanced_as_published, fitted


def legacy_logs(classes, clients, alpha):
    """The very draws of the paper: the old generator with seed 0, one row for each class."""
    drawn = np.random.RandomState(0).dirichlet(np.repeat(alpha, clients), size=classes)
    with np.errstate(divide="ignore"):
        return np.log(drawn.T)


def published(classes, clients, alpha, total):
    """The equations as they are printed, without logarithms."""
    shares = np.random.RandomState(0).dirichlet(np.repeat(alpha, clients), size=classes).T
    shares = shares / shares.sum()
    for _ in range(100):
        shares = shares / shares.sum(0, keepdims=True) / shares.sum(1, keepdims=True)
    return np.floor(shares * total)


@pytest.mark.parametrize(
    ("classes", "alpha", "held", "one_percent"),
    [(10, 0.1, 4.69, None), (10, 1e-3, 1.08, None), (100, 0.1, 29.3, 17.92)],
)
def test_the_draws_of_the_paper_give_its_table(classes, alpha, held, one_percent):
    sizes = np.full(classes, 50_000 // classes)
    counts = OrchestraSplit(alpha).counts(legacy_logs(classes, 100, alpha), sizes)
    assert (counts > 0).sum(1).mean() == pytest.approx(held, abs=1e-9)
    if one_percent:
        shares = counts / counts.sum(1, keepdims=True)
        assert (shares >= 0.01).sum(1).mean() == pytest.approx(one_percent, abs=1e-9)


def test_sizes_and_losses_are_as_published():
    small = OrchestraSplit(0.1).counts(legacy_logs(10, 100, 0.1), np.full(10, 5000))
    assert (small.sum(1).min(), small.sum(1).max()) == (494, 499)
    large = OrchestraSplit(0.1).counts(legacy_logs(100, 100, 0.1), np.full(100, 500))
    assert 1 - large.sum() / 50_000 == pytest.approx(0.041, abs=5e-4)


@pytest.mark.parametrize(("classes", "clients", "alpha"), [(10, 100, 0.1), (100, 100, 0.1)])
def test_logarithms_change_no_count(classes, clients, alpha):
    sizes = np.full(classes, 50_000 // classes)
    counts = OrchestraSplit(alpha).counts(legacy_logs(classes, clients, alpha), sizes)
    np.testing.assert_array_equal(counts, published(classes, clients, alpha, 50_000))


@pytest.mark.parametrize(("alpha", "held", "apart"), [(0.1, 4.69, 0.4), (1e-3, 1.08, 0.05)])
def test_our_own_draws_are_of_the_same_kind(make_images, alpha, held, apart):
    images = make_images(np.repeat(np.arange(10), 5000))
    split = make_split(OrchestraSplit(alpha), images, "d", 100, 3)
    classes = [len(np.unique(images.labels[own])) for own in split.indices]
    assert np.mean(classes) == pytest.approx(held, abs=apart)


@pytest.mark.parametrize("balance", [balanced_as_published, balanced])
def test_balance_brings_both_sums_where_they_belong(balance):
    shares = np.array([0.1, 0.3, 0.05, 0.2, 0.35])
    logs = np.random.default_rng(0).normal(size=(8, 5))
    logs -= np.log(np.exp(logs).sum(0)) - np.log(shares)
    made = np.exp(balance(logs))
    np.testing.assert_allclose(made.sum(1), 1 / 8, rtol=1e-5)
    np.testing.assert_allclose(made.sum(0), shares, rtol=1e-5)
    # Scaled rows and columns keep every ratio of ratios.
    kept = np.log(made) - logs
    np.testing.assert_allclose(kept - kept[:1] - kept[:, :1] + kept[0, 0], 0, atol=1e-9)


@pytest.mark.parametrize("alpha", [1e-300, 1e-4, 0.1, 1e5])
def test_largest_remainders_lose_nothing_and_make_equal_sizes(make_images, alpha):
    per_class = [900, 100, 350, 650, 1000]
    images = make_images(np.repeat(np.arange(5), per_class))
    split = make_split(OrchestraSplit(alpha, rounding="largest"), images, "d", 30, 0)
    assert [len(own) for own in split.indices] == [100] * 30 and not split.notes
    classes = np.mean([len(np.unique(images.labels[own])) for own in split.indices])
    assert classes == 5 if alpha > 1 else classes < (1.4 if alpha < 0.01 else 4)


def test_without_balance_each_class_is_cut_as_drawn():
    logs = np.log([[0.5, 0.25], [0.3, 0.25], [0.2, 0.5]])
    floor = OrchestraSplit(balance=False).counts(logs, np.array([11, 6]))
    assert floor.tolist() == [[5, 1], [3, 1], [2, 3]]
    largest = OrchestraSplit(balance=False, rounding="largest").counts(logs, np.array([11, 6]))
    assert largest.tolist() == [[6, 2], [3, 1], [2, 3]]


def test_what_is_too_much_of_a_class_moves_to_those_who_mind_least():
    counts, sizes = np.array([[4, 0], [4, 0], [1, 3]]), np.array([6, 6])
    logs = np.log([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    assert fitted(counts, sizes, logs).tolist() == [[4, 0], [2, 2], [0, 4]]
    assert counts.tolist() == [[4, 0], [4, 0], [1, 3]]


def test_a_client_without_images_is_refused_with_what_would_help(make_images):
    images = make_images(np.arange(100) % 10)
    with pytest.raises(DataError, match=r"20 of 20 clients.*use split.rounding=largest or fewer"):
        make_split(OrchestraSplit(1e5), images, "d", 20, 0)  # half an image of each class
    with pytest.raises(DataError, match=r"without an image.*split.balance=true"):
        make_split(OrchestraSplit(1e-3, False, "largest"), images, "d", 20, 0)


def test_the_concentration_must_be_one():
    with pytest.raises(ConfigError, match="split.alpha is -1"):
        OrchestraSplit(-1)
