"""SwAV: one view predicts to which prototypes another view was assigned.

Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020,
equations 2 to 4. Assignments spread a batch evenly over the prototypes (Sinkhorn), which is what
keeps the features from collapsing.

All views are assigned and all predict each other; the paper's small crops, which only predict, are
not made here. The queue that enlarges the assignment holds the projections of all views together,
where the released code has one for each view. Sizes are for small federated clients: the paper
has 3000 prototypes, a projector 2048 wide, and freezes prototypes for 313 steps. The released
code passes crops of one size through the network as one batch, so views share a BatchNorm pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.objectives.queue import Owner, queue_of, queue_part
from harmonium.learning.objectives.sinkhorn import sinkhorn
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@objectives("swav")
@dataclass(frozen=True)
class SwAV(Objective):
    """Swapped prediction of balanced assignments to prototypes.

    >>> SwAV(prototypes=128).prototypes
    128
    """

    paper = "Caron et al., 2020"
    views = (2, None)

    prototypes: int = 64  # directions that views are assigned to
    temperature: float = 0.1  # of the predicted assignment
    epsilon: float = 0.05  # of the balanced assignment; smaller is sharper
    iterations: int = 3  # of Sinkhorn's scaling
    freeze: int = 0  # first steps of the model in which prototypes stay at initialisation
    queue: int = 256  # earlier projections that join the assignment once so many exist; 0: none
    queue_owner: Owner = "fresh"  # fresh: empty each round, no state; local: kept
    hidden: int | None = None  # width of the projector's inner layer; none: the encoder's
    out: int = 128  # size of a projection
    norm: Norm = "batch"  # in the projector

    def __post_init__(self) -> None:
        check(self, "positive", lambda value: value > 0, "temperature", "epsilon")
        check(self, "at least 2", lambda count: count >= 2, "prototypes")
        check(self, "at least 1", lambda size: size >= 1, "iterations", "hidden", "out")
        check(self, "0 or more", lambda count: count >= 0, "freeze", "queue")

    @property
    def by_projections(self) -> bool:
        """True: beyond the inherited outputs, `see` only offers projections to the queue."""
        return True

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector and the prototypes, both averaged, and the queue, which is never sent."""
        parts = {
            "projector": Part(mlp(dim, self.hidden or dim, self.out, norm=self.norm)),
            "prototypes": Part(Prototypes(self.prototypes, self.out)),
        }
        if self.queue:
            parts["queue"] = queue_part(self.queue, self.out, self.queue_owner)
        return parts

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Features and projections of every view; the latter wait to join the queue."""
        seen = super().see(parts, batch)
        if self.queue:
            queue_of(parts).offer(torch.cat(seen.z))
        return seen

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Every view predicts the assignment of every other."""
        prototypes = prototypes_of(parts)
        still = int(prototypes.steps) < self.freeze
        rows = prototypes.rows.detach() if still else prototypes.rows
        scores = [functional.normalize(z) @ rows.T for z in seen.z]
        earlier = self._earlier(parts) @ rows.detach().T
        codes = [self._assign(score.detach(), earlier) for score in scores]
        return swapped_prediction(scores, codes, self.temperature)

    def _earlier(self, parts: Parts) -> Tensor:
        """The rows of the queue once images have filled it, else none."""
        if not self.queue:
            return prototypes_of(parts).rows.new_empty(0, self.out)
        real = queue_of(parts).real()
        return real if len(real) == self.queue else real[:0]

    def _assign(self, scores: Tensor, earlier: Tensor) -> Tensor:
        """Codes (n, prototypes) of a view's scores, balanced together with earlier ones."""
        together = torch.cat([earlier, scores]) / self.epsilon
        return sinkhorn(together, self.iterations)[len(earlier) :]

    def prepare(self, parts: Parts, *, first: bool = False) -> None:
        """Normalise averaged prototypes to unit length."""
        prototypes_of(parts).renormalise()

    def after_step(self, parts: Parts) -> None:
        """Normalise the prototypes, count the step, and add projections to the queue."""
        prototypes = prototypes_of(parts)
        if prototypes.rows.requires_grad:  # else the method has frozen them
            prototypes.renormalise()
            prototypes.steps += 1
        if self.queue:
            queue_of(parts).push()


class Prototypes(nn.Module):
    """Unit rows (count, dim), and the number of steps they have seen.

    Rows are averaged over clients; of the counts the server takes the largest.
    """

    steps: Tensor

    def __init__(self, count: int, dim: int) -> None:
        """Start with random directions."""
        super().__init__()
        self.rows = nn.Parameter(functional.normalize(torch.randn(count, dim)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def renormalise(self) -> None:
        """Bring every row back to length 1."""
        self.rows.copy_(functional.normalize(self.rows))


def prototypes_of(parts: Parts) -> Prototypes:
    """The prototypes among the parts of a model."""
    return cast(Prototypes, parts["prototypes"])


def swapped_prediction(
    scores: Sequence[Tensor], codes: Sequence[Tensor], temperature: float
) -> Tensor:
    """Mean over ordered pairs of views of the cross-entropy of one's code and the other's softmax.

    Args:
        scores: similarities of each view to the prototypes, (n, prototypes).
        codes: assignments of each view, (n, prototypes), rows of sum 1; get no gradient.
        temperature: divides the scores.

    >>> flat, code = [torch.zeros(3, 8)] * 2, [torch.full((3, 8), 1 / 8)] * 2
    >>> bool(torch.isclose(swapped_prediction(flat, code, 0.1), torch.tensor(8.0).log()))
    True
    """
    if len(scores) < 2:
        raise ConfigError(
            "objective=swav compares 2 or more views, but these views are 1: choose other views, "
            "e.g. views=simclr"
        )
    predicted = [(score / temperature).log_softmax(1) for score in scores]
    pairs = permutations(range(len(scores)), 2)
    losses = [-(codes[i].detach() * predicted[j]).sum(1).mean() for i, j in pairs]
    return torch.stack(losses).mean()
