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
    """One iteration: each column scaled to sum 1, then each row; constant factors cancel."""
    return logits.log_softmax(0).log_softmax(1)


def scaled(logits: Tensor, iterations: int) -> Tensor:
    """As `sinkhorn`, by two vectors that scale rows and columns: quicker for many iterations.

    Args:
        logits: similarities over temperature, (n, columns), at most some hundreds apart.
        iterations: of scaling columns and then rows, at most.

    Returns:
        (n, columns): rows sum to 1, columns to about n / columns, closer with more iterations.

    >>> scaled(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), 10).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    kernel = logits.detach().double().softmax(1)
    rows, columns = scaling(kernel, iterations)
    return (rows[:, None] * kernel * columns).to(logits.dtype)


def scaling(
    kernel: Tensor, iterations: int, rows: Tensor | None = None, tolerance: float = 1e-2
) -> tuple[Tensor, Tensor]:
    """Factors of rows (n,) and of columns (columns,) that balance a positive matrix.

    Args:
        kernel: the matrix to balance, (n, columns).
        iterations: at most; it ends once the rows' factors change by less than `tolerance`.
        rows: factors to begin with; none: all alike.
        tolerance: of the sum of relative changes.
    """
    n, columns = kernel.shape
    rows = kernel.new_ones(n) if rows is None else rows
    across = kernel.new_ones(columns)
    for _ in range(iterations):
        across = n / (columns * (rows @ kernel))
        previous, rows = rows, 1 / (kernel @ across)
        if float((previous / rows - 1).abs().sum()) < tolerance:
            break
    return rows, across
