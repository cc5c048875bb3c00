"""The check that rows are of unit length, for what clients send."""

from __future__ import annotations

import torch
from torch import Tensor


def non_unit_length(rows: Tensor, tolerance: float = 1e-3) -> float | None:
    """The length furthest from 1 among rows (n, dim) or of one row (dim,); None if all are 1.

    Args:
        rows: the rows; there may be none.
        tolerance: how far from 1 a length may lie, which covers rounding.

    >>> non_unit_length(torch.eye(3)), non_unit_length(2 * torch.eye(3))
    (None, 2.0)
    """
    lengths: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1).reshape(-1)
    distances = (lengths - 1).abs()
    if bool((distances <= tolerance).all()):
        return None
    return float(lengths[distances.argmax()])
