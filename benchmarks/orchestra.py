"""Orchestra against its baselines in short runs, and what its clustering costs a client.

    python benchmarks/orchestra.py [--part clustering arms] [--seeds 0 1 2] [--only orchestra ...]
                                   [--write docs/results/orchestra.md] [--json] [--runs FILE...]

Arms are the rows `orchestra/c10-SETTING/ROW@cpu` of Orchestra's tables at three heterogeneities:
ten clients, five a round, on 5,000 training pictures of CIFAR-10 (`harmonium data fetch cifar10`
first). Figures are test accuracy in percent of the frozen encoder; chance is 10. `--json` prints
nothing but a line for every measurement; files of such lines that are given as `--runs` join the
tables, and what they hold is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from harmonium.data.images import Images
from harmonium.federation.client import Client, Examples
from harmonium.methods.orchestra import Orchestra
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe import Recipe
from harmonium.report.tables import estimate, markdown
from harmonium.runs import run

Found = dict[str, Any]

SETTINGS = {"iid": "100,000", "device": "0.1", "skewed": "0.001"}  # alpha of the split
ARMS = ["f-simclr", "f-simsiam", "f-specloss", "f-byol", "rotpred", "orchestra"]
BASE = "f-simclr"
LIMIT = 1.0  # percent of a client's round that clustering may take
SHARES = {"balance": ["exact", "argmax"], "local_clusters": [8, 16]}


def measure(setting: str, row: str, seed: int, workers: int | None) -> Found:
    """One run and what it came to."""
    changes = [f"seed={seed}", "evaluate.every=1000"]
    changes += [] if workers is None else [f"engine.workers={workers}"]
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe.of(f"orchestra/c10-{setting}/{row}@cpu", *changes)
        found = run(recipe, out=Path(folder) / "run")
    told = [one["reported"]["anonymity"] for one in found.rounds if row == "orchestra"]
    return {
        "part": "arms",
        "setting": setting,
        "row": row,
        "seed": seed,
        "knn": 100 * found.figures["knn"],
        "linear": 100 * found.figures["linear"],
        "knn_untrained": 100 * found.untrained["knn"],
        "linear_untrained": 100 * found.untrained["linear"],
        "rank": found.figures["health"]["effective_rank"],
        "k": min(told, default=None),
        "seconds": time.process_time() - started,
    }


def timed(balance: str, local_clusters: int, times: int = 20) -> Found:
    """Processor time of a client's round and of the clustering in it, at the size of the arms."""
    words = [f"method.balance={balance}", f"method.local_clusters={local_clusters}"]
    recipe = Recipe.of("orchestra/c10-device/orchestra@cpu", *words, "method.k_min=1")
    method = recipe.method_for((32, 32, 3), 10)
    assert isinstance(method, Orchestra)
    epochs = recipe.local.scaled(recipe.clients, recipe.participation.fraction).epochs
    pictures = 450
    pixels = np.random.default_rng(0).integers(0, 255, (pictures, 32, 32, 3), dtype=np.uint8)
    examples = Examples(Images(pixels, np.zeros(pictures, int)), np.arange(pictures))
    rng = torch.Generator().manual_seed(0)
    client = Client(0, 1, 2, examples, method.views, rng, Noise("simulated", rng))
    spent = {"round": 0.0, "clustering": 0.0}
    inner = method.centroids

    def clustered(*given: Any) -> Any:
        started = time.process_time()
        made = inner(*given)
        spent["clustering"] += time.process_time() - started
        return made

    object.__setattr__(method, "centroids", clustered)
    width = method.blueprint["rotation"].in_features
    rows = functional.normalize(torch.randn(16, int(width), generator=rng))  # type: ignore[arg-type]
    got = SimpleNamespace(model=method.blueprint.shared(), centroids=rows)
    for turn in range(times + 1):
        started = time.process_time()
        method.train(client, got)
        spent["round"] += time.process_time() - started
        if not turn:  # the first is for warming up
            spent = dict.fromkeys(spent, 0.0)
    each = {name: 1000 * seconds / times for name, seconds in spent.items()}
    found = {"part": "clustering", "balance": balance, "local_clusters": local_clusters}
    return {**found, "epochs": epochs, **each}
if __name__ == "__main__":
    torch.set_num_threads(1)
    for b in ("exact","argmax"):
        for l in (8,16):
            f=timed(b,l); print(f, 100*f["clustering"]/f["round"])
