"""Kill a run at random moments, resume it, and compare every file with an undisturbed run.

    python benchmarks/kills.py [--kills 20] [--seed 0]

Each kill is SIGKILL to the whole process group, at a moment drawn over the whole duration of
the run, start-up and final evaluation included. The run is then started again by the same command.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMPARED = ("metrics.jsonl", "ledger.jsonl", "encoder.safetensors", "result.json", "split.npz")
RECIPE = (
    "fedavg data=shapes data.count=240 data.test_count=60 data.size=12 clients=6 rounds=6 "
    "encoder.width=8 encoder.out=32 local.batch=16 local.epochs=1 server=sgd split=dirichlet "
    "evaluate.every=2 evaluate.k=20 terms.proximal.mu=0.01"
)


def command(folder: Path, words: str = RECIPE) -> list[str]:
    return [sys.executable, "-m", "harmonium", "run", *words.split(), "--out", str(folder)]


def finish(folder: Path, words: str = RECIPE) -> float:
    started = time.monotonic()
    done = subprocess.run(command(folder, words), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run failed with exit code {done.returncode}: {done.stderr}")
    return time.monotonic() - started


def kill_after(seconds: float, folder: Path, words: str = RECIPE) -> bool:
    """Start the run, kill it and all its workers; returns whether it was still running."""
    process = subprocess.Popen(
        command(folder, words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in COMPARED}


def trial(kills: int, seed: int, base: Path, words: str = RECIPE) -> list[str]:
    """Kill and resume runs; returns the files that differ from those of an undisturbed run."""
    seconds = finish(base / "calm", words)
    calm, rng, differing = contents(base / "calm"), random.Random(seed), []
    for number in range(kills):
        folder = base / f"killed-{number}"
        while not kill_after(rng.uniform(0, seconds), folder, words):
            shutil.rmtree(folder)  # it was done before the kill: try again
        finish(folder, words)
        resumed = contents(folder)
        differing += [f"{folder.name}/{name}" for name in COMPARED if resumed[name] != calm[name]]
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        differing = trial(options.kills, options.seed, Path(base))
    print(f"{options.kills} kills; files that differ: {', '.join(differing) or 'none'}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
