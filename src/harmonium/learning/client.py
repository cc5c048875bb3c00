"""The client as its handlers see it: its images, batches, features, state and random generator.

A handler's only inputs are the message, the client's examples, its kept state and a random
generator keyed by (seed, round, ask, client). Any worker of any engine can therefore run it, and a
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

from harmonium.core.devices import CPU, to_device, to_host
from harmonium.core.errors import WireError
from harmonium.core.progress import work
from harmonium.core.types import ClientId, Weights
from harmonium.data.augment.views import Views
from harmonium.data.images import Images, Integers
from harmonium.learning.ahead import Ahead
from harmonium.privacy.mechanisms import Neighbours, Noise, Release

Sent = TypeVar("Sent", Tensor, Weights)


class Decline(Exception):
    """Raised by a handler that cannot answer; the client is left out of the round, with a note."""


class Examples:
    """One client's images, with labels only for methods that declare `uses_labels`."""

    def __init__(
        self,
        images: Images,
        index: np.ndarray,
        *,
        uses_labels: bool = False,
        device: torch.device = CPU,
        resident: Tensor | None = None,
    ) -> None:
        """Take the images at `index`; `labels` raises an error unless `uses_labels`.

        Pixels and labels are given on `device`. `resident` has the pixels of all `images` there, if
        they fit; otherwise every batch is sent.
        """
        self.device = device
        self._images = images
        self._index = index
        self._uses_labels = uses_labels
        self._resident = resident

    def __len__(self) -> int:
        return len(self._index)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self._images.shape[:2]

    def pixels(
        self, index: Tensor | None = None, device_index: Tensor | None = None, *, count: bool = True
    ) -> Tensor:
        """Images as uint8 (n, height, width, channels): those at `index`, or all.

        `device_index` is `index` on the device, where it is there already. Without `count` the
        images are not counted as read: see `count`.
        """
        rows = self._index if index is None else self._index[index.numpy()]
        if count:
            self.count(len(rows))
        if self._resident is None:
            pixels = torch.from_numpy(np.ascontiguousarray(self._images.batch(rows)))
            return to_device(pixels, self.device)
        if index is None:
            return self._resident[self._rows]
        if device_index is None:
            device_index = to_device(index, self.device)
        return self._resident[self._rows[device_index]]

    def count(self, images: int) -> None:
        """Count images as read; raises WireError if a task may not read as many."""
        if (reading := _reading.get()) is not None:
            reading.add(images / max(1, len(self)))

    def labels(self, index: Tensor | None = None, device_index: Tensor | None = None) -> Tensor:
        """Labels (n,) int64, -1 where unknown; `device_index` as in `pixels`."""
        if self.device.type == "cpu" or index is None:
            return to_device(self.host_labels(index), self.device)
        if device_index is None:
            device_index = to_device(index, self.device)
        return self._labels[device_index]

    @cached_property
    def _rows(self) -> Tensor:
        """Where the examples are among all images, on the device."""
        return to_device(torch.from_numpy(np.array(self._index)), self.device)  # mapped files warn

    @cached_property
    def _labels(self) -> Tensor:
        """The labels of all examples, on the device."""
        return to_device(self.host_labels(), self.device)

    def host_labels(self, index: Tensor | None = None) -> Tensor:
        """The same on the CPU, to decide by without waiting for the device."""
        if not self._uses_labels:
            raise WireError(
                "this method reads labels but does not declare it: set `uses_labels = True` in its "
                "class, or do without labels"
            )
        rows = self._index if index is None else self._index[index.numpy()]
        return torch.from_numpy(np.asarray(self._images.labels[rows], dtype=np.int64))


@dataclass
class Reading:
    """How many passes over the client's images a task has made, for any purpose."""

    most: float = math.inf  # passes allowed; images beyond them are not read
    beyond: str = "it goes over the images too often"  # the error message then
    passes: float = 0.0

    def add(self, share: float) -> None:
        """Count a share of the images; raises WireError beyond `most` passes."""
        if self.passes + share > self.most + 1e-6:  # rounding of the batches' shares
            raise WireError(self.beyond)
        self.passes += share


_reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextmanager
def counted_reading() -> Iterator[Reading]:
    """Count the passes over a client's images within the block, up to `Reading.most`."""
    reading = Reading()
    token = _reading.set(reading)
    try:
        yield reading
    finally:
        _reading.reset(token)


_enough: ContextVar[Callable[[int], bool] | None] = ContextVar("enough", default=None)


@contextmanager
def abridged(enough: Callable[[int], bool]) -> Iterator[None]:
    """Stop passes over examples early within the block, to estimate how long whole ones take.

    `enough` is called after every batch with the number of batches of this pass so far. Results of
    such passes have the right shapes, so that the code can go on, but are otherwise meaningless.
    """
    token = _enough.set(enough)
    try:
        yield
    finally:
        _enough.reset(token)


@dataclass
class Batch:
    """Some of a client's examples; pixels and views are computed on first use."""

    index: Tensor  # (n,) positions within the client's examples, on the CPU
    examples: Examples
    make: Views
    rng: torch.Generator
    sent_index: Tensor | None = None  # the same on the device, if it was sent already
    ahead: tuple[Ahead, int] | None = field(default=None, kw_only=True)  # and its place in there

    @property
    def device(self) -> torch.device:
        """Where pixels, views and labels are."""
        return self.examples.device

    @cached_property
    def device_index(self) -> Tensor:
        """`index` on the device, for rows of tensors that are there."""
        return to_device(self.index, self.device) if self.sent_index is None else self.sent_index

    @cached_property
    def pixels(self) -> Tensor:
        """The stored images, uint8 (n, height, width, channels)."""
        return self.examples.pixels(self.index, self.sent_index)

    @cached_property
    def views(self) -> list[Tensor]:
        """Random views, each (n, channels, height, width)."""
        if self.ahead is None or self.ahead[0].rng is not self.rng:
            return self.make(self.pixels, self.rng)
        ahead, place = self.ahead
        made = ahead.of(place)
        if "pixels" not in vars(self):
            self.examples.count(len(self.index))
            self.pixels = made.pixels
        return made.views

    @cached_property
    def plain(self) -> Tensor:
        """The images without augmentation, normalised, (n, channels, height, width)."""
        return self.make.plain(self.pixels)

    @property
    def labels(self) -> Tensor:
        """Labels (n,), for methods that declare `uses_labels`."""
        return self.examples.labels(self.index, self.sent_index)

    @property
    def host_labels(self) -> Tensor:
        """The labels on the CPU, to decide by without waiting for the device."""
        return self.examples.host_labels(self.index)

    def where(self, chosen: Tensor) -> Tensor:
        """Positions in the batch, on the device, of images chosen by a mask on the CPU."""
        return to_device(chosen.nonzero().flatten(), self.device)


@dataclass(frozen=True)
class Labelled:
    """A client's images with their labels, for the exchanges that evaluate; others have none."""

    examples: Examples  # those that it trains on
    groups: Integers | None = None  # of these, e.g. patients; held-out parts keep them together
    test: Examples | None = None  # further images, which it never trains on


