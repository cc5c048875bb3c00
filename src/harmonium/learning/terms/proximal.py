"""A pull towards the model received from the server.

Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020: every client adds
(mu / 2) * ||w - w_received||^2 to its loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.parts import Parts
from harmonium.learning.terms import Term, terms


@terms("proximal")
@dataclass(frozen=True)
class Proximal(Term):
    """(mu / 2) times the squared distance of the trained parameters from the received ones."""

    paper = "Li et al., 2020"
    alone = True

    mu: float = 0.01  # strength of the pull

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"terms.proximal.mu is {self.mu}; it must be 0 or more")

    def score(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The pull; its gradient is mu * (w - w_received)."""
        return self.mu / 2 * squared_distance(parts, context.received_model)


def squared_distance(parts: Parts, anchor: Mapping[str, Tensor]) -> Tensor:
    """The squared distance of the parameters in training from those of `anchor`; a scalar."""
    gaps = [
        (parameter - anchor[key]).square().sum()
        for key, parameter in parts.named_parameters()
        if parameter.requires_grad and key in anchor
    ]
    return torch.stack(gaps).sum() if gaps else torch.zeros(())
