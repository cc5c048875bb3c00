"""Whether a GPU computes what the CPU computes, how fast, and where it waits.

    python benchmarks/device.py [--device auto] [--seconds 120] [--markdown | --json] [--compile]

Five tables, within five minutes: the machine; the same round of several methods on the CPU and on
the device from the same seed, with tolerances; the figures of the same run; how often a task reads
the device back; images a second, waiting and peak memory of tasks by encoder, batch, precision and
memory format. Without an accelerator the CPU is compared with itself under other kernels, which
shows what rounding alone does. Whatever fails has a row with its error, and the rest goes on.
`--markdown` is for a report; of the machine it names only products and versions.

Speed is that of a whole task: message, views, steps, reply. On an accelerator it is in seconds on
the clock; on the CPU in CPU seconds of one thread, because tasks have one. A device waits while no
kernel and no copy runs on it; that is read from a trace of its kernels, where torch has one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import harmonium
from harmonium.core import codec, devices
from harmonium.core.devices import CPU
from harmonium.core.errors import ConfigError
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import make_split
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.evaluation.features import embed
from harmonium.evaluation.knn import knn_answers
from harmonium.federation.method import Method
from harmonium.learning.encoders import Encoder
from harmonium.recipe.presets import load_tree
from harmonium.recipe.schema import Recipe, known_keys
from harmonium.testing import Trial

# ---- tables --------------------------------------------------------------------------------------


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]  # heading and format by key


@dataclass
class Table:
    """Rows of raw values, and how to show them."""

    title: str
    columns: Columns
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self) -> list[list[str]]:
        """Headings and rows as text; columns without any value are left out."""
        keys = [key for key in self.columns if any(row.get(key) is not None for row in self.rows)]
        lines = [[self.columns[key][0] for key in keys]]
        for row in self.rows:
            shown = ((row.get(key), self.columns[key][1]) for key in keys)
            lines.append(["–" if value is None else form(value) for value, form in shown])
        return lines

    def text(self) -> str:
        """For a terminal."""
        lines = self.cells()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        drawn = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *(line.rstrip() for line in drawn), *self.notes])

    def markdown(self) -> str:
        """For a page or an issue."""
        head, *rest = (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
            for line in self.cells()
        )
        rule = "|" + "---|" * len(self.cells()[0])
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"### {self.title}", "", head, rule, *rest, "", *notes]).rstrip()


def small(value: float) -> str:
    """A difference: equal bits are worth telling apart."""
    return "0" if value == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def megabytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def one_line(error: BaseException) -> str:
    """An error for a row: its kind and the beginning of its first line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:140].rstrip(" :")


def verdict(holds: bool) -> str:
    return "met" if holds else "MISSED"


def say(text: str) -> None:
    """What is being measured, for those who wait."""
    print(f"... {text}", file=sys.stderr, flush=True)


# ---- the device ----------------------------------------------------------------------------------

TRACED = ("cuda", "xpu")  # devices whose kernels torch can trace


def chosen(name: str) -> torch.device:
    """The device to measure; `auto` is any accelerator that torch finds, `mps` included."""
    if name == devices.AUTO:
        return devices.accelerator() or CPU
    return devices.resolve(name)[0]


def ask(device: torch.device, *names: str) -> Any:
    """What the first of these functions of torch's module for the device says; none: nothing."""
    module = torch.get_device_module(device)
    for name in names:
        if hasattr(module, name):
            function = getattr(module, name)
            takes_device = device.type in TRACED and name != "empty_cache"
            return function(device) if takes_device else function()
    return None


def forget_memory(device: torch.device) -> None:
    """Give cached memory back, and count the peak from here on."""
    if device.type != "cpu":
        ask(device, "empty_cache")
        ask(device, "reset_peak_memory_stats")


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors took at once; what the driver holds where there is no such count."""
    if device.type == "cpu":
        return None
    held = ask(device, "max_memory_allocated", "driver_allocated_memory")
    return None if held is None else int(held)


def words_of(device: torch.device) -> dict[str, Any]:
    """The engine's settings for everything here."""
    return {"device": str(device), "workers": 0}


