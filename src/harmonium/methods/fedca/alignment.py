"""FedCA's alignment module: clients stay close to one model of public images (eq. 11 to 13).

The server trains an alignment model (f_align, g_align) on public images D_align and sends its
outputs, the alignment targets h_align = f_align(x) and z_align = g_align(h_align), to every client
once. Clients have the public images themselves. Targets take far fewer bytes than the
model, which a client would use for nothing else.

Everything here is in evaluation mode. Targets are computed once, by a model whose BatchNorm has
seen all public images; a client's features of the same images must be normalised in the same way,
or a model would be at a distance from itself. So they use the running statistics, and public
images do not move those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.core.types import Kind
from harmonium.learning.client import Client, Decline
from harmonium.learning.parts import Parts
from harmonium.learning.training import evaluating

Reduction = Literal["sum", "mean"]
AlignmentBatch = tuple[Tensor, Tensor, Tensor]  # public images, and their h_align and z_align
TARGETS: Mapping[str, Kind] = {"align_h": "public", "align_z": "public"}  # keys in states


def alignment_batches(client: Client, size: int) -> Iterator[AlignmentBatch]:
    """Public images with their targets, batch by batch, endlessly, in a new order each pass.

    Each batch is a D_align^sub of eq. 11 and 12. The paper leaves open how that subset is chosen
    and whether images are augmented; here each step takes the next `size` images, unaugmented.
    """
    while True:
        if client.public is None:
            raise Decline("it has no public images to align with")
        h, z = client.state["align_h"], client.state["align_z"]
        order = torch.randperm(len(h), generator=client.rng)
        both = (torch.split(one, size) for one in (order, to_device(order, client.device)))
        for index, here in zip(*both, strict=True):
            pixels = torch.from_numpy(client.public.batch(index.numpy()).copy())
            images = client.views.plain(to_device(pixels, client.device))
            yield images, h[here], z[here]


def alignment_loss(parts: Parts, batch: AlignmentBatch, reduction: Reduction) -> Tensor:
    """Squared distances of features and projections from their targets (eq. 11 to 13).

    Neither h nor z is normalised. As printed, eq. 11 and 12 are sums, which grow with the batch and
    with both widths; `mean` divides by the number of images, for which beta must be larger by that
    number.
    """
    images, h_align, z_align = batch
    with evaluating(parts["encoder"], parts["projector"]):
        h = parts["encoder"](images)
        z = parts["projector"](h)
    distance: Tensor = (h - h_align).square().sum() + (z - z_align).square().sum()
    return distance if reduction == "sum" else distance / len(h_align)
