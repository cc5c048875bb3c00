"""Figures from counts: the same as from the answers themselves, or within a known bound."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harmonium.evaluation.counts import (
    Counts,
    Ridge,
    at_least,
    auroc_of,
    class_means,
    counts_fault,
    figures_of,
    held_out,
    means_fault,
    shares_of_logits,
    shares_of_ridge,
)
from harmonium.evaluation.counts import counts_of as counts_of_answers
from harmonium.evaluation.linear import ridge_probe
from harmonium.evaluation.metrics import auroc, balanced_accuracy


def counts_of(shares: np.ndarray, labels: np.ndarray, bins: int) -> Counts:
    return counts_of_answers(shares.argmax(axis=1), shares, labels, bins)


def answered(seed: int, classes: int, images: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Shares that know something of the labels, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=images)
    logits = rng.normal(size=(images, classes)) + 1.5 * np.eye(classes)[labels]
    return shares_of_logits(logits), labels


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_accuracies_are_those_of_the_answers(classes: int) -> None:
    shares, labels = answered(classes, classes)
    figures = figures_of(counts_of(shares, labels, 16))
    predicted = shares.argmax(axis=1)
    assert figures["accuracy"] == pytest.approx(np.mean(predicted == labels))
    assert figures["balanced"] == pytest.approx(balanced_accuracy(predicted, labels))
    assert figures["commonest"] == pytest.approx(np.bincount(labels).max() / len(labels))
    assert figures["images"] == len(labels)


@pytest.mark.parametrize("bins", [1, 2, 5, 32, 500])
@pytest.mark.parametrize("seed", range(5))
def test_a_binned_area_is_within_its_bound(bins: int, seed: int) -> None:
    shares, labels = answered(seed, 2)
    exact = auroc(shares[:, 1], labels == 1)
    figures = figures_of(counts_of(shares, labels, bins))
    assert abs(figures["auroc"] - exact) <= figures["auroc_error"] + 1e-12
    assert figures["auroc_error"] <= (0.5 if bins == 1 else 0.5 / bins**0.5)
    scores = counts_of(shares, labels, bins).scores
    for number in range(2):  # every class against all others
        area, error = auroc_of(scores[number])
        assert abs(area - auroc(shares[:, number], labels == number)) <= error + 1e-12


def test_the_bound_is_reached_by_the_worst_order_within_bins() -> None:
    shares = np.array([[0.0, 0.1], [0.0, 0.2]])  # one bin, in the wrong order
    one = figures_of(counts_of(shares, np.array([1, 0]), 1))
    assert (one["auroc"], one["auroc_error"]) == (0.5, 0.5)
    assert auroc(shares[:, 1], np.array([True, False])) == 0


def test_without_bins_or_a_second_class_there_is_no_area() -> None:
    shares, labels = answered(0, 3)
    assert figures_of(counts_of(shares, labels, 0))["auroc"] is None
    assert figures_of(counts_of(shares, np.zeros_like(labels), 8))["auroc"] is None


def test_counts_add_up() -> None:
    (a, of_a), (b, of_b) = answered(1, 3), answered(2, 3)
    total = counts_of(a, of_a, 8) + counts_of(b, of_b, 8)
    both = counts_of(np.concatenate([a, b]), np.concatenate([of_a, of_b]), 8)
    assert torch.equal(total.confusion, both.confusion)
    assert torch.equal(total.scores, both.scores)


def test_shares_rank_as_probabilities_do() -> None:
    logits = np.array([[50.0, 0, 0], [3, 1, 0], [0.1, 0, 0], [-400, 0, 0]])
    shares = shares_of_logits(logits)
    assert (np.diff(shares[:, 0]) < 0).all() and ((shares >= 0) & (shares <= 1)).all()
    assert (shares.argmax(axis=1)[:3] == 0).all()
    assert shares_of_ridge(np.array([-9.0, -0.5, 0.5, 9.0])).tolist() == [0, 0, 0.5, 1]


def changed(counts: Counts, **cells: Any) -> Counts:
    """The counts with a number added to one cell of a table."""
    tables = {name: getattr(counts, name).clone() for name in cells}
    for name, (place, more) in cells.items():
        tables[name][place] += more
    return replace(counts, **tables)


@pytest.mark.parametrize(
    ("cells", "images", "names"),
    [
        ({"confusion": ((0, 0), -1000)}, 0, "confusion"),
        ({"scores": ((0, 0, 0), -1000)}, 0, "scores"),
        ({}, 1, "images"),
        ({}, -0.5, "images"),
        ({"confusion": ((0, 0), 1)}, 0, "images"),
        ({"confusion": ((0, 0), 1)}, 1, "scores"),
        ({"scores": ((1, 1, 3), 1)}, 0, "scores"),
    ],
)
def test_counts_that_cannot_be_are_found(cells: Any, images: float, names: str) -> None:
    counts = counts_of(*answered(0, 2), 4)
    assert counts_fault(counts, 200, 1) is None
    assert names in str(counts_fault(changed(counts, **cells), 200 + images, 1))


def test_a_class_of_too_few_images_is_found() -> None:
    shares, labels = answered(0, 2, 20)
    labels[:] = 0
    labels[0] = 1
    counts = counts_of(shares, labels, 4)
    assert counts_fault(counts, 20, 1) is None
    assert "fewer than 2" in str(counts_fault(counts, 20, 2))


# ---- ridge regression --------------------------------------------------------------------------


def features(seed: int, images: int = 150) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=images)
    rows = rng.normal(size=(images, 6)) * [1, 5, 0.1, 1, 1, 0] + 3
    rows[:, :3] += labels[:, None]
    return torch.from_numpy(rows.astype(np.float32)), labels


def test_a_classifier_from_means_over_sites_is_that_of_all_images() -> None:
    rows, labels = features(0)
    cuts = np.split(np.arange(150), [20, 90])  # unequal sites
    means = [class_means(rows[cut], labels[cut], 3) for cut in cuts]
    total = {
        name: sum(len(cut) * one[name] for cut, one in zip(cuts, means, strict=True)) / 150
        for name in means[0]
    }
    together, whole = Ridge.fit(total), Ridge.fit(class_means(rows, labels, 3))
    torch.testing.assert_close(together.weights, whole.weights)
    other, wanted = features(1)
    accuracy = np.mean(whole.scores(other).argmax(axis=1) == wanted)
    pooled = ridge_probe(rows, torch.from_numpy(labels), other, torch.from_numpy(wanted))
    assert accuracy == pytest.approx(pooled) and accuracy > 0.6


def test_a_classifier_survives_numbers_that_no_images_give() -> None:
    means = class_means(*features(0), 3)
    means["second"] = -means["second"]
    assert bool(Ridge.fit(means).weights.isfinite().all())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("shares", lambda shares: shares + 0.001, "shares"),
        ("shares", lambda shares: shares * 2, "shares"),
        ("shares", lambda shares: shares * torch.tensor([1, 1, -1]), "shares"),
        ("cross", lambda cross: cross * 1.1, "cross"),
        ("second", lambda second: -second, "second"),
    ],
)
def test_means_that_cannot_be_are_found(name: str, change: Any, words: str) -> None:
    means = class_means(*features(0), 3)
    assert means_fault(means, 150, 1) is None
    assert words in str(means_fault({**means, name: change(means[name])}, 150, 1))


def test_means_of_a_class_with_too_few_images_are_found() -> None:
    rows, labels = features(0)
    labels[labels == 2] = 1
    labels[0] = 2
    means = class_means(rows, labels, 3)
    assert means_fault(means, 150, 1) is None
    assert "fewer than 2" in str(means_fault(means, 150, 2))


# ---- held-out images ---------------------------------------------------------------------------


def test_groups_stay_together() -> None:
    rng = np.random.default_rng(0)
    groups = rng.integers(-1, 12, size=200)
    labels = rng.integers(-1, 3, size=200)
    rows = held_out(labels, groups, 0.3, rng)
    assert 0.2 * (labels >= 0).sum() < len(rows) < 0.5 * (labels >= 0).sum()
    assert (labels[rows] >= 0).all()
    rest = np.setdiff1d(np.flatnonzero(labels >= 0), rows)
    assert not set(groups[rows][groups[rows] >= 0]) & set(groups[rest][groups[rest] >= 0])
    assert len(held_out(np.array([0, 1]), np.array([4, 4]), 0.5, rng)) == 0  # one patient


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_every_class_is_learned_and_tested(share: float) -> None:
    labels = np.array([0] * 20 + [1] * 2 + [2] + [-1] * 9)
    rows = held_out(labels, None, share, np.random.default_rng(0))
    tested, rest = np.bincount(labels[rows], minlength=3), labels[np.setdiff1d(np.arange(23), rows)]
    assert tested[0] >= 1 and tested[1] == 1 and tested[2] == 0
    assert set(rest) == {0, 1, 2}
    assert at_least(labels, np.arange(len(labels)), 2).tolist() == list(range(22))
