"""A queue of the newest projections, for losses that need more of them than a batch has.

Every row belongs to one image. A queue is therefore never sent: it stays at the client (`local`)
or is drawn anew each round (`fresh`), and a rule that would send it is refused.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_device
from harmonium.learning.parts import Part, Parts

Owner = Literal["local", "fresh"]


class Queue(nn.Module):
    """First in, first out: `size` rows of unit length, random until real ones replace them.

    >>> queue = Queue(4, 2)
    >>> queue.offer(torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]))
    >>> queue.push()
    >>> len(queue.real()), queue.real()[0].tolist()
    (3, [1.0, 0.0])
    """

    rows: Tensor
    count: Tensor

    def __init__(self, size: int, dim: int) -> None:
        """Start with random directions."""
        super().__init__()
        self.register_buffer("rows", functional.normalize(torch.randn(size, dim)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))  # rows ever pushed
        self._offered: Tensor | None = None

    def offer(self, rows: Tensor) -> None:
        """Rows (n, dim) to take in once the step that made them is done."""
        self._offered = functional.normalize(rows.detach())

    def push(self) -> None:
        """Replace the oldest rows by those offered last; only the newest `size` fit."""
        if self._offered is None:
            return
        size = len(self.rows)
        newest = self._offered[-size:]
        start = int(self.count) + len(self._offered) - len(newest)
        places = torch.arange(start, start + len(newest), device=newest.device) % size
        self.rows[places] = newest.to(self.rows.dtype)
        self.count += len(self._offered)
        self._offered = None

    def real(self) -> Tensor:
        """The rows that came from images, (at most size, dim)."""
        return self.rows[: min(int(self.count), len(self.rows))]


def queue_part(size: int, dim: int, owner: Owner) -> Part:
    """A queue as a part that cannot be sent."""
    return Part(Queue(size, dim), owner, reveals="per_example")


def queue_of(parts: Parts, name: str = "queue") -> Queue:
    """The queue among the parts of a model."""
    return cast(Queue, parts[name])


@torch.no_grad()
def redraw(parts: Parts, name: str = "queue") -> None:
    """Redraw a `fresh` queue, so that no two rounds share negatives; others stay."""
    if parts.rules[name] == "fresh":
        rows = queue_of(parts, name).rows
        drawn = to_device(torch.randn(rows.shape, dtype=rows.dtype), rows.device)
        rows.copy_(functional.normalize(drawn))
