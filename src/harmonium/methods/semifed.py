"""SemiFed: images without a label get pseudo-labels where the received model is confident.

Lin et al., SemiFed: Semi-supervised Federated Learning with Consistency and Pseudo-Labeling, 2021,
in the form in which Louizos et al., A Mutual Information Perspective on Federated Contrastive
Learning, 2024, appendix B.2, compare with it: pseudo-labels come from the received model alone, and
not from several clients' models that agree. Neither text has formulas or settings for that form,
and no code was found. Here

    q(x) = softmax of the received model, in evaluation mode, on the image without augmentation,
    loss = CE(labelled, first view) + CE(labelled, second view)
           + CE(images with max q >= threshold, strong view; label: argmax q)
           + consistency * KL(q || p(strong view)) on all images without a label,

with p the model in training; each summand is a mean over its images in the batch. q is computed
once, before training, so pseudo-labels are fixed for the round.

    ask     to        down                          up
    train   cohort    model: encoder, classifier    model: the same, trained; loss

Nothing else is kept on either side.

The labelled part is the sum over both views, as in equation 13 of Louizos et al. The objective
`supervised` takes their mean, which gives half the gradient. The threshold, the weight 1 of the
consistency and the strong view (RandAugment, then an ordinary view) are choices made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.devices import to_device, to_host
from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views
from harmonium.data.images import UNKNOWN
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Batch, Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.objectives.supervised import known_cross_entropy
from harmonium.learning.parts import Parts
from harmonium.methods import methods
from harmonium.methods.pseudo_labels import class_probabilities, need


@dataclass
class SeenStrongly(Seen):
    """The two ordinary views of all images, and the strong view of those without a label."""

    strong: Tensor | None = None  # features of the images without a label, (m, dim), if any


@dataclass(frozen=True, kw_only=True)
class Predicted(Context):
    """What the received model predicts for the client's images."""

    q: Tensor  # class probabilities, (n, classes), on the CPU; zeros for labelled images
    guess: Tensor  # pseudo-labels, (n,), on the CPU; -1: none


@methods("semifed")
@dataclass(frozen=True)
class SemiFed(Method):
    """FedAvg with pseudo-labels and consistency for images without a label."""

    paper = "Lin et al., 2021"
    context = Predicted
    uses_labels: ClassVar[bool] = True

    threshold: float = 0.95  # smallest probability that gives a pseudo-label; above 1: none
    consistency: float = 1.0  # weight of the KL divergence between predictions

    def __post_init__(self) -> None:
        need(self, 3, "semifed")
        for name in ("threshold", "consistency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"method.{name} is {getattr(self, name)}; it must be 0 or more")

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Predict labels once with the received model, then train on all images."""
        parts = self.pull(client, got.model)
        q = to_host(class_probabilities(parts, client, self.world.classes))
        guess = pseudo_labels(q, self.threshold)
        # The supervised objective would train on labelled images only.
        everything = torch.arange(len(client.examples))
        context = Predicted(me=client.id, anchor=got.model, q=q, guess=guess)
        done = self.fit(parts, client, among=everything, context=context)
        return {"model": self.push(client, parts), "loss": done.loss}

    def passes_of(self, step: str) -> float:
        """Beside training, one pass predicts labels."""
        return super().passes_of(step) + (1 if step == "train" else 0)

    def see(self, parts: Parts, batch: Batch) -> SeenStrongly:
        """Features of two views of every image, and of a strong one of those without a label."""
        first, second, strong = batch.make.pipelines
        views = Views((first, second))(batch.pixels, batch.rng)
        unlabelled = batch.where(batch.host_labels == UNKNOWN)
        if len(unlabelled):
            views.append(strong(batch.pixels[unlabelled], batch.rng))
        (h,) = parts.through(views, "encoder")
        return SeenStrongly(batch, h[:2], [], strong=h[2] if len(h) == 3 else None)

    def score(self, parts: Parts, seen: Seen, context: Predicted) -> Tensor:
        """The losses of labels, pseudo-labels and consistency."""
        loss = len(seen.h) * super().score(parts, seen, context)  # mean over views to their sum
        if not isinstance(seen, SeenStrongly) or seen.strong is None:
            return loss
        batch, logits = seen.batch, parts["classifier"](seen.strong)
        index = batch.index[batch.host_labels == UNKNOWN]
        guess, q = (to_device(known[index], logits.device) for known in (context.guess, context.q))
        loss = loss + known_cross_entropy(logits, guess)  # labels of -1 are left out
        kl = functional.kl_div(logits.log_softmax(1), q, reduction="batchmean")
        return loss + self.consistency * kl


def pseudo_labels(q: Tensor, threshold: float) -> Tensor:
    """The most probable class if it reaches the threshold, else -1; `(n, classes)` to `(n,)`.

    >>> pseudo_labels(torch.tensor([[0.04, 0.96], [0.5, 0.5]]), threshold=0.95).tolist()
    [1, -1]
    """
    probability, label = q.max(1)
    return torch.where(probability >= threshold, label, UNKNOWN)
