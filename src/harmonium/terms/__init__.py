"""Extra losses that any objective can take, possibly with a part of their own.

A method never has to know which terms a recipe adds: `Method.loss` always adds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from harmonium.federation.parts import Part, Parts
from harmonium.federation.world import World
from harmonium.objectives import Seen
from harmonium.registry import Registry


@dataclass(frozen=True)
class Term:
    """One extra loss; override what differs."""

    name: ClassVar[str] = ""
    uses_labels: ClassVar[bool] = False

    def build(self, made: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """New parts; most terms have none."""
        return {}

    def score(self, parts: Parts, seen: Seen, given: Mapping[str, Any]) -> Tensor:
        """The loss to add. `given` has `me` (client id) and `anchor` (received weights, if any)."""
        raise TypeError(f"{type(self).__name__} must define `score`")

    def after_step(self, parts: Parts) -> None:
        """Called after every optimiser step, e.g. to keep rows at unit length."""


terms: Registry[Term] = Registry("term", "harmonium.terms", Term)