# ---- the machine ---------------------------------------------------------------------------------


def processor() -> str:
    """The processor's product name, where the system has it."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else ())
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str | None:
    """The version of the accelerator's driver, where it can be asked for."""
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        return next(iter(said.split()), None)
    version = Path("/sys/module/amdgpu/version")
    return version.read_text().strip() if version.exists() else None


def commit() -> str:
    """The commit of this clone, or nothing."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except OSError:
        return ""
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""


def machine(device: torch.device) -> Table:
    """What the figures are of."""
    build = (torch.version.cuda and f"CUDA {torch.version.cuda}") or (
        torch.version.hip and f"ROCm {torch.version.hip}"
    )
    about: dict[str, Any] = {
        "Harmonium": f"{harmonium.__version__}{commit()}",
        "torch": f"{torch.__version__}, {build or 'no CUDA or ROCm'}",
        "device": devices.device_name(device),
    }
    if device.type != "cpu":
        about["driver"] = driver()
        if device.type == "cuda":
            about["capability"] = ".".join(map(str, ask(device, "get_device_capability")))
        if memory := ask(device, "mem_get_info"):
            about["memory"] = f"{megabytes(memory[1])}, {megabytes(memory[0])} free"
        elif total := ask(device, "recommended_max_memory"):
            about["memory"] = f"{megabytes(total)} recommended at most"
    about["CPU"] = f"{processor()}, {os.cpu_count()} cores"
    if hasattr(os, "getloadavg"):
        about["load"] = f"{os.getloadavg()[0]:.1f} before the start"
    about["system"] = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
    rows = [{"what": key, "value": value} for key, value in about.items()]
    return Table("The machine", {"what": ("what", str), "value": ("", str)}, rows)


# ---- agreement -----------------------------------------------------------------------------------

# Relative differences after five steps at three clients, from the same seed. Without an accelerator
# this page of figures shows what other kernels on the CPU do to them: weights and losses differ by
# up to 2e-4, as steps magnify what rounding began, features of the same weights by 1e-6.
TOLERANCES = {"weights": 1e-3, "losses": 1e-3, "features": 1e-4}
POINTS = 1.0  # of kNN accuracy
RUN_POINTS = {"linear": 2.0}  # its penalty is one of a few, chosen by few images

FEW: dict[str, Any] = {
    "data": {"name": "shapes", "count": 3000, "test_count": 10, "size": 32, "validation": 0.667},
    "encoder": {"name": "cnn-small", "width": 8, "out": 64},
    "split": {"name": "dirichlet", "alpha": 1.0},
    "clients": 3,
    "rounds": 1,
}
STEPS = {"epochs": 1, "batch": 32, "max_steps": 5, "lr": 0.01}
BATCH_NORM = {"name": "resnet8", "width": 8, "norm": "batch"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg, simclr": ("fedavg", {}),
    "fedavg, byol": ("fedavg", {"objective": "byol"}),
    "fedavg, simclr, ResNet-8 with BatchNorm": ("fedavg", {"encoder": BATCH_NORM}),
    "fedsc, matrices in float64": ("fedsc", {"method": {"name": "fedsc", "passes": 1}}),
    "orchestra": ("orchestra", {}),
    "fsimclr, user verification": ("fsimclr", {}),
}
FAST_VIEWS: dict[str, Any] = {"views": {"name": "simclr", "mode": "fast"}}  # by the same draws
WHOLE: dict[str, Any] = {
    "data": {"name": "shapes", "count": 2000, "test_count": 2000, "size": 16, "validation": 0.2},
    "encoder": {"name": "cnn-small", "width": 8, "out": 64},
    "split": {"name": "dirichlet", "alpha": 1.0},
    "local": {"epochs": 1, "batch": 64, "lr": 0.01},
    "clients": 3,
    "rounds": 2,
    "evaluate": {"k": 20, "labels_per_class": [5]},
}


@dataclass(frozen=True)
class Outcome:
    """What a round led to."""

    start: Tensor  # all weights in a row, before
    weights: Tensor  # and after
    losses: list[float]  # of every client
    trial: Trial
    device: torch.device

    def evaluated(self, device: torch.device | None = None) -> tuple[Tensor, float]:
        """Features of held-out images and kNN accuracy, on a device; none: its own."""
        data, views = self.trial.dataset, self.trial.recipe.views.build()
        parts = (data.train, data.validation)
        encoder = self.trial.method.blueprint.copy_from(self.trial.server.model)["encoder"]
        with devices.use_device(device or self.device):
            bank, queries = (embed(encoder, part, views.plain) for part in parts)
            known, wanted = (torch.from_numpy(np.array(part.labels)) for part in parts)
            return queries, knn_answers(bank, known, queries, wanted, k=20).accuracy


def other_kernels() -> AbstractContextManager[Any]:
    """Torch's own CPU kernels in place of oneDNN's: the same sums, rounded otherwise."""
    return torch.backends.mkldnn.flags(enabled=False)


class Counted(LocalEngine):
    """Tasks in this process, which counts how often each reads the device back."""

    counts: list[tuple[str, Counter[str]]]

    def _in_process(self, task: Task, broadcast: bytes) -> codec.Tree:
        with read_backs(self.runtime.device) as counter:
            done = super()._in_process(task, broadcast)
        self.counts.append((task.step, counter))
        return done


def outcome(
    case: str,
    device: torch.device,
    counts: list[Any] | None = None,
    how: Mapping[str, Any] | None = None,
) -> Outcome:
    """A round of a case on a device; `counts` collects the read-backs of its tasks."""
    method, given = CASES[case]
    how = how or {}
    engine_settings = {**words_of(device), **how.get("engine", {})}
    tree = {**load_tree(method), **FEW, **given, "local": STEPS, **how, "engine": engine_settings}
    tree["local"] = {**STEPS, **how.get("local", {})}
    recipe = Recipe.from_tree(tree)
    dataset = recipe.data.load()

    def engine(recipe: Recipe, runtime: ClientRuntime, folder: Path) -> LocalEngine:
        kind = LocalEngine if counts is None or device.type == "cpu" else Counted
        made = kind(runtime, folder, workers=0, devices=(device,))
        if isinstance(made, Counted):
            made.counts = counts if counts is not None else []
        return made

    with devices.use_device(device):
        split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
        trial = Trial(recipe, dataset, split, engine=engine).go()
    losses = [
        float(reply.up["loss"])
        for recorded in trial.recorded
        for reply in recorded.replies
        if reply.up and "loss" in reply.up
    ]
    start = in_a_row(trial.method.blueprint.shared())
    return Outcome(start, in_a_row(trial.server.model), losses, trial, device)


def in_a_row(model: Mapping[str, Tensor]) -> Tensor:
    """All numbers of a model with rounding in them."""
    return torch.cat([one.double().flatten() for one in model.values() if one.is_floating_point()])


def apart(one: Tensor, other: Tensor, over: Tensor | None = None) -> float:
    """The length of the difference over the length of `over`, or of the second."""
    size = (other if over is None else over).double().norm().clamp(min=1e-300)
    return float((one.double() - other.double()).norm() / size)


def compared(
    here: Outcome, evaluated: tuple[Tensor, float], there: Outcome
) -> Iterator[dict[str, Any]]:
    """How far two outcomes are apart, training first; the first, evaluated, is that of the CPU."""
    pairs = zip(here.losses, there.losses, strict=True)
    yield {
        "weights": apart(there.weights, here.weights),
        "change": apart(there.weights, here.weights, here.weights - here.start),
        "losses": max(abs(b - a) / max(abs(a), 1e-12) for a, b in pairs),
    }
    elsewhere, _ = here.evaluated(there.device)  # the same weights
    yield {"features": apart(elsewhere, evaluated[0]), "knn_cpu": evaluated[1]}
    yield {"knn": there.evaluated()[1]}


def agrees(row: Mapping[str, Any]) -> bool:
    """Whether a row is within the tolerances; NaN is not."""
    near = all(row[key] <= most for key, most in TOLERANCES.items())
    return near and round(100 * abs(row["knn"] - row["knn_cpu"]), 9) <= POINTS


def low_precisions(device: torch.device) -> dict[str, dict[str, Any]]:
    """Settings of every precision but float32 that this version and this kind of device have."""
    low: dict[str, dict[str, Any]] = {}
    if device.type == "cuda":
        low["tf32"] = {"engine": {"tf32": True}}
    if device.type != "cpu" and "local.precision" in known_keys():
        low |= {name: {"local": {"precision": name}} for name in ("bf16", "fp16")}
    return low


def agreement(device: torch.device, counts: dict[str, list[Any]]) -> Table:
    """The same round of several methods on the CPU and on the device."""
    alone = device.type == "cpu"
    about: Columns = {
        "case": ("a round of", str),
        "weights": ("weights", small),
        "change": ("of the round's change", small),
        "losses": ("losses", small),
        "features": ("features", small),
        "knn_cpu": ("kNN, CPU", percent),
        "knn": ("kNN, other kernels" if alone else f"kNN, {device}", percent),
        "verdict": ("", str),
        "error": ("error", str),
    }
    with_what = "itself under other kernels" if alone else str(device)
    table = Table(f"Agreement of the CPU with {with_what}", about)
    first, on_cpu = next(iter(CASES)), dict[str, tuple[Outcome, tuple[Tensor, float]]]()
    more = [(first, name, how) for name, how in low_precisions(device).items()]
    more.append((first, "fast views", FAST_VIEWS))
    for case, name, how in [*((case, "", {}) for case in CASES), *more]:
        row: dict[str, Any] = {"case": f"{case}, {name}" if name else case}
        say(f"agreement: {row['case']}")
        table.rows.append(row)
        try:
            if case not in on_cpu:
                here = outcome(case, CPU)
                on_cpu[case] = here, here.evaluated()
            with other_kernels() if alone else nullcontext():
                found = None if name else counts.setdefault(case, [])
                there = outcome(case, device, found, how)
                for figures in compared(*on_cpu[case], there):
                    row |= figures
            row["verdict"] = verdict(agrees(row)) if not name else "no tolerance"
            if how is FAST_VIEWS:
                row["verdict"] = "MISSED: not told apart" if agrees(row) else "told apart"
        except Exception as error:
            row["error"] = one_line(error)
    limits = ", ".join(f"{key} {most:g}" for key, most in TOLERANCES.items())
    table.notes += [
        "Relative differences after five steps at three clients, from the same seed. "
        f"Tolerances: {limits}, kNN {POINTS:g} point (2,000 images). Features are of the same "
        "weights. Fast views, made by the same draws, must be told apart.",
        repeated(device),
    ]
    if alone and not torch.backends.mkldnn.is_available():
        table.notes.append("This build of torch has no oneDNN: both used the same kernels.")
    return table


def repeated(device: torch.device) -> str:
    """Whether the device gives the same bits twice."""
    case = next(iter(CASES))
    try:
        one, other = (outcome(case, device).weights for _ in range(2))
    except Exception as error:
        return f"A round was not repeated on {device}: {one_line(error)}"
    bits = "the same bits" if torch.equal(one, other) else "other bits"
    return f"A round that is repeated on {device} ends with {bits}."


def whole_run(device: torch.device, folder: Path) -> Table:
    """Figures of a short run: training, evaluation, probes."""
    alone = device.type == "cpu"
    there = "other kernels" if alone else str(device)
    table = Table(
        "The same run",
        {
            "probe": ("accuracy, %", str),
            "cpu": ("CPU", percent),
            "there": (there, percent),
            "points": ("difference", lambda points: f"{points:+.2f}"),
            "verdict": ("", str),
            "error": ("error", str),
        },
    )
    runs = {}
    for name, place in (("cpu", CPU), ("there", device)):
        say(f"a whole run: {name if name == 'cpu' else there}")
        try:
            with other_kernels() if alone and name != "cpu" else nullcontext():
                engine = words_of(place)
                runs[name] = harmonium.run("fedavg", **WHOLE, engine=engine, out=folder / name)
        except Exception as error:
            table.rows.append({"probe": name, "error": one_line(error)})
            return table
    for probe, here in runs["cpu"].figures.items():
        if isinstance(here, float):
            figure = runs["there"].figures[probe]
            points = 100 * (figure - here)
            limit = RUN_POINTS.get(probe.partition("_")[0], POINTS)
            row = {"probe": probe, "cpu": here, "there": figure, "points": points}
            table.rows.append({**row, "verdict": verdict(round(abs(points), 9) <= limit)})
    table.notes.append(
        f"Two rounds of fedavg with simclr, three clients, 2,000 test images. Tolerance {POINTS:g} "
        f"point; of linear probes {RUN_POINTS['linear']:g}, as their penalty is one of a few."
    )
    return table


# ---- read-backs ----------------------------------------------------------------------------------


class ReadBacks(TorchDispatchMode):
    """Counts operations for which the host must wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute as usual, and note what it was."""
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        away = any(one.device.type != "cpu" for one in given)
        name = getattr(op, "overloadpacket", op).__name__
        if away and name in ("index", "index_put", "index_put_"):
            for index in (one for one in args[1] if isinstance(one, Tensor)):
                self.counts["shapes"] += index.dtype == torch.bool
                self.counts["indices"] += index.device.type == "cpu"
        done = op(*args, **(kwargs or {}))
        if away:
            self.counts["numbers"] += name in NUMBERS
            self.counts["shapes"] += name in OF_UNKNOWN_SHAPE
            home = name in COPIES and isinstance(done, Tensor) and done.device.type == "cpu"
            self.counts["copies"] += home
        return done


NUMBERS = {"_local_scalar_dense", "equal", "_linalg_check_errors"}  # of which the host reads one
COPIES = {"copy_", "_to_copy", "_copy_from"}
OF_UNKNOWN_SHAPE = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount"}
OF_UNKNOWN_SHAPE |= {"unique_dim", "repeat_interleave"}
READS = {
    "numbers": "numbers read",
    "copies": "copies to the CPU",
    "shapes": "shapes that depend on values",
    "indices": "indices of the CPU",
    "driver": "by CUDA's own count",
}
MOST = 2  # numbers and copies of a task: what it decides by, if anything, and its reply


@contextmanager
def read_backs(device: torch.device) -> Iterator[Counter[str]]:
    """Count within the block; on CUDA devices also what the driver waits for."""
    counter: Counter[str] = Counter()
    cuda = device.type == "cuda"
    before = torch.cuda.get_sync_debug_mode() if cuda else 0
    with warnings.catch_warnings(record=cuda) as caught, ReadBacks() as mode:
        if cuda:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counter
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode(before)
            counter.update(mode.counts)
            if cuda:
                counter["driver"] = sum(
                    "called a synchronizing" in str(one.message) for one in caught or ()
                )


def reads_table(counts: Mapping[str, list[tuple[str, Counter[str]]]]) -> Table:
    """The largest counts of any task, by case and exchange."""
    columns: Columns = {
        "case": ("tasks of", str),
        "step": ("exchange", str),
        "tasks": ("tasks", str),
        **{key: (heading, str) for key, heading in READS.items()},
        "verdict": ("", str),
    }
    table = Table("Read-backs of a task, at most", columns)
    for case, tasks in counts.items():
        for step in dict.fromkeys(step for step, _ in tasks):
            some = [counter for one, counter in tasks if one == step]
            most = {key: max(counter[key] for counter in some) for key in READS}
            if not any("driver" in counter for counter in some):
                del most["driver"]
            few = most["numbers"] + most["copies"] <= MOST
            few = few and not most["shapes"] and not most["indices"]
            row = {"case": case, "step": step, "tasks": len(some), **most}
            table.rows.append({**row, "verdict": verdict(few)})
    table.notes.append(f"Expected: at most {MOST} numbers and copies a task, and nothing else.")
    return table


# ---- speed ---------------------------------------------------------------------------------------

SIDE, IMAGES = 32, 2048
ENCODERS: dict[str, dict[str, Any]] = {
    "cnn-small, width 8": {"name": "cnn-small", "width": 8},
    "cnn-small, width 32": {"name": "cnn-small", "width": 32},
    "cct-4-3x2": {"name": "cct-4-3x2"},
    "resnet18": {"name": "resnet18"},
}
BATCHES = (64, 256)
SHORTEST, LONGEST = 0.3, 3.0  # seconds of a task that is timed
CPU_BATCH = 16  # where the CPU stands beside an accelerator


@dataclass(frozen=True)
class Setting:
    """One measurement of speed."""

    encoder: str
    batch: int
    precision: str = "fp32"
    how: Mapping[str, Any] = field(default_factory=dict)  # settings of its precision
    device: torch.device = CPU
    other_layout: bool = False  # channels first in memory where Harmonium chooses last, or last
    resident: bool = True  # images stay on the device, if they fit

    def row(self) -> dict[str, Any]:
        """How it is named."""
        return {
            "encoder": self.encoder,
            "device": str(self.device),
            "batch": self.batch,
            "precision": self.precision,
            "images": None if self.resident else "sent by batch",
        }


def settings(device: torch.device, compiled: bool) -> list[Setting]:
    """All measurements, those that matter most first."""
    if device.type == "cpu":
        first = [Setting(name, BATCHES[0]) for name in ENCODERS]
        return first + [replace(one, other_layout=True) for one in first[:2]]
    beside = [Setting(name, CPU_BATCH) for name in ENCODERS]
    first = [Setting(name, batch, device=device) for batch in BATCHES for name in ENCODERS]
    low = [
        replace(one, precision=name, how=how)
        for name, how in low_precisions(device).items()
        for one in first
    ]
    large = [one for one in (*first, *low) if one.batch == BATCHES[-1]]
    turned = [replace(one, other_layout=True) for one in large if one.precision in ("fp32", "bf16")]
    sent = [replace(one, resident=False) for one in first if one.batch == BATCHES[0]]
    if compiled:
        how = {"local": {"compile": True}}
        low += [replace(one, precision="fp32, compiled", how=how) for one in first]
    return [*beside, *first, *low, *sent, *turned]


def noise(count: int = IMAGES) -> Dataset:
    """Random images; what is on them does not change the time."""
    rng = np.random.default_rng(0)
    images = Images(
        rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8), np.full(count, -1, np.int64)
    )
    return Dataset("noise", images, images.subset([]), images.subset([]), (), "")


def laid_out(encoder: Encoder, last: bool) -> Encoder:
    """The same encoder with its channels last, or first, in memory."""
    kind = type(encoder)
    forced = type(kind.__name__, (kind,), {"channels_last": last, "__module__": kind.__module__})
    return forced(**{one.name: getattr(encoder, one.name) for one in fields(encoder)})


class Speed:
    """Tasks of one setting; each call performs one with so many steps."""

    def __init__(self, setting: Setting, data: Dataset, folder: Path) -> None:
        """Build the model and the message."""
        self.setting = setting
        local = {"batch": setting.batch, "epochs": 10**6, "drop_last": True}
        recipe = Recipe.of(
            "fedavg",
            encoder=ENCODERS[setting.encoder],
            local={**local, **setting.how.get("local", {})},
            engine={**words_of(setting.device), **setting.how.get("engine", {})},
        )
        devices.allow_tf32(recipe.engine.tf32)
        self._method: Method = recipe.build_method(data)
        if setting.other_layout:
            turned = laid_out(self._method.encoder, not self._method.encoder.channels_last)
            self._method = replace(self._method, encoder=turned)
        self.layout = "last" if self._method.encoder.channels_last else "first"
        self._images, self._folder = data.train, folder
        self._message = codec.encode({"model": self._method.blueprint.shared()})
        self._resident: Tensor | None = None

    def task(self, steps: int) -> float:
        """Seconds of a task: on the clock, or of the CPU where it computes."""
        method = replace(self._method, local=replace(self._method.local, max_steps=steps))
        vars(method)["blueprint"] = self._method.blueprint
        device, index = self.setting.device, [np.arange(len(self._images))]
        runtime = ClientRuntime(method, self._images, index, self._folder, device=device)
        if self.setting.resident and self._resident is None:  # sent once in a run, not in a task
            self._resident = runtime.resident
        vars(runtime)["resident"] = self._resident
        devices.synchronise(device)
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        before = clock()
        done = runtime.perform(Task("train", 0, 1, 0, {}, None), self._message)
        devices.synchronise(device)
        if done["up"] is None:
            raise RuntimeError(done["why"])
        return clock() - before

    def measured(self, seconds: float) -> dict[str, Any]:
        """Images a second of a task of about so many seconds, its peak memory, its waiting."""
        forget_memory(self.setting.device)
        steps, taken = 1, self.task(1)
        cold = taken > 2 * seconds  # a slow encoder on a CPU: once is enough
        while not cold:
            taken = self.task(steps)
            if taken >= seconds / 2 or steps >= 4096:
                break
            steps = min(4096, max(2 * steps, int(0.8 * steps * seconds / max(taken, 1e-4))))
        each = taken / steps
        row: dict[str, Any] = {"rate": self.setting.batch / each, "steps": steps}
        row["memory"] = peak_memory(self.setting.device)
        if self.setting.device.type in TRACED:
            row["waits"] = self.waiting(each)
        return row

    def waiting(self, each: float, steps: int = 10) -> float | None:
        """The share of a step's time in which the device does nothing."""
        kinds = torch.profiler.ProfilerActivity
        activity = getattr(kinds, self.setting.device.type.upper(), None)
        if activity is None:
            return None
        with torch.profiler.profile(activities=[activity]) as profile:
            self.task(steps)
        path = self._folder / "trace.json"
        profile.export_chrome_trace(str(path))
        microseconds = busy(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        return max(0.0, 1 - microseconds / 1e6 / (each * steps)) if microseconds else None


def busy(events: Sequence[Mapping[str, Any]]) -> float:
    """Microseconds in which any kernel or copy of a trace runs; those that overlap count once."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def speed(device: torch.device, seconds: float, compiled: bool, folder: Path) -> Table:
    """Images a second of every setting, within so many seconds."""
    unit = "per CPU second of one thread" if device.type == "cpu" else "per second"
    columns: Columns = {
        "encoder": ("encoder", str),
        "device": ("device", str),
        "batch": ("batch", str),
        "precision": ("precision", str),
        "layout": ("channels", str),
        "images": ("images", str),
        "rate": (f"images {unit}", rate),
        "times": ("times the CPU", rate),
        "waits": ("device waits, %", percent),
        "memory": ("peak memory", megabytes),
        "error": ("error", str),
    }
    table = Table(f"Speed of tasks at {SIDE} pixels (simclr, two views an image)", columns)
    data, todo = noise(), settings(device, compiled)
    end, late, beside = time.monotonic() + seconds, 0, dict[str, float]()
    for number, setting in enumerate(todo):
        left = end - time.monotonic()
        if left <= 0:
            late = len(todo) - number
            break
        row = setting.row()
        say(", ".join(str(value) for value in row.values() if value is not None))
        table.rows.append(row)
        try:
            # Half of a row's time is for warming up and for finding the number of steps.
            share = min(LONGEST, max(SHORTEST, left / (len(todo) - number) / 2))
            tasks = Speed(setting, data, folder)
            row["layout"] = f"{tasks.layout}{'' if setting.other_layout else ', as chosen'}"
            row |= tasks.measured(share)
            if setting.device.type == "cpu":
                beside.setdefault(setting.encoder, row["rate"])
            elif setting.encoder in beside:
                row["times"] = row["rate"] / beside[setting.encoder]
        except Exception as error:
            row["error"] = one_line(error)
        devices.allow_tf32(False)
    table.notes += speed_notes(device, late)
    return table


def speed_notes(device: torch.device, late: int) -> list[str]:
    """What was measured how, and what was not."""
    notes = []
    if device.type == "cpu":
        notes.append(
            "Lower precisions, memory and waiting are measured on accelerators only; on most CPUs "
            "lower precisions are slow."
        )
    else:
        notes.append("CPU rows are per CPU second of one thread, all others per second.")
        if "local.precision" not in known_keys():
            notes.append("bf16 and fp16: this version has no local.precision.")
        if device.type not in TRACED:
            notes.append(f"How long the device waits: not measured on {device.type}.")
        if device.type == "mps":
            notes.append("Memory is what the driver holds after a task, not a peak.")
    if late:
        notes.append(f"{late} more rows were left out: the time was up (--seconds).")
    return notes


# ---- all of it -----------------------------------------------------------------------------------


def tables(device: torch.device, seconds: float, compiled: bool, folder: Path) -> Iterator[Table]:
    """All tables, each as soon as it is done."""
    counts: dict[str, list[tuple[str, Counter[str]]]] = {}
    made: dict[str, Callable[[], Table]] = {
        "The machine": lambda: machine(device),
        "Agreement": lambda: agreement(device, counts),
        "The same run": lambda: whole_run(device, folder),
        "Read-backs": lambda: reads_table(counts),
        "Speed": lambda: speed(device, seconds, compiled, folder),
    }
    if device.type == "cpu":  # nothing to read back
        del made["Read-backs"]
    for title, make in made.items():
        try:
            yield make()
        except Exception as error:
            yield Table(title, {"error": ("error", str)}, [{"error": one_line(error)}])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument("--seconds", type=float, help="for the table of speed (120; CPU alone: 40)")
    parser.add_argument("--markdown", action="store_true", help="tables for an issue")
    parser.add_argument("--json", action="store_true", help="one JSON document with all digits")
    parser.add_argument("--compile", action="store_true", help="also with local.compile=true")
    options = parser.parse_args(arguments)
    try:
        device = chosen(options.device)
    except ConfigError as error:
        parser.error(str(error).replace("engine.device is", "--device is"))
    if options.compile and "local.compile" not in known_keys():
        parser.error("--compile: this version has no local.compile")
    seconds = options.seconds or (40.0 if device.type == "cpu" else 120.0)
    devices.select(device)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
    if options.markdown:
        print("## benchmarks/device.py\n")
    done, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as base, own_home(Path(base)):
        if device.type == "cpu" and not options.json:
            print("No accelerator is measured: the CPU alone.\n", flush=True)
        for table in tables(device, seconds, options.compile, Path(base)):
            done.append(table)
            if not options.json:
                print(f"{table.markdown() if options.markdown else table.text()}\n", flush=True)
    took = time.monotonic() - began
    if options.json:
        each = {table.title: {"rows": table.rows, "notes": table.notes} for table in done}
        print(json.dumps({"device": str(device), "seconds": took, "tables": each}, indent=1))
        return
    missed = sum("MISSED" in row.get("verdict", "") for table in done for row in table.rows)
    errors = sum("error" in row for table in done for row in table.rows)
    print(f"{missed} MISSED, {errors} errors, {took:.0f} s.")


@contextmanager
def own_home(folder: Path) -> Iterator[None]:
    """Nothing of this stays in the user's own folder."""
    before = os.environ.get("HARMONIUM_HOME")
    os.environ["HARMONIUM_HOME"] = str(folder / "home")
    try:
        yield
    finally:
        if before is None:
            del os.environ["HARMONIUM_HOME"]
        else:
            os.environ["HARMONIUM_HOME"] = before


if __name__ == "__main__":
    main()
