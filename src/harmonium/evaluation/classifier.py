"""Linear classifiers on frozen features, trained in minibatches as papers train theirs.

`linear.py` finds the best linear rule; these reproduce a published schedule instead: an optimiser,
a rate, a number of epochs. The classifier after the last epoch is the one that counts. There is
nothing to choose, so no validation images are needed, and test images are only classified.

Whether features are standardised belongs to a protocol. With a fixed rate, steps grow with the size
of the features: without standardisation, classifiers learn faster on encoders, or adapters, with
large outputs, and the accuracy after a fixed number of epochs reflects size as well as content.
Protocols that other papers state leave features as they are. FedStyle states no protocol beyond its
rate and its batch; `lp_style` standardises, because it compares features from different networks.

An adapter may learn beside the classifier. It precedes the standardisation, whose mean and
deviation are computed from its outputs at initialisation and stay fixed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import each
from harmonium.core.threads import single_thread
from harmonium.evaluation.linear import standard

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam


@dataclass(frozen=True)
class Protocol:
    """How a classifier is trained."""

    optimiser: Literal["sgd", "adam"]
    lr: float
    batch: int
    epochs: int
    momentum: float = 0.0  # of SGD
    weight_decay: float = 0.0  # of weights and biases, as torch does it
    schedule: Literal["constant", "cosine"] = "constant"  # of lr over epochs; cosine ends at 0
    shuffle: bool = True  # images anew in every epoch
    standardise: bool = False  # each feature to mean 0 and deviation 1 over the training images

    def __post_init__(self) -> None:
        for name in ("batch", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a classifier needs {name} of at least 1")
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise ConfigError(
                "a classifier needs lr above 0, momentum from 0 to below 1 and weight_decay of 0 "
                f"or more, got {self.lr}, {self.momentum}, {self.weight_decay}"
            )

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, of which the first is 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


PROTOCOLS = {
    # FedStyle: rate and batch of all its training; the number of epochs is not stated.
    "lp_style": Protocol("sgd", 0.1, 64, 100, standardise=True),
    # FedSC's released code.
    "lp_fedsc": Protocol("adam", 3e-3, 512, 200),
    # FedU's and FedEMA's: batches of stored features, always in the same order.
    "lp_easyfl": Protocol("adam", 3e-3, 2048, 200, shuffle=False),
    # FedCA: Adam and epochs as stated; the rate and the batch are those of its training.
    "lp_fedca": Protocol("adam", 1e-3, 128, 100),
    # FedX's released code.
    "lp_fedx": Protocol("adam", 1e-3, 64, 100, weight_decay=1e-6),
    # Federated SimCLR with verification states no optimiser: this is a choice.
    "lp_000": Protocol("adam", 1e-3, 512, 100),
}
"""Protocols of features that stay as they are, by name."""

ORCHESTRA = Protocol("sgd", 30.0, 256, 50, momentum=0.9, schedule="cosine")
"""Orchestra's released code: rate 30 for batches of 256. It augments images, so features change
from epoch to epoch: `train` takes several passes of them."""


@dataclass(frozen=True)
class Classifier:
    """A trained classifier: an adapter, if any, and a linear layer for the known classes."""

    classes: Tensor  # (classes,), ascending
    weights: Tensor  # (dim + 1, classes); the last row is the bias
    shift: Tensor  # (dim,)
    scale: Tensor  # (dim,)
    adapter: nn.Module | None = None

    @property
    def finite(self) -> bool:
        """Whether training stayed finite; a classifier that diverged predicts any class."""
        return bool(self.weights.isfinite().all())

    def predict(self, features: Tensor, chunk: int = 4096) -> Tensor:
        """The class `(n,)` that each row of features is taken for."""
        return self.classes[self.scores(features, chunk).argmax(1)]

    def scores(self, features: Tensor, chunk: int = 4096) -> Tensor:
        """The scores of each row of features, `(n, classes)`."""
        with single_thread(), torch.no_grad():
            return torch.cat(
                [_scores(self._seen(some), self.weights) for some in torch.split(features, chunk)]
            )

    def _seen(self, features: Tensor) -> Tensor:
        adapted = features if self.adapter is None else self.adapter(features)
        return (adapted - self.shift) / self.scale


def train(
    features: Tensor | Sequence[Tensor],
    labels: Tensor,
    protocol: Protocol,
    rng: torch.Generator,
    *,
    adapter: nn.Module | None = None,
) -> Classifier:
    """Train a linear classifier on frozen features, with an adapter beside it if one is given.

    Its weights begin at 0, so only the order of the images is drawn. A copy of the adapter is
    trained by the same optimiser, in evaluation mode: dropout and BatchNorm's statistics are off.

    Args:
        features: `(n, dim)` of the training images; or several passes, of which each epoch takes
            the next and begins again after the last.
        labels: `(n,)`; images labelled -1 are left out. Classes that do not occur are never
            predicted.
        protocol: the optimiser, its rate, and the number of epochs.
        rng: of the order of the images.
        adapter: what learns beside the classifier, from `(n, dim)` to `(n, any)`; none: nothing.

    >>> rows, names = torch.eye(3).repeat(9, 1), torch.tensor([7, 2, 5] * 9)
    >>> rng = torch.Generator().manual_seed(0)
    >>> train(rows, names, PROTOCOLS["lp_style"], rng).predict(torch.eye(3)).tolist()
    [7, 2, 5]
    """
    passes = [features] if isinstance(features, Tensor) else features
    _check(passes, labels, adapter)
    known = labels >= 0
    features, labels = passes[0][known].float(), labels[known]
    classes, columns = torch.unique(labels, return_inverse=True)
    learner = copy.deepcopy(adapter)
    with single_thread():
        if learner is not None:
            learner.eval().requires_grad_(True)
        with torch.no_grad():
            inputs = features if learner is None else learner(features)
        shift, scale = torch.zeros(inputs.shape[1]), torch.ones(inputs.shape[1])
        if protocol.standardise:
            shift, scale = (torch.from_numpy(part) for part in standard(inputs.numpy()))
        begin = torch.zeros(inputs.shape[1] + 1, len(classes))
        if len(classes) == 1:  # there is nothing to learn
            return Classifier(classes, begin, shift, scale, learner)
        if learner is None:

            def rows(epoch: int) -> Tensor:
                number = epoch % len(passes)
                some = passes[number][known].float() if number else features
                return (some - shift) / scale

            weights = _regression(rows, len(passes), columns, protocol, rng)
        else:
            weights = _regression_with_adapter(
                features, columns, begin, (shift, scale), learner, protocol, rng
            )
            learner.requires_grad_(False)
    return Classifier(classes, weights, shift, scale, learner)


def _check(passes: Sequence[Tensor], labels: Tensor, adapter: nn.Module | None) -> None:
    """Refuse features and labels that do not fit each other, or an adapter with several passes."""
    if adapter is not None and len(passes) > 1:
        raise ConfigError("an adapter learns from one pass of features, not from several")
    first = passes[0]
    if first.ndim != 2 or len(first) != len(labels):
        raise DataError(
            f"a classifier needs features (images, dim) and one label for each image, got "
            f"{tuple(first.shape)} and {len(labels)} labels"
        )
    if not bool((labels >= 0).any()):
        raise DataError("a classifier needs at least one labelled image; all labels are -1")


def _scores(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], rows, weights[:-1])


def _orders(count: int, protocol: Protocol, rng: torch.Generator) -> list[Tensor]:
    """The order of the images in every epoch."""
    if not protocol.shuffle:
        return [torch.arange(count)] * protocol.epochs
    return [torch.randperm(count, generator=rng) for _ in range(protocol.epochs)]


def _wide(rows: Tensor) -> np.ndarray:
    """Rows with a 1 at their end, which the bias multiplies."""
    return np.concatenate([rows.numpy(), np.ones((len(rows), 1), np.float32)], 1)


def _regression(
    rows: Callable[[int], Tensor],
    passes: int,
    columns: Tensor,
    protocol: Protocol,
    rng: torch.Generator,
) -> Tensor:
    """Softmax regression by hand: the gradient is (softmax - one-hot)^T rows / batch.

    For matrices as narrow as these NumPy is several times quicker than autograd and an optimiser.
    `rows` gives the features of an epoch, of which there are so many different `passes`.
    """
    wide = _wide(rows(0))
    wanted = functional.one_hot(columns).T.float().numpy()
    weights = np.zeros((len(wanted), wide.shape[1]), np.float32)
    first, second, count = np.zeros_like(weights), np.zeros_like(weights), 0
    size, decay, (b, c) = protocol.batch, np.float32(protocol.weight_decay), BETAS
    with threadpool_limits(1), np.errstate(all="ignore"):  # `finite` reports what diverged
        orders = _orders(len(wide), protocol, rng)
        for epoch, order in enumerate(each("a classifier", orders, "epochs")):
            rate = protocol.rate(epoch)
            if epoch and passes > 1:
                wide = _wide(rows(epoch))
            xs, ys = wide[order.numpy()], wanted[:, order.numpy()]
            for start in range(0, len(xs), size):
                x = xs[start : start + size]
                error = weights @ x.T
                error -= np.maximum.reduce(error, 0)
                np.exp(error, out=error)
                error /= np.add.reduce(error, 0)
                error -= ys[:, start : start + size]
                step = error @ x
                step /= len(x)
                if decay:
                    step += decay * weights
                if protocol.optimiser == "adam":
                    count += 1
                    first += (1 - b) * (step - first)
                    second += (1 - c) * (step * step - second)
                    step = first / (np.sqrt(second / (1 - c**count)) + EPSILON) / (1 - b**count)
                elif protocol.momentum:
                    first *= protocol.momentum
                    first += step
                    step = first
                weights -= rate * step
    return torch.from_numpy(weights.T.copy())


def _regression_with_adapter(
    features: Tensor,
    columns: Tensor,
    begin: Tensor,
    standardised: tuple[Tensor, Tensor],
    adapter: nn.Module,
    protocol: Protocol,
    rng: torch.Generator,
) -> Tensor:
    """Like `_regression`, with an adapter that is trained too, in place."""
    weights = nn.Parameter(begin.clone())
    shift, scale = standardised
    learning = [weights, *adapter.parameters()]
    lr, decay = protocol.lr, protocol.weight_decay
    optimiser: torch.optim.Optimizer = (
        torch.optim.Adam(learning, lr=lr, betas=BETAS, eps=EPSILON, weight_decay=decay)
        if protocol.optimiser == "adam"
        else torch.optim.SGD(learning, lr=lr, momentum=protocol.momentum, weight_decay=decay)
    )
    orders = _orders(len(features), protocol, rng)
    for epoch, order in enumerate(each("a classifier", orders, "epochs")):
        for group in optimiser.param_groups:
            group["lr"] = protocol.rate(epoch)
        for x, y in zip(
            *(torch.split(part[order], protocol.batch) for part in (features, columns)), strict=True
        ):
            optimiser.zero_grad()
            scores = _scores((adapter(x) - shift) / scale, weights)
            functional.cross_entropy(scores, y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return weights.detach().clone()


class ResidualAdapter(nn.Module):
    """An adapter: features plus the output of a hidden layer, which is 0 at initialisation."""

    def __init__(self, dim: int, hidden: int, rng: torch.Generator) -> None:
        """Draw the first layer as torch does; the second is 0."""
        super().__init__()
        bound = 1 / math.sqrt(dim)
        first = torch.empty(hidden, dim), torch.empty(hidden)
        layer = [part.uniform_(-bound, bound, generator=rng) for part in first]
        self.inner, self.inner_bias = map(nn.Parameter, layer)
        self.outer = nn.Parameter(torch.zeros(dim, hidden))
        self.outer_bias = nn.Parameter(torch.zeros(dim))

    def forward(self, features: Tensor) -> Tensor:
        """(n, dim) to the same."""
        units = functional.linear(features, self.inner, self.inner_bias).relu()
        return features + functional.linear(units, self.outer, self.outer_bias)
