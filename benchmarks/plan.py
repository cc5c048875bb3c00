"""What `harmonium plan` says of three runs, beside what they take.

    python benchmarks/plan.py [--json | --write docs/results/plan.md]

Plans a run, performs it as a process of its own, and compares: seconds of a round and in all, the
largest memory of all processes (as `memory.py` measures it), bytes in the run's ledger, and the
size of its folder. Then it does both again in one process each and counts seconds of CPU time,
which depend less on what else the machine does. About three minutes in all on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harmonium
from harmonium.report.tables import markdown
from memory import peak
from stored import write_page

COMMON = "data=digits data.limit=600 views=digits rounds=6 evaluate.every=6"
RUNS = {
    "fedavg": f"fedavg {COMMON}",
    "fedsc": f"fedsc {COMMON} evaluate.objective=false",
    "orchestra": f"orchestra {COMMON}",
}
LIMITS = {"memory, MB": 0.3, "disk, MB": 0.2}  # of the run's
WALL, CPU = ("s a round", "s in all"), ("CPU s a round", "CPU s in all")
LIMITS |= dict.fromkeys((*WALL, *CPU), 0.3)
PAGE = """# What a plan says, and what runs take

`python benchmarks/plan.py` compares `harmonium plan` with three runs of six rounds on the bundled
digits, each as a process of its own with as many workers as cores. Bytes must be equal, because
they follow from what methods declare. The other figures may differ by the share of the last column;
the comparison says MISSED where they differ by more. Seconds depend on what else the machine does:
its {cores} cores had a load average of {before} before and {after} after. Where that is more than
half of the cores, wall times are not judged, for a plan is of a machine with nothing else to do.
CPU seconds are of one process (`engine.workers=0`). The seconds of a run in all include the start
of its processes and its plot, which a plan leaves out.

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


def in_cpu_time(words: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of CPU time that a plan says and a run takes, in a process of their own."""
    command = [sys.executable, __file__, "--cpu-time", words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    before, after = json.loads(done.stdout)
    return before, after


def print_cpu_time(words: str) -> None:
    """Plan and run in this process, with a clock that counts its CPU time."""
    time.perf_counter = time.process_time
    given = [*words.split(), "engine.workers=0"]
    plan = harmonium.plan(*given).time
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        harmonium.run(*given, out=Path(folder) / "run")
        whole = time.process_time() - began
        lines = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()
    assert plan is not None
    rounds = [json.loads(line)["seconds"] for line in lines]
    before = plan.training / plan.rounds, plan.seconds
    after = median(rounds[1:-1]), whole
    print(json.dumps([dict(zip(CPU, one, strict=True)) for one in (before, after)]))


def rows_of(
    name: str, before: dict[str, float], after: dict[str, float], busy: bool
) -> list[dict[str, Any]]:
    """The lines of a run in the table."""
    lines = []
    for key, plan in before.items():
        run, limit = after[key], LIMITS.get(key, 0.0)
        digits = "{:,.0f}" if key.startswith("bytes") else "{:.2f}"
        verdict = "met" if abs(plan - run) <= limit * run else "MISSED"
        lines.append(
            {
                "run": name,
                "what": key,
                "plan": digits.format(plan),
                "taken": digits.format(run),
                "ratio": f"{plan / run:.2f}",
                "within": f"{limit:.0%}" if limit else "equal",
                "verdict": "busy" if busy and key in WALL else verdict,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument("--cpu-time", metavar="WORDS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_time:
        print_cpu_time(options.cpu_time)
        return
    before = os.getloadavg()[0]
    lines = []
    for name, words in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            plan, run = planned(words), taken(words, Path(folder) / "run")
        busy = max(before, os.getloadavg()[0]) > (os.cpu_count() or 1) / 2
        cpu_plan, cpu_run = in_cpu_time(words)
        lines += rows_of(name, plan | cpu_plan, run | cpu_run, busy)
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
