"""What a client makes of pictures for tasks of its own, after federated training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Own:
    """A client's own features: of a frozen encoder, then of what learns beside a classifier.

    Both are networks of the client's own, and neither leaves it.
    """

    encoder: nn.Module  # of pictures, as `evaluate.embed` takes it
    adapter: nn.Module | None = None  # of its features; none: they are used as they are
