"""Sinkhorn's iteration: soft assignments that give every column about the same share of rows.

Cuturi, Sinkhorn Distances, 2013. It runs on logarithms, where scaling a row or column to sum 1 is a
log-softmax: exact in float32 for any scores, and all-equal rows simply end uniform.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Balanced soft assignments, as SwAV makes its codes; no gradient.

    Args:
        logits: similarities over temperature, (n, columns).
        iterations: of scaling all columns and then all rows to the same sum.

    Returns:
        (n, columns): rows sum to 1 exactly, columns to about n / columns.

    >>> sinkhorn(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), 3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    for _ in range(iterations):
        logits = sweep(logits)
    return logits.exp()


def sweep(logits: Tensor) -> Tensor:
    """One iteration: each column scaled to sum 1, then each row; the sums asked for cancel."""
    return logits.log_softmax(0).log_softmax(1)
