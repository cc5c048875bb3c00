"""Why a linear head on the features, as FedPR has it, loses in kNN: where its features point.

    python benchmarks/turns.py [--seeds 100 101] [--json]

Runs rotation prediction on `digits` at 8 pixels with all four pairs of head and turns. The means
of the four turns span three directions of the features. The table says how much of the upright
images' variance lies in these three, and what kNN finds on validation images with and without
them. Seeds 100 and up are for development: no table of results uses them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.evaluation import embed, knn_accuracy
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import markdown
from harmonium.runs.export import load_encoder
from harmonium.runs.start import run

SETTINGS = [
    "objective=rotation",
    "data=digits",
    "views=digits",
    "encoder.width=16",
    "encoder.out=128",
    "clients=5",
    "split=dirichlet",
    "split.alpha=0.3",
    "local.optimiser=adam",
    "local.lr=0.001",
    "local.clip=none",
    "rounds=20",
    "evaluate.labels_per_class=[]",
    "engine.workers=0",
]
FORMS = [(head, turns) for head in ("encoder", "projector") for turns in ("all", "one")]


def measure(recipe: Recipe) -> list[dict[str, Any]]:
    """Figures of the encoder at initialisation and after a run."""
    dataset = recipe.data.load()
    method = recipe.build_method(dataset)
    first = method.blueprint.copy_from().eval()["encoder"]
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, out=Path(folder) / "run")
        trained = load_encoder(Path(folder) / "run")

    def evaluate(encoder: nn.Module, prepare: Any) -> dict[str, Any]:
        bank, asked = dataset.train, dataset.validation

        def features(turn: int) -> Tensor:
            return embed(encoder, bank, lambda pixels: prepare(pixels.rot90(turn, (1, 2))))

        turned = [features(turn) for turn in range(4)]
        means = torch.stack([rows.mean(0) for rows in turned])
        turns = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:3]
        upright, queries = turned[0], embed(encoder, asked, prepare)
        centred = upright - upright.mean(0)
        labels, wanted = (torch.from_numpy(part.labels.copy()) for part in (bank, asked))

        def knn(change: Tensor) -> float:
            known, sought = upright @ change, queries @ change
            return 100 * knn_accuracy(known, labels, sought, wanted, k=20)

        everything = torch.eye(upright.shape[1])
        return {
            "share of variance": (
                (centred @ turns.T).square().sum() / centred.square().sum()
            ).item(),
            "kNN": knn(everything),
            "kNN without": knn(everything - turns.T @ turns),
        }

    return [evaluate(first, method.views.plain), evaluate(trained, lambda pixels: pixels)]


def main() -> None:
    """Run all forms and print means over seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    by_form: dict[str, list[dict[str, Any]]] = {}
    for head, turns in FORMS:
        for seed in options.seeds:
            chosen = [f"objective.head={head}", f"objective.turns={turns}", f"seed={seed}"]
            before, after = measure(Recipe.of("fedavg", *SETTINGS, *chosen))
            if (head, turns) == FORMS[0]:
                by_form.setdefault("untrained", []).append(before)
            by_form.setdefault(f"head on the {head}, turns: {turns}", []).append(after)
    rows = [
        {"encoder": name, **{key: sum(one[key] for one in its) / len(its) for key in its[0]}}
        for name, its in by_form.items()
    ]
    print(json.dumps(rows) if options.json else markdown(rows))


if __name__ == "__main__":
    main()
