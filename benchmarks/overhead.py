"""What a round costs beyond the bare training steps it contains.

    python benchmarks/overhead.py [--json | --markdown] [--repeats 5] [--images 512]

The floor is forward, backward and optimiser step of `cnn-small` with SimCLR on ready-made views of
the very same batches. A round adds everything else: views, messages both ways, checks, clipping,
the fold. The tiny encoder is `cnn-small` of width 8 at 16 pixels, where what surrounds a step shows
most. Both are measured as CPU time of one thread, one after the other in one process in the
environment of a worker, and the median of the ratios is shown. The cost of a task that trains
nothing is the engine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn

from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.engines.workers import task_environment
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import exchange, scalar, weights
from harmonium.learning.client import Client
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import markdown
from harmonium.runs.open_run import open_runtime
from harmonium.runs.start import _begin

TINY = ("encoder.width=8", "data.size=16")
LIMITS = {
    "batch 128": (("local.batch=128",), 1.05),
    "batch 16": (("local.batch=16",), 1.10),
    "tiny, batch 16": ((*TINY, "local.batch=16"), 1.12),
}
TASK_MILLISECONDS = 5.0


@methods("idle")
@dataclass(frozen=True)
class Idle(Method):
    """Sends the received model straight back, so that only the engine's own work is measured."""

    @exchange(down={"model": weights()}, up={"model": weights(), "loss": scalar()})
    def train(self, client: Client, got: Any) -> dict[str, Any]:
        """Send the model back without training."""
        return {"model": got.model, "loss": 0.0}


def host_of(folder: Path, *words: str, method: str = "fedavg") -> ClientRuntime:
    recipe = Recipe.of("fedavg", "data=shapes", "data.validation=0", *words)
    folder.mkdir()
    _begin(folder, recipe)
    host = open_runtime(folder)
    if method != "fedavg":
        kept = ("world", "encoder", "objective", "views")
        idle = Idle(**{field: getattr(host.method, field) for field in kept})
        host = replace(host, method=idle)
    return host


def rounds(host: ClientRuntime, folder: Path, workers: int = 0) -> Iterator[float]:
    """CPU seconds of one round after another."""
    examples = {client: len(index) for client, index in enumerate(host.indices)}
    server = Server(examples, host.method.blueprint.shared())
    number = 0
    with LocalEngine(host, folder, workers) as engine:
        driver = Driver(host.method, engine, Ledger())
        while True:
            number += 1
            before = cpu_seconds()
            server = replace(server, round=number)
            server = driver.drive(host.method.round(server, server.everyone), server)
            yield cpu_seconds() - before


def floors(host: ClientRuntime) -> Iterator[float]:
    """CPU seconds of the bare steps of one round after another."""
    method, batch = host.method, host.method.local.batch
    ready = []
    for index in host.indices:
        pixels = torch.from_numpy(host.images.batch(index))
        rng = torch.Generator().manual_seed(0)
        ready.append([torch.cat(method.views(part, rng)) for part in pixels.split(batch)])
    while True:
        before = cpu_seconds()
        for batches in ready:
            parts = method.blueprint.copy_from()
            optimiser = torch.optim.SGD(parts.parameters(), lr=0.05, momentum=0.9)
            for views in batches:
                optimiser.zero_grad()
                z: nn.Module = parts["projector"](parts["encoder"](views))
                bare_loss(z, method.objective.temperature).backward()
                optimiser.step()
        yield cpu_seconds() - before


def bare_loss(z: Any, temperature: float) -> torch.Tensor:
    """NT-Xent with nothing around it."""
    unit = nn.functional.normalize(z)
    similar = (unit @ unit.T / temperature).fill_diagonal_(float("-inf"))
    return nn.functional.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


def cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def columns(name: str, row: dict[str, float]) -> dict[str, str]:
    """A result as a row of a table."""
    value = row.get("ratio", row.get("milliseconds", 0.0))
    speed = row.get("samples_per_cpu_second")
    return {
        "": name,
        "measured": f"{value:.3f}",
        "unit": "x the bare steps" if "ratio" in row else "ms of CPU a client",
        "limit": f"{row['limit']:.2f}",
        "verdict": "met" if value <= row["limit"] else "MISSED",
        "samples a CPU s": "–" if speed is None else f"{speed:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print the table of a page")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as base:
        for mode in ("faithful", "fast"):
            for name, (words, limit) in LIMITS.items():
                settings = ["clients=2", f"data.count={2 * options.images}", "data.test_count=2"]
                settings += [*words, "local.epochs=1", f"views.mode={mode}"]
                folder = Path(base) / f"{mode}-{name}"
                host = host_of(folder, *settings)
                full, bare = rounds(host, folder), floors(host)
                next(full), next(bare)  # warm caches and allocators
                pairs = [(next(full), next(bare)) for _ in range(options.repeats)]
                ratio = statistics.median(a / b for a, b in pairs)
                seconds = statistics.median(a for a, _ in pairs)
                results[f"{name}, {mode} views"] = {
                    "ratio": ratio,
                    "limit": limit,
                    "samples_per_cpu_second": 2 * options.images / seconds,
                }
        folder = Path(base) / "idle"
        host = host_of(folder, "data.count=200", "data.test_count=2", "clients=50", method="idle")
        tasks = rounds(host, folder)
        next(tasks)
        each = statistics.median(next(tasks) for _ in range(options.repeats)) / 50
        results["task that trains nothing"] = {
            "milliseconds": 1e3 * each,
            "limit": TASK_MILLISECONDS,
        }
    if options.json:
        print(json.dumps(results))
        return
    if options.markdown:
        print(markdown([columns(name, row) for name, row in results.items()]))
        return
    for name, row in results.items():
        value = row.get("ratio", row.get("milliseconds"))
        unit = "x the bare steps" if "ratio" in row else "ms of CPU a client"
        verdict = "met" if value <= row["limit"] else "MISSED"
        print(f"{name:30s} {value:6.3f} {unit} (limit {row['limit']:.2f}: {verdict})")


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # such settings are read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], task_environment())
    main()
