import warnings

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional

from harmonium.evaluation import logistic
from harmonium.evaluation.linear import linear_rules
from harmonium.evaluation.logistic import regressions


def problem(n=300, dim=12, classes=4, seed=0, gap=1.5, rank=None):
    """Overlapping classes, on features of very different spread that depend on each other."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = gap * torch.randn(classes, dim, generator=rng)
    raw = torch.randn(n, dim, generator=rng) + centres[labels]
    raw = raw * torch.logspace(0, -2, dim) @ torch.randn(dim, dim, generator=rng)
    if rank:
        raw[:, rank:] = raw[:, :1]
    return (raw - raw.mean(0)) / raw.std(0), labels


def objective(features, labels, weights, strength):
    """The definition, in float64, with its gradient by autograd."""
    weights = weights.clone().requires_grad_()
    scores = features.double() @ weights[:, :-1].T + weights[:, -1]
    value = functional.cross_entropy(scores, labels)
    value = value + strength / 2 * weights[:, :-1].square().sum()
    value.backward()
    return float(value.detach()), weights.grad


def peer(features, labels, strength):
    """scikit-learn's solution to a tight tolerance, in float64."""
    model = LogisticRegression(C=1 / (strength * len(features)), max_iter=20_000, tol=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(features.double().numpy(), labels.numpy())
    parts = model.coef_, model.intercept_[:, None]
    return torch.cat([torch.from_numpy(part) for part in parts], dim=1)


@pytest.mark.parametrize("strength", [1.0, 0.01, 0.0001])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"classes": 30, "n": 900},
        {"n": 40, "dim": 100},
        {"n": 7, "dim": 3},
        {"rank": 5},
        {"gap": 30.0},
    ],
    ids=str,
)
def test_the_solution_is_scikit_learns(shape, strength):
    features, labels = problem(**shape)
    classes = int(labels.max()) + 1
    (found,) = regressions(features, labels, classes, [strength], tolerance=1e-10)
    wanted = peer(features, labels, strength)
    value, slope = objective(features, labels, found, strength)
    assert value - objective(features, labels, wanted, strength)[0] < 1e-7
    assert slope.abs().max() < 1e-4
    mine, theirs = (features.double() @ w[:, :-1].T + w[:, -1] for w in (found, wanted))
    assert (mine.softmax(1) - theirs.softmax(1)).abs().max() < 0.003
    clear = (theirs.topk(2, dim=1).values.diff(dim=1).abs() > 0.006).flatten()
    assert torch.equal(mine.argmax(1)[clear], theirs.argmax(1)[clear])
    (usual,) = regressions(features, labels, classes, [strength])
    assert objective(features, labels, usual, strength)[0] - value < 1e-4


def test_two_classes_are_scikit_learns_too():
    # It has one vector of weights for two classes, and penalises that.
    features, labels = problem(classes=2)
    for strength in (1.0, 0.001):
        (rule,) = linear_rules(features.numpy(), labels.numpy(), [strength])
        (wanted,) = peer(features, labels, strength)
        weights = rule.weights[1] - rule.weights[0]
        assert torch.allclose(weights.double(), wanted, atol=0.01 * float(wanted.abs().max()))


def test_one_evaluation_is_the_definition():
    features, labels = problem(n=2 * logistic.PART + 100, dim=5)  # three parts, the last of one
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    evaluated = logistic._evaluate(features, labels, weights, map)
    value, slope = objective(features, labels, weights, 0.0)
    chances = (features.double() @ weights[:, :-1].T + weights[:, -1]).softmax(1)
    assert evaluated.loss == pytest.approx(value, rel=1e-6)
    assert torch.allclose(evaluated.gradient, slope, atol=1e-6)
    assert evaluated.curvature == pytest.approx(float((chances * (1 - chances)).mean()), rel=1e-5)


def test_far_scores_do_not_overflow():
    features, labels = problem(n=60)
    evaluated = logistic._evaluate(
        features, labels, torch.full((4, 13), 1e4) * torch.eye(4, 13), map
    )
    assert torch.isfinite(evaluated.gradient).all()
    assert 0 < evaluated.loss < float("inf")


