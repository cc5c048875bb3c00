"""What the parts of FedCA are worth in a short run, what its protections cost, and its memory.

    python benchmarks/fedca.py [--part arms protections memory] [--seeds 0 1 2] [--only fedca ...]
                               [--write docs/results/fedca.md] [--json] [--runs FILE...]

Arms are the rows `fedca/c10-noniid-cnn5/ROW@cpu` of FedCA's tables: five clients with two classes
each on 5,000 training pictures of CIFAR-10 (`harmonium data fetch cifar10` first). Figures are
test accuracy in percent of the frozen encoder; chance is 10. `--json` prints nothing but a line for
every measurement; files of such lines that are given as `--runs` join the tables, and what they
hold is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harmonium.privacy.budget import epsilon
from harmonium.recipe import Recipe
from harmonium.report.tables import estimate, markdown
from harmonium.runs import run
from memory import peak

Found = dict[str, Any]

PLACE = "fedca/c10-noniid-cnn5"
DELTA = 1e-5
BASE = "fedsimclr"
ARMS: dict[str, list[str]] = {  # label -> row of the tables, and changes to it
    "fedsimclr": ["fedsimclr"],
    "neither part (InfoNCE)": ["dictionary", "method.size=0"],
    "alignment": ["alignment"],
    "dictionary": ["dictionary"],
    "dictionary, received": ["dictionary", "method.source=received"],
    "dictionary+ensembling": ["dictionary+ensembling"],
    "fedca": ["fedca"],
}
PROTECTIONS: dict[str, list[str]] = {
    "noise 0.1": ["method.noise=0.1"],
    "noise 1": ["method.noise=1"],
    "noise 10": ["method.noise=10"],
    "groups of 4": ["method.group=4"],
    "groups of 16": ["method.group=16"],
}
CLIENTS = (100, 1000)
PICTURES = 8  # of each client, where memory is measured
LIMIT = 1.3
MEMORY = (
    "data=shapes data.test_count=100 data.validation=0.01 data.size=16 views.size=16 rounds=2 "
    "encoder=cnn-small encoder.width=4 encoder.out=32 local.epochs=1 local.batch=8 "
    "public.count=200 public.validation=0 method.align_epochs=1 method.align_batch=8 "
    "evaluate.every=2 evaluate.k=5 evaluate.labels_per_class=[] engine.workers=0"
)


def measure(label: str, seed: int, workers: int | None) -> Found:
    """One run and what it came to."""
    row, *own = ARMS.get(label) or ["fedca", *PROTECTIONS[label]]
    changes = [*own, f"seed={seed}", "evaluate.every=1000"]
    changes += [] if workers is None else [f"engine.workers={workers}"]
    with tempfile.TemporaryDirectory() as folder:
        found = run(Recipe.of(f"{PLACE}/{row}@cpu", *changes), out=Path(folder) / "run")
        ledger = (Path(folder) / "run" / "ledger.jsonl").read_text(encoding="utf-8")
    releases: dict[int, list[Any]] = {}
    for line in map(json.loads, ledger.splitlines()):
        releases.setdefault(line["client"], []).extend(line.get("releases", []))
    spent = max(epsilon(its, DELTA) for its in releases.values())
    told = [one["reported"] for one in found.rounds if "reported" in one]
    ratios = [one["ratio"] for one in told if "ratio" in one]
    return {
        "label": label,
        "seed": seed,
        "knn": 100 * found.figures["knn"],
        "linear": 100 * found.figures["linear"],
        "knn_untrained": 100 * found.untrained["knn"],
        "linear_untrained": 100 * found.untrained["linear"],
        "rank": found.figures["health"]["effective_rank"],
        "ratio": sum(ratios) / len(ratios) if any(ratios) else None,
        "epsilon": spent or None,
    }


def remember(clients: int) -> Found:
    """Memory of a run with so many clients, and what their states take on disk."""
    words = ["fedca", *MEMORY.split(), f"clients={clients}", f"data.limit={clients * PICTURES}"]
    words.append(f"data.count={clients * PICTURES * 11 // 10}")
    with tempfile.TemporaryDirectory() as folder:
        most, seconds = peak(words, Path(folder) / "run")
        files = [one for one in (Path(folder) / "run" / "clients").rglob("*") if one.is_file()]
        held = sum(one.stat().st_size for one in files)
    return {"label": "memory", "seed": clients, "bytes": most, "seconds": seconds, "disk": held}


def compared(runs: Sequence[Found], labels: Sequence[str], base: str) -> list[dict[str, Any]]:
    """Rows of a table: means over seeds, and differences to the base run of the same seed."""
    by = {(one["label"], one["seed"]): one for one in runs if one["label"] != "memory"}
    rows = []
    for label in labels:
        its = [one for (name, _), one in by.items() if name == label]
        pairs = [(one, by[base, one["seed"]]) for one in its if (base, one["seed"]) in by]
        if not pairs:
            continue
        row: dict[str, Any] = {"row": label, "seeds": len(pairs)}
        for probe, title in (("knn", "kNN"), ("linear", "linear")):
            row[title] = estimate([one[probe] for one, _ in pairs])
            apart = estimate([one[probe] - other[probe] for one, other in pairs])
            row[f"{title}, difference"] = "" if label == base else apart
        row["effective rank"] = estimate([one["rank"] for one, _ in pairs])[0]
        rows.append({**row, "ratio": its[0]["ratio"], "epsilon": its[0]["epsilon"]})
    return rows


def arms(runs: Sequence[Found]) -> str:
    """The table of FedCA's parts, with the untrained encoder."""
    rows = compared(runs, list(ARMS), BASE)
    bases = [one for one in runs if one["label"] == BASE]
    first = {"row": "untrained", "seeds": len(bases)} | {
        title: estimate([one[f"{probe}_untrained"] for one in bases])
        for probe, title in (("knn", "kNN"), ("linear", "linear"))
    }
    shown = ["row", "seeds", "kNN", "kNN, difference", "linear", "linear, difference"]
    return markdown([first, *rows], [*shown, "effective rank", "ratio"], digits=2)


