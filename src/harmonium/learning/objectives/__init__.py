"""Objectives: the losses that clients minimise, and the parts of the model that they need.

An objective is frozen settings and a few small methods. `build` makes its parts, `see` runs them on
a batch, `score` computes the loss from these outputs, `after_step` updates targets. Splitting `see`
from `score` lets a method replace features or projections in between (FedStyle, APFL), and lets
terms use outputs that were already computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from harmonium.core.errors import ConfigError, undefined
from harmonium.core.registry import Registry
from harmonium.data.augment.views import Views
from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.contract import checked_view_counts
from harmonium.learning.objectives.heads import mlp
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

__all__ = ["Objective", "Seen", "check", "mlp", "objectives", "two"]


@dataclass
class Seen:
    """The outputs of the model for one batch, with one list entry per view."""

    batch: Batch
    h: list[Tensor]  # features, each (n, dim)
    z: list[Tensor]  # projections, each (n, dim_z)
    t: list[Tensor] = field(default_factory=list)  # projections of the EMA target, if any

    def pair(self) -> tuple[Tensor, Tensor]:
        """The projections of two views, for objectives that compare exactly two."""
        return two(self.z)


def two(views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A list of exactly two views as a pair."""
    if len(views) != 2:
        raise ConfigError(_miscounted("this objective", "2 views", len(views)))
    first, second = views
    return first, second


def _miscounted(objective: str, wanted: str, count: int) -> str:
    return (
        f"{objective} compares {wanted}, but these views are {count}: choose other views, e.g. "
        "views=simclr"
    )


@dataclass(frozen=True)
class Objective:
    """A loss and the parts it needs; override what differs."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # authors and year, for lists
    uses_labels: ClassVar[bool] = False
    views: ClassVar[tuple[int, int | None]] = (1, None)  # fewest and most views that it takes
    joint_views: ClassVar[bool] = True  # whether views share a BatchNorm pass in its paper's code

    @property
    def any_method(self) -> bool:
        """Whether any method can train it; false if it needs a context that only some provide."""
        return True

    @property
    def by_projections(self) -> bool:
        """Whether the loss depends on a view only through the projections of its features.

        Then a method may replace the features.
        """
        return type(self).see is Objective.see

    def check_context(self, context: type[Context]) -> None:
        """Raise an error if a method's context lacks fields that the loss needs."""

    def check_views(self, views: Views) -> None:
        """Raise an error if it cannot take this number of views."""
        least, most = checked_view_counts(self.views, self)
        count = len(views.pipelines)
        if count < least or (most is not None and count > most):
            wanted = f"{least} views" if least == most else f"{least} or more views"
            raise ConfigError(_miscounted(f"objective={self.name}", wanted, count))

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """New parts; `modules` has those built so far, `dim` is the encoder's feature size."""
        raise undefined(self, "build")

    def alone(self) -> bool:
        """Whether the loss is a mean over images that do not depend on each other."""
        return False

    def among(self, examples: Examples) -> Tensor | None:
        """Positions of the examples to train on; None: all of them."""
        return None

    def projections(self, views: int) -> int:
        """Number of projections that a method may mix before the loss, given `views` views."""
        return views

    def see(self, parts: Parts, batch: Batch) -> Seen:
        """Features and projections of every view; `Parts.through` decides what BatchNorm sees."""
        h, z = parts.through(batch.views, "encoder", "projector")
        return Seen(batch, h, z)

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The loss, a scalar mean over the batch."""
        raise undefined(self, "score")

    @property
    def pooled(self) -> tuple[str, ...]:
        """Parts that `means` uses; empty if the loss is not a function of means over images."""
        return ()

    @property
    def pooled_size(self) -> int:
        """Number of values that `means` returns."""
        raise undefined(self, "pooled_size")

    def means(self, parts: Parts, seen: Seen) -> Tensor:
        """Means over a batch that determine the loss, one vector in double precision."""
        raise undefined(self, "means")

    def from_means(self, means: Tensor, images: int) -> Tensor:
        """The loss over `images` images, from their means; differentiable."""
        raise undefined(self, "from_means")

    def prepare(self, parts: Parts, *, first: bool = False) -> None:
        """Called once a model is assembled, e.g. to start a fresh target from the encoder.

        `first`: the client has no state yet, so its local parts are at initialisation.
        """

    def after_step(self, parts: Parts) -> None:
        """Called after every optimiser step."""


def check(chosen: Any, rule: str, fits: Callable[[Any], bool], *names: str) -> None:
    """Raise an error for settings that are set and do not fit; `rule` describes valid values."""
    section = "objective" if isinstance(chosen, Objective) else "method"
    for name in names:
        value = getattr(chosen, name)
        if value is not None and not (fits(value) and math.isfinite(value)):
            raise ConfigError(f"{section}.{name} is {value}; it must be {rule}")


objectives: Registry[Objective] = Registry("objective", "harmonium.learning.objectives", Objective)
