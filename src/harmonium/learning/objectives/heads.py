"""Small networks on top of features: projectors and predictors."""

from __future__ import annotations

from typing import Literal

from torch import nn

from harmonium.learning.encoders import groups_of

Norm = Literal["batch", "group", "none"]


def mlp(
    *sizes: int,
    norm: Norm = "none",
    bias: bool = True,
    out_bias: bool | None = None,
    out_norm: bool = False,
) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them, normalised before it if asked for.

    Args:
        sizes: of the input, of every inner layer, and of the output.
        norm: of the inner layers.
        bias: whether linear layers have one.
        out_bias: whether the last one has, if that differs.
        out_norm: end with BatchNorm without scale and shift, as SimSiam and Orchestra do.

    >>> sum(p.numel() for p in mlp(512, 2048, 128).parameters())
    1312896
    """
    layers: list[nn.Module] = []
    for inner, outer in zip(sizes[:-1], sizes[1:-1], strict=False):
        layers += [nn.Linear(inner, outer, bias), *_norm(norm, outer), nn.ReLU()]
    layers.append(nn.Linear(sizes[-2], sizes[-1], bias if out_bias is None else out_bias))
    if out_norm:
        layers.append(nn.BatchNorm1d(sizes[-1], affine=False))
    return nn.Sequential(*layers)


def _norm(kind: Norm, size: int) -> list[nn.Module]:
    if kind == "batch":
        return [nn.BatchNorm1d(size)]
    return [nn.GroupNorm(groups_of(size, pixels=1), size)] if kind == "group" else []
