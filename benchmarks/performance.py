"""The page on speed, start-up and memory, from one run of each of three benchmarks.

    python benchmarks/performance.py [--write docs/results/performance.md]

Runs `overhead.py`, `rivals.py` and `memory.py`, about ten minutes in all. For the rows of Flower
install the extras that `rivals.py` names, into the environment of Harmonium.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from stored import write_page

HERE = Path(__file__).parent
PAGE = """# Speed, start-up and memory

Measured by `benchmarks/performance.py`, which runs the three commands below, on a machine with
{cores} cores and no GPU. The figures that count are seconds of CPU time and their ratios, with
competitors in turn, for they depend least on what else a machine does; wall times and rounds an
hour do depend on it, and the load average stands beside them. Everybody computes on one thread.

## A round beside its bare training steps

`python benchmarks/overhead.py`: CPU time of a round of `cnn-small` (width 32 and 32 pixels, or as
the row says) with SimCLR over that of forward, backward and optimiser steps on ready-made views of
the same batches, and the CPU time of a task that trains nothing, which is the engine's own. Load
average {load} before.

{overhead}

## Beside Flower's simulation and plain loops

`python benchmarks/rivals.py`: the same federated SimCLR as users write it with Harmonium, with
Flower's simulation on Ray, and as loops in plain PyTorch. The networks, images, shares, batches and
steps are the same. Flower's clients and the `loop` make each view with Pillow by the usual small
transforms; the `lean loop` makes them with Pillow too, but leaves out whatever can be. So the
distance between `flower` and `loop` is what Flower and Ray cost, and the distance between `loop`
and `harmonium` is mostly what views made a batch at a time save. `x harmonium` is CPU time over
that of Harmonium with its default views, and `x fast views` over that with `views.mode=fast`. `bare
steps` on ready-made views are what the same steps cost a plain program. Harmonium can be below them
because its processes keep freed memory, while the others leave the C library's settings as they
are. The start-up of Harmonium includes the figures of the untrained encoder, which the others do
not have. What is counted and how is said in the file; the programs are in `benchmarks/contenders/`.

{rivals}

## Memory with ten and with 1,000 clients

`python benchmarks/memory.py`: the largest memory of a whole run on the same images, with 10 and
with 1,000 clients, where clients keep nothing (`fedavg`) and where each keeps a model (`alone`).
Largest proportional set size of all processes, with as many workers as cores.

{memory}
"""


def printed(benchmark: str, *options: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(HERE / f"{benchmark}.py"), *options]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, help="write the page to this file")
    options = parser.parse_args()
    text = PAGE.format(
        cores=os.cpu_count(),
        load=f"{os.getloadavg()[0]:.1f}",
        overhead=printed("overhead", "--markdown"),
        rivals=printed("rivals"),
        memory=printed("memory", "--markdown"),
    )
    if options.write:
        write_page(options.write, text)
    print(text)


if __name__ == "__main__":
    main()
