"""Memory of a run with 10 clients and with 1,000, on the same images.

    python benchmarks/memory.py [--json | --markdown] [--clients 10 1000]

Shows the largest proportional set size (memory shared between processes is counted once) of the
whole process tree, sampled twenty times a second, for a method without client state and for one
that keeps a model at every client.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harmonium.report.tables import markdown

RECIPE = (
    "data=shapes data.count=10000 data.test_count=500 rounds=2 participation.fraction=1 "
    "encoder=cnn-small encoder.width=8 local.batch=32 local.epochs=1 evaluate.every=2 "
    "evaluate.labels_per_class=[]"
)
LIMIT = 1.3


def family(root: int) -> list[int]:
    """A process and all its descendants."""
    pids, open_ = [], [root]
    while open_:
        pid = open_.pop()
        pids.append(pid)
        try:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            open_ += [int(c) for t in tasks for c in (t / "children").read_text().split()]
        except OSError:
            continue
    return pids


def proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0


def peak(words: Sequence[str], folder: Path) -> tuple[int, float]:
    """Largest memory of a run in bytes, and the seconds it took."""
    command = [sys.executable, "-m", "harmonium", "run", *words, "--out", str(folder), "--json"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    most = 0
    while process.poll() is None:
        most = max(most, sum(proportional_bytes(pid) for pid in family(process.pid)))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"this run failed: {' '.join(words)}")
    return most, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print the table of a page")
    parser.add_argument("--clients", type=int, nargs=2, default=[10, 1000])
    options = parser.parse_args()
    results = {}
    for method in ("fedavg", "alone"):
        with tempfile.TemporaryDirectory() as base:
            few, many = (
                peak([method, *RECIPE.split(), f"clients={clients}"], Path(base) / str(clients))
                for clients in options.clients
            )
        results[method] = {
            "megabytes": [few[0] / 1e6, many[0] / 1e6],
            "seconds": [few[1], many[1]],
            "ratio": many[0] / few[0],
            "limit": LIMIT,
        }
    if options.json:
        print(json.dumps(results))
        return
    lines = [line_of(method, row, options.clients) for method, row in results.items()]
    if options.markdown:
        print(markdown(lines))
        return
    for line in lines:
        measured = ", ".join(f"{key} {line[key]}" for key in list(line)[1:5])
        print(
            f"{line['method']:7s} {measured}: {line['ratio']} times (limit {line['limit']}: "
            f"{line['verdict']})"
        )


def line_of(method: str, row: dict[str, Any], clients: Sequence[int]) -> dict[str, str]:
    """A result as the columns of a table."""
    return {
        "method": method,
        **{
            f"{count} clients, {unit}": f"{value:.0f}"
            for key, unit in (("megabytes", "MB"), ("seconds", "s"))
            for count, value in zip(clients, row[key], strict=True)
        },
        "ratio": f"{row['ratio']:.2f}",
        "limit": f"{LIMIT}",
        "verdict": "met" if row["ratio"] <= LIMIT else "MISSED",
    }


if __name__ == "__main__":
    main()
