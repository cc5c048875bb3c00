"""Kill `harmonium embed` at random moments, continue it, and compare the bytes of its output.

    python benchmarks/embed.py [--images 10000] [--side 32] [--kills 10] [--seed 0]

Each kill is SIGKILL to the whole process group, at a moment drawn over the time that an undisturbed
command takes from its start. The command is then started again, until all kills have hit it. Some
images cannot be read. Then it prints the images a second of an undisturbed command, with its start
and without.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

TRAINING = (
    "fedavg data=shapes data.count=200 data.test_count=40 data.size={side} clients=2 rounds=1 "
    "encoder.width=16 encoder.out=64 local.epochs=1 local.batch=32 evaluate.labels_per_class=[]"
)


def harmonium(*words: str) -> list[str]:
    return [sys.executable, "-m", "harmonium", *words]


def make_images(folder: Path, count: int, side: int, seed: int) -> None:
    """Images of noise in subfolders; every thousandth file holds no image."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        place = folder / f"site-{number % 7}" / f"{number:06d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        if number % 1000 == 999:
            place.write_bytes(b"no image")
        else:
            pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place, compress_level=1)


def finish(command: list[str]) -> tuple[float, str]:
    """Run a command to its end; returns its seconds and what it said beside its results."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return time.monotonic() - started, done.stderr


def kill_after(seconds: float, command: list[str]) -> bool:
    """Start a command and kill it; returns whether it was still running."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def trial(
    encoder: Path, images: Path, base: Path, kills: int, seed: int, kind: str = ".parquet"
) -> dict[str, object]:
    """Kill commands and continue them; returns what was seen."""
    rng, calm = random.Random(seed), base / f"calm{kind}"
    words = ("embed", str(encoder), str(images), "--out")
    seconds, _ = finish(harmonium(*words, str(calm)))
    seen = {"seconds": seconds, "kills": 0, "outputs": 0, "continued": 0, "different": 0}
    while seen["kills"] < kills:
        output = base / f"killed-{seen['outputs']}{kind}"
        command = harmonium(*words, str(output))
        while seen["kills"] < kills and kill_after(rng.uniform(0, seconds), command):
            seen["kills"] += 1
        said = finish(command)[1]
        seen["continued"] += bool(re.search("continuing", said))
        seen["outputs"] += 1
        seen["different"] += output.read_bytes() != calm.read_bytes()
        left = [path.name for path in base.iterdir() if path.name.startswith(output.name + ".")]
        seen["left behind"] = [*seen.get("left behind", []), *left]
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        make_images(base / "images", options.images, options.side, options.seed)
        training = TRAINING.format(side=options.side).split()
        finish(harmonium("run", *training, "--out", str(base / "run")))
        one = next((base / "images").rglob("*.png"))
        words = ("embed", str(base / "run"), str(one), "--out", str(base / "one.npz"))
        start, _ = finish(harmonium(*words))
        seen = trial(base / "run", base / "images", base, options.kills, options.seed)
    seconds = seen["seconds"]
    working = options.images / max(0.1, seconds - start)
    print(f"{options.images:,} images of {options.side} x {options.side}: {seconds:.1f} s")
    print(f"images a second: {options.images / seconds:,.0f}; without start-up {working:,.0f}")
    print(f"kills: {seen['kills']}, of {seen['outputs']} outputs; continued: {seen['continued']}")
    print(f"outputs that differ: {seen['different']}")
    print(f"left behind: {', '.join(seen['left behind']) or 'nothing'}")
    sys.exit(bool(seen["different"] or seen["left behind"]))


if __name__ == "__main__":
    main()
