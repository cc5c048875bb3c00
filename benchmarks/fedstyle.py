"""FedStyle and the personal methods it is compared with, in short runs; its lambda, its memory.

    python benchmarks/fedstyle.py [--part arms classifier lambda styles memory]
                                  [--objective simclr simsiam] [--seeds 0 1 2]
                                  [--only fedstyle ...] [--lambda 0.1 ...] [--data FOLDER]
                                  [--write docs/results/fedstyle.md] [--json] [--runs FILE...]

Arms are the rows `fedstyle/digit-1-ho-OBJECTIVE/ROW@cpu` of FedStyle's tables: three clients, one
with digits of MNIST, one of SVHN, one of USPS (`harmonium data fetch mnist svhn usps` first, or
`--data` names a folder of archives called mnist*.npz, svhn*.npz and usps*.npz for those that were
not fetched). Figures are those of `harmonium eval RUN personal`. `--json` prints nothing but a
line for every measurement; files of such lines that are given as `--runs` join the tables, and
what they hold is not measured again. `--write` also draws docs/images/fedstyle.png, and
`--part styles` docs/images/fedstyle-styles.png.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstyle_page import ADAPTERS, BY, LAMBDAS, OBJECTIVES, STYLES, draw, growth, page
from harmonium.evaluation.geometry import effective_rank, spread
from harmonium.measures.evaluation import evaluate_run
from harmonium.measures.run_reader import open_run
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import changed_recipe, run
from memory import peak
from stored import arguments, earlier_runs, show

Measurement = dict[str, Any]

ARMS: dict[str, list[str]] = {  # label -> row of the tables, and changes to it
    "untrained": ["fedavg", "rounds=1", "local.lr=1e-12"],
    "centralised": ["centralised"],
    "alone": ["alone"],
    "fedavg": ["fedavg"],
    "fedper": ["fedper"],
    "fedrep": ["fedrep"],
    "fedprox, as printed": ["fedprox"],
    "fedprox": ["fedprox-standard"],
    "apfl, crossed": ["apfl"],
    "apfl": ["apfl-original"],
    "ditto, updated": ["ditto"],
    "ditto": ["ditto-original"],
    "fedstyle": ["fedstyle"],
}
EVALUATIONS: dict[str, dict[str, list[str]]] = {  # further evaluations of the same run
    "untrained": {"untrained": ["personal.epochs=0"]},
    "fedavg": {"fedavg": [], "fedavg, with an MLP": ["personal.adapter=mlp"]},
    "fedstyle": {
        "fedstyle": [],
        "fedstyle, G held still": ["personal.adapter=frozen"],
        "fedstyle, content alone": ["personal.adapter=none"],
        "fedstyle, with an MLP for G": ["personal.adapter=mlp"],
    },
}
ADAM = ["personal.protocol=lp_fedca", "personal.standardise=true"]
CLIENTS = (20, 200)
IMAGES = 8  # of each client, where memory is measured
LIMIT = 1.3
MEMORY = (
    "data=shapes data.test_count=100 data.validation=0.01 data.size=16 views.size=16 rounds=2 "
    "encoder=cnn-small encoder.width=8 encoder.out=64 local.epochs=1 local.batch=8 "
    "evaluate.every=2 evaluate.k=5 evaluate.labels_per_class=[] engine.workers=0"
)
KEEPERS = {"ditto": ["ditto"], "fedstyle": ["fedstyle", "method.style_epochs=1"]}


def members(folder: Path | None) -> list[str]:
    """The setting of the archives of the styles, if a folder holds them; else none."""
    archives = [sorted(folder.glob(f"{name}*.npz")) if folder else [] for name in STYLES]
    files = [str(some[0]) if some else name for some, name in zip(archives, STYLES, strict=True)]
    return [f"data.sets=[{', '.join(files)}]"] if folder else []


def evaluations(label: str, by: str = "") -> dict[str, list[str]]:
    """The evaluations of an arm's run, by label; `by` names another classifier."""
    evaluations = EVALUATIONS.get(label, {label: []})
    return {name + by: [*how, *(ADAM if by else [])] for name, how in evaluations.items()}


def measure(
    label: str, objective: str, seed: int, words: Sequence[str], by: str = ""
) -> list[Measurement]:
    """Figures of one run, a row for each evaluation."""
    row, *own = ARMS[label]
    with tempfile.TemporaryDirectory() as folder:
        place = f"fedstyle/digit-1-ho-{objective}/{row}@cpu"
        changes = [*words, *own, f"seed={seed}", "evaluate.every=1000"]
        run(Recipe.of(place, *changes), out=Path(folder) / "run")
        return [
            {"label": name, "objective": objective, "seed": seed, **evaluated(Path(folder), how)}
            for name, how in evaluations(label, by).items()
        ]


def evaluated(folder: Path, how: Sequence[str]) -> Measurement:
    """General and personal accuracy of the run in a folder, in percent, by style."""
    evaluation = evaluate_run(folder / "run", "personal", *how, out=folder / "figures")
    figures = next(iter(evaluation.figures["personal"].values()))
    general, personal = figures["generalisation"]["groups"], figures["personalisation"]
    lone = personal["clients"] == 1  # all images in one place: nobody's own features
    return {
        "general": [100 * value for value in general.values()],
        "personal": None if lone else [100 * personal["groups"][name] for name in general],
        "spread": None if lone else 100 * personal["spread"],
        "worst": None if lone else 100 * personal["worst"],
    }


