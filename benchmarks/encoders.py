"""How fast every encoder trains on a CPU, with its channels first and last in memory.

    python benchmarks/encoders.py [--json] [--seconds 3] [--side 32] [--only resnet] [--norm batch]

A step is forward, backward and SGD on ready-made colour images. The layouts take turns in one
process with one thread; what counts is CPU time, and the ratio is the median over pairs of steps,
above 1 where channels last are faster. `--seconds` is for one encoder at one batch size; slow ones
have a single pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from harmonium.learning.encoders import Convolutional, Encoder, encoders
from harmonium.learning.encoders.fixup import FixupResNet20

BATCHES = (16, 64)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def stepper(encoder: Encoder, side: int, layout: torch.memory_format) -> Callable[[int], float]:
    """A function from a batch size to the CPU seconds of one step."""
    torch.manual_seed(0)
    network = encoder.build(3, side).to(memory_format=layout)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    ready = {b: torch.randn(b, 3, side, side).contiguous(memory_format=layout) for b in BATCHES}

    def step(batch: int) -> float:
        before = time.process_time()
        optimiser.zero_grad()
        network(ready[batch]).square().mean().backward()
        optimiser.step()
        return time.process_time() - before

    return step


def measure(encoder: Encoder, side: int, seconds: float) -> dict[str, Any]:
    """Images per CPU second in both layouts, from pairs of steps."""
    first, last = (stepper(encoder, side, layout) for layout in LAYOUTS)
    first(BATCHES[0]), last(BATCHES[0])  # warm caches and allocators
    speeds = {}
    for batch in BATCHES:
        start, pairs = time.process_time(), [(first(batch), last(batch))]
        while time.process_time() - start < seconds:
            pairs.append((first(batch), last(batch)))
        pairs = pairs[1:] or pairs
        speeds[f"batch {batch}"] = {
            "channels_first": batch / statistics.median(a for a, _ in pairs),
            "channels_last": batch / statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
            "pairs": len(pairs),
        }
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--only", default="", help="encoders whose name contains this")
    parser.add_argument("--norm", choices=("group", "batch", "none"), default="group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen: dict[str, Encoder] = {name: cls() for name, cls in encoders.table().items()}
    chosen["fixup-resnet20, width=8"] = FixupResNet20(width=8)
    results: dict[str, Any] = {}
    if not options.json:
        print(f"{'images per CPU second':38s}" + "".join(f"{f'batch {b}':>26s}" for b in BATCHES))
        print(f"{'encoder':26s}{'parameters':>12s}" + 2 * f"{'first':>9s}{'last':>9s}{'ratio':>8s}")
    for name, encoder in sorted(chosen.items()):
        if options.only not in name:
            continue
        if isinstance(encoder, Convolutional):
            encoder = replace(encoder, norm=options.norm)
        parameters = sum(p.numel() for p in encoder.build(3, options.side).parameters())
        rows = measure(encoder, options.side, options.seconds)
        results[name] = {"parameters": parameters, **rows}
        if not options.json:
            speeds = "".join(
                f"{row['channels_first']:9.0f}{row['channels_last']:9.0f}{row['ratio']:8.2f}"
                for row in rows.values()
            )
            print(f"{name:26s}{parameters:12,d}{speeds}", flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
