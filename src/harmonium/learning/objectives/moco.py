"""MoCo: contrast a view with the key of the other view and many keys of earlier batches.

He et al., Momentum Contrast for Unsupervised Visual Representation Learning, 2020 (version 1), and
Chen et al., Improved Baselines with Momentum Contrastive Learning, 2020 (version 2). Keys come from
a slow copy of the encoder, the target; a queue of the newest ones serves as negatives.

In a federation we follow EasyFL (Zhuang et al., 2022): each round the target starts from the
received model, and both views are queries. We depart from it twice, because a client's round has
few steps:

- The queue starts empty each round, so a client keeps no state. EasyFL keeps it (`queue_owner:
  local`), but keys of older models are easy to distinguish from new ones whatever their image, and
  with few images a client we saw features collapse.
- Negatives are keys of images: those in the queue so far, and the others of the batch. The
  original also uses the random initial rows of a queue that is not yet full (`negatives: queue`).
  There this matters for the first steps only; with a new queue every round all views collapse.

Each view passes the networks separately, queries and keys alike, as in both codes. Images are not
shuffled before the target sees them: shuffling keeps a view and its key from sharing BatchNorm
statistics on one of several devices; in one process a whole batch shares them anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives, two
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.objectives.infonce import info_nce
from harmonium.learning.objectives.queue import Owner as QueueOwner
from harmonium.learning.objectives.queue import queue_of, queue_part, redraw
from harmonium.learning.objectives.twin import Buffers, Owner, follow, restart, targets, twin
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

TEMPERATURES = {1: 0.07, 2: 0.2}  # by version


@objectives("moco")
@dataclass(frozen=True)
class MoCo(Objective):
    """Contrast of a view with the other view's key and a queue of keys.

    >>> MoCo(version=1).softmax_temperature
    0.07
    """

    paper = "He et al., 2020"
    views = (2, 2)
    joint_views = False

    version: Literal[1, 2] = 2  # 1: linear head, low temperature; 2: two layers, higher
    temperature: float | None = None  # of the softmax; none: 0.07 or 0.2, by version
    hidden: int | None = None  # width of version 2's inner layer; none: the encoder's
    norm: Norm = "batch"  # in version 2's head, as in EasyFL; none as published
    out: int = 128  # size of a projection
    queue: int = 4096  # number of keys; choose fewer with queue_owner=local and few images
    negatives: Literal["pictures", "queue"] = "pictures"  # real keys, or all rows of the queue
    momentum: float = 0.99  # what the target keeps of itself in a step
    symmetric: bool = True  # both views are queries, losses are added; else only the first
    target: Owner = "fresh"  # mean: averaged; local: kept; fresh: restarted each round
    ema_buffers: Buffers = "own"  # target's BatchNorm statistics: its own, or a copy
    queue_owner: QueueOwner = "fresh"  # fresh: new each round, no state; local: kept

    def __post_init__(self) -> None:
        check(self, "positive", lambda softmax_temperature: softmax_temperature > 0, "temperature")
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out", "queue")
        check(self, "within 0 and 1", lambda momentum: 0 <= momentum <= 1, "momentum")

    @property
    def softmax_temperature(self) -> float:
        """The temperature as set, or the default of the version."""
        return TEMPERATURES[self.version] if self.temperature is None else self.temperature

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector, the slow copy of encoder and projector, and the queue."""
        inner = () if self.version == 1 else (self.hidden or dim,)
        projector = mlp(dim, *inner, self.out, norm=self.norm)
        followed = {**modules, "projector": projector}
        return {
            "projector": Part(projector),
            "target": twin(followed, ("encoder", "projector"), self.target),
            "queue": queue_part(self.queue, self.out, self.queue_owner),
        }

    def projections(self, views: int) -> int:
        """One for each view that is a query."""
        return 2 if self.symmetric else 1

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Projections of the queries, and the target's keys of the other views."""
        first, second = two(batch.views)
        queries, others = ([first, second],) * 2 if self.symmetric else ([first], [second])
        h, z = parts.through(queries, "encoder", "projector")
        keys = targets(parts, others)
        queue_of(parts).offer(torch.cat(keys))
        return Seen(batch, h, z, keys)

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The contrastive loss with the other view's key, summed over the queries."""
        queue, softmax_temperature = queue_of(parts), self.softmax_temperature
        losses = [
            contrast(z, t, queue.rows, softmax_temperature)
            if self.negatives == "queue"
            else info_nce(z, t, softmax_temperature, anchors="first", negatives=queue.real())
            for z, t in zip(seen.z, reversed(seen.t), strict=True)
        ]
        return torch.stack(losses).sum()

    def prepare(self, parts: Parts, *, first: bool = False) -> None:
        """Restart `fresh` parts: the target from the received model, the queue at random."""
        restart(parts, first=first)
        if self.negatives == "queue":
            redraw(parts)

    def after_step(self, parts: Parts) -> None:
        """Let the target follow, and add the keys of this step to the queue."""
        follow(parts, self.momentum, self.ema_buffers)
        queue_of(parts).push()


def contrast(query: Tensor, key: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of finding each query's key among it and all negatives (MoCo eq. 1).

    Args:
        query: projections, (n, dim).
        key: the target's projections of the same images, (n, dim); no gradient.
        negatives: unit rows, (size, dim); no gradient.
        temperature: divides the cosine similarities.

    >>> same = torch.ones(4, 3)
    >>> loss = contrast(same, same, functional.normalize(torch.ones(7, 3)), 0.2)
    >>> bool(torch.isclose(loss, torch.tensor(8.0).log()))
    True
    """
    query, key = functional.normalize(query), functional.normalize(key.detach())
    own = (query * key).sum(1, keepdim=True)
    others = query @ negatives.detach().to(query.dtype).T
    logits = torch.cat([own, others], 1) / temperature
    return functional.cross_entropy(logits, logits.new_zeros(len(query), dtype=torch.int64))
