"""Trial passes on blank images, made on the device before a run starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.federation.method import Method
from harmonium.learning import compiling
from harmonium.learning.precision import TYPES


def blank_pass(method: Method, device: torch.device, images: int) -> Callable[[int | None], Tensor]:
    """A function that passes blank images through a method's networks and returns a loss.

    It takes the size of the batches that are compiled; none: none are.
    """
    parts = method.blueprint.copy_from(device=device).train()
    world, path = (
        method.world,
        ["encoder", *(["projector"] if "projector" in method.blueprint else [])],
    )
    blank = torch.zeros(images, world.channels, world.side, world.side).to(device)

    def loss(compiled: int | None) -> Tensor:
        with parts.computing(TYPES.get(method.local.precision), compiled):
            outputs = parts.through([blank] * len(method.views.pipelines), *path)[-1]
        return torch.stack([output.square().sum() for output in outputs]).sum()

    return loss


def gain_of_compiling(method: Method, device: torch.device) -> compiling.Gain:
    """What compiling costs and gains; its results are kept, so that workers need not repeat it."""
    compiling.check(device)
    batch = method.local.batch
    loss = blank_pass(method, device, batch)
    with work("compiling"), single_thread():
        return compiling.measured(lambda: loss(None), lambda: loss(batch), device)
