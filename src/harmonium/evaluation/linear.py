"""Linear probes on frozen features: full, with few labels, and a closed-form one for monitoring.

All standardise the features by the training images and leave out images labelled -1. The
penalty `strength` multiplies half the squared weights against the mean loss, so that a value
means the same for any number of images. Classes that the training labels lack are never
predicted, and their test images count as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import work
from harmonium.core.seeds import numpy_rng
from harmonium.core.threads import single_thread
from harmonium.evaluation.logistic import regressions
from harmonium.evaluation.metrics import Answers, answers

STRENGTHS = (1.0, 0.1, 0.01, 0.001, 0.0001)
FEW_STRENGTH = 0.01  # accuracy is flat between 0.1 and 0.0001 with 1 to 20 labels a class
RIDGE_STRENGTH = 0.01
BLOCK = 1024  # rows that are measured at a time, in float64

Array = np.ndarray


@dataclass(frozen=True)
class LinearProbe:
    """Result of a linear probe: accuracies are shares, counts are labelled images."""

    accuracy: float
    strength: float
    validation_accuracy: float | None  # None where there was no labelled validation image
    train: int
    validation: int
    test: int
    answers: Answers = field(repr=False, compare=False)


@dataclass(frozen=True)
class FewLabels:
    """Result of a few-label probe over several draws of which labels are known."""

    accuracy: float
    stderr: float | None  # None for a single draw
    accuracies: tuple[float, ...]
    per_class: int
    labels: int  # known labels in one draw
    test: int
    answers: Answers = field(repr=False, compare=False)  # of every draw


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    validation: Tensor,
    validation_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    strengths: Sequence[float] = STRENGTHS,
) -> LinearProbe:
    """Multinomial logistic regression on frozen features, its penalty chosen on validation.

    One path of solutions (`logistic.py`) from the strongest penalty to the weakest, each start
    being the last solution. The strength with the best validation accuracy wins, the stronger one
    on a tie. The winner is used as it is, not fitted again with the validation images: the model
    that is reported is the one that was chosen. It sees the test images once.

    Args:
        train: features `(n, dim)`.
        train_labels: `(n,)`.
        validation: features `(v, dim)`.
        validation_labels: `(v,)`; when none is known, the middle strength of the grid is taken.
        test: features `(m, dim)`.
        test_labels: `(m,)`.
        strengths: penalties to choose from, in any order.
    """
    grid = sorted(set(strengths), reverse=True)
    if not grid or grid[-1] <= 0:
        raise ConfigError(f"a linear probe needs penalties above 0, got {tuple(strengths)}")
    features, labels = _labelled("train", train, train_labels)
    held_out, held_out_labels = _labelled("validation", validation, validation_labels, needed=False)
    asked, asked_labels = _labelled("test", test, test_labels)
    shift, scale = standard(features)
    features, held_out, asked = ((part - shift) / scale for part in (features, held_out, asked))
    if len(held_out) == 0:
        grid = [grid[len(grid) // 2]]
    best: LinearRule | None = None
    best_accuracy, best_strength = -1.0, grid[0]
    for strength, model in zip(grid, linear_rules(features, labels, grid), strict=True):
        accuracy = model.accuracy(held_out, held_out_labels) if len(held_out) else 0.0
        if accuracy > best_accuracy:
            best, best_accuracy, best_strength = model, accuracy, strength
    assert best is not None  # the grid is not empty and any accuracy is above -1
    predictions = answers([(best.scores(asked), best.classes)], asked_labels)
    return LinearProbe(
        accuracy=predictions.accuracy,
        strength=best_strength,
        validation_accuracy=best_accuracy if len(held_out) else None,
        train=len(features),
        validation=len(held_out),
        test=len(asked),
        answers=predictions,
    )


def few_label_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    per_class: int,
    draws: int = 5,
    seed: int = 0,
    strength: float = FEW_STRENGTH,
) -> FewLabels:
    """Test accuracy when only `per_class` labels of each class are known.

    The penalty is fixed: so few labels leave none to choose with, and a validation set would be
    labels that the setting says are not there. Standardisation uses all training images, which
    needs no label. A class with fewer images gives all it has.

    Args:
        train: features `(n, dim)`.
        train_labels: `(n,)`, from which the known ones are drawn.
        test: features `(m, dim)`.
        test_labels: `(m,)`.
        per_class: known labels a class.
        draws: independent draws of which labels are known.
        seed: of the draws; draw number i is the same whatever `draws` is.
        strength: penalty of the logistic regression.
    """
    if per_class < 1 or draws < 1 or strength <= 0:
        raise ConfigError(
            "a few-label probe needs per_class >= 1, draws >= 1 and strength > 0, "
            f"got {per_class}, {draws}, {strength}"
        )
    pool = _finite("train", train)
    features, labels = _labelled("train", train, train_labels)
    asked, asked_labels = _labelled("test", test, test_labels)
    shift, scale = standard(pool)
    asked = (asked - shift) / scale
    scored = []
    known = 0
    with work("few-label probe", draws, "draws") as at:
        for draw in range(draws):
            chosen = _draw(labels, per_class, numpy_rng(seed, "few_labels", per_class, draw))
            known = len(chosen)
            some = (features[chosen] - shift) / scale
            model = next(iter(linear_rules(some, labels[chosen], [strength])))
            scored.append((model.scores(asked), model.classes))
            at(len(scored))
    predictions = answers(scored, asked_labels)
    accuracies = [float(share) for share in predictions.right.double().mean(dim=1)]
    deviation = float(np.std(accuracies, ddof=1)) if draws > 1 else None
    return FewLabels(
        accuracy=float(np.mean(accuracies)),
        stderr=None if deviation is None else deviation / math.sqrt(draws),
        accuracies=tuple(accuracies),
        per_class=per_class,
        labels=known,
        test=len(asked),
        answers=predictions,
    )


def probe_scores(
    train: Tensor, train_labels: Tensor, test: Tensor, *, strength: float = FEW_STRENGTH
) -> tuple[Array, Array]:
    """Scores `(m, classes)` of test features by a logistic regression, and the sorted classes.

    The penalty is fixed, so that no image has to be set aside to choose it. Shapes as in
    `linear_probe`; test images need no labels.
    """
    features, labels = _labelled("train", train, train_labels)
    shift, scale = standard(features)
    model = next(iter(linear_rules((features - shift) / scale, labels, [strength])))
    return model.scores((_finite("test", test) - shift) / scale), model.classes


def ridge_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    strength: float = RIDGE_STRENGTH,
) -> float:
    """Test accuracy of least squares on one-hot labels, in closed form.

    Several times cheaper than `linear_probe` and within a few points of it: made for watching a
    run, not for tables. Shapes as in `few_label_probe`.
    """
    if strength <= 0:
        raise ConfigError(f"a ridge probe needs a penalty above 0, got {strength}")
    features, labels = (torch.from_numpy(part) for part in _labelled("train", train, train_labels))
    asked, asked_labels = (torch.from_numpy(part) for part in _labelled("test", test, test_labels))
    shift, scale = (torch.from_numpy(part) for part in standard(features.numpy()))
    features, asked = (features - shift) / scale, (asked - shift) / scale
    classes = torch.from_numpy(np.unique(labels.numpy()))
    one_hot = (labels[:, None] == classes).float()
    prior = one_hot.mean(dim=0)  # features are centred, so the intercept is the class share
    gram = (features.T @ features / len(features)).double()
    gram.diagonal().add_(strength)
    moment = (features.T @ (one_hot - prior) / len(features)).double()
    weights = torch.cholesky_solve(moment, torch.linalg.cholesky(gram)).float()
    predicted = classes[(asked @ weights + prior).argmax(dim=1)]
    return float((predicted == asked_labels).double().mean())


@dataclass(frozen=True)
class LinearRule:
    """A linear rule: scores against the sorted labels it knows."""

    weights: Tensor  # float32 (classes, dim + 1); the last column is the intercept
    classes: Array  # (classes,)

    def scores(self, features: Array) -> Array:
        """Scores `(n, classes)` of the rows of `features` `(n, dim)`."""
        with single_thread():
            rows, intercept = torch.from_numpy(features), self.weights[:, -1]
            scores: Array = torch.addmm(intercept, rows, self.weights[:, :-1].T).numpy()
        return scores

    def accuracy(self, features: Array, labels: Array) -> float:
        """Share of rows of `features` `(n, dim)` whose label is predicted."""
        predicted = self.scores(features).argmax(axis=1)
        return float(np.mean(self.classes[predicted] == labels))


def linear_rules(features: Array, labels: Array, strengths: Sequence[float]) -> list[LinearRule]:
    """Logistic regressions for each strength, every one started from the one before."""
    classes, columns = np.unique(labels, return_inverse=True)
    if len(classes) == 1:  # it is always predicted
        alone = LinearRule(torch.zeros(1, features.shape[1] + 1), classes)
        return [alone for _ in strengths]
    # The penalty is defined for one weight vector that separates two classes. Softmax regression
    # gives each class half of it, with half of the squared norm, hence twice the penalty.
    factor = 2.0 if len(classes) == 2 else 1.0
    solutions = regressions(
        torch.from_numpy(features),
        torch.from_numpy(columns.astype(np.int64)),
        len(classes),
        [factor * strength for strength in strengths],
    )
    return [LinearRule(weights.float(), classes) for weights in solutions]


def _draw(labels: Array, per_class: int, rng: np.random.Generator) -> Array:
    """Sorted positions of `per_class` random members of each class."""
    members = [rng.permutation(np.flatnonzero(labels == name)) for name in np.unique(labels)]
    return np.sort(np.concatenate([some[:per_class] for some in members]))


def standard(features: Array) -> tuple[Array, Array]:
    """Mean and standard deviation `(dim,)`; constant columns get 1, so they become zeros."""
    blocks = [features[start : start + BLOCK] for start in range(0, len(features), BLOCK)]
    mean = sum(block.astype(np.float64).sum(axis=0) for block in blocks) / len(features)
    variance = sum(np.square(block - mean).sum(axis=0) for block in blocks) / len(features)
    deviation = np.sqrt(variance)
    # Below float32's own rounding of the column, what is left is noise that must not be blown up.
    constant = deviation <= 1e-6 * np.abs(mean) + 1e-12
    return mean.astype(np.float32), np.where(constant, 1.0, deviation).astype(np.float32)


def _finite(name: str, features: Tensor) -> Array:
    """Float32 copy of features `(n, dim)`, or an error that says how many rows are broken."""
    array = features.detach().cpu().float().numpy()
    if array.ndim != 2:
        raise DataError(f"{name} features must be (images, dim), got {tuple(array.shape)}")
    broken = int((~np.isfinite(array)).any(axis=1).sum())
    if broken:
        raise DataError(
            f"{broken} of {len(array)} {name} features are not finite numbers; "
            "the encoder has diverged (lower local.lr) or the images are damaged"
        )
    return array


def _labelled(
    name: str, features: Tensor, labels: Tensor, needed: bool = True
) -> tuple[Array, Array]:
    """Rows of `features` `(n, dim)` whose label is known, and those labels."""
    if len(features) != len(labels):
        raise DataError(f"{len(features)} {name} features came with {len(labels)} labels")
    array, numbers = _finite(name, features), labels.detach().cpu().numpy()
    known = numbers >= 0
    if needed and not known.any():
        raise DataError(f"the {name} images carry no labels, and a linear probe needs some")
    return (array, numbers) if known.all() else (array[known], numbers[known])
