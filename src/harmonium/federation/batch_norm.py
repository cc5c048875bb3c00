"""Recalibration of BatchNorm's statistics on the averaged model.

Averaged running statistics do not match the averaged model, because each client measured those of
its own model. With `batch_norm=recalibrate`, clients pass their images through the averaged encoder
once more, and the server pools their statistics: the mean of means, and the total variance around
it. Deeper layers are measured behind layers that normalise by the current batch, as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.core.devices import to_double
from harmonium.core.errors import NotEnoughReplies
from harmonium.core.types import ClientId, Weights
from harmonium.federation.wire import CALIBRATE, Ask, Plan

if TYPE_CHECKING:
    from harmonium.federation.method import Server


def calibrated(server: Server, cohort: Sequence[ClientId]) -> Plan:
    """The server with statistics of BatchNorm that clients measured on its model.

    One answer is enough. If nobody in the cohort answers, all clients are asked, up to nine times.
    """
    encoder = {k: value for k, value in server.model.items() if k.startswith("encoder.")}
    for asked in (cohort, *[server.everyone] * 9):
        got = yield Ask(CALIBRATE, asked, {"encoder": encoder}, least=0)
        if got.ids:
            memory = {**server.memory, "statistics": pooled(got.statistics)}
            return replace(server, memory=memory)
    raise NotEnoughReplies("no client measured BatchNorm's statistics in ten attempts")


@torch.no_grad()
def measure(encoder: nn.Module, batches: Iterable[Tensor]) -> int:
    """Set every BatchNorm's running statistics to those of all its inputs over some batches.

    Returns the number of images; without any, the statistics are unchanged.

    >>> norm = nn.BatchNorm1d(1)
    >>> measure(norm, torch.tensor([[1.0], [3.0], [5.0], [7.0], [9.0]]).split(3))
    5
    >>> norm.running_mean.item(), norm.running_var.item()
    (5.0, 10.0)
    """
    norms = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    sums: dict[nn.Module, list[Tensor]] = {}
    modes = [(norm, norm.training, norm.momentum) for norm in norms]
    hooks = [norm.register_forward_pre_hook(lambda n, x: _add(sums, n, x[0])) for norm in norms]
    try:
        for norm in norms:
            norm.train()
            norm.momentum = 0.0  # its own running statistics stay as they are
        images = sum(len(batch) for batch in batches if norms and encoder(batch) is not None)
    finally:
        for hook in hooks:
            hook.remove()
        for norm, training, momentum in modes:
            norm.training, norm.momentum = training, momentum
    for measured, (count, first, second) in sums.items():
        mean = first / count
        variance = (second / count - mean.square()).clamp_min(0) * count / (count - 1).clamp_min(1)
        norm_layer: Any = measured
        norm_layer.running_mean.copy_(mean)
        norm_layer.running_var.copy_(variance)
    return images


def _add(sums: dict[nn.Module, list[Tensor]], norm: nn.Module, values: Tensor) -> None:
    """Add the count, sum and sum of squares of a batch, by channel, in double precision."""
    rows = to_double(values).transpose(0, 1).flatten(1)  # (channels, everything else)
    new = [torch.tensor(float(rows.shape[1])), rows.sum(1), rows.square().sum(1)]
    so_far = sums.get(norm)
    sums[norm] = new if so_far is None else [a + b for a, b in zip(so_far, new, strict=True)]


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
