"""Assignments: predict the cluster that a slow copy of the network assigns to another view.

The loss of a client of Orchestra (Lubana et al., 2022, Algorithm 1): the slow copy, the target,
assigns one view of an image by its cosines to the centroids, and the online network predicts this
assignment from another view (eq. 4). Alone this collapses to one assignment for all images, so the
network also predicts the rotation of an image (eq. 3). The method provides the centroids.

Lines 13 and 14 of Algorithm 1 print a minus before a loss to minimise, and eq. 3 is an accuracy:
here both are cross-entropies. Where paper and released code differ, the defaults are the code's:
the target moves before a step and sees a view, and views are turned; `update: after`,
`target_view: raw` and `augment: false` are the paper's. In the code the online network also sees
the target's view, which affects only its BatchNorm statistics; `extra_forward` does that, in a
separate pass. As in the code, the assigned view and the turned one pass the online network one
after the other, so BatchNorm normalises each separately; `local.joint_views` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import Views
from harmonium.learning.client import Batch
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen, check, objectives
from harmonium.learning.objectives.rotation import Rotation, Turned
from harmonium.learning.objectives.twin import Owner, follow, restart, targets, twin
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World


@dataclass(frozen=True, kw_only=True)
class Clustered(Context):
    """A context with the centroids that images are assigned to."""

    centroids: Tensor  # unit rows, (clusters, dim)


@dataclass(kw_only=True)
class Assigned(Seen):
    """Outputs of the online network (second view, turned images) and the target (first view)."""

    turned: Seen | None


@objectives("assignments")
@dataclass(frozen=True)
class Assignments(Rotation):
    """Cross-entropy of assignments to given centroids, and rotation prediction.

    >>> Assignments(momentum=0.99).target
    'mean'
    """

    paper = "Lubana et al., 2022"
    views = (2, 3)
    joint_views = False

    turns: Literal["all", "one"] = "one"  # all four of each image, or one at random
    head: Literal["encoder", "projector"] = "projector"  # input of the linear head
    augment: bool = True  # turn the last view instead of the image itself
    bias: bool = False  # in the projector's last layer
    temperature: float = 0.1  # of the softmax over centroids
    momentum: float = 0.996  # how much of itself the target keeps in a step; 0: no target
    update: Literal["before", "after"] = "before"  # target moves before a step, or after it
    target: Owner = "mean"  # sent and averaged, kept at the client, or restarted every round
    target_view: Literal["augmented", "raw"] = "augmented"  # first view, or the image itself
    extra_forward: bool = False  # the online network sees it too, for BatchNorm's statistics
    cluster_weight: float = 1.0  # of the assignments; 0: rotation prediction alone
    rotation_weight: float = 1.0  # of the turns; 0: assignments alone

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "positive", lambda temperature: temperature > 0, "temperature")
        check(self, "within 0 and 1", lambda momentum: 0 <= momentum <= 1, "momentum")
        check(self, "0 or more", lambda weight: weight >= 0, "cluster_weight", "rotation_weight")
        if not self.cluster_weight + self.rotation_weight:
            raise ConfigError("objective.cluster_weight and objective.rotation_weight are both 0")
        if self.head != "projector":
            raise ConfigError(
                "objective.head is encoder; objective=assignments needs objective.head=projector"
            )

    @property
    def any_method(self) -> bool:
        """Only without assignments, because the centroids come from Orchestra."""
        return not self.cluster_weight

    def check_context(self, context: type[Context]) -> None:
        """Refuse a method without centroids."""
        if self.cluster_weight and "centroids" not in context.names():
            raise ConfigError(
                "objective=assignments needs centroids: set method=orchestra, or "
                "objective.cluster_weight=0 to predict turns alone"
            )

    def check_views(self, views: Views) -> None:
        """Require two views to compare, or a third to turn; refuse turned views."""
        Objective.check_views(self, views)
        super().check_views(views)

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """A projector, the rotation head, and the target copy of encoder and projector."""
        parts = super().build(modules, dim, world)
        followed = {**modules, "projector": parts["projector"].module}
        return {**parts, "target": twin(followed, ("encoder", "projector"), self.target)}

    def prepare(self, parts: Parts, *, first: bool = False) -> None:
        """Start a `fresh` target, or a client's first `local` one, from the received model."""
        restart(parts, first=first)

    def target_projections(self, parts: Parts, batch: Batch) -> Tensor:
        """Unit projections of the target, (n, dim), without gradient."""
        images = batch.views[0] if self.target_view == "augmented" else batch.plain
        if self.extra_forward:
            with torch.no_grad():
                parts["projector"](parts["encoder"](images))
        return functional.normalize(targets(parts, [images])[0])

    def projections(self, views: int) -> int:
        """The assigned view has one; turned images are not counted."""
        return 1 if self.cluster_weight else 0

    def see(self, parts: Parts, batch: Batch) -> Any:
        """Outputs of target and online network; a loss of weight 0 needs no forward pass."""
        if self.update == "before":
            follow(parts, self.momentum)
        target = self.target_projections(parts, batch)
        assigned = batch.views[1:2] if self.cluster_weight else []
        turned, turns = self.turned(batch) if self.rotation_weight else ([], torch.zeros(0))
        h, z = parts.through([*assigned, *turned], "encoder", "projector")
        rest = len(assigned)
        outputs = Turned(batch, h[rest:], z[rest:], turns=turns) if turned else None
        return Assigned(batch, h[:rest], z[:rest], [target], turned=outputs)

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """Weighted sum of the cross-entropies of assignments (eq. 4) and of turns (eq. 3)."""
        self.check_context(type(context))
        losses, turned = [], cast(Assigned, seen).turned
        if self.cluster_weight:
            centroids = cast(Clustered, context).centroids
            loss = assignment_loss(seen.t[0], seen.z[0], centroids, self.temperature)
            losses.append(self.cluster_weight * loss)
        if turned is not None:
            losses.append(self.rotation_weight * super().score(parts, turned, context))
        return torch.stack(losses).sum()

    def after_step(self, parts: Parts) -> None:
        """Let the target follow, unless it did before the step."""
        if self.update == "after":
            follow(parts, self.momentum)


def assignment_loss(
    target: Tensor, online: Tensor, centroids: Tensor, temperature: float
) -> Tensor:
    """Mean cross-entropy of the target's assignments and the online network's (eq. 4).

    Args:
        target: projections of one view, (n, dim); no gradient.
        online: projections of another view of the same images, (n, dim).
        centroids: unit rows, (clusters, dim); no gradient.
        temperature: divides the cosines of both.

    >>> same = torch.ones(3, 2)
    >>> bool(torch.isclose(assignment_loss(same, same, same, 0.1), torch.tensor(3.0).log()))
    True
    """
    fixed = centroids.detach().T / temperature
    wanted = (functional.normalize(target.detach()) @ fixed).softmax(1)
    return -(wanted * (functional.normalize(online) @ fixed).log_softmax(1)).sum(1).mean()
