"""What a run would take, from a few measured steps: time, bytes, memory and disk.

The run's own code performs its setup and two rounds with two of its clients in a temporary folder.
Passes over examples stop after a few batches, and the time for the remaining ones is extrapolated.
Evaluations are timed on a sample of the images. `replay` counts the messages of all rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from harmonium.core import codec, devices
from harmonium.core.errors import HarmoniumError, counted
from harmonium.core.machine import memory_growth
from harmonium.core.progress import send_events_to, work
from harmonium.core.types import ClientId
from harmonium.data.datasets import DataSpec
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split, make_split
from harmonium.data.published_datasets import Published
from harmonium.data.sets.sites import Sites
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.evaluation.evaluator import Evaluator
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, Plan
from harmonium.learning.client import abridged
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock
from harmonium.runs.footprint import Memory, memory_of, run_folder_size
from harmonium.runs.loop import initial_encoder
from harmonium.runs.open_run import load_public, make_runtime, missing
from harmonium.runs.privacy_report import reported_delta
from harmonium.runs.replay import Answers, Replay, copied, replay
from harmonium.runs.start import evaluation_data

CLIENTS = 2  # clients that are timed
BATCHES = 4  # timed batches of a pass over examples; the first is slower and not counted
PASS = 1.0  # seconds after which a pass stops before that number
PATIENCE = 6.0  # seconds of measuring after which only what is needed is measured
EMBEDDED = 500  # images of a batch of `embed`
EVALUATED = 1.0  # seconds that features for a trial evaluation may take


@dataclass(frozen=True)
class Estimate:
    """The time and traffic that a run would need."""

    setup: float  # seconds before the first round
    training: float  # seconds of all rounds
    evaluation: float  # seconds of all evaluations, including the final one
    rounds: int
    bytes_down: int  # of all rounds
    bytes_up: int
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The total time of the run."""
        return self.setup + self.training + self.evaluation

    def plain(self) -> dict[str, Any]:
        """A dict for JSON."""
        return {**asdict(self), "seconds": self.seconds}

    def line(self) -> str:
        """The time, in the line that a command prints."""
        parts = {"setup": self.setup, "training": self.training, "evaluation": self.evaluation}
        pace = f"{self.training / self.rounds:.2g} s a round"
        times = ", ".join(f"{name} {clock(part)}" for name, part in parts.items())
        return f"time     about {clock(self.seconds)}: {times}; {pace}"


@dataclass(frozen=True)
class Measured:
    """All that a trial of a run has found out."""

    estimate: Estimate
    replay: Replay
    memory: Memory | None  # none where processes cannot be measured
    disk: int  # bytes of the run's folder at its end
    image: float  # seconds of a client's round for each of its images


@dataclass(frozen=True)
class RunData:
    """The images of a run: in all, by client, and public ones."""

    dataset: Dataset
    split: Split
    public: Dataset | None = None
    evaluated: bool = True  # whether encoders are evaluated on them

    @classmethod
    def load(cls, recipe: Recipe, dataset: Dataset | None = None) -> RunData:
        """As a run loads them; `dataset` if it is loaded already."""
        dataset = recipe.data.load() if dataset is None else dataset
        split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
        return cls(dataset, split, load_public(recipe, dataset.train.shape))


def estimated(recipe: Recipe, *, verdict: bool = True) -> Estimate | str:
    """An estimate of a run, or the reason why there is none.

    Without `verdict`, the final evaluation on the test set is left out, as in the runs of a study.
    """
    try:
        if unknown := unmeasurable(recipe):
            return unknown
        return measured(recipe, RunData.load(recipe), verdict=verdict).estimate
    except HarmoniumError as error:
        return f"a run would be refused: {error}"
    except Exception as error:  # noqa: BLE001  (a dry run shows its recipe even if the trial fails)
        return f"a trial failed: {type(error).__name__}: {error}"


def unmeasurable(recipe: Recipe) -> str:
    """Why a run cannot be measured now; empty if it can."""
    if missing(recipe):
        return "the images are missing"
    if isinstance(recipe.data, Sites):
        return "the images are at the sites"
    for spec in filter(None, (recipe.data, recipe.public)):
        if not _loads_quickly(spec):
            return f"{spec.name} is not decoded yet: `harmonium data show` or a run does that"
    return ""


