"""Harmonium beside Flower's simulation and beside plain PyTorch loops, on the same federation.

    python benchmarks/rivals.py [--json] [--only tiny wide] [--turns 3] [--workers 1]

Everybody trains the same network (`cnn-small`) with SimCLR and SGD on the same images, in the same
shares and batches, one epoch a round at each of ten clients:

- Harmonium as `harmonium.run` plays it, with faithful views (the default) and with fast ones
- Flower's simulation on Ray with its strategy FedAvg and the usual per-image transforms
- a loop: plain PyTorch with the same transforms, a Dataset and a DataLoader
- a lean loop: Pillow views still image by image, but nothing that could be left out
- bare steps on views that were made before: the floor, no federation

Each is a program of its own in `benchmarks/contenders/`. Their rounds are measured in turn, so that
a busy machine slows all alike. CPU seconds are those of all processes that a contender started,
daemons included, from the end of one round to the end of the next. Figures are medians over turns,
ratios those of the same turn. What round 1 and all before it take beyond a later round is start-up,
in CPU time, and in wall time as the median of three starts in the setting `tiny`, whose rounds are
short; that of the command `harmonium run` has a row of its own. Memory is the largest proportional
set size of all its processes (what they share is counted once). Everybody computes on one thread.
Nobody evaluates in a round; the start-up of Harmonium has its figures of the untrained encoder in
it. Flower and Ray are extras of this benchmark: where they are missing, a line says how to install
them and the rest is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
from torch import nn

from contenders.common import Task, network
from harmonium.data.partition import make_split
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import markdown
from memory import family, proportional_bytes

HERE = Path(__file__).parent
SETTINGS = {  # width, side, batch
    "tiny": (8, 16, 16),
    "wide": (32, 32, 64),
    "wide-16": (32, 32, 16),
}
TURNS = {"tiny": (7, 3), "wide": (4, 1), "wide-16": (4, 1)}  # of each contender, and their rounds
COMMAND = "harmonium run"  # only its start-up and memory are measured
CONTENDERS = {  # program, and Harmonium's views
    "harmonium": ("on_harmonium", "faithful"),
    "harmonium, fast views": ("on_harmonium", "fast"),
    COMMAND: ("", "faithful"),
    "flower": ("on_flower", ""),
    "loop": ("loop", ""),
    "lean loop": ("lean", ""),
    "bare steps": ("floor", ""),
}
STARTS = {"tiny": 3}  # how often each is started; elsewhere a round is too long to tell start-up
OURS, FLOOR = ("harmonium", "harmonium, fast views"), "bare steps"
BASES = {OURS[0]: "x harmonium", OURS[1]: "x fast views", FLOOR: "x bare steps"}
FLOWER_GOALS = {"tiny": 4.0, "wide": 1.3}  # times the CPU seconds of Harmonium, at least
LEAN_GOAL, START_GOAL = 1.0, 2.0  # times, at least; seconds, at most
EXTRA = "pip install 'flwr[simulation]==1.41.0'"
CLIENTS, IMAGES = 10, 200  # images of a client
LR, MOMENTUM, TEMPERATURE = 0.05, 0.9, 0.5
TICK = os.sysconf("SC_CLK_TCK")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PAUSE = 0.25  # seconds between samples of processes and memory


# ---- processes of a contender --------------------------------------------------------------------


def adopting(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that adopts what its children leave behind, so that daemons stay with it."""
    libc = ctypes.CDLL(None)

    def adopt() -> None:
        libc.prctl(SUBREAPER, 1, 0, 0, 0)

    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, preexec_fn=adopt, **options)


