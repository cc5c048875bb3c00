"""Settings of engines: the section of a recipe that says where clients run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from harmonium.core import devices
from harmonium.core.errors import ConfigError


@dataclass(frozen=True)
class EngineSettings:
    """Where clients run; it changes results by no more than the rounding of another device."""

    kind: Literal["local", "flower"] = "local"  # on this machine, or over Flower's messages
    workers: int | None = None  # processes; none: one per core; 0: in this process (local)
    device: str | tuple[str, ...] = devices.AUTO  # where: auto, cpu, cuda, cuda:1, mps, or a list
    tf32: bool = False  # faster, coarser float32 products on CUDA devices that have them
    deadline: float = 3600.0  # seconds that a site has to answer (flower)
    patience: float = 120.0  # seconds to wait in a round for a site that is offline (flower)
    tries: int = 3  # times that a round with too few answers is tried (flower)

    def __post_init__(self) -> None:
        devices.check(self.device)
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"engine.workers is {self.workers}; it must be 0 or more")
        for name in ("deadline", "patience"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}; it must be above 0")
        if self.tries < 1:
            raise ConfigError(f"engine.tries is {self.tries}; it must be at least 1")

    @property
    def processes(self) -> int:
        """How many processes run clients: as many as set, or one for each core or accelerator.

        A single accelerator needs no process beside this one.
        """
        if self.workers is not None:
            return self.workers
        if self.kind == "local" and self.devices[0].type != "cpu":
            return len(self.devices) if len(self.devices) > 1 else 0
        return os.cpu_count() or 1

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that clients' tasks are spread over; a ConfigError if one is not here."""
        return devices.resolve(self.device)

    def check_in_process(self) -> None:
        """Refuse other processes, for an encoder that exists only in this one."""
        other = "engine=flower" if self.kind != "local" else f"engine.workers={self.workers}"
        if self.kind != "local" or self.workers:
            raise ConfigError(
                f"{other}, but an encoder given as nn.Module stays in this process: use "
                "engine.workers=0, or a function `def build(channels: int, side: int) -> "
                "nn.Module` in a module of yours, named as encoder=module:build"
            )