def measured(recipe: Recipe, data: RunData, *, verdict: bool = True) -> Measured:
    """Measure a run with these images; raises what the run would raise."""
    device = devices.use_device(recipe.engine.devices[0])
    with work("measuring a few steps"), device, tempfile.TemporaryDirectory() as folder:
        return _measured(_uncompiled(recipe), data, Path(folder), verdict)


def _uncompiled(recipe: Recipe) -> Recipe:
    """The recipe without compiling, whose first pass would be taken for the pace of all others."""
    if not recipe.local.compile:
        return recipe
    return recipe.changed(local=replace(recipe.local, compile=False))


def _loads_quickly(spec: DataSpec) -> bool:
    """Whether images load quickly: they are decoded already, or generated rather than read."""
    reads = isinstance(spec, Published) or {"path", "sets"} & {one.name for one in fields(spec)}
    return not reads or spec.is_decoded()


def _measured(recipe: Recipe, data: RunData, folder: Path, verdict: bool) -> Measured:
    # Drawing noise and adding masks take little time; a trial does without them.
    runtime = replace(
        make_runtime(recipe, data.dataset, data.split, folder, data.public),
        masks=None,
        noise="simulated",
    )
    method, examples = runtime.method, data.split.examples
    with memory_growth() as grown:
        trial = _Trial(recipe, runtime, examples, folder)
        trial.run()
        training = grown()
    with memory_growth() as grown:
        evaluations = _evaluations(recipe, data, method, verdict)
        features = grown()
    cohort = recipe.participation.asked(recipe.training)
    beside = max(1, min(recipe.workers, cohort, os.cpu_count() or 1))
    first, later = trial.rounds[0], trial.rounds[-1]
    begin, before = (trial.measuring(plan) for plan in (method.begin, method.before_evaluation))
    delta, _ = reported_delta(recipe)
    found = replay(recipe, method, examples, trial.answers, public=runtime.public, delta=delta)
    rounds = found.last
    of_rounds = partial(in_all_rounds, clients=recipe.training, cohort=cohort, rounds=rounds)
    due = sum(recipe.evaluate.due(n, recipe.rounds) for n in range(1, rounds + 1))
    asked = begin.clients + before.clients * due
    estimate = Estimate(
        setup=trial.setup.server + trial.setup.clients / beside,
        training=later.server * rounds
        + of_rounds(first.clients / cohort, later.clients / cohort) / beside,
        evaluation=evaluations.one * (1 + due)
        + evaluations.last
        + begin.server
        + before.server * due
        + asked / beside,
        rounds=rounds,
        bytes_down=found.traffic.down,
        bytes_up=found.traffic.up,
        assumed=_assumed(recipe, trial, beside, cohort),
    )
    mean = sum(examples.values()) / len(examples)
    return Measured(
        estimate,
        found,
        memory_of(recipe, method, training, features, evaluations.growth),
        run_folder_size(recipe, method, data.split, found, folder, trial.timed, due),
        later.clients / cohort / max(1.0, mean),
    )


def in_all_rounds(first: float, later: float, *, clients: int, cohort: int, rounds: int) -> float:
    """The total over all clients and rounds, from one client's first round and a later one.

    A first round costs more where clients do something once, such as learning a style: each client
    does it in the first round that asks it. It costs less where there is no state to send yet.

    >>> in_all_rounds(5.0, 2.0, clients=4, cohort=2, rounds=3)  # 2 * (5 + 2 + 2), and 2 * 3 later
    24.0
    """
    newer = min(clients, cohort * rounds) - cohort
    return cohort * (first + later * (rounds - 1)) + max(0.0, first - later) * newer


