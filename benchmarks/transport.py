"""What rounded weights cost in accuracy and save in bytes, and how rounding was chosen.

    python benchmarks/transport.py [--part arms rounding] [--seeds 0 1 2] [--json] [--runs FILE...]
                                   [--write docs/results/transport.md]

Runs are `digits`, the digits that come along: ten clients with few classes each, thirty rounds, a
small CNN. Figures are test accuracy in percent of the frozen encoder; megabytes are the ledger's, a
client and round. `--part rounding` rounds the changes that clients really make in four ways.
`--json` prints nothing but a line for every measurement; files of such lines that are given as
`--runs` join the tables, and what they hold is not measured again.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harmonium.federation.filters.rounding import STEPS
from harmonium.federation.method import TRAINED
from harmonium.federation.wire import Value, exchange, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.methods.fedavg import FedAvg
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import estimate, markdown
from harmonium.runs.start import run
from paired import paired, untrained
from stored import arguments, earlier_runs, show

Measurement = dict[str, Any]

METHODS = {
    "fedavg": ("FedAvg with SimCLR", ""),
    "scaffold": (
        "SCAFFOLD with SimCLR, which sends variates beside the model",
        "method=scaffold local.optimiser=sgd local.momentum=0 local.lr=0.1 local.clip=1",
    ),
}
BASE = "as they are"
ARMS = {
    BASE: [],
    "up in 16 bits": ["transport.up=fp16"],
    "up in 8 bits": ["transport.up=int8"],
    "up in 8 bits, no error feedback": ["transport.up=int8", "transport.error_feedback=false"],
    "up in 8 bits, down in 16": ["transport.up=int8", "transport.down=fp16"],
}
WAYS = ("up", "down")
LOCAL = {  # how clients of the rounding part train
    "Adam": [],
    "SGD": ["local.optimiser=sgd", "local.lr=0.05"],
}
SHOWN = ["row", "seeds", "kNN", "kNN, difference", "linear", "linear, difference", "MB up"]


def measure(method: str, arm: str, seed: int, workers: int | None) -> Measurement:
    """Figures of one run."""
    changes = [*METHODS[method][1].split(), *ARMS[arm], f"seed={seed}", "evaluate.every=30"]
    changes += [] if workers is None else [f"engine.workers={workers}"]
    with tempfile.TemporaryDirectory() as folder:
        result = run(Recipe.of("digits", *changes), out=Path(folder) / "run")
        text = (Path(folder) / "run" / "ledger.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["step"] == "train"]
    return {
        "label": f"{method}/{arm}",
        "seed": seed,
        "knn": 100 * result.figures["knn"],
        "linear": 100 * result.figures["linear"],
        "knn_untrained": 100 * result.untrained["knn"],
        "linear_untrained": 100 * result.untrained["linear"],
        "rank": result.figures["health"]["effective_rank"],
        "up": sum(sum(line["up"].values()) for line in lines) / len(lines),
        "down": sum(sum(line["down"].values()) for line in lines) / len(lines),
    }


CHANGES: dict[int, list[dict[str, Tensor]]] = {}  # by round: the changes of every client


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg that records how clients change the model."""

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train as FedAvg does."""
        parts = self.pull(client, got.model)
        done = self.fit(parts, client, context=Context(me=client.id, anchor=got.model))
        changes = {key: value - got.model[key] for key, value in parts.state_dict().items()}
        CHANGES.setdefault(client.round, []).append(changes)
        return {"model": self.push(client, parts), "loss": done.loss}


def rounded(value: Tensor, rows: bool, rng: torch.Generator | None) -> tuple[Tensor, int]:
    """A tensor rounded to 8 bits in one of four ways, and its bytes."""
    flat = value.reshape(len(value) if rows and value.ndim > 1 else 1, -1)
    step = flat.abs().amax(1, keepdim=True) / STEPS
    size = flat / step.where(step > 0, 1.0)
    whole = size.round() if rng is None else (size + torch.rand(size.shape, generator=rng)).floor()
    return (whole * step).view_as(value), flat.numel() + 4 * len(flat)


def rounding(number: int) -> Measurement:
    """Errors of four ways to round the changes of round 5, over all clients."""
    CHANGES.clear()
    label = list(LOCAL)[number]
    words = ["method=__main__:Watched", *LOCAL[label], "rounds=5", "seed=100", "engine.workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        run(Recipe.of("digits", *words, "evaluate.every=5"), out=Path(folder) / "run")
    changes, ways = CHANGES[5], []
    for rows, chance in itertools.product((False, True), (False, True)):
        rng = torch.Generator().manual_seed(0) if chance else None
        errors, size = [], 0
        for change in changes:
            rounded_change = {key: rounded(value, rows, rng) for key, value in change.items()}
            errors.append({key: rounded_change[key][0] - value for key, value in change.items()})
            size = sum(bytes for _, bytes in rounded_change.values())
        ways.append(
            {
                "local steps": label,
                "a scale for every": "row" if rows else "tensor",
                "rounding": "by chance" if chance else "to the nearest",
                "kB": size / 1e3,
                "error of an answer, %": 100 * norm(errors) / norm(changes),
                "error of the average, %": 100 * norm(total(errors)) / norm(total(changes)),
            }
        )
    return {"label": "rounding", "seed": number, "ways": ways}


def norm(some: Sequence[dict[str, Tensor]]) -> float:
    """The Euclidean norm of all numbers together."""
    return math.sqrt(sum(float(v.double().square().sum()) for one in some for v in one.values()))


def total(some: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The sum over clients."""
    return [{key: torch.stack([one[key] for one in some]).sum(0) for key in some[0]}]


