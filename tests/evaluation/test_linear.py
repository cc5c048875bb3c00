import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from harmonium.core.errors import ConfigError, DataError
from harmonium.evaluation.linear import few_label_probe, linear_probe, ridge_probe


@pytest.fixture(scope="module")
def digits():
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.data))
    pixels = torch.tensor(raw.data[order], dtype=torch.float32)
    labels = torch.tensor(raw.target[order])
    parts = slice(0, 1000), slice(1000, 1400), slice(1400, None)
    return [item for part in parts for item in (pixels[part], labels[part])]


def blobs(n=60, classes=3, dim=5, seed=0, gap=8.0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return torch.randn(n, dim, generator=rng) + gap * torch.eye(classes, dim)[labels], labels


def test_separable_data_are_separated():
    probe = linear_probe(*blobs(90), *blobs(30, seed=1), *blobs(30, seed=2))
    assert probe.accuracy == 1.0
    assert (probe.train, probe.validation, probe.test) == (90, 30, 30)
    assert ridge_probe(*blobs(90), *blobs(30, seed=2)) == 1.0


def test_digits(digits):
    probe = linear_probe(*digits)
    assert 0.94 < probe.accuracy < 0.99
    assert linear_probe(*digits) == probe
    ridge = ridge_probe(*digits[:2], *digits[4:])
    assert 0.9 < ridge <= probe.accuracy + 0.02


def test_the_result_is_the_plain_regression_of_the_chosen_strength(digits):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    train, train_labels, *_, test, test_labels = digits
    probe = linear_probe(*digits, strengths=(0.01,))
    scaler = StandardScaler().fit(train.numpy())
    plain = LogisticRegression(C=1 / (0.01 * len(train)), max_iter=2000, tol=1e-8)
    plain.fit(scaler.transform(train.numpy()), train_labels.numpy())
    expected = plain.score(scaler.transform(test.numpy()), test_labels.numpy())
    assert probe.accuracy == pytest.approx(expected, abs=0.006)


def test_selection_never_sees_the_test_part(digits):
    *known, test, test_labels = digits
    chosen = linear_probe(*known, test, test_labels)
    shuffled = linear_probe(*known, test, test_labels[torch.randperm(len(test_labels))])
    assert shuffled.strength == chosen.strength
    assert shuffled.validation_accuracy == chosen.validation_accuracy
    assert shuffled.accuracy < 0.3
    other = linear_probe(*known, test * 0 + 1, test_labels)
    assert other.strength == chosen.strength


def test_selection_follows_validation():
    # A penalty of 1e6 leaves only the class shares; a weak one follows the features. Validation
    # labels that agree with the one or the other must decide.
    features, labels = blobs(90, classes=3)
    labels = (labels == 0).long()  # 0 is the larger class
    grid = (1e6, 1e-4)
    flat = linear_probe(features, labels, features, 0 * labels, features, labels, strengths=grid)
    sharp = linear_probe(features, labels, features, labels, features, labels, strengths=grid)
    assert (flat.strength, sharp.strength) == grid
    assert flat.accuracy == pytest.approx(2 / 3)
    assert sharp.accuracy == 1.0
    tie = linear_probe(*blobs(90), *blobs(30, seed=1), *blobs(30, seed=2), strengths=(0.001, 0.01))
    assert tie.strength == 0.01  # both are perfect; the stronger penalty wins


def test_unlabelled_images_are_left_out():
    features, labels = blobs(90)
    hidden = labels.clone()
    hidden[::2] = -1
    keep = hidden >= 0
    rest = (*blobs(30, seed=1), *blobs(30, seed=2))
    assert linear_probe(features, hidden, *rest) == linear_probe(
        features[keep], labels[keep], *rest
    )


def test_a_class_that_training_lacks_counts_as_wrong():
    features, labels = blobs(90)
    keep = labels != 1
    probe = linear_probe(features[keep], labels[keep], *blobs(30, seed=1), *blobs(30, seed=2))
    assert probe.accuracy == pytest.approx(2 / 3)
    assert ridge_probe(features[keep], labels[keep], *blobs(30, seed=2)) == pytest.approx(2 / 3)


def test_a_single_class_is_named():
    features, _ = blobs(30)
    only = torch.full((30,), 2)
    probe = linear_probe(features, only, *blobs(30, seed=1), *blobs(30, seed=2))
    assert probe.accuracy == pytest.approx(1 / 3)
    assert ridge_probe(features, only, *blobs(30, seed=2)) == pytest.approx(1 / 3)


def test_constant_features_give_the_largest_class():
    constant = torch.full((50, 8), 0.1)
    labels = (torch.arange(50) < 30).long()
    probe = linear_probe(constant, labels, constant, labels, constant, labels)
    assert probe.accuracy == pytest.approx(0.6)
    assert ridge_probe(constant, labels, constant, labels) == pytest.approx(0.6)


def test_two_images_are_enough_and_validation_may_be_missing():
    features, labels = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([4, 9])
    none = torch.empty(0, 2), torch.empty(0, dtype=torch.long)
    probe = linear_probe(features, labels, *none, features, labels)
    assert probe.accuracy == 1.0
    assert probe.validation == 0
    assert probe.validation_accuracy is None


def test_few_labels(digits):
    train, train_labels, *_, test, test_labels = digits
    few, more = (
        few_label_probe(train, train_labels, test, test_labels, per_class=count, draws=4, seed=1)
        for count in (1, 20)
    )
    assert 0.3 < few.accuracy < more.accuracy < 0.97
    assert few.labels == 10
    assert more.labels == 200
    assert few.accuracy == pytest.approx(np.mean(few.accuracies))
    assert few.stderr == pytest.approx(np.std(few.accuracies, ddof=1) / 2)
    again = few_label_probe(train, train_labels, test, test_labels, per_class=1, draws=4, seed=1)
    other = few_label_probe(train, train_labels, test, test_labels, per_class=1, draws=4, seed=2)
    assert again == few
    assert other.accuracies != few.accuracies
    single = few_label_probe(train, train_labels, test, test_labels, per_class=1, draws=1, seed=1)
    assert single.accuracies == few.accuracies[:1]
    assert single.stderr is None


def test_few_labels_of_a_small_class():
    features, labels = blobs(31)
    small = (labels != 2) | (torch.arange(31) == 2)
    result = few_label_probe(features[small], labels[small], *blobs(30, seed=2), per_class=5)
    assert result.labels == 11
    assert result.accuracy > 0.9


def test_refusals():
    features, labels = blobs(30)
    none = torch.full_like(labels, -1)
    with pytest.raises(DataError, match="train .*no labels"):
        ridge_probe(features, none, features, labels)
    with pytest.raises(DataError, match="1 of 30 test .*not finite"):
        broken = features.clone()
        broken[3, 1] = float("nan")
        ridge_probe(features, labels, broken, labels)
    with pytest.raises(DataError, match="29 labels"):
        ridge_probe(features, labels[1:], features, labels)
    with pytest.raises(ConfigError, match="above 0"):
        linear_probe(*(features, labels) * 3, strengths=(0.0,))
    with pytest.raises(ConfigError, match="per_class"):
        few_label_probe(features, labels, features, labels, per_class=0)
