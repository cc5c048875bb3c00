"""What a run will take, and what would stop it, before it begins: `harmonium plan`, `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core import machine
from harmonium.core.errors import HarmoniumError, counted
from harmonium.core.paths import home
from harmonium.core.seeds import numpy_rng
from harmonium.data.images import UNKNOWN, Dataset, Images
from harmonium.data.partition import Split
from harmonium.data.sets.sites import Sites
from harmonium.engines import memory as accelerators
from harmonium.federation.method import Method
from harmonium.learning import compiling
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock, size_of
from harmonium.runs import findings
from harmonium.runs.estimate import BATCHES, Estimate, RunData, measured, unmeasurable
from harmonium.runs.findings import Finding, Level, stop
from harmonium.runs.footprint import Memory
from harmonium.runs.open_run import device_notes, missing
from harmonium.runs.replay import Spending, Traffic
from harmonium.runs.start import holds

SITE_IMAGES = 1000  # of a site, in what is said of a federation
FAR_SITES = "the images are at the sites"


@dataclass(frozen=True)
class Clients:
    """The clients that train, and their images."""

    count: int
    fewest: int | None  # images of a client; none: not known here
    most: int | None
    asked: int  # clients asked in a round


@dataclass(frozen=True)
class Disk:
    """Bytes on disks, and how many are free there."""

    folder: int  # of the run's folder at its end
    where: str
    free: int
    images: int  # of the decoded images in the cache, which all runs share
    needed: int  # that are not there yet, with a commit that is being written


@dataclass(frozen=True)
class RunPlan:
    """What a run will take, and what was found. `print(plan.summary())` shows it."""

    recipe: Recipe
    findings: tuple[Finding, ...]
    clients: Clients | None = None
    time: Estimate | None = None
    memory: Memory | None = None
    traffic: Traffic | None = None
    disk: Disk | None = None
    privacy: Spending | None = None
    image: float | None = None  # seconds of a client's round for each of its images
    unknown: str = ""  # why some of this is none

    @property
    def stops(self) -> tuple[Finding, ...]:
        """What a run cannot work with; empty if it can begin."""
        return self._of("stop")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What a run would go on with, and its user may regret."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Remarks."""
        return self._of("note")

    def _of(self, level: Level) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.level == level)

    def plain(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        parts = ("clients", "memory", "traffic", "disk", "privacy")
        known = {name: getattr(self, name) for name in parts}
        return {
            "digest": self.recipe.digest,
            "works": not self.stops,
            "time": self.time.plain() if self.time else None,
            **{name: asdict(one) if one is not None else None for name, one in known.items()},
            "image": self.image,
            "unknown": self.unknown,
            "findings": [asdict(one) for one in self.findings],
        }

    def summary(self) -> str:
        """The plan as a few lines of text."""
        found = (f"{one.level:<8} {one.text}" for one in (*self.notes, *self.warnings, *self.stops))
        return "\n".join([*self.lines(), *found])

    def lines(self) -> list[str]:
        """What the run will take, a line each."""
        lines = [*self._clients(), *self._time()]
        if self.memory is not None:
            lines.append(f"memory   {_memory_words(self.memory)}")
        if self.traffic is not None:
            lines += _traffic_lines(self.traffic)
        if self.disk is not None:
            there = f"{size_of(self.disk.free)} are free"
            lines.append(
                f"disk     about {size_of(self.disk.folder)} in {self.disk.where}; {there}"
            )
            if self.disk.images:
                lines.append(f"cache    {size_of(self.disk.images)} of decoded images")
        if self.privacy is not None:
            lines.append(f"privacy  {_privacy_words(self.privacy)}")
        if self.time is not None:
            lines.append(f"assumed  {'; '.join(self.time.assumed)}")
        return lines

    def _clients(self) -> Iterator[str]:
        if (clients := self.clients) is None:
            return
        images = "images not known here"
        if clients.fewest is not None:
            few, most = clients.fewest, clients.most
            images = f"{few:,} images" if few == most else f"{few:,} to {most:,} images"
        rounds = counted(self.recipe.rounds, "round")
        whom = f"{counted(clients.count, 'client')} of {images}"
        yield f"clients  {whom}; {rounds}, {clients.asked} clients asked in each"

    def _time(self) -> Iterator[str]:
        if self.time is not None:
            yield self.time.line()
            return
        if not self.stops:
            yield f"time     not known: {self.unknown}"
        if self.image is not None:
            took, images = clock(SITE_IMAGES * self.image), f"{SITE_IMAGES:,} images"
            yield f"a round  about {took} for {images} of a site that computes as this machine"


def _memory_words(memory: Memory) -> str:
    each = f"{size_of(memory.main)} here"
    if memory.at_sites:
        return f"about {size_of(memory.main)} at the server and {size_of(memory.worker)} at a site"
    if memory.workers:
        each += f" and {size_of(memory.worker)} in {counted(memory.workers, 'worker')}"
        each += " each" if memory.workers > 1 else ""
    free = f"; {size_of(memory.available)} are free" if memory.available is not None else ""
    return f"about {size_of(memory.total)}: {each}{free}"


def _traffic_lines(traffic: Traffic) -> list[str]:
    about = "" if traffic.exact else "about "
    ways = f"{traffic.down:,} down and {traffic.up:,} up"
    lines = [f"bytes    {about}{ways}, of all clients and rounds"]
    lines.append(
        f"a client {about}{traffic.client_down:,} down and {traffic.client_up:,} up; "
        f"{traffic.round_down:,} and {traffic.round_up:,} in a round that asks it"
    )
    if traffic.measuring:
        lines.append(f"measures {about}{traffic.measuring:,} bytes both ways, on top of these")
    return lines


def _privacy_words(spending: Spending) -> str:
    text = f"epsilon {spending.worst:.4g} at delta {spending.delta:g} for the worst client"
    if spending.clients > 1:
        text += f", {spending.median:.4g} for the median of {spending.clients}"
    return text + (f"; the budget is {spending.budget:g}" if spending.budget is not None else "")


# ---- making a plan -------------------------------------------------------------------------------


def plan(
    what: Recipe | str | type[Method], *words: str, out: str | Path | None = None, **settings: Any
) -> RunPlan:
    """Say what a run would take, and what would stop it. Nothing is trained or kept.

    Images that were not decoded yet are decoded, as a run would do. A few steps of two clients are
    measured, which takes some seconds.

    Args:
        what: as for `run`.
        words: settings as on the command line.
        out: the folder that the run would have, to see whether it fits there.
        settings: settings by name.

    Returns:
        Time, memory, bytes, disk and privacy; and findings: `stops`, `warnings` and `notes`.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> found = harmonium.plan("digits", **small, **{"engine.workers": 0})
    >>> found.stops, found.clients.fewest, found.traffic.exact
    ((), 30, True)
    """
    return plan_of(Recipe.of(what, *words, **settings), out=out)


def plan_of(
    recipe: Recipe, *, out: str | Path | None = None, decode: bool = True, sites: bool = False
) -> RunPlan:
    """The same for a recipe.

    Args:
        recipe: of the run.
        out: the folder that it would have.
        decode: without it, images that are not decoded yet stay so.
        sites: the clients' images are those of sites, whatever the recipe names for evaluation.
    """
    sites = sites or isinstance(recipe.data, Sites)
    planning = _Planning(recipe, Path(out) if out is not None else None, decode, sites)
    try:
        return planning.planned()
    except HarmoniumError as error:  # what the run itself would raise
        planning.found.append(stop("recipe", error))
        return planning.result()


class _Planning:
    """One plan in the making."""

    def __init__(self, recipe: Recipe, out: Path | None, decode: bool, sites: bool) -> None:
        self.recipe, self.out, self.decode, self.sites = recipe, out, decode, sites
        self.found: list[Finding] = []
        self.facts: dict[str, Any] = {}

    def result(self) -> RunPlan:
        """The plan, with stops first."""
        order: Sequence[Level] = ("stop", "warning", "note")
        found = sorted(dict.fromkeys(self.found), key=lambda one: order.index(one.level))
        unknown = self.facts.get("unknown", "")
        if not unknown and "time" not in self.facts:
            unknown = "a run would be refused"
        return RunPlan(self.recipe, tuple(found), **{**self.facts, "unknown": unknown})

    @property
    def stopped(self) -> bool:
        """Whether a run cannot work, so that there is nothing to measure."""
        return any(one.level == "stop" for one in self.found)

    def planned(self) -> RunPlan:
        """Check first what is quick, then the images, then measure."""
        recipe = self.recipe
        recipe.check()
        if self.out is not None:
            holds(self.out, recipe)
        device = recipe.engine.devices[0]
        self.found += [Finding("note", "device", text) for text in device_notes(recipe)]
        self.found += [Finding("note", "recipe", text) for text in recipe.notes]
        self.found += [stop("images", text) for text in missing(recipe)]
        if recipe.local.compile:
            compiling.check(device)
        if self.stopped:
            self.facts["unknown"] = "the images are missing"
            return self.result()
        if self.sites:
            return self._of_sites()
        if (why := unmeasurable(recipe)) and not self.decode:
            self.facts["unknown"] = why
            return self.result()
        dataset = recipe.data.load()
        self.found += findings.of_lost_clients(recipe.split, dataset)
        data = RunData.load(recipe, dataset)
        method = recipe.build_method(dataset)
        self._check(data, method)
        if not self.stopped:
            self._measure(data)
        return self.result()

    def _check(self, data: RunData, method: Method) -> None:
        """What can be said without a step of training."""
        recipe, examples = self.recipe, data.split.examples
        self.facts["clients"] = Clients(
            len(examples),
            min(examples.values()),
            max(examples.values()),
            recipe.participation.asked(recipe.training),
        )
        self.found += findings.of_encoder(method)
        if self.stopped:
            return
        self.found += findings.of_clients(recipe, method, examples)
        side, shape = method.world.side, data.dataset.train.shape
        self.found += findings.of_sizes(recipe.data, side, shape)
        self.found += findings.of_labels(recipe, method, data.dataset)
        self.found += findings.notes_of(recipe, method, data.dataset, data.split)
        accelerators.check(method, recipe.engine.devices, recipe.workers)

    def _measure(self, data: RunData) -> None:
        """Measure a few steps, and compare what a run takes with what there is."""
        recipe = self.recipe
        try:
            trial = measured(recipe, data)
        except HarmoniumError:
            raise
        except Exception as error:  # noqa: BLE001  (a method or an encoder may be the user's own)
            self.facts["unknown"] = f"a trial failed: {type(error).__name__}: {error}"
            self.found.append(findings.warning("trial", self.facts["unknown"]))
            return
        where = self.out or home() / "runs"
        free = machine.free_space(where)
        needed = trial.disk + trial.replay.server
        images = 0 if self.sites else _bytes_of(data.dataset)
        images += _bytes_of(data.public) if data.public else 0
        memory = trial.memory
        if self.sites and memory is not None:  # the other process is at a site
            memory = replace(memory, workers=0, total=memory.main, at_sites=True)
        self.facts |= {
            "time": None if self.sites else trial.estimate,
            "image": trial.image if self.sites else None,
            "memory": memory,
            "traffic": trial.replay.traffic,
            "disk": Disk(trial.disk, str(where), free, images, needed),
            "privacy": trial.replay.spending,
        }
        self.found += findings.of_participation(recipe, trial.replay)
        self.found += findings.of_disk(needed, free, where)
        if memory is not None:
            self.found += findings.of_memory(recipe, memory)
        if trial.replay.spending is not None:
            smallest = 0 if self.sites else min(data.split.examples.values())
            self.found += findings.of_spending(recipe, trial.replay.spending, smallest)

    def _of_sites(self) -> RunPlan:
        """The plan of a federation: what follows from the recipe, on images of noise."""
        recipe = self.recipe = self.recipe.changed(engine={"workers": 1, "device": "cpu"})
        data = _pretended(recipe)
        method = recipe.build_method(data.dataset)
        self.facts["unknown"] = FAR_SITES
        asked = recipe.participation.asked(recipe.training)
        self.facts["clients"] = Clients(recipe.training, None, None, asked)
        self.found += findings.of_encoder(method)
        if method.reads_labels and not (isinstance(recipe.data, Sites) and recipe.data.classes):
            text = f"{method.name} reads labels: name all classes, data.classes=[one,other]"
            self.found.append(stop("images", text))
        if not self.stopped:
            self._measure(data)
        text = (
            f"{FAR_SITES}, so their numbers, sizes and labels are not known here, nor the time of "
            f"a round; bytes are for clients={recipe.clients}, the number of sites"
        )
        self.found.append(Finding("note", "images", text))
        return self.result()


def _pretended(recipe: Recipe) -> RunData:
    """Images of noise in place of those of sites: the same few for every client."""
    side, channels = recipe.data.size or 0, recipe.data.channels or 0
    count, rng = BATCHES * recipe.local.batch, numpy_rng(recipe.seed, "plan")
    pixels = np.frombuffer(rng.bytes(count * side * side * channels), np.uint8)
    counted_by = recipe.evaluate.sites_classes
    classes = (recipe.data.classes if isinstance(recipe.data, Sites) else ()) or counted_by
    least = min(len(classes), len(counted_by) or len(classes))
    labels = rng.integers(0, least, count) if classes else np.full(count, UNKNOWN)
    images = Images(pixels.reshape(count, side, side, channels), labels.astype(np.int64))
    nothing = images.subset([])
    dataset = Dataset(recipe.data.name, images, nothing, nothing, classes, "")
    split = Split(tuple(np.arange(count) for _ in range(recipe.clients)), {}, "", "")
    return RunData(dataset, split, evaluated=False)


def _bytes_of(dataset: Dataset) -> int:
    """Bytes of the pixels of all parts."""
    parts = (dataset.train, dataset.validation, dataset.test)
    return sum(len(part) * int(np.prod(part.shape)) for part in parts)
