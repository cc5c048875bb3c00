"""EMA twins: slow copies of parts, whose outputs are an objective's targets.

The share rule of a twin sets who owns it between rounds, which changes both results and bytes:
`mean` sends and averages it like the encoder, `local` keeps it at the client, `fresh` restarts it
from the received model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from harmonium.learning.parts import Part, Parts

Owner = Literal["mean", "local", "fresh"]
Buffers = Literal["own", "copy"]


def twin(modules: Mapping[str, nn.Module], names: tuple[str, ...], owner: Owner) -> Part:
    """A copy of the named parts that no gradient reaches."""
    copies = nn.ModuleDict({name: copy.deepcopy(modules[name]) for name in names})
    return Part(copies.requires_grad_(False), owner)


@torch.no_grad()
def restart(parts: Parts, *, first: bool = False, name: str = "target") -> None:
    """Start a twin from the model it follows: a `fresh` one always, a `local` one at `first`."""
    rule = parts.rules[name]
    if rule == "fresh" or (rule == "local" and first):
        for part, follower in parts[name].items():  # type: ignore[operator]
            follower.load_state_dict(parts[part].state_dict())


@torch.no_grad()
def targets(parts: Parts, views: Sequence[Tensor], name: str = "target") -> list[Tensor]:
    """Projections of the views by a twin of encoder and projector, without gradient."""
    twin: Mapping[str, nn.Module] = parts[name]  # type: ignore[assignment]
    return parts.through(views, twin["encoder"], twin["projector"])[1]


@torch.no_grad()
def follow(parts: Parts, momentum: float, buffers: Buffers = "own", name: str = "target") -> None:
    """Move a twin towards its model: target <- momentum target + (1 - momentum) online.

    BatchNorm statistics come from the twin's own forward passes (`own`) or are copied from the
    model that it follows (`copy`). A twin in evaluation mode is not moved.
    """
    if not parts[name].training:
        return
    for part, follower in parts[name].items():  # type: ignore[operator]
        slow: list[Tensor] = list(follower.parameters())
        torch._foreach_lerp_(slow, list(parts[part].parameters()), 1 - momentum)
        if buffers == "copy":
            for ours, theirs in zip(follower.buffers(), parts[part].buffers(), strict=True):
                ours.copy_(theirs)
