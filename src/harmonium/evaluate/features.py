"""One pass of a frozen encoder over pictures; every probe reads the matrix it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.errors import ConfigError, DataError


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode and give every submodule its own mode back afterwards.

    Each flag is restored by itself because a partly frozen encoder keeps some layers in eval mode
    on purpose, and `module.train()` would wake them.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def embed(
    encoder: nn.Module,
    pixels: np.ndarray,
    prepare: Callable[[Tensor], Tensor],
    batch: int = 500,
) -> Tensor:
    """Frozen features of pictures.

    Args:
        encoder: maps prepared pictures to `(b, dim)`; run in eval mode, its modes are restored.
        pixels: uint8 pictures `(n, height, width, channels)`; may be read-only or memory-mapped.
        prepare: turns a uint8 batch `(b, height, width, channels)` into what the encoder takes.
        batch: pictures per forward pass; bounds memory and does not change the result.

    Returns:
        Float32 features `(n, dim)` on the CPU, free of any autograd history.
    """
    if batch < 1:
        raise ConfigError(f"embed needs a batch of at least 1 picture, got {batch}")
    if len(pixels) == 0:
        raise DataError("there are no pictures to embed")
    parameter = next(encoder.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    features: Tensor | None = None
    with evaluating(encoder):
        for start in range(0, len(pixels), batch):
            # A copy, because torch cannot wrap the read-only pages of a memory-mapped file.
            pictures = torch.from_numpy(np.array(pixels[start : start + batch]))
            with torch.inference_mode():
                part = encoder(prepare(pictures).to(device))
            if part.ndim != 2 or len(part) != len(pictures):
                raise DataError(
                    f"an encoder must give one feature vector a picture: {len(pictures)} pictures "
                    f"came back as {tuple(part.shape)} instead of ({len(pictures)}, dim)"
                )
            if features is None:
                # Made outside inference mode, so that later code may use it with autograd.
                features = torch.empty(len(pixels), part.shape[1])
            features[start : start + batch] = part
    assert features is not None  # the loop ran at least once: pixels is not empty
    return features
