"""What every objective learns in a short federated run, beside the encoder at initialisation.

    python benchmarks/objectives.py [--data digits cifar10] [--only simclr byol] [--seeds 0 1 2]
                                    [--write docs/results/objectives.md] [--json] [--runs FILE...]

FedAvg over five clients, each objective with its defaults but for what the table names; the same
encoder, views, split, rounds and optimiser for all. Figures are test accuracy in percent of the
frozen encoder; chance is 10. `cifar10` means 5,000 of its training images: fetch them first with
`harmonium data fetch cifar10`. A proof of learning and not a ranking: nothing is searched for any
one objective. `--json` prints every run as a line; files of such lines that are given as `--runs`
join the table, and what they hold is not run again.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.recipe.schema import Recipe
from harmonium.report.tables import estimate, markdown
from harmonium.runs.start import run
from stored import arguments, earlier_runs, show

Run = dict[str, Any]

OBJECTIVES: dict[str, list[str]] = {
    "simclr": [],
    "infonce": [],
    "spectral": [],
    "spectral, FedSC's form": ["objective=spectral", "objective.form=fedsc"],
    "spectral, Orchestra's form": ["objective=spectral", "objective.form=orchestra"],
    "simsiam": [],
    "byol": [],
    "moco": ["objective.queue=512"],
    "moco, version 1": ["objective=moco", "objective.version=1", "objective.queue=512"],
    "barlow": [],
    "vicreg": [],
    "swav": [],
    "rotation": ["objective.turns=one", "objective.head=projector", "objective.augment=true"],
    "rotation, Orchestra's form": [
        "objective=rotation",
        "objective.turns=one",
        "objective.head=projector",
    ],
    "rotation, FedPR's form": ["objective=rotation"],
    "autoencoder": [],
    "supervised": [],
}
# Left out of the check at the end, for a reason that the page gives.
DEGENERATE = {
    ("digits", "rotation, Orchestra's form"),
    ("digits", "rotation, FedPR's form"),
}
COMMON = [
    "encoder.width=16",
    "encoder.out=128",
    "clients=5",
    "local.optimiser=adam",
    "local.lr=0.001",
    "local.clip=none",
    "evaluate.labels_per_class=[]",
    "evaluate.every=1000",
]
SETS = {
    "digits": [
        "data=digits",
        "split=iid",
        "views=digits",
        "views.size=16",
        "views.crop_min=0.7",
        "local.batch=32",
        "rounds=40",
        "evaluate.k=20",
    ],
    "cifar10": [
        "data=cifar10",
        "data.limit=5000",
        "split=dirichlet",
        "split.alpha=0.3",
        "rounds=8",
        "evaluate.k=50",
    ],
}

ABOUT = """# What every objective learns in a short run

FedAvg over five clients. Test accuracy in percent of frozen encoders, beside the encoder at
initialisation; labels train no encoder but that of `supervised`. Figures are means over seeds. A
gain is paired: each run is compared with the untrained encoder of its own seed, and ± is the
standard error of the mean over seeds. A proof of learning, not a ranking. The check at the end of
the benchmark asks for a mean gain in kNN above 0 from every objective, but for two that the notes
on `digits` explain.

Settings of all runs: `{common}`. Everything else is the default, but for
{own}.

Looked at before: optimiser and widths are those of the recipe `digits`, which was picked by its
test figures on `digits`, seed 0. MoCo's defaults (which negatives, whose queue) and the least size
of a group in GroupNorm were chosen by runs on `digits`, too. On `cifar10` one run of rotation
prediction with 12 rounds came first, and the table of seed 0 was made once before with the same
settings.
"""
NOTES = {
    "digits": """
An earlier version of this page had images of 8 pixels, batches of 64, 20 rounds and clients
that held few classes (a Dirichlet split, 0.3). With seed 0 all but FedPR's form of rotation were
better than the untrained encoder; seed 1 did not confirm it: spectral contrast, FedSC's form of
it, SimSiam, BYOL and FedPR's form were worse, Barlow Twins and SwAV equal. A second setting (16
pixels, batches of 32, 30 rounds, the same split), chosen by validation kNN of seeds 100 to 102
among some 27, failed as well: SimSiam lost 3.4 points on the mean of seeds 0 to 2.

The untrained encoder is good here. Images shared out at random, and 40 rounds, made the
difference; they were tried on seed 100 alone, by leave-one-out kNN on training and validation
images, with SimSiam (95.5 with crops of at least half the image, 95.8 with at least 0.7;
untrained 93.7) and BYOL (95.8 with half). That fixed the setting of this table. Its seeds had no
part in any choice.

Rotation prediction has three rows. Orchestra's form turns images as they are; on so few of them
it learns them by heart, and kNN falls while its loss does. With random views to turn
(`objective.augment=true`, tried on seeds 100 and 101) it gains. So both published forms, which turn
images as they are, are left out of the check here, and the augmented one is in it.