class Family:
    """A process and all that it started: their CPU seconds, and their largest memory together."""

    def __init__(self, root: int) -> None:
        self.root, self.most = root, 0
        self._seen: dict[tuple[int, str], float] = {}  # CPU seconds of every process ever seen
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.works = threading.Event()  # cleared while others are measured, which it must not slow
        self.works.set()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """CPU seconds so far, of processes that ended too."""
        with self._lock:
            total = 0.0
            for pid in family(self.root):
                try:
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                own, waited = (sum(map(int, stat[at : at + 2])) / TICK for at in (11, 13))
                total += own + waited
                self._seen[pid, stat[19]] = own  # 19: when it started
            # A parent need not keep the times of children that ended: neither sum can be too large.
            return max(total, sum(self._seen.values()))

    def end(self) -> None:
        """End all of it."""
        self._ended.set()
        self.works.set()
        self._thread.join()
        for pid in family(self.root):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._ended.wait(PAUSE):
            self.works.wait()
            self.seconds()
            self.most = max(self.most, sum(map(proportional_bytes, family(self.root))))


class Contender:
    """One program and the figures of its rounds after the first."""

    def __init__(self, name: str, task: Task, place: Path) -> None:
        """Start it, and wait for the end of its first round."""
        self.name, self.wall, self.cpu = name, [], []
        program, views = CONTENDERS[name]
        place.mkdir(exist_ok=True)
        self._path = place / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        self._task = task.with_views(views)
        self._task.write(self._path)
        began = time.perf_counter()
        with self._path.with_suffix(".log").open("wb") as log:
            own = {**os.environ, "RAY_TMPDIR": str(place)}  # else Ray joins a cluster that runs
            self._process = adopting(self._command(program), stderr=log, env=own)
        self.family = Family(self._process.pid)
        self._wait()
        self.first_rounds = [time.perf_counter() - began]
        self.first_cpu = self.family.seconds()
        self.family.works.clear()

    def _command(self, program: str) -> list[str]:
        script = HERE / "contenders" / f"{program}.py"
        return [sys.executable, str(script), str(self._path)]

    def play(self, rounds: int) -> None:
        """Measure some rounds more, as means over them."""
        self.family.works.set()
        before, began = self.family.seconds(), time.perf_counter()
        for _ in range(rounds):
            self._go_on()
            self._wait()
        self.wall.append((time.perf_counter() - began) / rounds)
        self.cpu.append((self.family.seconds() - before) / rounds)
        self.family.works.clear()

    def _go_on(self) -> None:
        """Let it begin its next round."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def _wait(self) -> None:
        """Until it says that a round is over."""
        for line in self._process.stdout:
            if line.startswith(b"round "):
                return
        self._fail()

    def _fail(self) -> None:
        """Stop, and show the end of what it wrote."""
        log = self._path.with_suffix(".log").read_text(errors="replace")
        raise SystemExit(f"{self.name} ended:\n{log[-3000:]}")

    def end(self) -> None:
        """End the program and all that it started."""
        self.family.end()
        self._process.wait()

    def figures(self) -> dict[str, Any]:
        """What was measured."""
        wall = statistics.median(self.wall)
        return {
            "rounds_an_hour": 3600 / wall,
            "cpu_seconds": statistics.median(self.cpu),
            "startup_seconds": statistics.median(self.first_rounds) - wall,
            "startup_cpu_seconds": self.first_cpu - statistics.median(self.cpu),
            "first_round_seconds": statistics.median(self.first_rounds),
            "megabytes": self.family.most / 1e6,
            "each_wall": self.wall,
            "each_cpu": self.cpu,
        }


class Command(Contender):
    """The command `harmonium run`, which waits for nobody: two rounds are watched."""

    def _command(self, program: str) -> list[str]:
        self._out, self._done = self._path.with_suffix(".run"), 0
        words = ["run", "fedavg", *self._task.words(), "--out", str(self._out), "--json"]
        return [sys.executable, "-m", "harmonium", *words]

    def _go_on(self) -> None:
        """It does."""

    def _wait(self) -> None:
        """Until its log has the next round; round 0 is written before the first."""
        self._done += 1
        log = self._out / "metrics.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") <= self._done:
            if self._process.poll() is not None:
                self._fail()
            time.sleep(0.01)


# ---- one setting ---------------------------------------------------------------------------------


def prepare(setting: str, workers: int, place: Path) -> Task:
    """Write images, shares and recipe for all contenders."""
    width, side, batch = SETTINGS[setting]
    words = ["data=shapes", f"data.size={side}", f"data.count={CLIENTS * IMAGES}"]
    words += ["data.test_count=50", "data.validation=0", f"clients={CLIENTS}", "split=iid"]
    words += [f"encoder.width={width}", f"local.batch={batch}", "local.epochs=1", f"local.lr={LR}"]
    words += [f"local.momentum={MOMENTUM}", "local.schedule=constant", "local.clip=none"]
    words += [f"objective.temperature={TEMPERATURE}", "evaluate.every=1000"]
    words += ["evaluate.labels_per_class=[]"]
    recipe = Recipe.of("fedavg", *words)
    data = recipe.data.load()  # Harmonium's contenders find it decoded, as the others do
    split = make_split(recipe.split, data, None, recipe.clients, recipe.seed)
    np.save(place / "images.npy", np.array(data.train.batch(np.arange(len(data.train)))))
    np.save(place / "shares.npy", np.stack(split.indices))
    (place / "recipe.txt").write_text("\n".join(words), encoding="utf-8")
    parts = recipe.build_method(data).blueprint.copy_from()
    groups = [layer.num_groups for layer in parts.modules() if isinstance(layer, nn.GroupNorm)]
    shapes = [
        sorted(tuple(p.shape) for p in net.parameters()) for net in (parts, network(width, groups))
    ]
    if shapes[0] != shapes[1]:
        raise SystemExit("the contenders' network is no longer that of Harmonium")
    return Task(
        folder=str(place),
        width=width,
        side=side,
        batch=batch,
        groups=tuple(groups),
        clients=CLIENTS,
        rounds=10**6,  # the benchmark ends them
        workers=workers,
        lr=LR,
        momentum=MOMENTUM,
        temperature=TEMPERATURE,
    )


def compare(setting: str, names: Sequence[str], turns: int | None, workers: int) -> dict[str, Any]:
    """The figures of all contenders in one setting."""
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        task = prepare(setting, workers, Path(base))
        before = os.getloadavg()[0]
        running = []
        for name in names:
            kind = Command if name == COMMAND else Contender
            one = kind(name, task, Path(base) / "0")
            stack.callback(one.end)
            if name == COMMAND:
                one.play(1)
                one.end()
            for number in range(1, STARTS.get(setting, 1)):
                again = kind(name, task, Path(base) / str(number))
                again.end()
                one.first_rounds += again.first_rounds
            running.append(one)
        figures = {one.name: one.figures() for one in running if one.name == COMMAND}
        running = [one for one in running if one.name != COMMAND]
        usual, rounds = TURNS[setting]
        for number in range(turns or usual):
            first = number % len(running)
            for one in running[first:] + running[:first]:
                one.play(rounds)
        figures |= {one.name: one.figures() for one in running}
        load = [before, os.getloadavg()[0]]
    return {"load": load, "turns": turns or usual, "contenders": figures}


def ratio(figures: Mapping[str, Any], name: str, base: str) -> float | None:
    """How many times the CPU seconds of another contender: the median over rounds."""
    if name not in figures or base not in figures:
        return None
    pairs = zip(figures[name]["each_cpu"], figures[base]["each_cpu"], strict=True)
    return statistics.median(one / two for one, two in pairs)


# ---- what is shown -------------------------------------------------------------------------------


def rows(
    setting: str, result: Mapping[str, Any], absent: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A row for every contender, empty for those that are not installed."""
    figures, table = result["contenders"], []
    for name in CONTENDERS:
        if name in absent:
            table.append({"": name})
        if name not in figures:
            continue
        its = figures[name]
        row: dict[str, Any] = {"": name}
        if name != COMMAND:
            row["rounds an hour"] = round(its["rounds_an_hour"])
            row["CPU s a round"] = its["cpu_seconds"]
            row["samples a CPU s"] = round(CLIENTS * IMAGES / its["cpu_seconds"])
            row |= {heading: ratio(figures, name, base) for base, heading in BASES.items()}
        if name != FLOOR:  # which have their views made before they start
            row["start-up, s"] = its["startup_seconds"] if setting in STARTS else None
            row["start-up, CPU s"] = its["startup_cpu_seconds"]
            row["round 1 ends, s"] = its["first_round_seconds"]
        row["memory, MB"] = round(its["megabytes"])
        table.append(row)
    return table