def arms(runs: Sequence[Measurement], method: str) -> str:
    """The table of a method: means over seeds, and differences to weights as they are."""
    by = {arm: [one for one in runs if one["label"] == f"{method}/{arm}"] for arm in ARMS}
    if not by[BASE]:
        return ""
    rows = [untrained(by[BASE])]
    for arm, its in by.items():
        if row := paired(arm, its, by[BASE]):
            sizes = {f"MB {way}": estimate([one[way] / 1e6 for one in its])[0] for way in WAYS}
            rows.append({**row, **sizes})
    return f"\n## {METHODS[method][0]}\n\n{markdown(rows, [*SHOWN, 'MB down'], digits=2)}"


def page(runs: Sequence[Measurement]) -> str:
    """The stored result."""
    seeds = sorted({one["seed"] for one in runs if one["label"] != "rounding"})
    text = ABOUT.format(seeds=" ".join(map(str, seeds)))
    text += "".join(arms(runs, method) for method in METHODS)
    ways = [row for one in runs if one["label"] == "rounding" for row in one["ways"]]
    text += f"\n{CAME.strip()}\n"
    if ways:
        text += f"\n## How to round\n\n{ROUNDING.strip()}\n\n{markdown(ways, digits=2)}"
        text += f"\n{CHOICE.strip()}\n"
    return text


ABOUT = """# Rounded weights: accuracy and bytes

`python benchmarks/transport.py --seeds {seeds}`

Digits that come along, ten clients with few classes each (`dirichlet`, 0.3), thirty rounds with all
of them, a small CNN without BatchNorm. Figures are test accuracy in percent of frozen encoders, as
means over seeds; chance is 10. A difference is paired by seed, to weights as they are, and ± is the
standard error of a mean over seeds. Megabytes are what the ledger counted, a client and round.
"""
CAME = """
What came out: 16 bits halve what goes up, 8 bits make a quarter of it, and neither costs accuracy
that three seeds could show. Of the sixteen differences to weights as they are, three are well
beyond two standard errors: one is a gain (FedAvg, 8 bits up and 16 down, linear), two are losses of
SCAFFOLD up in 16 bits (that of kNN is one image of 359 with each seed), which 8 bits do not
repeat. Error feedback makes no difference that could be told here; it is the default because it
costs no bytes and keeps small steps from being lost for good.
"""
ROUNDING = """
`python benchmarks/transport.py --part rounding`

What clients changed in round 5 of `digits`, seed 100, rounded to 8 bits in four ways. Errors are
Euclid's norm of what rounding took over that of the changes: of single answers, and of their sum.
"""
CHOICE = """
Taken: to the nearest, with a scale for every row. Where rows of a tensor differ in size, as after
SGD, a scale for each more than halves the error for 1.7 percent more bytes. Rounding by chance is
right on average, but the average is over ten clients only, and there its error is still larger.
"""


def main() -> None:
    """Measure what is asked for and print the page."""
    parser = arguments(__doc__)
    parts = ["arms", "rounding"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    runs: list[Measurement] = earlier_runs(options)
    measured = {(one["label"], one["seed"]) for one in runs}
    todo = [(seed, f"{m}/{arm}") for seed in options.seeds for m in options.method for arm in ARMS]
    todo = todo if "arms" in options.part else []
    todo += [(number, "rounding") for number in range(len(LOCAL)) if "rounding" in options.part]
    for seed, label in todo:
        if (label, seed) in measured:
            continue
        method, _, arm = label.partition("/")
        runs.append(measure(method, arm, seed, options.workers) if arm else rounding(seed))
        print(json.dumps(runs[-1]), flush=True)
    show(options, page, runs)


if __name__ == "__main__":
    main()
