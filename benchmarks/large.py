"""Data larger than memory: what is held in memory while large images are decoded and read.

    python benchmarks/large.py [--json] [--gigabytes 3] [--size 224]

Writes images into the cache as a data set does, and reads all of them in shuffled batches. Shows
the largest amount of anonymous memory (what cannot be dropped, unlike mapped files) that this
process had on top of what importing took. It must not depend on how many images there are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harmonium.data.cache import Writer

LIMIT_MEGABYTES = 200
BATCH = 64


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this system does not tell anonymous memory")


class Peak:
    """The largest anonymous memory while the block runs, sampled fifty times a second."""

    def __enter__(self) -> Peak:
        self.start = self.most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._began = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._stop.set()
        self._thread.join()

    @property
    def megabytes(self) -> float:
        """Megabytes beyond those at the start."""
        return (self.most - self.start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    import numpy as np
    import torch

    from harmonium.data.augment.views import preset
    from harmonium.data.datasets import DataSpec, no_labels

    torch.set_num_threads(1)
    count = round(options.gigabytes * 1e9 / (3 * options.size**2))

    class Noise(DataSpec):
        """Random images, written in pieces."""

        name = "noise"

        def identity(self) -> dict[str, int]:
            """The number of images."""
            return {"count": count}

        def decode(self, writer: Writer) -> tuple[str, ...]:
            """Write all training images, and one test image."""
            rng = np.random.default_rng(0)
            for part, many in (("train", count), ("test", 1)):
                for start in range(0, many, BATCH):
                    piece = min(BATCH, many - start)
                    pixels = rng.integers(0, 256, (piece, options.size, options.size, 3), np.uint8)
                    writer.append(part, pixels, no_labels(piece))
            return ()

    with tempfile.TemporaryDirectory() as home:
        os.environ["HARMONIUM_HOME"] = home
        with Peak() as decoding:
            train = Noise().load().train
        views = preset("none")
        order = np.random.default_rng(0).permutation(len(train))
        with Peak() as reading:
            for start in range(0, len(order), BATCH):
                views.plain(torch.from_numpy(train.batch(order[start : start + BATCH])))
    results = {
        "images": count,
        "gigabytes": round(count * 3 * options.size**2 / 1e9, 2),
        "decoding": {"megabytes": round(decoding.megabytes), "seconds": round(decoding.seconds, 1)},
        "reading": {"megabytes": round(reading.megabytes), "seconds": round(reading.seconds, 1)},
        "limit_megabytes": LIMIT_MEGABYTES,
    }
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{count:,} images of {options.size}x{options.size}, {results['gigabytes']} GB")
        for name, peak in (("decoding", decoding), ("reading", reading)):
            print(f"{name:9} {peak.megabytes:6.0f} MB on top, {peak.seconds:6.1f} s")
        print(f"limit     {LIMIT_MEGABYTES:6} MB")
    if max(decoding.megabytes, reading.megabytes) > LIMIT_MEGABYTES:
        raise SystemExit("more memory than the limit")


if __name__ == "__main__":
    main()
