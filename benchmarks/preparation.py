"""What the preparation of images inside an exported ONNX graph costs, beside Pillow's.

    python benchmarks/preparation.py [--json] [--repeat 3]

CPU milliseconds an image on one thread, the least of several calls: uint8 colour images, scaled to
the size of training and normalised. It also prints by how much prepared bytes differ: not at all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from harmonium.data.decoding.conversion import shaped
from harmonium.handover.preparation import preparation
from harmonium.handover.programs import onnx_session

CASES = (  # side of training, side of images, images in a call
    (224, 224, 8),
    (224, 256, 8),
    (224, 512, 4),
    (224, 1024, 2),
    (32, 28, 256),
    (32, 512, 16),
)


def least(call: Callable[[], Any], repeat: int, images: int) -> float:
    """CPU milliseconds an image of the quickest of several calls."""
    spent = []
    for _ in range(repeat):
        before = time.process_time()
        call()
        spent.append(1000 * (time.process_time() - before) / images)
    return min(spent)


def measure(side: int, given: int, count: int, repeat: int) -> dict[str, Any]:
    """One row: the cost of both ways, and how many bytes they give differently."""
    graph = preparation((side, side), 3, "cut", None, None)
    session = onnx_session(graph.SerializeToString())
    images = np.random.default_rng(0).integers(0, 256, (count, given, given, 3), dtype=np.uint8)
    found = session.run(None, {"images": images})[0].transpose(0, 2, 3, 1)
    wanted = shaped(images, (side, side), 3)
    return {
        "from": f"{given} x {given}",
        "to": f"{side} x {side}",
        "onnx": least(lambda: session.run(None, {"images": images}), repeat, count),
        "pillow": least(lambda: shaped(images, (side, side), 3), repeat, count),
        "bytes that differ": int((np.round(found * 255) != wanted).sum()),
    }


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    rows = [measure(*case, asked.repeat) for case in CASES]
    if asked.json:
        print(json.dumps(rows))
        return
    print("| from | to | ONNX, ms | Pillow, ms | bytes that differ |\n|---|---|---|---|---|")
    for row in rows:
        times = f"{row['onnx']:.2f} | {row['pillow']:.2f}"
        print(f"| {row['from']} | {row['to']} | {times} | {row['bytes that differ']} |")


if __name__ == "__main__":
    main()