def _assumed(recipe: Recipe, trial: _Trial, beside: int, cohort: int) -> tuple[str, ...]:
    clients = counted(len(trial.timed), "client")
    started = "the start of worker processes is not counted"
    assumptions = [
        f"training at the pace of up to {BATCHES} batches at {clients} of the {cohort} of a round",
        f"{counted(beside, 'client')} trained at once, with nothing else running on this machine",
        "evaluations at the pace of a sample of the images",
        *([started] if recipe.engine.workers != 0 else []),
    ]
    if recipe.participation.unreliable:
        assumptions.append("the time of a round in which no client drops out")
    if recipe.stop.patience is not None:
        assumptions.append("all rounds, though stop.patience may end the run before")
    if recipe.privacy.masks is not None:
        assumptions.append("the time of a round without secure aggregation")
    if recipe.engine.kind != "local":
        assumptions.append("the local engine")
    return tuple(assumptions)


# ---- the trial -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """The cost of a plan: seconds at the server, and seconds of all clients that it asks."""

    server: float
    clients: float


class _Trial:
    """A run's setup and two of its rounds, abridged: a few clients train, and others copy them."""

    def __init__(
        self, recipe: Recipe, runtime: ClientRuntime, examples: dict[ClientId, int], folder: Path
    ) -> None:
        self.recipe, self.method = recipe, runtime.method
        mean = float(np.mean(list(examples.values())))
        near = sorted(examples, key=lambda client: abs(examples[client] - mean))
        self.cohort = sorted(near[: recipe.participation.asked(recipe.training)])
        self.timed = near[: min(CLIENTS, len(self.cohort))]
        # These have more or fewer images than clients have on average.
        self._scale = mean / max(1.0, float(np.mean([examples[c] for c in self.timed])))
        shared = self.method.blueprint.shared()
        self._server = Server(examples, shared, public=runtime.public, device=devices.current())
        self._meter = _Meter()
        self._engine = _TimedEngine(runtime, folder, self._meter, self.timed, examples)
        self._driver = Driver(self.method, self._engine, Ledger())
        self.setup = _Cost(0.0, 0.0)
        self.rounds: list[_Cost] = []

    @property
    def answers(self) -> Answers:
        """What the clients sent."""
        return self._engine.answers

    def run(self) -> None:
        """Measure the setup, the first round, and a second one while there is time."""
        self.setup = self._cost(0, self.method.run_plan)
        for number in range(1, min(2, self.recipe.rounds) + 1):
            if number == 1 or not self._meter.is_late:
                self.rounds.append(self._cost(number, self.method.run_plan))

    def measuring(self, plan: Callable[[Server, Sequence[ClientId]], Plan]) -> _Cost:
        """The cost of a plan in which clients measure the model."""
        server = self._server
        cost = self._cost(server.round, plan)
        self._server = server
        return cost

    def _cost(self, number: int, plan: Callable[[Server, Sequence[ClientId]], Plan]) -> _Cost:
        engine, meter = self._engine, self._meter
        began, extrapolated = time.perf_counter(), meter.extrapolated
        engine.measured = engine.of_all = 0.0
        server = replace(self._server, round=number)
        with send_events_to(meter.event), abridged(meter.enough):
            self._server = self._driver.drive(plan(server, self.cohort), server)
        whole = time.perf_counter() - began + meter.extrapolated - extrapolated
        return _Cost(max(0.0, whole - engine.measured), engine.of_all * self._scale)