`rotation, FedPR's form`, the default of `objective=rotation`, has a further reason to lose. Its
linear head sits right on the features and makes them say above all how an image is turned: with
the first setting three of 128 directions, those of the turns, come to hold 51 percent of the
variance of upright images (12 before training) and drown the digit for kNN. It is still there:
without these directions kNN rises from 79.5 to 89.6 (92.0 before training). With a projector in
between their share is 13 to 14 percent, and kNN is 88.9 with all four turns in a batch and 92.0
with one. Means of seeds 100 and 101 on validation images, by `python benchmarks/turns.py`.
""",
    "cifar10": """
One seed; an image more or less is 0.01 points, and the standard error of a figure by the test
images alone is about 0.5. Nothing is left out of the check here.
""",
}


def words(label: str, data: str, seed: int) -> list[str]:
    """The settings of one run, as they would be typed."""
    chosen = OBJECTIVES[label]
    named = [] if any(word.startswith("objective=") for word in chosen) else [f"objective={label}"]
    return [*named, *chosen, *SETS[data], *COMMON, f"seed={seed}"]


def measure(label: str, data: str, seed: int, workers: int | None) -> Run:
    """Figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe.of("fedavg", *words(label, data, seed))
        changes = [] if workers is None else [f"engine.workers={workers}"]
        result = run(recipe, *changes, out=Path(folder) / "run")
    health = result.figures["health"]
    return {
        "data": data,
        "objective": label,
        "seed": seed,
        "knn": 100 * result.figures["knn"],
        "knn_untrained": 100 * result.untrained["knn"],
        "linear": 100 * result.figures["linear"],
        "linear_untrained": 100 * result.untrained["linear"],
        "rank": health["effective_rank"],
        "warnings": [warning.partition(":")[0] for warning in health["warnings"]],
    }


def gains(runs: Sequence[Run], probe: str = "knn") -> list[float]:
    """What each run gained over the untrained encoder of its own seed."""
    return [one[probe] - one[f"{probe}_untrained"] for one in runs]


def summary(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    """A row of the table: the runs of one objective, means over seeds."""

    def mean(key: str) -> float:
        return estimate([one[key] for one in runs])[0]

    return {
        "objective": label,
        "kNN": mean("knn"),
        "untrained": mean("knn_untrained"),
        "gain": estimate(gains(runs)),
        "smallest gain": min(gains(runs)),
        "linear": mean("linear"),
        "linear gain": estimate(gains(runs, "linear")),
        "effective rank": mean("rank"),
        "warnings": "; ".join(sorted({w for one in runs for w in one["warnings"]})) or "none",
    }


def grouped(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """The runs of each data set and each objective."""
    order = {label: place for place, label in enumerate(OBJECTIVES)}
    groups: dict[str, dict[str, list[Run]]] = {}
    for one in sorted(runs, key=lambda one: order[one["objective"]]):
        groups.setdefault(one["data"], {}).setdefault(one["objective"], []).append(one)
    return groups


def page(runs: Sequence[Run]) -> str:
    """The stored result: every table with the command that makes it."""
    own = [f"`{label}`: `{' '.join(words)}`" for label, words in OBJECTIVES.items() if words]
    text = ABOUT.format(common=" ".join(COMMON), own=", ".join(own))
    for data, by_label in grouped(runs).items():
        seeds = sorted({one["seed"] for one in runs if one["data"] == data})
        command = f"--data {data} --seeds {' '.join(map(str, seeds))}"
        text += f"\n## {data}\n\n`python benchmarks/objectives.py {command}`\n\n"
        text += f"Settings: `{' '.join(SETS[data])}`.\n\n"
        text += markdown([summary(label, its) for label, its in by_label.items()], digits=1)
        text += "\n" + "\n".join([*lost(by_label, data), *uneven(by_label)]) + "\n" + NOTES[data]
    return text


def lost(by_label: Mapping[str, Sequence[Run]], data: str) -> list[str]:
    """A line for the objectives without a gain on average, except those in DEGENERATE."""
    labels = [label for label in by_label if (data, label) not in DEGENERATE]
    behind = [label for label in labels if not estimate(gains(by_label[label]))[0] > 0]
    return [f"No better than untrained on the mean: {', '.join(behind)}."] if behind else []


def uneven(by_label: Mapping[str, Sequence[Run]]) -> list[str]:
    """A line for the objectives that do not gain on every seed."""
    some = [label for label, its in by_label.items() if not min(gains(its)) > 0]
    return [f"Not better than untrained on every seed: {', '.join(some) or 'none'}."]


def main() -> None:
    """Run what is asked for and print a table for each data set."""
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--only", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    options = parser.parse_args()
    runs: list[Run] = earlier_runs(options)
    measured = {(one["data"], one["seed"], one["objective"]) for one in runs}
    for data, seed, label in itertools.product(options.data, options.seeds, options.only):
        if (data, seed, label) in measured:
            continue
        runs.append(one := measure(label, data, seed, options.workers))
        figures = f"{one['knn']:.1f}, untrained {one['knn_untrained']:.1f}"
        line = f"{data}, seed {seed}: {label} {figures}"
        print(json.dumps(one) if options.json else line, flush=True)
    show(options, page, runs)
    if behind := [f"{d}: {line}" for d, its in grouped(runs).items() for line in lost(its, d)]:
        raise SystemExit("\n".join(behind))


if __name__ == "__main__":
    main()
