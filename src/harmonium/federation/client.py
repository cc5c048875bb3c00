"""A client as a handler sees it, and the one local training loop.

A handler's only inputs are the message, this client's examples, its own kept state and a random
generator keyed by (seed, round, ask, client). Hence any worker may run it, on any engine, and a
killed task is simply run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.data.images import Images
from harmonium.data.views import Views
from harmonium.descent import SGD, Adam
from harmonium.errors import ConfigError, WireError, counted
from harmonium.federation import schedule as schedules
from harmonium.federation.contract import checked_loss
from harmonium.federation.schedule import MILESTONES, Schedule
from harmonium.federation.wire import ClientId, Weights
from harmonium.privacy.mechanisms import Neighbours, Noise, Release
from harmonium.telling import work

Sent = TypeVar("Sent", Tensor, Weights)


class Decline(Exception):
    """Raised by a handler that cannot answer; the client is left out of the round, by name."""


class Examples:
    """One client's pictures. Labels are there only for methods that declare `uses_labels`."""

    def __init__(self, images: Images, index: np.ndarray, *, uses_labels: bool = False) -> None:
        """Show the pictures at `index`; their labels only to a method that declares them."""
        self._images = images
        self._index = index
        self._uses_labels = uses_labels

    def __len__(self) -> int:
        return len(self._index)

    def pixels(self, index: Tensor | None = None) -> Tensor:
        """Pictures as uint8 (n, height, width, channels); all of them without an index."""
        rows = self._index if index is None else self._index[index.numpy()]
        if (reading := _reading.get()) is not None:
            reading.add(len(rows) / max(1, len(self)))
        return torch.from_numpy(np.ascontiguousarray(self._images.batch(rows)))

    def labels(self, index: Tensor | None = None) -> Tensor:
        """Labels (n,) int64, -1 where unknown."""
        if not self._uses_labels:
            raise WireError(
                "this method reads labels without permission. Declare `uses_labels = True` in the "
                "method's class, or do without them."
            )
        rows = self._index if index is None else self._index[index.numpy()]
        return torch.from_numpy(np.asarray(self._images.labels[rows], dtype=np.int64))


@dataclass
class Reading:
    """How often a task went over the client's images, whatever for."""

    most: float = math.inf  # passes; what goes beyond is refused before it has the images
    beyond: str = "it goes over the images too often"  # what is said then
    passes: float = 0.0

    def add(self, share: float) -> None:
        """Count some of the images; WireError if that is too much."""
        if self.passes + share > self.most + 1e-6:  # shares of batches add up to 1 but for rounding
            raise WireError(self.beyond)
        self.passes += share


_reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextmanager
def counted_reading() -> Iterator[Reading]:
    """Count the passes over a client's images, of whatever kind; they end at `Reading.most`."""
    reading = Reading()
    token = _reading.set(reading)
    try:
        yield reading
    finally:
        _reading.reset(token)


_enough: ContextVar[Callable[[int], bool] | None] = ContextVar("enough", default=None)


@contextmanager
def abridged(enough: Callable[[int], bool]) -> Iterator[None]:
    """Have passes over examples stop early, to measure what the whole of them would take.

    `enough` is asked after every batch with the number of batches of this pass so far. What comes
    of such work is of no use but to go on with: results have the right shapes, nothing else.
    """
    token = _enough.set(enough)
    try:
        yield
    finally:
        _enough.reset(token)


@dataclass
class Batch:
    """Some of a client's examples; views are made when first looked at."""

    index: Tensor  # (n,) positions within the client's examples
    examples: Examples
    make: Views
    rng: torch.Generator

    @cached_property
    def pixels(self) -> Tensor:
        """The pictures as they are, uint8 (n, height, width, channels)."""
        return self.examples.pixels(self.index)

    @cached_property
    def views(self) -> list[Tensor]:
        """Random views, each (n, channels, height, width)."""
        return self.make(self.pixels, self.rng)

    @cached_property
    def plain(self) -> Tensor:
        """The pictures without augmentation, normalised, (n, channels, height, width)."""
        return self.make.plain(self.pixels)

    @property
    def labels(self) -> Tensor:
        """Labels (n,), for methods that declare `uses_labels`."""
        return self.examples.labels(self.index)


