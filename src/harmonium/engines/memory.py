"""Memory of accelerators: whether workers fit before a run starts, and which batch would fit.

What training needs is measured on the device itself with two small batches of blank images, because
it grows in proportion to the batch. Where torch cannot tell a device's memory, nothing is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harmonium.core.devices import free_memory
from harmonium.core.errors import ConfigError, counted
from harmonium.engines.trial import blank_pass
from harmonium.federation.method import Method

PROCESS = 600_000_000  # bytes that torch's kernels and libraries take in each process, about
SIZES = (4, 16)  # images of the batches that are measured
Memory: Any = torch.accelerator.memory


@dataclass(frozen=True)
class Need:
    """Bytes that training takes on a device."""

    fixed: int  # whatever the batch: model, gradients, optimiser
    each: int  # for each image of a batch

    def of(self, batch: int) -> int:
        """Bytes for a batch of this size."""
        return self.fixed + batch * self.each

    def largest_batch(self, room: float) -> int:
        """The largest batch that fits, a multiple of 8 if it is not small; 0 if none does.

        >>> Need(1000, 10).largest_batch(1999), Need(1000, 10).largest_batch(500)
        (96, 0)
        """
        most = max(0, int((room - self.fixed) // max(1, self.each)))
        return most - most % 8 if most > 8 else most


def need(method: Method, device: torch.device) -> Need | None:
    """What a training step of a method needs on a device; None where torch cannot tell."""
    try:
        peaks = [_peak(method, device, size) for size in SIZES]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    each = max(1, (peaks[1] - peaks[0]) // (SIZES[1] - SIZES[0]))
    weights = sum(p.numel() * p.element_size() for p in method.blueprint.parameters())
    moments = 2 * weights  # of the optimiser, at most
    return Need(max(0, peaks[0] - SIZES[0] * each) + moments, each)


def _peak(method: Method, device: torch.device, size: int) -> int:
    """The most that one step with so many images has allocated."""
    Memory.empty_cache()
    before = Memory.memory_allocated(device)
    Memory.reset_peak_memory_stats(device)
    loss = blank_pass(method, device, size)(None)
    loss.backward()  # type: ignore[no-untyped-call]
    return int(Memory.max_memory_allocated(device) - before)


def check(method: Method, devices: Sequence[torch.device], workers: int) -> None:
    """Refuse a run whose workers would not fit on their devices side by side."""
    for number, device in enumerate(devices):
        if device.type == "cpu":
            continue
        sharing = len(range(number, max(1, workers), len(devices)))
        free, wanted = free_memory(device), need(method, device)
        if not sharing or free is None or wanted is None:
            continue
        batch = method.local.batch
        one = wanted.of(batch) + (PROCESS if workers else 0)
        if sharing * one <= free:
            continue
        fits = wanted.largest_batch(free / sharing - (PROCESS if workers else 0))
        remedies = [f"engine.workers={int(free // one) * len(devices)}"] if free >= one else []
        remedies += [f"local.batch={fits}"] if fits >= 2 else []
        raise ConfigError(
            f"{counted(sharing, 'worker')} with local.batch={batch} would take about "
            f"{_size(sharing * one)} on {device}, of which {_size(free)} are free: set "
            + (" or ".join(remedies) or "a smaller encoder, or engine.device=cpu")
        )


def is_exhausted(error: RuntimeError) -> bool:
    """Whether an error says that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def advice(method: Method, device: torch.device) -> str:
    """What to set after a step did not fit: the batch that would, by a new measurement."""
    batch, fits = method.local.batch, 0
    wanted = need(method, device)
    if wanted is not None and (free := free_memory(device)) is not None:
        fits = wanted.largest_batch(0.9 * free)
    fits = min(fits, batch // 2) or batch // 2
    smaller = f"local.batch={fits} would fit; or " if fits >= 2 else ""
    return f"{smaller}use fewer engine.workers, a smaller encoder, or engine.device=cpu"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
