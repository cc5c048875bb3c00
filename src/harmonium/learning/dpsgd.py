"""DP-SGD: training with differential privacy for single images.

Abadi et al., Deep Learning with Differential Privacy, 2016. The gradient of each image is clipped
to a norm of at most `local.dp_clip`, and noise is added to their sum. This is private only if the
loss is a mean over images that do not interact: contrast within a batch and BatchNorm are refused.

An epoch takes every image once, so one image in another's place moves one sum of the epoch by
at most twice the clip, and the epoch is one Gaussian release, whatever the number of its steps.
Batches are shuffled, not sampled at random, so there is no amplification by subsampling. The model
that is sent depends on the images through the noisy sums alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from harmonium.core.devices import to_double
from harmonium.learning.client import Batch, Client
from harmonium.learning.contract import checked_loss
from harmonium.learning.training import Local
from harmonium.privacy.mechanisms import Release


@dataclass(kw_only=True)
class One(Batch):
    """A single image of a batch, with the views that it has there."""

    whole: Batch
    place: int

    @cached_property
    def views(self) -> list[Tensor]:
        """The batch's views of this image."""
        return [view[self.place : self.place + 1] for view in self.whole.views]


def words(local: Local) -> tuple[str, ...]:
    """A sentence on DP-SGD for the method card; empty without it."""
    if local.dp_clip is None:
        return ()
    noise = "no noise, which hides nothing"
    if local.dp_noise:
        noise = f"noise of {local.dp_noise:g} deviations over its sensitivity"
    sentence = f"Gradients of single images are shortened to {local.dp_clip:g} in every step"
    return (f"{sentence}, and their sum gets {noise}.",)


def costs(local: Local) -> tuple[Release, ...]:
    """The privacy cost of a round of training: one release for each epoch."""
    if not local.dp_noise or local.dp_clip is None:
        return ()
    sensitivity = 2 * local.dp_clip
    sigma = local.dp_noise * sensitivity
    return (Release("model", "gaussian", sensitivity, sigma, count=local.epochs),)


def step(
    parameters: list[nn.Parameter],
    loss: Callable[[Batch], Tensor],
    batch: Batch,
    local: Local,
    client: Client,
) -> Tensor:
    """Set `grad` to the noisy mean of the clipped gradients; returns the mean loss."""
    clip = local.dp_clip or math.inf
    sums = [to_double(torch.zeros_like(p)) for p in parameters]
    losses, count = list[Tensor](), len(batch.index)
    for place in range(count):
        index = batch.index[place : place + 1]
        one = checked_loss(
            loss(One(index, batch.examples, batch.make, batch.rng, whole=batch, place=place))
        )
        gradients = torch.autograd.grad(one, parameters, allow_unused=True)
        losses.append(to_double(one.detach().reshape(())))
        squares = [to_double(g).square().sum() for g in gradients if g is not None]
        norm = torch.stack(squares).cumsum(0)[-1].sqrt()
        short = (clip / norm.clamp(min=1e-300)).clamp(max=1.0)
        # A gradient that is not finite counts as none: to stop here would reveal something.
        counts = norm.isfinite()
        for into, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                into += torch.where(counts, short * to_double(gradient), 0.0)
    sigma = local.dp_noise * 2 * clip if local.dp_noise else 0.0
    for parameter, gradient in zip(parameters, sums, strict=True):
        noisy = client.noise.gaussian(gradient, sigma) if sigma else gradient
        parameter.grad = (noisy / count).to(parameter.device, parameter.dtype)
    return torch.stack(losses).cumsum(0)[-1] / count
