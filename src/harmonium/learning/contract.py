"""Checks of contributed encoders and objectives; each fault is one line with its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.core.errors import ConfigError
from harmonium.learning.parts import Part


def called(thing: object) -> str:
    """What messages call an object: its class's registered name, or else the class's own."""
    cls = thing if isinstance(thing, type) else type(thing)
    return str(vars(cls).get("name") or cls.__name__)


def checked_parts(parts: Any, owner: object, name: str) -> Mapping[str, Part]:
    """What `build` or `extra_parts` returned, which must be parts by name."""
    example = 'return {"projector": Part(module)}'
    if not isinstance(parts, Mapping):
        got = "nothing" if parts is None else f"a {type(parts).__name__}"
        raise ConfigError(
            f"{called(owner)}.{name} returns {got}: it must return parts by name, e.g. `{example}`"
        )
    for key, part in parts.items():
        if not isinstance(part, Part):
            raise ConfigError(
                f'{called(owner)}.{name} returns a {type(part).__name__} as "{key}": wrap it, e.g. '
                f"`{example}`"
            )
    return parts


def checked_view_counts(views: Any, objective: object) -> tuple[int, int | None]:
    """The class variable `views` of an objective: the fewest and the most that it takes."""
    pair = isinstance(views, tuple | list) and len(views) == 2
    if not pair or type(views[0]) is not int or type(views[1]) not in (int, type(None)):
        example = f"({views}, {views})" if type(views) is int else "(2, 2)"
        raise ConfigError(
            f"{called(objective)}.views is {views!r}: it must be the fewest and the most views, "
            f"e.g. views = {example}, or (1, None) for any number"
        )
    return views[0], views[1]


def checked_network(network: Any, encoder: object) -> nn.Module:
    """What an encoder's `build` returned, which must be a module."""
    if not isinstance(network, nn.Module):
        got = "nothing" if network is None else f"a {type(network).__name__}"
        raise ConfigError(f"{called(encoder)}.build returns {got}: it must return an nn.Module")
    return network


def checked_loss(loss: Any) -> Tensor:
    """A loss that can be minimised: one number that depends on what is trained."""
    if not isinstance(loss, Tensor):
        got = "nothing" if loss is None else f"a {type(loss).__name__}"
        raise ConfigError(f"`score` returns {got}: it must return the loss, a tensor of one number")
    if loss.numel() != 1 or loss.dim() > 1:
        raise ConfigError(
            f"`score` returns a tensor of shape {tuple(loss.shape)}: the loss is one number, e.g. "
            "the mean of these, `.mean()`"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "`score` returns a loss that depends on nothing that is trained: compute it from "
            "`seen` or `parts`, without .item(), .detach() and torch.no_grad()"
        )
    return loss
