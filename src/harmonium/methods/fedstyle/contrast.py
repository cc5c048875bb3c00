"""The loss that a FedStyle client's style network learns by, equation 2 of Yang et al., 2022.

The loss is a supervised InfoNCE with two classes: the client's own images (class 0) and their
Sobel-filtered copies (class 1). With B images in the batch, s_i the class of row i of the 2B rows
and z_i its representation, the paper prints

    L_style = sum_i 1 / (2B - 1) sum_{j != i, s_j = s_i}
              -log( exp(z_i . z_j / tau) / sum_{n != i} exp(z_i . z_n / tau) ).

Two things are left open or look like slips in the paper:

- Rows are scaled to unit length here. The paper does not say so, but tau = 0.07 is the temperature
  of InfoNCE on cosines; dot products of unscaled rows divided by 0.07 would saturate the softmax.
- An anchor has B - 1 partners of its own class, but the formula divides by 2B - 1 and sums over the
  2B anchors. The usual supervised contrastive loss is the mean over anchors and partners. The
  printed sum is 2B(B - 1) / (2B - 1) times that mean: 63.5 times for B = 64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.devices import to_device

Reduction = Literal["mean", "sum"]


def style_contrast(
    images: Tensor, copies: Tensor, temperature: float, reduction: Reduction = "mean"
) -> Tensor:
    """Supervised InfoNCE between the style of images and the style of their Sobel copies.

    Args:
        images: representations of the images, (n, dim), n at least 2.
        copies: representations of their Sobel copies, (n, dim).
        temperature: tau, which divides the cosine similarities.
        reduction: `mean` over anchors and partners, or `sum` for equation 2 as printed.

    Returns:
        The loss, a scalar. If the two styles are fully separated it is log(n - 1) under `mean` and
        not 0, because the n - 1 partners of an anchor share the softmax among them.

    >>> separated = torch.eye(2).repeat_interleave(5, 0).chunk(2)
    >>> round(style_contrast(*separated, 0.01).exp().item(), 4)  # n - 1
    4.0
    """
    n = len(images)
    z = functional.normalize(torch.cat([images, copies]))  # rows 0..n-1 images, n..2n-1 copies
    # -inf on the diagonal takes n = i out of the denominator, and j = i out of the numerator.
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    total = -logits.log_softmax(1).flatten()[_partners(n, z.device)].sum()
    return total / (2 * n * (n - 1) if reduction == "mean" else 2 * n - 1)


@lru_cache(maxsize=4)
def _partners(n: int, device: torch.device) -> Tensor:
    """Places in the flattened matrix of all pairs (i, j) where 1[i != j] 1[s_i = s_j] is 1."""
    style = torch.arange(2 * n) // n  # s_i
    pairs = (style[:, None] == style).fill_diagonal_(False)
    return to_device(pairs.flatten().nonzero().flatten(), device)