def test_threads_do_not_matter():
    features, labels = problem(n=3 * logistic.PART, dim=6)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(regressions(features, labels, 4, [0.1, 0.001]))
        assert torch.get_num_threads() == threads
        torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


PATH = [1.0, 0.1, 0.01, 0.001]


def test_a_path_leads_to_each_solution():
    features, labels = problem(n=600)
    path = regressions(features, labels, 4, PATH)
    for strength, one in zip(PATH, path, strict=True):
        (alone,) = regressions(features, labels, 4, [strength])
        gap = objective(features, labels, one, strength)[0]
        assert gap == pytest.approx(objective(features, labels, alone, strength)[0], abs=1e-5)


def test_a_path_is_shorter_than_its_solutions_alone(monkeypatch):
    features, labels = problem(n=logistic.MANY)
    passes = []
    counted = logistic._evaluate
    monkeypatch.setattr(logistic, "_evaluate", lambda *a: passes.append(1) or counted(*a))
    regressions(features, labels, 4, PATH)
    along, passes[:] = len(passes), []
    for strength in PATH:
        regressions(features, labels, 4, [strength])
    assert along < len(passes)


def test_few_images_are_solved_further():
    features, labels = problem(n=600)
    for strength in PATH:
        (found,) = regressions(features, labels, 4, [strength])
        (best,) = regressions(features, labels, 4, [strength], tolerance=1e-9)
        values = [objective(features, labels, one, strength)[0] for one in (found, best)]
        assert values[0] - values[1] < logistic.TOLERANCE


@pytest.mark.parametrize("strength", [1e-4, 1e-12])
def test_separable_features_do_not_diverge(strength, monkeypatch):
    features, labels = problem(gap=100.0)
    passes = []
    counted = logistic._evaluate
    monkeypatch.setattr(logistic, "_evaluate", lambda *a: passes.append(1) or counted(*a))
    (found,) = regressions(features, labels, 4, [strength])
    assert torch.isfinite(found).all()
    assert len(passes) <= logistic.PASSES + 2
    scores = features.double() @ found[:, :-1].T + found[:, -1]
    assert torch.equal(scores.argmax(1), labels)
    assert objective(features, labels, found, strength)[0] < 0.02


def test_fewer_rows_than_features_are_the_same_rows_twice():
    # Repeating all rows changes nothing about the mean, but these are no longer fewer.
    features, labels = problem(n=30, dim=50)
    (few,) = regressions(features, labels, 4, [0.01], tolerance=1e-10)
    (many,) = regressions(features.repeat(2, 1), labels.repeat(2), 4, [0.01], tolerance=1e-10)
    assert torch.allclose(few, many, atol=1e-3)


def test_a_feature_without_spread_and_one_row_a_class():
    features = torch.zeros(20, 3)
    labels = torch.tensor([0] * 15 + [1] * 4 + [2])
    (found,) = regressions(features, labels, 3, [0.01])
    assert torch.allclose(found[:, :-1], torch.zeros(3, 3, dtype=torch.float64))
    shares = torch.tensor([15, 4, 1], dtype=torch.float64) / 20
    assert torch.allclose(found[:, -1].softmax(0), shares, atol=2e-3)
    single = torch.eye(3, 5)
    (found,) = regressions(single, torch.arange(3), 3, [0.1])
    assert (single.double() @ found[:, :-1].T + found[:, -1]).argmax(1).tolist() == [0, 1, 2]


def test_outliers_and_a_rare_class_take_longer_but_arrive():
    features, labels = problem()
    features = features.clone()
    features[::50] *= 100
    rare = (labels == 1) & (torch.arange(300) > 8)
    features, labels = features[~rare], labels[~rare]
    wanted, _ = objective(features, labels, peer(features, labels, 0.01), 0.01)
    for tolerance, gap in ((logistic.TOLERANCE, 2e-3), (1e-9, 1e-5)):
        (found,) = regressions(features, labels, 4, [0.01], tolerance=tolerance)
        assert objective(features, labels, found, 0.01)[0] - wanted < gap
