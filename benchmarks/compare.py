"""Compare every method and baseline on the built-in digits, killed in the middle and begun again.

    python benchmarks/compare.py [--seeds 2] [--out FOLDER] [--write docs/results/compare.md]

The comparison is killed with all its workers once half of its runs are complete, then the same
command is given again. What was complete is held against what it was before: bytes and times of its
files. The table says how methods do after a few rounds with one budget that none of them was tuned
for: it shows that the command works, not which method is best.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harmonium.methods import methods
from harmonium.recipe.presets import baselines
from harmonium.report.tables import markdown
from harmonium.studies.comparison.cells import BY_ITSELF
from stored import write_page

# References, no method, fedsimclr by another name, and one that needs a third view.
AMISS = {*BY_ITSELF, "diagnosis", "fedavg", "semifed"}
ROUNDED = ["fedsimclr,transport.up=fp16", "fedsimclr,transport.up=int8"]
OTHERS = sorted({*methods.table(), *baselines()} - {*AMISS, "fedsimclr"})
NAMES = ["fedsimclr", *ROUNDED, *OTHERS]
BUDGET = (
    "data=digits views=digits clients=4 split=dirichlet split.alpha=0.3 split.labels=0.2 rounds=2 "
    "local.epochs=2 local.for_clients=none local.batch=32 encoder.width=8 encoder.out=32 "
    "evaluate.k=20 evaluate.every=1 evaluate.labels_per_class=[5] compare.references=first "
    "engine.workers=0"
)


def command(folder: Path, seeds: int) -> list[str]:
    """The one command that is measured."""
    words = [*NAMES, *BUDGET.split(), f"seeds={seeds}", "--out", str(folder), "--json"]
    return [sys.executable, "-m", "harmonium", "compare", *words]


def complete(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of complete runs: when they were written, and their size."""
    runs = [path.parent for path in folder.glob("*/*/result.json")]
    files = [path for run in runs for path in run.rglob("*") if path.is_file()]
    stats = {str(path): path.stat() for path in files if path.name != ".lock"}
    return {name: (about.st_mtime_ns, about.st_size) for name, about in stats.items()}


def interrupted(folder: Path, seeds: int, runs: int) -> dict[str, tuple[int, int]]:
    """Start the comparison and kill it half-way; returns the files that were complete."""
    process = subprocess.Popen(
        command(folder, seeds), stdout=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and len(list(folder.glob("*/*/result.json"))) < runs // 2:
        time.sleep(0.5)
    if process.poll() is not None:
        raise SystemExit("the comparison ended before it was killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return complete(folder)


def page(result: dict, summary: str) -> str:  # type: ignore[type-arg]
    """The page of results."""
    rows = []
    for row in result["rows"]:
        its = result["details"]["rows"][row["encoder"]]
        shown = {"encoder": row["encoder"]}
        for key, name in (("knn", "kNN"), ("linear", "linear"), ("linear_5", "5 labels a class")):
            figure = its["figures"].get(key)
            shown[name] = figure and (100 * figure["mean"], 100 * (figure["stderr"] or 0.0))
        if "traffic" in its:
            shown["MB up"] = sum(its["traffic"]["up"].values()) / 1e6
        rows.append(shown)
    notes = "".join(f"- {note}\n" for note in result["notes"])
    return (
        "# Every method in one comparison\n\n"
        "Made by `python benchmarks/compare.py --write docs/results/compare.md`.\n\n"
        f"{summary}\n\n"
        f"The budget: `{BUDGET}`. None of the methods was tuned for it, and two rounds are few: "
        "this page shows that all of them run side by side, not which is best. kNN and linear in "
        "percent, mean and standard error over seeds; MB up are of one client in one round. "
        "SemiFed is missing, for it needs a third view, and views are part of the budget."
        f"\n\n{markdown(rows, digits=2)}\n{notes}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.out or Path(place) / "compared"
        runs = options.seeds * (len(NAMES) + 3)
        started = time.monotonic()
        before = interrupted(folder, options.seeds, runs)
        count = len({Path(name).parts[-3:-1] for name in before if name.endswith("result.json")})
        done = subprocess.run(command(folder, options.seeds), capture_output=True, text=True)
        seconds = time.monotonic() - started
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {done.stderr[-2000:]}")
        after = complete(folder)
        touched = [name for name, about in before.items() if after.get(name) != about]
        summary = (
            f"{len(NAMES)} methods, baselines and rounded weights with {options.seeds} seeds and "
            f"three references: {runs} runs in {seconds / 60:.0f} minutes. It was killed when "
            f"{count} runs were complete and begun again by the same command: {len(touched)} of "
            f"the {len(before)} files of complete runs were written again."
        )
        result = json.loads(done.stdout)
    text = page(result, summary)
    print(text)
    if options.write:
        write_page(options.write, text)
    if touched:
        raise SystemExit(f"written again: {touched[0]}")


if __name__ == "__main__":
    main()