@dataclass
class Client:
    """All that a handler may touch; the engine supplies it and keeps `state`."""

    id: ClientId
    round: int  # 0 before the first
    rounds: int  # of the whole run
    examples: Examples
    views: Views
    rng: torch.Generator
    noise: Noise
    public: Images | None = None  # the shared public set, the same everywhere
    state: dict[str, Any] = field(default_factory=dict)  # survives between asks; never sent
    releases: list[Release] = field(default_factory=list)
    _released: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # and a copy

    def batches(
        self,
        epochs: int,
        size: int,
        *,
        least: int = 2,
        among: Tensor | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Shuffled batches; a client smaller than a batch is one batch.

        A last batch of fewer than `least` examples is dropped: contrast and BatchNorm need two.
        With `drop_last` any last batch that is not full is, unless the epoch has no other. `among`
        are the positions of the examples to use, if not all.
        """
        count = len(self.examples) if among is None else len(among)
        if drop_last:
            least = max(least, min(size, count))
        who = "training at the server" if self.id < 0 else f"client {self.id}"
        enough, seen, steps = _enough.get(), 0, 0
        with work(who, epochs * count, "images") as at:
            for _ in range(epochs):
                order = torch.randperm(count, generator=self.rng)
                order = order if among is None else among[order]
                for index in torch.split(order, size):
                    if len(index) >= least:
                        yield Batch(index, self.examples, self.views, self.rng)
                        steps += 1
                    at(seen := seen + len(index))
                    if enough is not None and enough(steps):
                        return

    def look(
        self, model: Callable[[Tensor], Tensor], among: Tensor | None = None, *, size: int = 256
    ) -> Tensor:
        """What a model makes of the pictures as they are, a row each, in order, without gradients.

        `among` are the positions of the examples to look at, if not all. The model should be in
        evaluation mode, so that no picture moves another's row.
        """
        index = torch.arange(len(self.examples)) if among is None else among
        rows = []
        with torch.no_grad():
            for some in self.pieces("features", torch.split(index, size)):
                rows.append(model(self.views.plain(self.examples.pixels(some))))
        found = torch.cat(rows)
        missing = len(index) - len(found)  # where work is abridged: rows that are there stand in
        return torch.cat([found, found[torch.arange(missing) % len(found)]]) if missing else found

    def pieces(self, what: str, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """Positions of examples, some at a time; tells how far it is and can be abridged."""
        where = "the server" if self.id < 0 else f"client {self.id}"
        enough, seen = _enough.get(), 0
        with work(f"{what} at {where}", sum(map(len, pieces)), "images") as at:
            for number, some in enumerate(pieces, 1):
                yield some
                at(seen := seen + len(some))
                if enough is not None and enough(number):
                    return

    def release(
        self,
        name: str,
        value: Tensor,
        *,
        sensitivity: float,
        sigma: float,
        neighbours: Neighbours = "replace",
        then: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Add Gaussian noise to a guarded field and note it in the ledger.

        `sensitivity` is how far the value moves, by Euclid's distance, when one picture takes
        another's place, or with `add-remove` when one comes or goes. `then` post-processes the
        noisy value (symmetrise, pack); what it returns is what the handler must send under `name`,
        untouched.
        """
        noisy = self.noise.gaussian(value, sigma)
        by = Release(name, "gaussian", sensitivity, sigma, self.noise.source, neighbours=neighbours)
        return self.released(name, noisy if then is None else then(noisy), [by])

    def released(self, name: str, value: Sent, by: Sequence[Release]) -> Sent:
        """Note in the ledger a guarded field whose noise was added where it was made.

        `by` is all the noise between the pictures and the value, as whoever made it tells. The
        handler must send the returned value under `name`, untouched.
        """
        if not by:
            raise WireError(f"`{name}` is released without a record of the noise in it")
        self.releases += [replace(one, field=name, noise=self.noise.source) for one in by]
        self._released[name] = (value, _copy(value))
        return value

    def was_released(self, name: str, value: Any) -> bool:
        """Whether this very value was released under this name, and is as it was then."""
        if name not in self._released:
            return False
        released, then = self._released[name]
        if isinstance(released, dict) and released is value:
            return set(released) == set(then) and all(
                torch.equal(part, then[key]) for key, part in released.items()
            )
        return released is value and torch.equal(released, then)


def _copy(value: Tensor | Weights) -> Tensor | Weights:
    if isinstance(value, dict):
        return {key: part.clone() for key, part in value.items()}
    return value.clone()


@dataclass(frozen=True)
class Local:
    """How a client trains in a round. The optimiser starts anew each time."""

    epochs: int = 2  # passes over the client's examples
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
    dp_clip: float | None = None  # largest gradient norm of one picture (DP-SGD); none: any
    dp_noise: float = 0.0  # on a step's sum of them: standard deviations over its sensitivity
    for_clients: int | None = None  # clients that epochs were chosen for; other numbers scale them
    for_fraction: float | None = None  # participation that lr was chosen for; others scale it

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 2)):  # contrast and BatchNorm need two
            if getattr(self, name) < least:
                raise ConfigError(
                    f"local.{name} is {getattr(self, name)}; it must be at least {least}"
                )
        for name in ("lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"local.{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"local.momentum is {self.momentum}; it must be at least 0 and below 1"
            )
        schedules.check("local", self.schedule, self.warmup, self.decay, self.milestones)
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"local.clip is {self.clip}; it must be above 0, or none")
        if self.dp_clip is not None and not 0 < self.dp_clip < math.inf:
            raise ConfigError(f"local.dp_clip is {self.dp_clip}; it must be above 0, or none")
        if not 0 <= self.dp_noise < math.inf:
            raise ConfigError(f"local.dp_noise is {self.dp_noise}; it must be 0 or more")
        if self.dp_noise and self.dp_clip is None:
            raise ConfigError("local.dp_noise needs local.dp_clip, e.g. 1")
        if self.for_clients is not None and self.for_clients < 1:
            raise ConfigError(f"local.for_clients is {self.for_clients}; it must be at least 1")
        if self.for_fraction is not None and not 0 < self.for_fraction <= 1:
            raise ConfigError(
                f"local.for_fraction is {self.for_fraction}; it must be above 0 and at most 1"
            )

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round (the first is 1)."""
        return self.lr * schedules.factor(
            self.schedule, round, rounds, self.warmup, self.decay, self.milestones
        )

    def scaled(self, clients: int, fraction: float) -> Local:
        """The same training for another federation, by Orchestra's rules (Lubana et al., 2022).

        Epochs grow with the number of clients, for each then has fewer pictures; the learning rate
        with the root of the share that takes part, for an average of more is less noisy.

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
        """Steps of a training on so many images, of which short batches are some."""
        full, rest = divmod(images, self.batch)
        short = rest >= 2 and not (self.drop_last and full)
        return self.epochs * (full + short)

    def optimise(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """A new optimiser over some parameters."""
        if self.optimiser == "adam":
            return Adam(parameters, lr=rate, weight_decay=self.weight_decay)
        return SGD(parameters, lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Fitted:
    """What a local training did."""

    loss: float  # mean over steps
    steps: int


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
    values bit for bit and cost no gradient. A client without a single step declines.
    """
    from harmonium.federation import dpsgd  # which stands on this module

    names = list(parts) if train is None else list(train)
    parts.train()
    parameters = [p for name in names for p in parts[name].parameters() if p.requires_grad]
    optimiser = local.optimise(parameters, local.rate(client.round, client.rounds))
    total, steps = 0.0, 0
    with frozen(module for name, module in parts.items() if name not in names):
        batches = client.batches(local.epochs, local.batch, among=among, drop_last=local.drop_last)
        for batch in batches:
            optimiser.zero_grad()
            if local.dp_clip is None:
                value = checked_loss(loss(batch))
                value.backward()  # type: ignore[no-untyped-call]
                amount = value.item()
            else:
                amount = dpsgd.step(parameters, loss, batch, local, client)
            if local.clip is not None:
                nn.utils.clip_grad_norm_(parameters, local.clip)
            if beside is not None:
                beside(batch)
            optimiser.step()
            if after is not None:
                after()
            total += amount
            steps += 1
    if not steps:
        count = len(client.examples if among is None else among)
        raise Decline(f"it has {counted(count, 'example')} to train on, too few for one step")
    return Fitted(total / steps, steps)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode; afterwards every submodule has its own mode back.

    Each flag is restored by itself because a partly frozen encoder keeps some layers in evaluation
    mode on purpose, and `module.train()` would wake them. Gradients flow as before.
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
    """Hold modules still: no gradients, and BatchNorm in evaluation mode."""
    held = [(module, module.training) for module in modules]
    flags = [(p, p.requires_grad) for module, _ in held for p in module.parameters()]
    try:
        for module, _ in held:
            module.eval().requires_grad_(False)
        yield
    finally:
        for module, training in held:
            module.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