class _TimedEngine(LocalEngine):
    """The local engine; it performs and times the tasks of a few clients, and copies the others."""

    def __init__(
        self,
        runtime: ClientRuntime,
        folder: Path,
        meter: _Meter,
        timed: Sequence[ClientId],
        examples: Mapping[ClientId, int],
    ) -> None:
        super().__init__(runtime, folder, workers=0, devices=(devices.current(),))
        self.answers: dict[str, list[dict[ClientId, Mapping[str, Any]]]] = {}
        self.measured = 0.0  # seconds that the tasks performed would take in full
        self.of_all = 0.0  # and those of all clients asked
        self._meter, self._timed, self._examples = meter, timed, examples

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Perform a few tasks, keep what they answer, and copy it for the other clients."""
        few = [client for client in ask.to if client in self._timed] or ask.to[:CLIENTS]
        sent, before = dict[ClientId, Mapping[str, Any]](), self.measured
        for reply in super().deliver(replace(ask, to=few), turn):
            if reply.up is not None:
                sent[reply.client] = reply.up
            yield reply
        self.of_all += (self.measured - before) * len(ask.to) / max(1, len(few))
        if sent:  # of the first time and of the last
            self.answers[ask.step] = [*self.answers.get(ask.step, [])[:1], sent]
        for client in (one for one in ask.to if one not in few):
            yield copied(self.runtime.method, ask.step, client, self._examples, sent)

    def _in_process(self, task: Task, broadcast: bytes) -> codec.Tree:
        began, extrapolated = time.perf_counter(), self._meter.extrapolated
        done = super()._in_process(task, broadcast)
        self.measured += time.perf_counter() - began + self._meter.extrapolated - extrapolated
        return done


class _Meter:
    """Stops passes over examples early and extrapolates the time of the remaining batches."""

    def __init__(self) -> None:
        self.extrapolated = 0.0  # seconds that the stopped passes would have taken on top
        self._latest = ""
        self._seen: dict[str, list[tuple[float, int]]] = {}
        self._total: dict[str, int] = {}
        self._began = time.perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether measuring has taken long enough."""
        return time.perf_counter() - self._began > PATIENCE

    def event(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Record the progress of a pass."""
        if total is None or unit != "images":
            return
        if done == total:
            self._seen.pop(what, None)
            return
        devices.synchronise(devices.current())
        self._latest, self._total[what] = what, total
        self._seen.setdefault(what, []).append((time.perf_counter(), done))

    def enough(self, batches: int) -> bool:
        """Whether a pass may stop; if so, the time of its remaining batches is added."""
        seen = self._seen.get(self._latest, [])
        if batches < 1 or len(seen) < 2:
            return False
        took = seen[-1][0] - seen[0][0]
        if batches < BATCHES and not (took > PASS and batches > 1) and not self.is_late:
            return False
        (start, none), (end, done) = seen[1 if len(seen) > 2 else 0], seen[-1]
        left = self._total[self._latest] - done
        self.extrapolated += left * (end - start) / max(1, done - none)
        return True


# ---- evaluations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Evaluations:
    one: float = 0.0  # seconds of an evaluation during training
    last: float = 0.0  # of the final one, with all its probes
    growth: int | None = 0  # bytes of memory that features of all images take


def _evaluations(recipe: Recipe, data: RunData, method: Method, verdict: bool) -> _Evaluations:
    """What evaluations take, from a sample of the images."""
    if not data.evaluated:
        return _Evaluations()
    dataset, settings = evaluation_data(data.dataset, data.split), recipe.evaluate
    encoder = initial_encoder(method, dataset)
    evaluator = Evaluator(settings, dataset, method.views, recipe.seed, encoder)
    some = 64
    with memory_growth() as grown:
        pace = _seconds(lambda: _features(encoder, evaluator, dataset.train, some)) / some
        growth = grown()
    parts = ("train", "validation", "test")
    images = sum(len(getattr(dataset, name)) for name in parts)
    if growth is not None:  # as many batches at once as there are cores
        growth = growth * min(images, EMBEDDED * (os.cpu_count() or 1)) // some
    some = int(min(1000, max(some, EVALUATED / pace)))
    sampled = {name: _first(getattr(dataset, name), some) for name in parts}
    few = replace(
        evaluator, data=replace(dataset, labelled=_first(dataset.labelled, some), **sampled)
    )
    bank, queries = settings.bank, settings.queries
    one = _seconds(lambda: few.validate(encoder))
    whole = min(bank, len(dataset.train)) + min(queries, len(dataset.validation))
    part = min(bank, len(few.data.train)) + min(queries, len(few.data.validation))
    last = _seconds(lambda: few.test(encoder).figures) if verdict else 0.0
    count = sum(len(getattr(few.data, name)) for name in parts)
    own = settings.clients if method.has_own_encoders else 1
    kinds = own + 1 + 2  # trained, untrained, and two kinds of raw pixels
    return _Evaluations(one * whole / max(1, part), last * images / max(1, count) * kinds, growth)


def _features(encoder: nn.Module, evaluator: Evaluator, images: Images, count: int) -> None:
    from harmonium.evaluation.features import embed

    embed(encoder, _first(images, count), evaluator.views.plain)


def _first(images: Any, count: int) -> Any:
    if images is None or len(images) <= count:
        return images
    return images.subset(np.arange(count))


def _seconds(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began
