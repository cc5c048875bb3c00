"""Extra losses that any objective can take, possibly with a part of their own.

A method never has to know which terms a recipe adds: `Method.loss` always adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from harmonium.core.errors import undefined
from harmonium.core.registry import Registry
from harmonium.core.types import Weights
from harmonium.learning.context import Context
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.parts import Part, Parts
from harmonium.learning.world import World

if TYPE_CHECKING:
    from harmonium.federation.method import Method


@dataclass(frozen=True)
class Term:
    """One extra loss; override what differs."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # authors and year, for cards
    uses_labels: ClassVar[bool] = False
    reveals: ClassVar[str] = ""  # what leaves because of it, in plain words
    alone: ClassVar[bool] = False  # whether images do not depend on each other

    def check(self, objective: Objective) -> None:
        """Raise an error for an objective that it cannot be added to."""

    def build(self, modules: Mapping[str, nn.Module], dim: int, world: World) -> dict[str, Part]:
        """New parts; most terms have none."""
        return {}

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The loss to add."""
        raise undefined(self, "score")

    def after_step(self, parts: Parts, context: Context) -> None:
        """Called after every optimiser step, e.g. to keep rows at unit length."""

    def at_server(self, model: Weights) -> Weights:
        """The model after the server optimiser's step, with constraints of the term restored."""
        return model

    def reply_fault(self, model: Weights) -> str | None:
        """Why the parts of this term in an upload are invalid; None if they are valid."""
        return None

    def note(self, method: Method, cohort: int) -> str:
        """A note for users on a run with `cohort` clients in a round; empty: none."""
        return ""

    # Measures on the model before an evaluation; most terms have none.
    def measures(self, objective: Objective) -> tuple[str, ...]:
        """Names of the numbers that a client measures on its images."""
        return ()

    def measure(
        self, parts: Parts, seen: Seen, context: Context, objective: Objective
    ) -> Sequence[Tensor]:
        """Those numbers for one batch, means over its images."""
        return ()

    def report(self, means: Mapping[str, float], entropy: float) -> dict[str, Any]:
        """Figures from the means over clients and from the entropy of the clients in nats."""
        return {}


terms: Registry[Term] = Registry("term", "harmonium.learning.terms", Term)
