"""Local training: its settings, and the training loop that all methods share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harmonium.core.devices import to_widest
from harmonium.core.errors import ConfigError, counted
from harmonium.learning import compiling, schedules
from harmonium.learning.client import Batch, Client, Decline
from harmonium.learning.contract import checked_loss
from harmonium.learning.optimisers import SGD, Adam, FusedAdam, FusedSGD, clip_gradients
from harmonium.learning.parts import Parts
from harmonium.learning.precision import TYPES, Precision, Scaler
from harmonium.learning.schedules import MILESTONES, Schedule


@dataclass(frozen=True)
class Local:
    """Settings of a client's training in a round. The optimiser state is new each round."""

    epochs: int = 2  # passes over the client's examples
    max_steps: int | None = None  # optimiser steps a round, at most; none: all of the epochs
    batch: int = 64  # examples a step
    drop_last: bool = False  # leave out an epoch's last batch if it is short and not the only one
    joint_views: bool | None = None  # views share a BatchNorm pass; none: as the released code
    optimiser: Literal["sgd", "adam"] = "sgd"  # what steps
    lr: float = 0.05  # learning rate before its schedule
    momentum: float = 0.9  # of SGD
    weight_decay: float = 0.0  # of either optimiser
    schedule: Schedule = "cosine"  # of lr over rounds; constant within one
    warmup: int = 0  # rounds in which lr grows to its full value
    decay: float | None = None  # factor of step (none: 0.1) and of exponential (none: 0.99)
    milestones: tuple[float, ...] = MILESTONES  # shares of the rounds at which step multiplies
    clip: float | None = 1.0  # largest gradient norm; none: unlimited
    precision: Precision = "fp32"  # of networks in training; bf16 and fp16 are for accelerators
    compile: bool = False  # full batches pass networks as compiled code
    dp_clip: float | None = None  # largest gradient norm of one image (DP-SGD); none: any
    dp_noise: float = 0.0  # on a step's sum of them: standard deviations over its sensitivity
    for_clients: int | None = None  # clients that epochs were chosen for; other numbers scale them
    for_fraction: float | None = None  # participation that lr was chosen for; others scale it

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 2)):  # contrast and BatchNorm need two
            self._require(name, getattr(self, name) >= least, f"at least {least}")
        self._require("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1")
        for name in ("lr", "weight_decay"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        schedules.check("local", self.schedule, self.warmup, self.decay, self.milestones)
        self._require("clip", self.clip is None or self.clip > 0, "above 0, or none")
        dp_clip = self.dp_clip
        self._require("dp_clip", dp_clip is None or 0 < dp_clip < math.inf, "above 0, or none")
        self._require("dp_noise", 0 <= self.dp_noise < math.inf, "0 or more")
        if self.dp_noise and dp_clip is None:
            raise ConfigError("local.dp_noise needs local.dp_clip, e.g. 1")
        if self.precision != "fp32" and dp_clip is not None:
            raise ConfigError(
                f"local.precision={self.precision} is not proved for DP-SGD: set "
                "local.precision=fp32"
            )
        if self.compile and dp_clip is not None:
            raise ConfigError(
                "local.compile=true compiles whole batches, and DP-SGD takes images one by one: "
                "set local.compile=false"
            )
        clients, fraction = self.for_clients, self.for_fraction
        self._require("for_clients", clients is None or clients >= 1, "at least 1")
        self._require(
            "for_fraction", fraction is None or 0 < fraction <= 1, "above 0 and at most 1"
        )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"local.{name} is {getattr(self, name)}; it must be {rule}")

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round (the first is 1)."""
        return self.lr * schedules.factor(
            self.schedule, round, rounds, self.warmup, self.decay, self.milestones
        )

    def scaled(self, clients: int, fraction: float) -> Local:
        """The same training for another federation, by Orchestra's rules (Lubana et al., 2022).

        Epochs grow with the number of clients, as each then has fewer images; the learning rate
        grows with the root of the participation, as the mean of more clients is less noisy.

        >>> Local(epochs=10, for_clients=100).scaled(clients=25, fraction=1.0).epochs  # 2.5
        3
        """
        epochs, lr = self.epochs, self.lr
        if self.for_clients is not None:  # halves are rounded up
            epochs = max(1, (2 * epochs * clients + self.for_clients) // (2 * self.for_clients))
        if self.for_fraction is not None:
            lr *= math.sqrt(fraction / self.for_fraction)
        return replace(self, epochs=epochs, lr=lr, for_clients=None, for_fraction=None)

    def steps(self, images: int) -> int:
        """Number of optimiser steps on `images` images, short batches included."""
        full, rest = divmod(images, self.batch)
        short = rest >= 2 and not (self.drop_last and full)
        steps = self.epochs * (full + short)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def passes(self, images: float) -> float:
        """Passes over `images` images that this training makes, as `max_steps` may cut them.

        >>> Local(epochs=2, batch=10).passes(50), Local(batch=10, max_steps=1).passes(50)
        (2.0, 0.2)
        """
        if self.max_steps is None:
            return float(self.epochs)
        return min(float(self.epochs), self.max_steps * min(self.batch, images) / max(images, 1))

    def optimise(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """A new optimiser over some parameters."""
        how: dict[str, Any] = {"lr": rate, "weight_decay": self.weight_decay}
        how |= {"momentum": self.momentum} if self.optimiser == "sgd" else {}
        if self.precision == "fp16":
            return (FusedAdam if self.optimiser == "adam" else FusedSGD)(parameters, **how)
        return (Adam if self.optimiser == "adam" else SGD)(parameters, **how)


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`."""

    losses: Sequence[Tensor]  # of every step, where they were computed

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return len(self.losses)

    @property
    def loss(self) -> Tensor:
        """The mean loss over steps, where it was computed: to read it waits for the device."""
        return to_widest(torch.stack(list(self.losses))).cumsum(0)[-1] / self.steps


