"""One pass of a frozen encoder over images; every probe reads the matrix it returns.

The pass is made on the current device (`core/devices.py`), and the matrix read back at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.core.devices import (
    current,
    on_current_device,
    room_for,
    to_device,
    to_host,
    without_gradients,
)
from harmonium.core.errors import ConfigError, DataError
from harmonium.core.threads import single_thread
from harmonium.data.images import Images
from harmonium.learning.training import evaluating as evaluating


def embed(
    encoder: nn.Module,
    pixels: np.ndarray | Images,
    prepare: Callable[[Tensor], Tensor],
    batch: int = 500,
    *,
    views: Callable[[Tensor, int], Tensor] | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Frozen features of images, on all cores.

    Batches go to as many threads as there are cores, each computing on its own: no two threads
    wait for each other inside an operation, and the bits are those of a single thread.

    Args:
        encoder: maps prepared images to `(b, dim)`; run in eval mode, its modes are restored.
        pixels: uint8 images `(n, height, width, channels)`; may be read-only or memory-mapped.
        prepare: turns a uint8 batch `(b, height, width, channels)` into what the encoder takes.
        batch: images per forward pass; bounds memory and does not change the result.
        views: used instead of `prepare` for random views. It also gets the number of the batch's
            first image, from which to seed, because batches come in any order. The result then
            depends on `batch`.
        watch: called with the number of images done and the total.

    Returns:
        Float32 features `(n, dim)` on the CPU, free of any autograd history.
    """
    if batch < 1:
        raise ConfigError(f"embed needs a batch of at least 1 image, got {batch}")
    if len(pixels) == 0:
        raise DataError("there are no images to embed")
    device = current()

    def features_of(start: int) -> Tensor:
        rows = np.arange(start, min(start + batch, len(pixels)))
        # A copy, because torch cannot wrap the read-only pages of a memory-mapped file.
        taken = pixels.batch(rows) if isinstance(pixels, Images) else pixels[rows]
        bare = to_device(torch.from_numpy(np.array(taken)), device)
        with without_gradients(device):
            prepared = prepare(bare) if views is None else views(bare, start)
            part: Tensor = encoder(prepared)
        if part.ndim != 2 or len(part) != len(rows):
            raise DataError(
                f"an encoder must give one feature vector an image: {len(rows)} images "
                f"came back as {tuple(part.shape)} instead of ({len(rows)}, dim)"
            )
        return part

    with on_current_device(encoder), evaluating(encoder), single_thread():
        starts = range(0, len(pixels), batch)
        at_once = (os.cpu_count() or 1) if device.type == "cpu" else 1
        with ThreadPoolExecutor(min(at_once, len(starts))) as threads:
            parts = []
            for start, part in zip(starts, threads.map(features_of, starts), strict=True):
                if start == 0:
                    stays = room_for(len(pixels) * part[0].numel() * part.element_size(), device)
                parts.append(part if stays else to_host(part))
                watch(min(start + batch, len(pixels)), len(pixels))
            # The copy is made outside inference mode, so that later code may use autograd.
            features: Tensor = to_host(torch.cat(parts))
            return features.clone()