def sweep(strength: float, objective: str, seed: int, words: Sequence[str]) -> Measurement:
    """A run with this weight of the infused loss: both accuracies, and the geometry of G."""
    place = f"fedstyle/digit-1-ho-{objective}/fedstyle@cpu"
    changes = [*words, f"method.strength={strength}", f"seed={seed}", "evaluate.every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        run(Recipe.of(place, *changes), out=Path(folder) / "run")
        by_adapter = {
            name: evaluated(Path(folder), [f"personal.adapter={name}"]) for name in ADAPTERS
        }
        inner = style_geometry(Path(folder) / "run")
    return {
        "label": f"lambda {strength:g}",
        "objective": objective,
        "seed": seed,
        "general": by_adapter["own"]["general"],
        **{name: one["personal"] for name, one in by_adapter.items()},
        **inner,
    }


def style_geometry(path: Path) -> Measurement:
    """Ranks and spread of content and of G's output on clients' test images; means over clients."""
    opened = open_run(path, path.name, changed_recipe(path, []))
    test, by_client = opened.dataset.test, []
    for client, own in opened.owns(sorted(opened.examples)):
        images = test.subset(np.flatnonzero(test.factors["style"] == client))
        rows = opened.features(own.encoder, images, f"client {client}")
        with torch.no_grad():
            content, both = (
                own.without(rows),
                own.adapter(rows) if own.adapter else rows,
            )
        output = both - content
        by_client.append(
            {
                "content_rank": effective_rank(content),
                "generator_rank": effective_rank(output),
                "generator_spread": spread(output),
                "generator_size": float(output.norm(dim=1).mean() / content.norm(dim=1).mean()),
            }
        )
    return {key: math.fsum(one[key] for one in by_client) / len(by_client) for key in by_client[0]}


def style_neighbours(seed: int, words: Sequence[str], plot: Path | None) -> Measurement:
    """How style features group, with five clients of each style; `plot` gets a copy of the maps."""
    changes = [*words, "participation.number=none", f"seed={seed}", "evaluate.every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        place = "fedstyle/digit-5-ho-simclr/fedstyle@cpu"
        run(Recipe.of(place, *changes), out=Path(folder) / "fedstyle")
        evaluation = evaluate_run(Path(folder) / "fedstyle", "styles", out=Path(folder) / "figures")
        if plot:
            plot.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(evaluation.main_plots["styles"], plot)
    apart = next(iter(evaluation.figures["styles"].values()))["apart"]
    return {"label": "styles", "objective": "simclr", "seed": seed, "apart": apart}


def memory_of(label: str, clients: int) -> Measurement:
    """Memory of a run with this many clients, and the size of their states on disk."""
    words = [*KEEPERS[label], *MEMORY.split(), f"clients={clients}"]
    words += [f"data.limit={clients * IMAGES}", f"data.count={clients * IMAGES * 11 // 10}"]
    with tempfile.TemporaryDirectory() as folder:
        most, seconds = peak(words, Path(folder) / "run")
        files = [one for one in (Path(folder) / "run" / "clients").rglob("*") if one.is_file()]
        sizes = {one.stat().st_ino: one.stat().st_size for one in files}  # of two names once
    measured = {"bytes": most, "seconds": seconds, "disk": sum(sizes.values())}
    return {"label": f"memory, {label}", "objective": "", "seed": clients, **measured}


def main() -> None:
    """Measure what is asked for and print the page."""
    parser = arguments(__doc__)
    parts = ["arms", "classifier", "lambda", "styles", "memory"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--only", nargs="+", choices=ARMS, help="of the arms")
    parser.add_argument("--lambda", nargs="+", type=float, default=LAMBDAS, dest="strengths")
    parser.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=["simclr"])
    parser.add_argument("--data", type=Path, help="a folder of archives instead of fetched sets")
    options = parser.parse_args()
    runs: list[Measurement] = earlier_runs(options)
    measured = {(one["label"], one["objective"], one["seed"]) for one in runs}
    words = members(options.data)
    words += [] if options.workers is None else [f"engine.workers={options.workers}"]

    def add(*made: Measurement) -> None:
        runs.extend(made)
        for one in made:
            print(json.dumps(one), flush=True)

    for seed, objective in itertools.product(options.seeds, options.objective):
        for label in (options.only or ARMS) if "arms" in options.part else ():
            if any((name, objective, seed) not in measured for name in evaluations(label)):
                add(*measure(label, objective, seed, words))
        for label in ("fedavg", "fedstyle") if "classifier" in options.part else ():
            if any((name, objective, seed) not in measured for name in evaluations(label, BY)):
                add(*measure(label, objective, seed, words, BY))
        for strength in options.strengths if "lambda" in options.part else ():
            if (f"lambda {strength:g}", objective, seed) not in measured:
                add(sweep(strength, objective, seed, words))
    images = options.write.parent.parent / "images" if options.write else None
    for seed in options.seeds if "styles" in options.part else ():
        if ("styles", "simclr", seed) not in measured:
            plot = images / "fedstyle-styles.png" if images and seed == options.seeds[0] else None
            add(style_neighbours(seed, words, plot))
    for label, clients in itertools.product(KEEPERS, CLIENTS) if "memory" in options.part else ():
        if (f"memory, {label}", "", clients) not in measured:
            add(memory_of(label, clients))
    show(options, page, runs)
    if options.write and images:
        draw(runs, images / "fedstyle.png")
    if growth(runs) > LIMIT:
        raise SystemExit(f"memory grows {growth(runs):.2f} times; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
