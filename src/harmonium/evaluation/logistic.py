"""Multinomial logistic regression over the whole data: preconditioned L-BFGS.

Minimises the mean cross entropy plus `strength / 2` times the squared weights; intercepts are free.
Plain L-BFGS begins every step with a multiple of the identity in place of the Hessian (Nocedal and
Wright 2006, section 7.2). Here it begins with the second moments of the features times the mean
curvature of the classes, plus the penalty: one small matrix, from a sample of rows. Features of
very different spread then take tens of passes over the data instead of hundreds.

Passes are in float32 on the current device, block by block, with scores and gradient of a block
while it is in the cache. Sums over blocks and all that has the size of the weights is float64.
Torch's threads share the blocks, each computing on its own; sums are in the order of the rows, so
the bits are those of one thread. A pass reads the device back once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harmonium.core.devices import current, has_double, room_for, to_device, to_host
from harmonium.core.progress import emit
from harmonium.core.threads import single_thread

TOLERANCE = 1e-5  # stop where a further step would lower the objective by less, in nats an image
MANY = 10_000  # images; with fewer, each counts more, so the tolerance shrinks in proportion
PASSES = 200  # over the data at one strength, at most
BLOCK = 1024  # rows that stay in the cache
PART = 4 * BLOCK  # rows that one thread takes at a time
SAMPLE = 5000  # rows for the second moments, at most
MEMORY = 10  # steps that are remembered
RENEWAL = 10  # steps after which the mean curvature of the classes is measured again


class LossEvaluation(NamedTuple):
    """The loss at given weights and its derivatives, from one pass over the data."""

    loss: float  # mean cross entropy
    gradient: Tensor  # of the loss, `(classes, dim + 1)`
    curvature: float  # mean of p (1 - p) over images and classes


def regressions(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strengths: Sequence[float],
    *,
    tolerance: float = TOLERANCE,
) -> list[Tensor]:
    """The solution for each strength, every one started from the one before.

    From strong to weak penalties, successive solutions are close. A solution that has not converged
    within `PASSES` is used as it is: on separable features the optimum of a weak penalty is far
    away.

    Args:
        features: float32 `(n, dim)`, best with mean 0 and deviation 1.
        labels: int64 `(n,)`, from 0 to `classes - 1`.
        classes: at least 2.
        strengths: penalties above 0.
        tolerance: see `TOLERANCE`.

    Returns:
        Float64 weights `(classes, dim + 1)`; the last column is the intercept.
    """
    basis = None
    workers = torch.get_num_threads()
    with single_thread(), ThreadPoolExecutor(workers) as threads:
        if len(features) < features.shape[1]:  # solve in the span of the rows, where solutions lie
            basis, mixture = torch.linalg.qr(features.T.double())
            features = mixture.T.float().contiguous()
        device = current()
        if has_double(device) and room_for(4 * features.numel(), device):
            features, labels = to_device(features, device), to_device(labels, device)
        alone = workers == 1 or len(features) <= PART or features.device.type != "cpu"
        share = map if alone else threads.map

        def evaluate(weights: Tensor) -> LossEvaluation:
            return _evaluate(features, labels, weights, share)

        moments = _moments(features)
        tolerance *= min(1.0, len(features) / MANY)
        weights = torch.zeros(classes, features.shape[1] + 1, dtype=torch.float64)
        solutions = []
        for strength in strengths:
            weights = _solve(evaluate, moments, weights, strength, tolerance)
            solutions.append(weights)
            if len(strengths) > 1:  # else the probe around it reports the progress
                emit("linear probe", len(solutions), len(strengths), "penalties")
    if basis is not None:
        solutions = [torch.cat([w[:, :-1] @ basis.T, w[:, -1:]], dim=1) for w in solutions]
    return solutions


def _solve(
    evaluate: Callable[[Tensor], LossEvaluation],
    moments: Tensor,
    weights: Tensor,
    strength: float,
    tolerance: float,
) -> Tensor:
    """L-BFGS from some weights to the solution for one strength."""
    penalty = torch.full((weights.shape[1],), strength, dtype=torch.float64)
    penalty[-1] = 0

    def objective(weights: Tensor) -> LossEvaluation:
        loss, gradient, curvature = evaluate(weights)
        loss += 0.5 * _dot(penalty * weights, weights)
        return LossEvaluation(loss, gradient + penalty * weights, curvature)

    here = objective(weights)
    past: list[_Step] = []
    passes = steps = 0
    while passes < PASSES:
        if steps % RENEWAL == 0:
            root = _root(moments, penalty, here.curvature)
        steps += 1
        direction = _direction(here.gradient, past, root)
        slope = _dot(here.gradient, direction)
        if slope / 2 < tolerance:
            break
        length, there = 1.0, objective(weights - direction)
        passes += 1
        # The objective is convex, so a step that lowers it enough needs no second condition.
        while there.loss > here.loss - 1e-4 * length * slope and length > 1e-4:
            length *= _shortening(here.loss, there.loss, length * slope)
            there = objective(weights - length * direction)
            passes += 1
        if not there.loss < here.loss:  # only rounding errors are left
            break
        step, change = -length * direction, there.gradient - here.gradient
        past = [*past, _Step(step, change, _dot(step, change))][-MEMORY:]
        weights, here = weights + step, there
    return weights


class _Step(NamedTuple):
    """An earlier step, how the gradient changed over it, and their inner product."""

    step: Tensor
    change: Tensor
    product: float


def _direction(gradient: Tensor, past: Sequence[_Step], root: Tensor) -> Tensor:
    """The gradient times the inverse Hessian, estimated from the past steps and `_root`."""
    direction, shares = gradient.clone(), []
    for step, change, product in reversed(past):
        shares.append(_dot(step, direction) / product)
        direction.sub_(change, alpha=shares[-1])
    direction = _whitened(direction, root)
    if past:  # scaled to the curvature along the last step
        _, change, product = past[-1]
        direction *= product / _dot(change, _whitened(change, root))
    for (step, change, product), share in zip(past, reversed(shares), strict=True):
        direction.add_(step, alpha=share - _dot(change, direction) / product)
    return direction


def _evaluate(
    features: Tensor, labels: Tensor, weights: Tensor, share: Callable[..., Any]
) -> LossEvaluation:
    """One pass over the data."""
    there = to_device(weights.float(), features.device)
    narrow, intercept = there[:, :-1].contiguous(), there[:, -1:]

    def part(start: int) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(there, dtype=torch.float64)
        loss, squares = gradient.new_zeros(()), gradient.new_zeros(())
        stop = min(start + PART, len(features))
        for begin in range(start, stop, BLOCK):
            rows = features[begin : min(begin + BLOCK, stop)]
            own = labels[None, begin : begin + len(rows)]
            # One column an image: sums over classes run along rows of memory.
            scores = torch.addmm(intercept, narrow, rows.T)
            scores -= scores.amax(dim=0)
            loss -= scores.gather(0, own).sum(dtype=torch.float64)
            total = scores.exp_().sum(dim=0)
            loss += total.log().sum(dtype=torch.float64)
            chances = scores.div_(total)
            squares += torch.linalg.vector_norm(chances).double().square()
            chances.scatter_add_(0, own, torch.full_like(own, -1.0, dtype=torch.float32))
            gradient[:, :-1] += chances @ rows
            gradient[:, -1] += chances.sum(dim=1)
        return loss, gradient, squares

    losses, gradients, squares = zip(*share(part, range(0, len(features), PART)), strict=True)
    count = len(features)
    gradient, *parts = to_host(
        [torch.stack(gradients).sum(dim=0), torch.stack(losses), torch.stack(squares)]
    )
    loss, square = (sum(one.tolist()) / count for one in parts)
    return LossEvaluation(loss, gradient / count, (1 - square) / len(weights))


def _moments(features: Tensor) -> Tensor:
    """Second moments `(dim + 1, dim + 1)` of features and a 1, from evenly spaced rows."""
    rows = features[:: -(-len(features) // SAMPLE)]
    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
    moments: Tensor = to_host(rows.T @ rows / len(rows))
    return moments.double()


def _root(moments: Tensor, penalty: Tensor, curvature: float) -> Tensor:
    """Cholesky root of the matrix that approximates the Hessian."""
    curvature = max(curvature, 1e-6)
    slack = 1e-7 * curvature * float(moments.trace())  # moments may be singular, and are rounded
    root: Tensor
    while True:
        hessian = curvature * moments
        hessian.diagonal().add_(penalty + slack)
        root, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            return root
        slack *= 10


def _whitened(gradient: Tensor, root: Tensor) -> Tensor:
    return torch.cholesky_solve(gradient.T, root).T.contiguous()


def _shortening(here: float, there: float, slope: float) -> float:
    """The factor by which to shorten a step: to the parabola's minimum, from 0.1 to 0.5."""
    excess = there - here + slope
    return min(0.5, max(0.1, slope / (2 * excess))) if excess < math.inf else 0.1


def _dot(first: Tensor, second: Tensor) -> float:
    return float(torch.dot(first.view(-1), second.view(-1)))
