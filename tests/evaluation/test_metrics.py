"""Figures beside plain accuracy, against those of scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from harmonium.core.errors import DataError
from harmonium.evaluation.metrics import answers, auroc, balanced_accuracy, commonest_class


@pytest.mark.parametrize("seed", range(5))
def test_balanced_accuracy_is_the_mean_recall(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.choice([0, 3, 7], 40, p=[0.7, 0.2, 0.1])
    predicted = rng.choice([0, 3, 7], 40)
    wanted = balanced_accuracy_score(labels, predicted)
    assert balanced_accuracy(predicted, labels) == pytest.approx(wanted)


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
def test_classes_that_are_absent_from_the_test_part_do_not_count() -> None:
    labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 5, 1, 5])
    assert balanced_accuracy(predicted, labels) == balanced_accuracy_score(labels, predicted) == 0.5
    with pytest.raises(DataError):
        balanced_accuracy(np.empty(0), np.empty(0))


@pytest.mark.parametrize("seed", range(5))
def test_auroc_counts_pairs_and_halves_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive = rng.random(50) < 0.2
    positive[:2] = True, False
    scores = rng.integers(0, 6, 50) / 6  # many ties
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores))
    assert auroc(np.zeros(50), positive) == 0.5


def test_auroc_is_none_where_it_has_no_meaning() -> None:
    scores = np.array([0.1, 0.2])
    for positive in (np.array([True, True]), np.array([False, False])):
        assert auroc(scores, positive) is None
    assert auroc(np.array([np.nan, 0.1]), np.array([True, False])) is None


def test_answers_are_of_every_draw() -> None:
    labels = np.array([2, 2, 4, 4])
    first = np.array([[3.0, 1.0], [1.0, 2.0], [0.0, 1.0], [5.0, 5.0]])  # a tie names the smaller
    got = answers([(first, np.array([2, 4])), (first[::-1], np.array([2, 4]))], labels)
    assert got.right.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert got.accuracy == got.balanced == 0.5
    areas = [roc_auc_score(labels == 4, one[:, 1] - one[:, 0]) for one in (first, first[::-1])]
    assert got.auroc == pytest.approx(np.mean(areas))


def test_only_two_classes_have_an_auroc() -> None:
    scores = np.eye(2)
    assert answers([(scores, np.array([0, 1]))], np.array([0, 1])).auroc == 1.0
    three = np.vstack([scores, scores[:1]])
    assert answers([(three, np.array([0, 1]))], np.array([0, 1, 2])).auroc is None  # 2 was unknown
    assert answers([(np.eye(3), np.arange(3))], np.arange(3)).auroc is None


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predicted = rng.choice([0, 3], 50, p=[0.8, 0.2]), rng.choice([0, 3], 50)
    labels[:2] = 0, 3
    scores, weights = rng.integers(0, 6, 50) / 6, rng.integers(1, 5, 50) / 4
    wanted = balanced_accuracy_score(labels, predicted, sample_weight=weights)
    assert balanced_accuracy(predicted, labels, weights) == pytest.approx(wanted)
    area = roc_auc_score(labels == 3, scores, sample_weight=weights)
    assert auroc(scores, labels == 3, weights) == pytest.approx(area)
    assert auroc(scores, labels == 3, weights) != pytest.approx(auroc(scores, labels == 3))


@pytest.mark.parametrize("classes", [2, 10])
def test_naming_the_commonest_class_is_worth_nothing(classes: int) -> None:
    known, labels = np.array([*range(classes), 1]), np.arange(3 * classes) % classes
    found = commonest_class(known, np.append(labels, 1))
    assert found.accuracy == pytest.approx(4 / (3 * classes + 1))
    assert found.balanced == pytest.approx(1 / classes)
    assert found.auroc == (0.5 if classes == 2 else None)


def test_a_rule_that_knows_one_of_two_classes_ranks_nothing() -> None:
    found = answers([(np.zeros((3, 1)), np.array([1]))], np.array([0, 1, 1]))
    assert found.balanced == found.auroc == 0.5
    assert answers([(np.zeros((3, 1)), np.array([1]))], np.array([1, 1, 1])).auroc is None
    assert answers([(np.zeros((3, 1)), np.array([1]))], np.array([0, 1, 2])).auroc is None