def protections(runs: Sequence[Found]) -> str:
    """The table of protections against FedCA without any."""
    rows = compared(runs, ["fedca", *PROTECTIONS], "fedca")
    for row in rows:
        bare = row["epsilon"] is None
        row["epsilon"] = "no bound" if bare else f"{row['epsilon']:.1f}"
    shown = ["row", "seeds", "kNN", "kNN, difference", "linear", "linear, difference"]
    return markdown([{**row} for row in rows], [*shown, "epsilon"], digits=2)


def memory(runs: Sequence[Found]) -> str:
    """The table of memory and of states on disk."""
    rows = [
        {
            "clients": one["seed"],
            "peak memory, MB": one["bytes"] / 1e6,
            "states on disk, MB": one["disk"] / 1e6,
            "seconds": one["seconds"],
        }
        for one in sorted(runs, key=lambda one: one["seed"])
        if one["label"] == "memory"
    ]
    return markdown(rows, digits=1)


def growth(runs: Sequence[Found]) -> float:
    """How many times the memory of few clients many need."""
    found = {one["seed"]: one["bytes"] for one in runs if one["label"] == "memory"}
    return found[max(found)] / found[min(found)] if found else 1.0


ABOUT = """# FedCA in short runs: its parts, its protections, its memory

"""


def page(runs: Sequence[Found]) -> str:
    """The stored result."""
    return ABOUT + arms(runs) + protections(runs) + memory(runs)


def main() -> None:
    """Measure what is asked for and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = ["arms", "protections", "memory"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--only", nargs="+", choices=[*ARMS, *PROTECTIONS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, help="worker processes; 0: in this process")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="what --json has printed")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    runs: list[Found] = []
    for path in asked.runs:
        runs += map(json.loads, path.read_text(encoding="utf-8").splitlines())
    held = {(one["label"], one["seed"]) for one in runs}
    labels = [*(ARMS if "arms" in asked.part else [])]
    labels += PROTECTIONS if "protections" in asked.part else []
    wanted = [label for label in labels if not asked.only or label in asked.only]
    todo = list(itertools.product(asked.seeds, wanted))
    if "memory" in asked.part:
        todo += [(clients, "memory") for clients in CLIENTS]
    for seed, label in todo:
        if (label, seed) in held:
            continue
        runs.append(remember(seed) if label == "memory" else measure(label, seed, asked.workers))
        print(json.dumps(runs[-1]), flush=True)
    if not asked.json:
        print(page(runs))
    if asked.write:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(page(runs), encoding="utf-8")
    if growth(runs) > LIMIT:
        raise SystemExit(f"memory grows {growth(runs):.2f} times; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
