"""Images decoded per second from JPEG files, in this process and in one and two others.

    python benchmarks/jpeg_decoding.py [--json] [--count 300] [--workers 0 1 2] [--repeats 3]

Every contender brings the same photographs of 640 x 480 to 224 x 224 and writes them as a data set,
starting its processes anew; repetitions are interleaved so that a busy machine slows all alike,
the best time of each counts. Also shown: the most memory that the process which collects them had,
measured in a process of its own, and whether all made the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harmonium.data.cache import Writer
from harmonium.data.decoding.image_files import ImageFile, write_images
from harmonium.data.sets.folder import Folder

SIZE, SIDE = (640, 480), 224


def make(folder: Path, count: int) -> None:
    """Write smooth images with some noise, in files about as large as those of photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize(SIZE, Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + rng.normal(0, 8, smooth.shape).astype(np.int16)
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{number:05d}.jpg", quality=90)


def decode(folder: Path, workers: int) -> dict[str, float | str]:
    """Decode the folder once; returns seconds, megabytes and the SHA-256 of the pixels."""
    files = {"train": [ImageFile(path, path.name) for path in sorted(folder.iterdir())]}
    spec = Folder(path=str(folder), size=SIDE)
    with tempfile.TemporaryDirectory() as target:
        began = time.perf_counter()
        writer = Writer(Path(target), SIDE, 3)
        write_images(writer, files, spec, workers)
        writer.finish({})
        writer.close()
        seconds = time.perf_counter() - began
        with open(Path(target) / "train-pixels.npy", "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "megabytes": kilobytes / 1024, "sha256": content}


def measure(folder: Path, workers: int) -> dict[str, float | str]:
    """Run `decode` in a process of its own, so that its memory can be measured."""
    words = [sys.executable, __file__, "--folder", str(folder), "--workers", str(workers)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, env=os.environ)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--count", type=int, default=300, help="number of images")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="processes")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions of each")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(decode(options.folder, options.workers[0])))
        return
    with tempfile.TemporaryDirectory() as base:
        make(Path(base), options.count)
        runs: dict[int, list[dict[str, Any]]] = {workers: [] for workers in options.workers}
        for _ in range(options.repeats):
            for workers, rows in runs.items():
                rows.append(measure(Path(base), workers))
    results = {
        workers: {
            "images_per_second": options.count / min(row["seconds"] for row in rows),
            "megabytes": max(row["megabytes"] for row in rows),
        }
        for workers, rows in runs.items()
    }
    same = len({row["sha256"] for rows in runs.values() for row in rows}) == 1
    if options.json:
        print(json.dumps({"count": options.count, "workers": results, "same_bytes": same}))
        return
    print(f"{options.count} images of {SIZE[0]} x {SIZE[1]} to {SIDE} x {SIDE}")
    for workers, row in results.items():
        where = f"{workers} more" if workers else "this process"
        print(
            f"{where:12s} {row['images_per_second']:6.0f} images/s, "
            f"at most {row['megabytes']:.0f} MB"
        )
    print("the same bytes: " + ("yes" if same else "NO"))


if __name__ == "__main__":
    main()
