"""Spectral contrast: partners align, all others become orthogonal, by inner products alone.

HaoChen et al., Provable Guarantees for Self-Supervised Deep Learning with Spectral Contrastive
Loss, 2021. Three forms are in use, and their numbers differ:

- `haochen`, their code: only pairs across the two views repel, and only of different images;
- `fedsc` (Jing et al., 2024, eq. 1 and 5): by correlation matrices, so same-view pairs and every
  row with itself count too. It is twice the equation (80 in the appendix), as in the released
  code, for which its learning rates were chosen;
- `orchestra`, a baseline of Lubana et al., 2022: cosines of the outputs of one more linear layer,
  named centroids, on unit projections.

The first two shorten projections to a norm of at most sqrt(mu), without which they could grow
without bound. HaoChen's projector is 2048 and 1000 wide and ends in BatchNorm; for small encoders
their own width is enough, without BatchNorm. All three codes pass each view through the networks by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.devices import to_double
from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, mlp, objectives
from harmonium.learning.objectives.heads import Norm
from harmonium.learning.parts import Part, Parts
from harmonium.learning.symmetric import triangle, unpack
from harmonium.learning.world import World

Form = Literal["haochen", "fedsc", "orchestra"]


@objectives("spectral")
@dataclass(frozen=True)
class Spectral(Objective):
    """Contrast of views by squared inner products.

    >>> Spectral(form="fedsc", mu=4.0).mu
    4.0
    """

    paper = "HaoChen et al., 2021"
    views = (2, None)
    joint_views = False

    form: Form = "haochen"  # which pairs repel: across views, all pairs, or by cosines
    mu: float = 1.0  # largest squared norm of a projection; 2 to 5 in FedSC; not for orchestra
    hidden: int | None = None  # width of the projector's inner layer; none: the encoder's
    out: int = 128  # size of a projection; published 1000, 512 in FedSC and Orchestra
    norm: Norm = "batch"  # in the projector; none in FedSC
    out_norm: bool = False  # end the projector with BatchNorm; true in Orchestra
    bias: bool = True  # in the projector's linear layers; false in Orchestra
    centroids: int = 128  # outputs of the further layer of form=orchestra

    def __post_init__(self) -> None:
        check(self, "positive", lambda mu: 0 < mu < math.inf, "mu")
        check(self, "at least 1", lambda size: size >= 1, "hidden", "out", "centroids")

    def check_views(self, views: Views) -> None:
        """Pairs of views in FedSC's form, two views in the others."""
        super().check_views(views)
        count = len(views.pipelines)
        if count % 2 or (count > 2 and self.form != "fedsc"):
            raise ConfigError(
                f"objective.form={self.form} compares views in pairs, but these views are {count}: "
                "choose other views, e.g. views=simclr"
            )

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A two-layer projector, and the centroids where the form has them."""
        sizes = (dim, self.hidden or dim, self.out)
        projector = mlp(*sizes, norm=self.norm, bias=self.bias, out_norm=self.out_norm)
        parts = {"projector": Part(projector)}
        if self.form == "orchestra":
            parts["centroids"] = Part(nn.Linear(self.out, self.centroids))
        return parts

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The chosen form of the loss."""
        if self.form == "fedsc":
            return correlation_contrast(seen.z, self.mu)
        first, second = seen.pair()
        if self.form == "orchestra":
            unit = functional.normalize(torch.cat([first, second]))
            return cosine_contrast(*parts["centroids"](unit).chunk(2))
        return spectral_contrast(first, second, self.mu)

    # ---- the loss over all clients' images ----------------------------------------------------
    @property
    def pooled(self) -> tuple[str, ...]:
        """The encoder and all parts of this objective."""
        return ("encoder", "projector", "centroids")

    @property
    def pooled_size(self) -> int:
        """One number and one matrix in FedSC's form, two of each in others."""
        size = self.centroids if self.form == "orchestra" else self.out
        return (1 if self.form == "fedsc" else 2) * (1 + triangle(size))

    def means(self, parts: Parts, seen: Seen) -> Tensor:
        """Tr R+ and R in FedSC's form; Tr R+, the mean (z1 z2)^2 and R of either view in others."""
        if self.form == "fedsc":
            rows = shortened(to_double(torch.cat(list(seen.z))), self.mu)
            first, second = rows.chunk(2)
            matrices = [correlation(rows)]
        else:
            first, second = self._contrasted(parts, seen)
            matrices = [correlation(first), correlation(second)]
        inner = (first * second).sum(1)
        scalars = [inner.mean()] if self.form == "fedsc" else [inner.mean(), inner.square().mean()]
        above = torch.triu_indices(*matrices[0].shape, device=inner.device)
        return torch.cat([torch.stack(scalars), *(one[above[0], above[1]] for one in matrices)])

    def from_means(self, means: Tensor, images: int) -> Tensor:
        """FedSC's form: -Tr R+ + |R|^2 / 2, its equation 1; others: their loss of one batch.

        FedSC's is half of the loss that clients train with, which is twice the equation.
        """
        if self.form == "fedsc":
            return unpack(means[1:], self.out).square().sum() / 2 - means[0]
        trace, square, *packed = means[0], means[1], *means[2:].chunk(2)
        size = self.centroids if self.form == "orchestra" else self.out
        first, second = (unpack(one, size) for one in packed)
        repulsion = (images * (first * second).sum() - square) / max(images - 1, 1)  # i != j
        return (repulsion - 2 * trace) / (1 if self.form == "orchestra" else self.mu)

    def _contrasted(self, parts: Parts, seen: Seen) -> tuple[Tensor, Tensor]:
        """What the forms with pairs across views compare, in double precision."""
        first, second = seen.pair()
        if self.form == "orchestra":
            unit = parts["centroids"](functional.normalize(torch.cat([first, second])))
            first, second = functional.normalize(to_double(unit)).chunk(2)
            return first, second
        return shortened(to_double(first), self.mu), shortened(to_double(second), self.mu)


