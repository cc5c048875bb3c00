"""Gaussian noise on correlation matrices: sensitivity, calibration, and a plausibility check.

Algorithm 2 (DP-CalR), line 8, adds N(0, sigma^2) to every entry of the correlation matrix
R_j = (1 / n_j) sum over images of A(x), where A(x) is the mean of z z^T over the views of x,
|z|^2 <= mu, and n_j is the number of images |D_j|. A(x) is positive semi-definite and
|A(x)|_F <= mu.

Sensitivity (paper and measurements disagree). The proof of Proposition 6.6 bounds how far one image
moves R_j by mu / n_j. That is right if an image is added or removed while the divisor stays
n_j (`add-remove`). If one image is replaced by another, the bound is

    |A - A'|_F = sqrt(|A|^2 + |A'|^2 - 2 <A, A'>) <= sqrt(2) mu,   as <A, A'> >= 0,

so sqrt(2) mu / n_j (`replace`), attained by orthogonal z and z'. The sigmas of Table 6 agree with
the claimed epsilons for sqrt(2) and not for Proposition 6.6, so `replace` is the default. Section
6 states the result a second time without 1 / n_j^2; the proof has it.

Accounting. Proposition 6.6 converts Rényi divergences; `sigma_for` solves the exact epsilon of
T_j Gaussian releases, which is smaller for the same sigma. T_j counts the releases of client j.
With partial participation the paper changes sigma "according to the ratio of participation", and
its released code does so linearly. That spends more than is claimed: T_j shrinks with the ratio,
so the same epsilon allows sigma to shrink with its square root only. Here T_j is what each client
really sends, and nothing is deducted for sampling, as the server knows who took part.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from harmonium.learning.symmetric import is_between

Neighbours = Literal["replace", "add-remove"]
ROUNDING = 1e-3  # of mu: what float32 may add to the eigenvalues of a packed matrix


def sensitivity(mu: float, images: int, neighbours: Neighbours) -> float:
    """How far one image moves the correlation matrix of a client, in the Frobenius norm.

    Args:
        mu: largest squared norm of a projection.
        images: n_j, the divisor of the matrix.
        neighbours: whether one image is replaced, or added or removed.

    >>> sensitivity(4.0, 100, "add-remove")
    0.04
    """
    return (math.sqrt(2) if neighbours == "replace" else 1.0) * mu / images


def is_plausible(matrix: Tensor, mu: float, sigma: float, *, psd: bool) -> bool:
    """Whether a received matrix can be a correlation matrix plus its declared noise.

    Without noise R_j is a mean of z z^T with |z|^2 <= mu, so its eigenvalues and its trace lie
    between 0 and mu. N(0, sigma^2) on H x H entries moves an eigenvalue by hardly more than
    2 sigma sqrt(H) (the spectral norm; its symmetric half by sqrt(2) less), and the trace by
    sigma sqrt(H) in the standard deviation. With another 10 sigma for eigenvalues and 10 standard
    deviations for the trace, an honest client is refused less than once in 10^20 matrices.

    Args:
        matrix: R_j with noise, symmetric, (H, H), in double precision.
        mu: largest squared norm of a projection.
        sigma: standard deviation of the noise; 0: none.
        psd: whether negative eigenvalues were dropped, so that they do not cancel others in the
            trace.

    >>> import torch
    >>> is_plausible(torch.eye(2).double(), mu=2.0, sigma=0.0, psd=False)
    True
    >>> is_plausible(-torch.eye(2).double(), mu=2.0, sigma=0.0, psd=False)
    False
    """
    dim = len(matrix)
    eigenvalue_slack = sigma * (2 * math.sqrt(dim) + 10) + ROUNDING * mu
    trace_slack = 10 * sigma * math.sqrt(dim) + ROUNDING * mu
    largest_trace = mu + (dim * eigenvalue_slack if psd else trace_slack)
    if not is_between(matrix, -eigenvalue_slack, mu + eigenvalue_slack):
        return False
    return bool(-trace_slack <= matrix.trace() <= largest_trace)
