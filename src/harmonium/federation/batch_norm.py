"""BatchNorm's statistics measured anew on a finished average.

Averaged running statistics belong to no model: each client measured its own. `batch_norm=
recalibrate` has the clients pass their pictures through the averaged encoder once more, and pools
what they find: the mean of means, and the variance of everything around it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.federation.wire import Weights


@torch.no_grad()
def measure(encoder: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Replace every BatchNorm's running statistics by the mean over some batches; no other effect.

    >>> pictures = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    >>> norm = measure(nn.BatchNorm1d(1), pictures.split(2))
    >>> norm.running_mean.item(), norm.running_var.item()
    (4.0, 2.0)
    """
    norms = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return encoder
    held = [(norm, norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
        norm.train()
    for batch in batches:
        encoder(batch)
    for norm, momentum, training in held:
        norm.momentum, norm.training = momentum, training
    return encoder


def moments(statistics: Weights) -> Weights:
    """Running means and variances as first and second moments, which can be averaged."""
    return {
        key: value + statistics[_mean_of(key)].square() if _is_variance(key) else value
        for key, value in statistics.items()
    }


def pooled(moments: Weights) -> Weights:
    """Averaged moments as means and variances again."""
    return {
        key: (value - moments[_mean_of(key)].square()).clamp_min(0) if _is_variance(key) else value
        for key, value in moments.items()
    }


def _is_variance(key: str) -> bool:
    return key.endswith("running_var")


def _mean_of(key: str) -> str:
    return key.removesuffix("var") + "mean"
