"""Why verification does not lose on Fashion-MNIST under rotation shift: which images are asked.

    python benchmarks/turned_probes.py [--seeds 0 1 2]

Repeats that cell of benchmarks/verification.py and asks linear probes in three ways: learn from
images as clients hold them and be asked about upright ones, as published; learn from upright ones
and be asked about such; learn from held ones and be asked about images turned as clients turn
theirs. Prints Federated SimCLR less local SimCLR, in points, for every seed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harmonium.data.images import Images
from harmonium.data.partition import make_split
from harmonium.data.shift import turned, with_split_angles
from harmonium.evaluation import embed
from harmonium.evaluation.linear import linear_probe
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import markdown
from harmonium.runs.export import load_encoder
from harmonium.runs.start import run
from verification import FEDERATED, LOCAL, words

ASKED = 4000  # test images


def probes(arm: str, seed: int) -> dict[str, float]:
    """Accuracy in percent of the three probes on one run's encoder."""
    cell = ("uv", "fashion-mnist", "rotation shift", arm)
    recipe = Recipe.of("fedavg", *words(cell, seed), "engine.workers=0")
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, out=Path(folder) / "run")
        encoder = load_encoder(Path(folder) / "run")
    data = recipe.data.load()
    split = make_split(recipe.split, data, None, recipe.clients, recipe.seed)
    upright = data.test.subset(np.arange(ASKED))
    angles = np.concatenate(split.angles or ())
    drawn = np.random.default_rng(0).choice(angles, ASKED).astype(np.float32)
    spun = Images(turned(np.array(upright.pixels), drawn), upright.labels)

    def seen(images: Images) -> tuple[Tensor, Tensor]:
        return embed(encoder, images, lambda x: x), torch.from_numpy(np.array(images.labels))

    chosen = seen(data.validation)

    def probe(learn: Images, ask: Images) -> float:
        return 100 * linear_probe(*seen(learn), *chosen, *seen(ask)).accuracy

    rotated = with_split_angles(data, split).train
    return {
        "held, asked upright": probe(rotated, upright),
        "upright, asked upright": probe(data.train, upright),
        "held, asked as held": probe(rotated, spun),
    }


def main() -> None:
    """Print a row for every seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    rows = []
    for seed in parser.parse_args().seeds:
        local, federated = probes(LOCAL, seed), probes(FEDERATED, seed)
        rows.append({"seed": seed} | {way: federated[way] - local[way] for way in local})
    print(markdown(rows, digits=1))


if __name__ == "__main__":
    main()