@dataclass
class Client:
    """Everything that a handler may use; the engine creates it and stores `state`."""

    id: ClientId
    round: int  # from 1; 0 before the first round
    rounds: int  # rounds of the whole run
    examples: Examples
    views: Views
    rng: torch.Generator
    noise: Noise
    public: Images | None = None  # the shared public set, the same everywhere
    state: dict[str, Any] = field(default_factory=dict)  # survives between asks; never sent
    releases: list[Release] = field(default_factory=list)
    device: torch.device = CPU  # where its messages, state, pixels and models are
    labelled: Labelled | None = None  # in exchanges that evaluate, of a plan that does
    _released: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # values and copies

    def batches(
        self,
        epochs: int,
        size: int,
        *,
        least: int = 2,
        among: Tensor | None = None,
        drop_last: bool = False,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Shuffled batches; a client with fewer examples than `size` has one batch an epoch.

        A last batch of fewer than `least` examples is dropped, as contrast and BatchNorm need two.
        With `drop_last` every last batch that is not full is dropped, unless it is the only one.
        `among` are the positions of the examples to use; None uses all. `steps`: the most
        batches to make.
        """
        count = len(self.examples) if among is None else len(among)
        if drop_last:
            least = max(least, min(size, count))
        who = "training at the server" if self.id < 0 else f"client {self.id}"
        enough, seen, made = _enough.get(), 0, 0
        ahead = None
        if enough is None and self.device.type == "cpu":  # an accelerator is busy enough
            ahead = Ahead(self.examples, self.views, self.rng)
        with work(who, epochs * count, "images") as at:
            for _ in range(epochs):
                order = torch.randperm(count, generator=self.rng)
                order = order if among is None else among[order]
                coming = [index for index in torch.split(order, size) if len(index) >= least]
                coming = coming if steps is None else coming[: steps - made]
                if ahead is not None:
                    ahead.epoch(coming)
                sent = torch.split(to_device(order, self.device), size)
                for place, (index, there) in enumerate(zip(coming, sent, strict=False)):
                    own = None if ahead is None else (ahead, place)
                    yield Batch(index, self.examples, self.views, self.rng, there, ahead=own)
                    made += 1
                    at(seen := seen + len(index))
                    if made == steps or (enough is not None and enough(made)):
                        return
                at(seen := seen + count - sum(map(len, coming)))

    def features(
        self, model: Callable[[Tensor], Tensor], among: Tensor | None = None, *, size: int = 256
    ) -> Tensor:
        """The model's outputs for the images without augmentation, one row each, without gradients.

        `among` are the positions of the examples to use; None uses all. The model should be in
        evaluation mode, so that a row does not depend on the other images of its batch.
        """
        index = torch.arange(len(self.examples)) if among is None else among
        rows = []
        with torch.no_grad():
            for some in self.pieces("features", torch.split(index, size)):
                rows.append(model(self.views.plain(self.examples.pixels(some))))
        outputs = torch.cat(rows)
        if len(outputs) == len(index):
            return outputs
        times = -(-len(index) // len(outputs))  # `abridged` needs the shape only
        return outputs.repeat(times, *[1] * (outputs.dim() - 1))[: len(index)]

    def pieces(self, what: str, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """The pieces (positions of examples) one by one, with progress; see `abridged`."""
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
        """Add Gaussian noise to a guarded field and record it in the ledger.

        `sensitivity` is the largest Euclidean change of the value when one image is replaced, or
        with `add-remove` when one is added or removed. `then` post-processes the noisy value
        (symmetrise, pack). The handler must send the returned value unchanged under `name`.
        """
        noisy = self.noise.gaussian(to_host(value), sigma)
        by = Release(name, "gaussian", sensitivity, sigma, self.noise.source, neighbours=neighbours)
        return self.released(name, noisy if then is None else then(noisy), [by])

    def released(self, name: str, value: Sent, by: Sequence[Release]) -> Sent:
        """Record in the ledger a guarded field that already contains noise.

        `by` lists all noise between the images and the value. The handler must send the returned
        value unchanged under `name`.
        """
        if not by:
            raise WireError(f"`{name}` is released without a record of the noise in it")
        value = to_host(value)  # as it will be sent
        self.releases += [replace(each, field=name, noise=self.noise.source) for each in by]
        self._released[name] = (value, _copy(value))
        return value

    def was_released(self, name: str, value: Any) -> bool:
        """Whether this object was released under this name and has not changed since."""
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
