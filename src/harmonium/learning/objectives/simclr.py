"""SimCLR: two views of an image attract, all other views in the batch repel.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, 2020. The loss
is NT-Xent over 2N views; its denominator has 2N - 1 terms and contains the positive (FedCA eq. 3).

The released code joins the two views into one batch of 2N, so they share a BatchNorm pass. Codes of
federated papers differ: EasyFL and FedX join them as well; Orchestra's and FeatARC's pass each view
by itself (`local.joint_views: false`). Orchestra's projector ends in BatchNorm without scale and
shift and has no bias in its first layer (`bias: false, out_norm: true`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.joined import joined
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@objectives("simclr")
@dataclass(frozen=True)
class SimCLR(Objective):
    """Contrast of two views by NT-Xent.

    >>> SimCLR(temperature=0.2).temperature
    0.2
    """

    paper = "Chen et al., 2020"
    views = (2, 2)

    temperature: float = 0.5  # of the softmax over similarities
    hidden: int | None = None  # width of the projector's inner layer; none: the encoder's
    out: int = 128  # size of a projection
    norm: Norm = "batch"  # in the projector; batch as the original has it, and learns faster
    bias: bool = True  # in the projector's inner layer; false in Orchestra, where BatchNorm follows
    out_norm: bool = False  # end the projector with BatchNorm without scale and shift, as Orchestra

    def __post_init__(self) -> None:
        check(self, "positive", lambda temperature: temperature > 0, "temperature")
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out")

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A two-layer projector, averaged like the encoder."""
        sizes, ends = (dim, self.hidden or dim, self.out), self.out_norm
        projector = mlp(*sizes, norm=self.norm, bias=self.bias, out_bias=True, out_norm=ends)
        return {"projector": Part(projector)}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """NT-Xent of the two projections."""
        seen.pair()  # two views, or an error
        return _nt_xent(joined(seen.z), self.temperature)


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Mean over 2N views of -log softmax of the positive among the 2N - 1 other views.

    Args:
        first: projections of one view, (n, dim).
        second: projections of the other view of the same images, (n, dim).
        temperature: divides the cosine similarities.

    >>> same = torch.ones(4, 3)
    >>> bool(torch.isclose(nt_xent(same, same, 0.5), torch.tensor(7.0).log()))
    True
    """
    return _nt_xent(torch.cat([first, second]), temperature)


def _nt_xent(rows: Tensor, temperature: float) -> Tensor:
    """The same of the rows of both views, (2n, dim)."""
    unit = functional.normalize(rows)
    similar = unit @ unit.T / temperature
    similar = similar.fill_diagonal_(float("-inf"))
    partner = torch.arange(len(unit), device=unit.device).roll(len(unit) // 2)
    return functional.cross_entropy(similar, partner)
