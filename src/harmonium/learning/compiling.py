"""Compiled networks: with `local.compile=true`, full batches in training run as compiled code.

Compiling takes seconds to minutes for each kind of network and batch. Its results are kept in
`HARMONIUM_HOME/compiled`, for all processes and later runs. Last batches that are not full, and
everything that is not training, run as usual, so that no batch size is compiled for a single step.
Compiled kernels round otherwise, so a run with this setting has bits of its own; they are the same
for any number of workers and after any crash.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.core.devices import synchronise
from harmonium.core.errors import ConfigError
from harmonium.core.paths import home

BACKEND = "inductor"
KINDS = 64  # kinds of networks and batches that one process compiles, at most
STEPS = 5  # passes that are timed


@dataclass(frozen=True)
class Gain:
    """What compiling has cost and gained, by a trial on blank images."""

    seconds: float  # of the first compiled pass
    before: float  # milliseconds of a forward and backward pass without compiling
    after: float  # and with it

    def __str__(self) -> str:
        text = (
            f"local.compile: the first pass took {self.seconds:.1f} s; a later one takes "
            f"{self.after:.3g} ms, {self.before:.3g} ms without compiling"
        )
        saved = self.before - self.after
        if saved <= 0:
            return f"{text}: it does not pay here"
        return f"{text}: it pays after about {1e3 * self.seconds / saved:,.0f} steps"


def check(device: torch.device) -> None:
    """Refuse a machine on which torch cannot compile for a device."""
    if BACKEND != "inductor":
        return
    if device.type == "cpu":
        names = (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl")
        if not any(name and shutil.which(name) for name in names):
            raise ConfigError(
                "local.compile=true needs a C++ compiler, and there is none here: install one, "
                "e.g. g++, or set local.compile=false"
            )
    elif device.type != "cuda":
        raise ConfigError(f"local.compile=true is for cpu and cuda, not for {device.type}")
    elif importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "local.compile=true needs triton on CUDA devices: install it, or set "
            "local.compile=false"
        )


def through(module: nn.Module, rows: Tensor) -> Tensor:
    """A module's output for a batch, by compiled code."""
    output: Tensor = _compiled(BACKEND)(module, rows)
    return output


@cache
def _compiled(backend: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """One function for all modules: those of the same layers share what it has compiled."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "compiled"))
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, KINDS)

    def forward(module: nn.Module, rows: Tensor) -> Tensor:
        output: Tensor = module(rows)
        return output

    function: Callable[[nn.Module, Tensor], Tensor] = torch.compile(
        forward, backend=backend, dynamic=False
    )
    return function


def measured(
    plain: Callable[[], Tensor], compiled: Callable[[], Tensor], device: torch.device
) -> Gain:
    """Compare two ways to compute a loss, forward and backward."""

    def seconds(loss: Callable[[], Tensor], times: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(times):
            loss().backward()  # type: ignore[no-untyped-call]
        synchronise(device)
        return (time.perf_counter() - began) / times

    first = seconds(compiled, 1)
    seconds(plain, 1)
    return Gain(first, 1e3 * seconds(plain, STEPS), 1e3 * seconds(compiled, STEPS))