def fit(
    parts: nn.ModuleDict,
    client: Client,
    loss: Callable[[Batch], Tensor],
    local: Local,
    *,
    train: Iterable[str] | None = None,
    after: Callable[[], None] | None = None,
    beside: Callable[[Batch], None] | None = None,
    among: Tensor | None = None,
) -> Fitted:
    """Minimise `loss` over the client's batches by changing the named parts (default: all).

    `beside` runs with every batch before its step, for a second model that learns from it too;
    `after` runs after every step (EMA targets, unit rows). Parts that are not trained keep their
    values bit for bit and need no gradients. Raises Decline if no batch is large enough.
    """
    from harmonium.learning import dpsgd  # imports this module

    names = list(parts) if train is None else list(train)
    parts.train()
    parameters = [p for name in names for p in parts[name].parameters() if p.requires_grad]
    optimiser = local.optimise(parameters, local.rate(client.round, client.rounds))
    losses: list[Tensor] = []
    scaler = Scaler(local.precision, client.device)
    others = (module for name, module in parts.items() if name not in names)
    with _computing(parts, local, client), frozen(others):
        for batch in client.batches(
            local.epochs,
            local.batch,
            among=among,
            drop_last=local.drop_last,
            steps=local.max_steps,
        ):
            for parameter in parameters:
                parameter.grad = None
            if local.dp_clip is None:
                value = checked_loss(loss(batch))
                scaler.backward(value, optimiser)
            else:
                value = dpsgd.step(parameters, loss, batch, local, client)
            if local.clip is not None:
                clip_gradients(parameters, local.clip)
            if beside is not None:
                beside(batch)
            scaler.step(optimiser)
            if after is not None:
                after()
            losses.append(value.detach().reshape(()))  # to read it now would wait for the device
    if not losses:
        count = len(client.examples if among is None else among)
        raise Decline(f"it has {counted(count, 'example')} to train on, too few for one step")
    return Fitted(losses)


def _computing(
    parts: nn.ModuleDict, local: Local, client: Client
) -> AbstractContextManager[object]:
    """The precision of networks in training, and whether they are compiled."""
    if not isinstance(parts, Parts):
        return nullcontext()
    if local.compile:
        compiling.check(client.device)
    return parts.computing(TYPES.get(local.precision), local.batch if local.compile else None)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode, and restore the mode of every submodule afterwards.

    Each flag is restored on its own because a partly frozen encoder keeps some layers in evaluation
    mode on purpose, which `module.train()` would undo. Gradients flow as before.
    """
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def frozen(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Freeze modules: no gradients, and BatchNorm in evaluation mode."""
    modes = [(module, module.training) for module in modules]
    flags = [(p, p.requires_grad) for module, _ in modes for p in module.parameters()]
    try:
        for module, _ in modes:
            module.eval().requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
