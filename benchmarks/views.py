"""Views per core-second: Harmonium's two modes beside a careful Pillow pipeline, same work.

Every contender makes SimCLR's views of the same 32 x 32 colour images: resized crop of 20 to
100 % of the area, mirror, brightness, contrast, saturation and hue in a random order, grey,
optionally a 3 x 3 blur of every second image, normalised floats at the end. One thread, CPU time,
repetitions interleaved so that a busy machine slows all alike, medians.

    python benchmarks/views.py [--json] [--batch 128 --batch 16] [--repeats 40]

A `_pair` is two views of every image in one call, which is what a training step pays for; its
cost in milliseconds is beside it, and the targets are held against it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageChops, ImageFilter

from harmonium.data.augment.views import View, Views

SIDE = 32
TARGETS = {"faithful": 1.3, "fast": 3.0}  # times Pillow
NAMES = ("faithful", "faithful_pair", "fast", "fast_pair")


def crop_box(rng: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random resized crop."""
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = SIDE * SIDE * rng.uniform(0.2, 1)
        ratio = math.exp(rng.uniform(low, high))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= SIDE and 0 < height <= SIDE:
            left, top = rng.randint(0, SIDE - width), rng.randint(0, SIDE - height)
            return left, top, left + width, top + height
    return 0, 0, SIDE, SIDE


def filled(mode: str, value: int | tuple[int, int, int]) -> Image.Image:
    """An image of one colour."""
    return Image.new(mode, (SIDE, SIDE), value)


def pillow_view(image: Image.Image, rng: random.Random, blur: float) -> Image.Image:
    """One view of one image, all in Pillow's own code."""
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=crop_box(rng))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.8:
        order = [0, 1, 2, 3]
        rng.shuffle(order)
        for operation in order:
            factor = rng.uniform(0.6, 1.4)
            if operation == 0:
                image = Image.blend(filled("RGB", 0), image, factor)
            elif operation == 1:
                mean = image.convert("L").reduce(SIDE).getpixel((0, 0))
                image = Image.blend(filled("RGB", (mean, mean, mean)), image, factor)
            elif operation == 2:
                image = Image.blend(image.convert("L").convert("RGB"), image, factor)
            else:
                hue, saturation, value = image.convert("HSV").split()
                shift = filled("L", round(255 * rng.uniform(-0.1, 0.1)) % 256)
                hue = ImageChops.add_modulo(hue, shift)
                image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
    if rng.random() < 0.2:
        image = image.convert("L").convert("RGB")
    if rng.random() < blur:
        near = math.exp(-0.5 / rng.uniform(0.1, 2) ** 2)
        row = (near, 1.0, near)
        image = image.filter(ImageFilter.Kernel((3, 3), [a * b for a in row for b in row]))
    return image


def pillow_views(arrays: np.ndarray, rng: random.Random, blur: float) -> torch.Tensor:
    """A batch of views; bytes become floats once for the whole batch."""
    views = np.empty_like(arrays)
    for index, array in enumerate(arrays):
        views[index] = np.asarray(pillow_view(Image.fromarray(array), rng, blur))
    return torch.from_numpy(views).float().div_(255).sub_(0.5).div_(0.5).permute(0, 3, 1, 2)


def smooth_images(count: int) -> torch.Tensor:
    """Smooth coloured images, which are closer to photographs than pure noise."""
    rng = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 5, 5, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bilinear")
    return smooth.mul_(255).byte().permute(0, 2, 3, 1).contiguous()


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, one call of each in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repeats + 2):
        for name, make in contenders.items():
            began = time.process_time()
            make()
            if repetition >= 2:  # the first two warm up
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compare(batch: int, blur: float, repeats: int) -> dict[str, float]:
    """Views per core-second and ratios to Pillow at one batch size, one and two views at once."""
    pixels = smooth_images(batch)
    arrays, dice = pixels.numpy(), random.Random(0)
    rng = torch.Generator().manual_seed(0)
    contenders: dict[str, Callable[[], object]] = {
        "pillow": lambda: pillow_views(arrays, dice, blur)
    }
    for mode in TARGETS:
        view = View(mode=mode, blur=blur)
        pair = Views((view, view))
        contenders[mode] = lambda view=view: view(pixels, rng)
        contenders[f"{mode}_pair"] = lambda pair=pair: pair(pixels, rng)
    seconds = measure(contenders, repeats)
    row: dict[str, float] = {"batch": batch, "blur": blur}
    for name, taken in seconds.items():
        views = 2 * batch if name.endswith("_pair") else batch
        row[name] = views / taken
        if name != "pillow":
            row[f"{name}_over_pillow"] = row[name] / row["pillow"]
        if name.endswith("_pair"):
            row[f"{name}_milliseconds"] = 1000 * taken
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--batch", type=int, action="append", help="batch size; may be repeated")
    parser.add_argument("--repeats", type=int, default=40, help="timed repetitions of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = options.batch or [128, 16]
    rows = [compare(b, blur, options.repeats) for b in batches for blur in (0.0, 0.5)]
    if options.json:
        print(json.dumps({"side": SIDE, "targets": TARGETS, "rows": rows}, indent=1))
        return
    print(f"views per core-second, {SIDE} x {SIDE} RGB, one thread, torch {torch.__version__}")
    print("batch blur  pillow   " + "".join(f"{name:>25}" for name in NAMES))
    for row in rows:
        print(f"{row['batch']:5.0f} {row['blur']:4.1f} {row['pillow']:7.0f}   ", end="")
        for name in NAMES:
            taken = row.get(f"{name}_milliseconds")
            note = "" if taken is None else f", {taken:.2f} ms"
            print(f"{row[name]:9.0f} ({row[name + '_over_pillow']:.1f} x{note})".rjust(25), end="")
        print()
    for mode, target in TARGETS.items():
        worst = min(row[f"{mode}_pair_over_pillow"] for row in rows)
        verdict = "met" if worst >= target else "MISSED"
        print(f"{mode}: pairs at least {worst:.2f} x Pillow (target {target} x: {verdict})")


if __name__ == "__main__":
    main()
