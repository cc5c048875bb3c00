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
from stored import arguments, before, show

Found = dict[str, Any]

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
LOOKS: dict[str, dict[str, list[str]]] = {  # further looks at the same run
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
    """The word that says where the styles come from: by name, or from files in a folder."""
    found = [sorted(folder.glob(f"{name}*.npz")) if folder else [] for name in STYLES]
    files = [str(some[0]) if some else name for some, name in zip(found, STYLES, strict=True)]
    return [f"data.sets=[{', '.join(files)}]"] if folder else []


def looks(label: str, by: str = "") -> dict[str, list[str]]:
    """What is measured of an arm's run, by label, and by another classifier if one is named."""
    found = LOOKS.get(label, {label: []})
    return {name + by: [*how, *(ADAM if by else [])] for name, how in found.items()}


def measure(
    label: str, objective: str, seed: int, words: Sequence[str], by: str = ""
) -> list[Found]:
    """One run and what it came to, a line a look."""
    row, *own = ARMS[label]
    with tempfile.TemporaryDirectory() as folder:
        place = f"fedstyle/digit-1-ho-{objective}/{row}@cpu"
        changes = [*words, *own, f"seed={seed}", "evaluate.every=1000"]
        run(Recipe.of(place, *changes), out=Path(folder) / "run")
        return [
            {"label": name, "objective": objective, "seed": seed, **judged(Path(folder), how)}
            for name, how in looks(label, by).items()
        ]


def judged(folder: Path, how: Sequence[str]) -> Found:
    """Both figures of the run in a folder, in percent, style by style."""
    made = evaluate_run(folder / "run", "personal", *how, out=folder / "figures")
    found = next(iter(made.figures["personal"].values()))
    general, personal = found["generalisation"]["groups"], found["personalisation"]
    lone = personal["clients"] == 1  # all images in one place: nobody's own features
    return {
        "general": [100 * value for value in general.values()],
        "personal": None if lone else [100 * personal["groups"][name] for name in general],
        "spread": None if lone else 100 * personal["spread"],
        "worst": None if lone else 100 * personal["worst"],
    }


def sweep(strength: float, objective: str, seed: int, words: Sequence[str]) -> Found:
    """A run with this weight of the infused loss: both figures, and what becomes of G."""
    place = f"fedstyle/digit-1-ho-{objective}/fedstyle@cpu"
    changes = [*words, f"method.strength={strength}", f"seed={seed}", "evaluate.every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        run(Recipe.of(place, *changes), out=Path(folder) / "run")
        found = {name: judged(Path(folder), [f"personal.adapter={name}"]) for name in ADAPTERS}
        inner = inside(Path(folder) / "run")
    return {
        "label": f"lambda {strength:g}",
        "objective": objective,
        "seed": seed,
        "general": found["own"]["general"],
        **{name: one["personal"] for name, one in found.items()},
        **inner,
    }


def inside(path: Path) -> Found:
    """Of every client's test images: how wide content and G's output are; means over clients."""
    opened = open_run(path, path.name, changed_recipe(path, []))
    test, found = opened.dataset.test, []
    for client, own in opened.owns(sorted(opened.examples)):
        images = test.subset(np.flatnonzero(test.factors["style"] == client))
        rows = opened.features(own.encoder, images, f"client {client}")
        with torch.no_grad():
            content, both = own.without(rows), own.adapter(rows) if own.adapter else rows
        made = both - content
        found.append(
            {
                "content_rank": effective_rank(content),
                "generator_rank": effective_rank(made),
                "generator_spread": spread(made),
                "generator_size": float(made.norm(dim=1).mean() / content.norm(dim=1).mean()),
            }
        )
    return {key: math.fsum(one[key] for one in found) / len(found) for key in found[0]}


def style_neighbours(seed: int, words: Sequence[str], plot: Path | None) -> Found:
    """What near style features share, with five clients of each style; `plot` gets their maps."""
    changes = [*words, "participation.number=none", f"seed={seed}", "evaluate.every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        place = "fedstyle/digit-5-ho-simclr/fedstyle@cpu"
        run(Recipe.of(place, *changes), out=Path(folder) / "fedstyle")
        made = evaluate_run(Path(folder) / "fedstyle", "styles", out=Path(folder) / "figures")
        if plot:
            plot.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made.main_plots["styles"], plot)
    apart = next(iter(made.figures["styles"].values()))["apart"]
    return {"label": "styles", "objective": "simclr", "seed": seed, "apart": apart}


def remember(label: str, clients: int) -> Found:
    """Memory of a run with so many clients, and what their states take on disk."""
    words = [*KEEPERS[label], *MEMORY.split(), f"clients={clients}"]
    words += [f"data.limit={clients * IMAGES}", f"data.count={clients * IMAGES * 11 // 10}"]
    with tempfile.TemporaryDirectory() as folder:
        most, seconds = peak(words, Path(folder) / "run")
        files = [one for one in (Path(folder) / "run" / "clients").rglob("*") if one.is_file()]
        sizes = {one.stat().st_ino: one.stat().st_size for one in files}  # of two names once
    found = {"bytes": most, "seconds": seconds, "disk": sum(sizes.values())}
    return {"label": f"memory, {label}", "objective": "", "seed": clients, **found}


def main() -> None:
    """Measure what is asked for and print the page."""
    parser = arguments(__doc__)
    parts = ["arms", "classifier", "lambda", "styles", "memory"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--only", nargs="+", choices=ARMS, help="of the arms")
    parser.add_argument("--lambda", nargs="+", type=float, default=LAMBDAS, dest="strengths")
    parser.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=["simclr"])
    parser.add_argument("--data", type=Path, help="a folder of archives instead of fetched sets")
    asked = parser.parse_args()
    runs: list[Found] = before(asked)
    held = {(one["label"], one["objective"], one["seed"]) for one in runs}
    words = members(asked.data)
    words += [] if asked.workers is None else [f"engine.workers={asked.workers}"]

    def add(*made: Found) -> None:
        runs.extend(made)
        for one in made:
            print(json.dumps(one), flush=True)

    for seed, objective in itertools.product(asked.seeds, asked.objective):
        for label in (asked.only or ARMS) if "arms" in asked.part else ():
            if any((name, objective, seed) not in held for name in looks(label)):
                add(*measure(label, objective, seed, words))
        for label in ("fedavg", "fedstyle") if "classifier" in asked.part else ():
            if any((name, objective, seed) not in held for name in looks(label, BY)):
                add(*measure(label, objective, seed, words, BY))
        for strength in asked.strengths if "lambda" in asked.part else ():
            if (f"lambda {strength:g}", objective, seed) not in held:
                add(sweep(strength, objective, seed, words))
    images = asked.write.parent.parent / "images" if asked.write else None
    for seed in asked.seeds if "styles" in asked.part else ():
        if ("styles", "simclr", seed) not in held:
            plot = images / "fedstyle-styles.png" if images and seed == asked.seeds[0] else None
            add(style_neighbours(seed, words, plot))
    for label, clients in itertools.product(KEEPERS, CLIENTS) if "memory" in asked.part else ():
        if (f"memory, {label}", "", clients) not in held:
            add(remember(label, clients))
    show(asked, page, runs)
    if asked.write and images:
        draw(runs, images / "fedstyle.png")
    if growth(runs) > LIMIT:
        raise SystemExit(f"memory grows {growth(runs):.2f} times; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