def goals(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """What was promised, what was measured, and whether that is enough."""
    table = []

    def judge(goal: str, value: float | None, limit: float, least: bool, unit: str) -> None:
        row = {"": goal, "goal": f"at {'least' if least else 'most'} {limit:g}{unit}"}
        if value is None:
            row |= {"measured": "–", "verdict": "not measured"}
        else:
            met = value >= limit if least else value <= limit
            row |= {"measured": f"{value:.2f}{unit}", "verdict": "met" if met else "MISSED"}
        table.append(row)

    for own in OURS:
        for setting, result in results.items():
            figures = result["contenders"]
            where = f"{own}, {setting}"
            if setting in FLOWER_GOALS:
                times = ratio(figures, "flower", own)
                judge(f"{where}: faster than flower", times, FLOWER_GOALS[setting], True, " x")
            times = ratio(figures, "lean loop", own)
            judge(f"{where}: not behind the lean loop", times, LEAN_GOAL, True, " x")
    for own in (COMMAND, *OURS):
        for setting in STARTS:
            if its := results.get(setting, {"contenders": {}})["contenders"].get(own):
                judge(
                    f"{own}, {setting}: start-up", its["startup_seconds"], START_GOAL, False, " s"
                )
    return table


def page(found: Mapping[str, Any]) -> str:
    """Tables of all settings and of the goals, in Markdown, which is readable as it is."""
    about = found["about"]
    lines = [
        f"{CLIENTS} clients with {IMAGES} images each, one epoch a round, "
        f"{_many(about['workers'], 'client')} at a time. "
        f"{about['cores']} cores; Python {about['python']}, "
        + ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        + ".",
        "",
    ]
    for setting, result in found["settings"].items():
        width, side, batch = SETTINGS[setting]
        before, after = result["load"]
        lines += [
            f"**{setting}**: width {width}, {side} pixels, batches of {batch}; "
            f"{_many(result['turns'], 'turn')} of {_many(TURNS[setting][1], 'round')}; "
            f"load average {before:.1f} before, {after:.1f} after",
            "",
            markdown(rows(setting, result, about["missing"]), digits=2),
        ]
        lines += [f"{name}: {why}\n" for name, why in about["missing"].items()]
    return "\n".join([*lines, markdown(goals(found["settings"]))])


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def missing() -> dict[str, str]:
    """Contenders that cannot be measured here, and what to do."""
    absent = [name for name in ("flwr", "ray") if importlib.util.find_spec(name) is None]
    if not absent:
        return {}
    return {"flower": f"not measured, {' and '.join(absent)} not installed: {EXTRA}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--turns", type=int, help="of each contender; 7 in tiny, else 4")
    parser.add_argument("--workers", type=int, default=1, help="clients that train at once")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all contenders are ended
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    absent = missing()
    names = [name for name in options.contenders if name not in absent]
    absent = {name: why for name, why in absent.items() if name in options.contenders}
    versions = {name: version(name) for name in ("harmonium", "torch", "pillow")}
    if "flower" in names:
        versions |= {name: version(name) for name in ("flwr", "ray")}
    about = {
        "workers": options.workers,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "missing": absent,
    }
    settings = {}
    with tempfile.TemporaryDirectory() as home:
        # Telemetry and update checks would reach out of this machine.
        quiet = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
        homes = ("HARMONIUM_HOME", "FLWR_HOME")
        os.environ |= {**dict.fromkeys(homes, home), **dict.fromkeys(quiet, "0")}
        os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
        warm = "import torch, PIL.Image, harmonium.cli.main; harmonium.run"
        warm += "; import flwr.simulation, ray" * ("flower" in names)
        subprocess.run([sys.executable, "-c", warm], check=True)  # reads the files from disk
        for setting in options.only:
            settings[setting] = compare(setting, names, options.turns, options.workers)
    found = {"about": about, "settings": settings}
    print(json.dumps(found) if options.json else page(found))


if __name__ == "__main__":
    main()