def spectral_contrast(first: Tensor, second: Tensor, mu: float = 1.0) -> Tensor:
    """HaoChen's form: (-2 mean of z1_i z2_i + mean over i != j of (z1_i z2_j)^2) / mu.

    Args:
        first: projections of one view, (n, dim).
        second: projections of the other view of the same images, (n, dim).
        mu: largest squared norm of a projection.

    >>> apart = torch.eye(3)
    >>> spectral_contrast(apart, apart).item()
    -2.0
    """
    inner = shortened(first, mu) @ shortened(second, mu).T
    return _attract_and_repel(inner) / mu


def cosine_contrast(first: Tensor, second: Tensor) -> Tensor:
    """Orchestra's form: as HaoChen's, of cosines instead of inner products.

    Args:
        first: outputs of the centroids for one view, (n, centroids).
        second: the same for the other view, (n, centroids).

    >>> cosine_contrast(9 * torch.eye(3), torch.eye(3)).item()
    -2.0
    """
    return _attract_and_repel(functional.normalize(first) @ functional.normalize(second).T)


def correlation_contrast(
    views: Sequence[Tensor],
    mu: float = 1.0,
    *,
    alpha: float = 1.0,
    others: Tensor | None = None,
    weight: float | None = None,
) -> Tensor:
    """FedSC's form, eq. 80 twice: -2 Tr R+ + alpha |R|^2 + 2 (1 - alpha) Tr(R R_others).

    R is the correlation of all views and R+ that of partners. Both are used without being formed
    where that is cheaper: |R| is the norm of the smaller Gram matrix.

    Args:
        views: projections, 2V views of the same images, each (n, dim); v and v + V are partners.
        mu: largest squared norm of a projection.
        alpha: weight of the contrast within these images; 1 without other clients.
        others: the other clients' mean correlation matrix, (dim, dim); it gets no gradient.
        weight: of the term with `others`, in place of 1 - alpha.

    >>> apart = torch.eye(2)
    >>> correlation_contrast([apart, apart]).item()
    -1.5
    """
    if len(views) % 2:
        raise ConfigError(f"form=fedsc pairs views with views, but these views are {len(views)}")
    rows = shortened(torch.cat(list(views)), mu)
    partners = rows.chunk(2)
    loss = alpha * _squared_norm(rows) - 2 * (partners[0] * partners[1]).sum(1).mean()
    if others is not None:
        weight = 1 - alpha if weight is None else weight
        loss = loss + 2 * weight * (rows @ others.detach() * rows).sum(1).mean()
    return loss


def correlation(rows: Tensor) -> Tensor:
    """The mean of z z^T over projections (n, dim), as (dim, dim); shorten them first.

    >>> correlation(torch.eye(2)).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    return rows.T @ rows / len(rows)


def shortened(rows: Tensor, mu: float) -> Tensor:
    """Projections (n, dim), those longer than sqrt(mu) cut to that length.

    >>> shortened(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), mu=4.0)
    tensor([[1.2000, 1.6000],
            [0.3000, 0.4000]])
    """
    excess: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True) / math.sqrt(mu)
    return rows / excess.clamp_min(1)


def _squared_norm(rows: Tensor) -> Tensor:
    """The squared Frobenius norm of the correlation of rows (n, dim)."""
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return (gram / len(rows)).square().sum()


def _attract_and_repel(inner: Tensor) -> Tensor:
    """-2 times the mean of the diagonal plus the mean square of the rest, 0 for one image."""
    n = len(inner)
    rest = inner - torch.diag(inner.diagonal())
    return rest.square().sum() / max(n * (n - 1), 1) - 2 * inner.diagonal().mean()
