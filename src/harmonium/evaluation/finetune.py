"""Fine-tuning: a head is put on an encoder, and both are trained with labels.

Papers evaluate encoders in this way with few labels and on other data sets. FedCA (Zhang et al.,
2020) puts a perceptron with one hidden layer on top and trains for 100 epochs by Adam with rate
0.001. Orchestra (Lubana et al., 2022) puts a linear layer on top; its code trains the whole network
with the rate of its linear probe, 30, at which no network learns, so here it is SGD with 0.1 and a
cosine over 50 epochs. The network after the last epoch is the one that counts: nothing is chosen,
so no validation image is needed, and test images are only classified.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.devices import CPU, current, room_for, seeded, to_device
from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.data.augment.pipeline import View
from harmonium.data.images import UNKNOWN, Images
from harmonium.evaluation.features import embed, evaluating
from harmonium.evaluation.metrics import Answers, answers
from harmonium.learning.optimisers import SGD, Adam

Head = Literal["linear", "mlp"]
Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Tuning:
    """Settings of fine-tuning."""

    head: Head
    optimiser: Literal["sgd", "adam"]
    lr: float
    epochs: int
    batch: int = 128
    momentum: float = 0.0  # of SGD
    schedule: Literal["constant", "cosine"] = "constant"  # of lr over epochs; cosine ends at 0
    hidden: int | None = None  # units of mlp; none: as many as features
    view: View | None = None  # by which images are changed at every step; none: as they are

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 2), ("hidden", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"fine-tuning needs {name} of at least {least}, not {value}")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"fine-tuning needs lr above 0, not {self.lr}")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, of which the first is 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


TUNINGS = {
    "mlp": Tuning("mlp", "adam", 1e-3, 100),  # FedCA; batches as in its training
    "linear": Tuning("linear", "sgd", 0.1, 50, momentum=0.9, schedule="cosine"),  # Orchestra
}
"""The settings that papers state, by their heads."""


@dataclass(frozen=True)
class Tuned:
    """A trained network and the classes that its scores stand for."""

    network: nn.Module  # from prepared images to (n, classes)
    classes: Tensor  # (classes,), ascending

    def answers(self, images: Images, prepare: Prepare) -> Answers | None:
        """Its predictions on the labelled images; None where its training diverged."""
        asked = images.subset(np.flatnonzero(images.labels != UNKNOWN))
        if len(asked) == 0:
            raise DataError("there is no labelled image to test a fine-tuned network on")
        scores = embed(self.network, asked, prepare)
        if not bool(scores.isfinite().all()):
            return None
        return answers([(scores.numpy(), self.classes.numpy())], asked.labels)


def finetune(encoder: nn.Module, images: Images, how: Tuning, prepare: Prepare, seed: int) -> Tuned:
    """Train a copy of an encoder and a new head on labelled images, in one thread.

    Args:
        encoder: from prepared images to `(n, dim)`; it stays as it is.
        images: images with labels; those labelled -1 are left out.
        how: the training.
        prepare: what makes the network's input of images where `how` has no view.
        seed: of the head, of the order of the images and of their views.
    """
    known = np.flatnonzero(images.labels != UNKNOWN)
    if len(known) < 2:
        raise DataError(f"fine-tuning needs at least 2 labelled images, got {len(known)}")
    pixels = torch.from_numpy(np.array(images.batch(known)))
    classes, wanted = torch.unique(torch.from_numpy(images.labels[known]), return_inverse=True)
    rng, device = seeds.torch_rng(seed, "finetune"), current()
    if room_for(pixels.numel(), device):
        pixels = to_device(pixels, device)
    wanted = to_device(wanted, device)
    with (
        single_thread(),
        seeded(device, seeds.seed_of(seed, "finetune", "torch")),
        work("fine-tuning", how.epochs * len(known), "images") as at,
    ):
        network = copy.deepcopy(encoder).to(device)
        with torch.no_grad(), evaluating(network):
            dim = network(prepare(to_device(pixels[:1], device))).shape[1]
        whole = nn.Sequential(network, _head(how, dim, len(classes)).to(device))
        whole.train().requires_grad_(True)
        optimiser = _optimiser(how, list(whole.parameters()))
        for epoch in range(how.epochs):
            for group in optimiser.param_groups:
                group["lr"] = how.rate(epoch)
            order = torch.randperm(len(known), generator=rng)
            there = to_device(order, device)
            for step, rows in enumerate(torch.split(order, how.batch)):
                at(epoch * len(known) + step * how.batch)
                if len(rows) < 2 < len(known):  # BatchNorm needs two; another epoch has it
                    continue
                here = there[step * how.batch :][: len(rows)]
                some = to_device(pixels[here if pixels.device == device else rows], device)
                seen = prepare(some) if how.view is None else how.view(some, rng)
                optimiser.zero_grad()
                loss = functional.cross_entropy(whole(seen), wanted[here])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        optimiser.zero_grad()  # gradients need not come home
    return Tuned(whole.eval().requires_grad_(False).to(CPU), classes)


def _head(how: Tuning, dim: int, classes: int) -> nn.Module:
    if how.head == "linear":
        return nn.Linear(dim, classes)
    hidden = how.hidden or dim
    return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _optimiser(how: Tuning, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if how.optimiser == "adam":
        return Adam(parameters, lr=how.lr)
    return SGD(parameters, lr=how.lr, momentum=how.momentum)
