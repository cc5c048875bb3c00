"""What `harmonium plan` says of three runs, beside what they take.

    python benchmarks/plan.py [--json | --write docs/results/plan.md]

Plans a run, performs it as a process of its own, and compares: seconds of a round and in all, the
largest memory of all processes (as `memory.py` measures it), bytes in the run's ledger, and the
size of its folder. About five minutes in all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from memory import peak
from stored import write_page

from harmonium.report.tables import markdown

COMMON = "data=digits views=digits rounds=10 evaluate.every=10"
RUNS = {
    "fedavg": f"fedavg {COMMON} local.epochs=5",
    "fedsc": f"fedsc {COMMON} evaluate.objective=false",
    "orchestra": f"orchestra {COMMON}",
}
LIMITS = {"s a round": 0.3, "s in all": 0.3, "memory, MB": 0.3, "disk, MB": 0.2}  # of the run's
PAGE = """# What a plan says, and what runs take

`python benchmarks/plan.py` compares `harmonium plan` with three runs of ten rounds on the bundled
digits, each as a process of its own with as many workers as cores. Bytes must be equal, because
they follow from what methods declare. The other figures may differ by the share of the last column;
the comparison says MISSED where they differ by more. Seconds depend on what else the machine does
between a plan and its run: its {cores} cores had a load average of {before} before and {after}
after. The seconds of a run in all include the start of its processes, which a plan leaves out.

{table}

The runs:

{runs}
"""


def planned(words: str) -> dict[str, float]:
    """The figures of a plan."""
    command = [sys.executable, "-m", "harmonium", "plan", *words.split(), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    plan = json.loads(done.stdout)
    return {
        "s a round": plan["time"]["training"] / plan["time"]["rounds"],
        "s in all": plan["time"]["seconds"],
        "memory, MB": plan["memory"]["total"] / 1e6 if plan["memory"] else 0.0,
        "bytes down": plan["traffic"]["down"],
        "bytes up": plan["traffic"]["up"],
        "disk, MB": plan["disk"]["folder"] / 1e6,
    }


def taken(words: str, folder: Path) -> dict[str, float]:
    """The same figures of the run."""
    memory, seconds = peak(words.split(), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "s a round": median(one["seconds"] for one in times[1:-1]),  # these are not evaluated
        "s in all": seconds,
        "memory, MB": memory / 1e6,
        "bytes down": sum(row["bytes_down"] for row in rows),
        "bytes up": sum(row["bytes_up"] for row in rows),
        "disk, MB": size / 1e6,
    }


def rows_of(name: str, before: dict[str, float], after: dict[str, float]) -> list[dict[str, Any]]:
    """The lines of a run in the table."""
    lines = []
    for key, plan in before.items():
        run, limit = after[key], LIMITS.get(key, 0.0)
        digits = "{:,.0f}" if key.startswith("bytes") else "{:.2f}"
        lines.append(
            {
                "run": name,
                "what": key,
                "plan": digits.format(plan),
                "taken": digits.format(run),
                "ratio": f"{plan / run:.2f}",
                "within": f"{limit:.0%}" if limit else "equal",
                "verdict": "met" if abs(plan - run) <= limit * run else "MISSED",
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    lines = []
    for name, words in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines += rows_of(name, planned(words), taken(words, Path(folder) / "run"))
    if options.json:
        print(json.dumps(lines))
        return
    table = markdown(lines)
    print(table)
    if options.write:
        page = PAGE.format(
            cores=os.cpu_count(),
            before=f"{before:.1f}",
            after=f"{os.getloadavg()[0]:.1f}",
            table=table,
            runs="\n".join(f"- `harmonium run {words}`" for words in RUNS.values()),
        )
        write_page(options.write, page)


if __name__ == "__main__":
    main()
