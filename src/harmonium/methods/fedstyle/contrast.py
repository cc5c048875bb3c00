"""Contrast of two styles, for networks that learn what images look like."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Reduction = Literal["mean", "sum"]


def style_contrast(
    pictures: Tensor, copies: Tensor, temperature: float, reduction: Reduction = "mean"
) -> Tensor:
    """Supervised contrast of two styles: -log softmax of each row's partners among all others.

    Args:
        pictures: rows of one style, (n, dim), n at least 2.
        copies: rows of the other style, (n, dim).
        temperature: divides the cosine similarities.
        reduction: mean over anchors and partners, or eq. 2's sum, 2n(n - 1) / (2n - 1) times that.

    >>> apart = torch.eye(2).repeat_interleave(5, 0).chunk(2)
    >>> round(style_contrast(*apart, 0.01).exp().item(), 4)  # the other four share alike
    4.0
    """
    n = len(pictures)
    unit = functional.normalize(torch.cat([pictures, copies]))
    similar = (unit @ unit.T / temperature).fill_diagonal_(-math.inf)
    style = torch.arange(2 * n) // n
    alike = (style[:, None] == style).fill_diagonal_(False)
    total = -similar.log_softmax(1)[alike].sum()
    return total / (2 * n * (n - 1) if reduction == "mean" else 2 * n - 1)
