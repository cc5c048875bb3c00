"""Mixed precision: networks compute in 16 bits, weights, losses and updates stay in 32.

With `local.precision=bf16` or `fp16`, `Parts.through` passes views through networks under torch's
autocast and returns their outputs in float32, so every loss, and every head that an objective calls
by itself, computes as usual. Gradients of `fp16` would underflow, so the loss is multiplied by a
factor that adapts: a step whose gradients overflow is left out, and the factor halved.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "bf16", "fp16"]
TYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

FIRST = 2.0**10  # factor of the first step of a task; torch's 2^16 costs most tasks a step


class Scaler:
    """Carries the gradients of a loss to an optimiser, scaled where they would underflow.

    Nothing here reads the device: torch's fused optimisers leave a step out there.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._scaler = None
        if precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type, init_scale=FIRST)

    def backward(self, loss: Tensor, optimiser: torch.optim.Optimizer) -> None:
        """Set the gradients of a loss."""
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(optimiser)

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        """Step, unless gradients have overflowed."""
        if self._scaler is None:
            optimiser.step()
            return
        self._scaler.step(optimiser)
        self._scaler.update()
