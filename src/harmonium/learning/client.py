"""A client as a handler sees it, and the one local training loop.

A handler's only inputs are the message, this client's examples, its own kept state and a random
generator keyed by (seed, round, ask, client). Hence any worker may run it, on any engine, and a
killed task is simply run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from harmonium.core.errors import WireError
from harmonium.core.progress import work
from harmonium.core.types import ClientId, Weights
from harmonium.data.augment.views import Views
from harmonium.data.images import Images
from harmonium.privacy.mechanisms import Neighbours, Noise, Release

Sent = TypeVar("Sent", Tensor, Weights)


class Decline(Exception):
    """Raised by a handler that cannot answer; the client is left out of the round, by name."""


class Examples:
    """One client's images. Labels are there only for methods that declare `uses_labels`."""

    def __init__(self, images: Images, index: np.ndarray, *, uses_labels: bool = False) -> None:
        """Show the images at `index`; their labels only to a method that declares them."""
        self._images = images
        self._index = index
        self._uses_labels = uses_labels

    def __len__(self) -> int:
        return len(self._index)

    def pixels(self, index: Tensor | None = None) -> Tensor:
        """Images as uint8 (n, height, width, channels); all of them without an index."""
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
        """The images as they are, uint8 (n, height, width, channels)."""
        return self.examples.pixels(self.index)

    @cached_property
    def views(self) -> list[Tensor]:
        """Random views, each (n, channels, height, width)."""
        return self.make(self.pixels, self.rng)

    @cached_property
    def plain(self) -> Tensor:
        """The images without augmentation, normalised, (n, channels, height, width)."""
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
        """What a model makes of the images as they are, a row each, in order, without gradients.

        `among` are the positions of the examples to look at, if not all. The model should be in
        evaluation mode, so that no image moves another's row.
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

        `sensitivity` is how far the value moves, by Euclid's distance, when one image takes
        another's place, or with `add-remove` when one comes or goes. `then` post-processes the
        noisy value (symmetrise, pack); what it returns is what the handler must send under `name`,
        untouched.
        """
        noisy = self.noise.gaussian(value, sigma)
        by = Release(name, "gaussian", sensitivity, sigma, self.noise.source, neighbours=neighbours)
        return self.released(name, noisy if then is None else then(noisy), [by])

    def released(self, name: str, value: Sent, by: Sequence[Release]) -> Sent:
        """Note in the ledger a guarded field whose noise was added where it was made.

        `by` is all the noise between the images and the value, as whoever made it tells. The
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
