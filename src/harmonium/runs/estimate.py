"""How long a run would take and what it would send, from a few measured steps: `--dry-run`.

The run's own code performs its setup and two rounds with two of its clients in a temporary folder.
Passes over examples stop after a few batches, and the time for the remaining ones is extrapolated.
Evaluations are timed on a sample of the images.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from harmonium.core import codec, devices
from harmonium.core.errors import HarmoniumError, counted
from harmonium.core.progress import send_events_to, work
from harmonium.core.types import ClientId
from harmonium.data.datasets import DataSpec
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import make_split
from harmonium.data.published_datasets import Published
from harmonium.data.sets.sites import Sites
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.evaluation.evaluator import Evaluator
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import MEASURING, Ask, Plan
from harmonium.learning.client import abridged
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock, size_of
from harmonium.runs.loop import initial_encoder
from harmonium.runs.open_run import load_public, make_runtime, missing
from harmonium.runs.start import evaluation_data

CLIENTS = 2  # clients that are timed
BATCHES = 4  # timed batches of a pass over examples; the first is slower and not counted
PASS = 1.0  # seconds after which a pass stops before that number
PATIENCE = 6.0  # seconds of measuring after which only what is needed is measured
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

    def lines(self) -> list[str]:
        """The lines that the command prints."""
        parts = {"setup": self.setup, "training": self.training, "evaluation": self.evaluation}
        pace = f"{self.training / self.rounds:.2g} s a round"
        times = ", ".join(f"{name} {clock(part)}" for name, part in parts.items())
        return [
            f"time     about {clock(self.seconds)}: {times}; {pace}",
            f"bytes    about {size_of(self.bytes_down)} down and {size_of(self.bytes_up)} up",
            f"assumed  {'; '.join(self.assumed)}",
        ]


def estimated(recipe: Recipe, *, verdict: bool = True) -> Estimate | str:
    """An estimate of a run, or the reason why there is none.

    Without `verdict`, the final evaluation on the test set is left out, as in the runs of a study.
    """
    try:
        if missing(recipe):
            return "the images are missing"
        if isinstance(recipe.data, Sites):
            return "the images are at the sites"
        for spec in filter(None, (recipe.data, recipe.public)):
            if not _loads_quickly(spec):
                return f"{spec.name} is not decoded yet: `harmonium data show` or a run does that"
        device = devices.use_device(recipe.engine.devices[0])
        with work("measuring a few steps"), device, tempfile.TemporaryDirectory() as folder:
            return _measured(_uncompiled(recipe), Path(folder), verdict)
    except HarmoniumError as error:
        return f"a run would be refused: {error}"
    except Exception as error:  # noqa: BLE001  (a dry run shows its recipe even if the trial fails)
        return f"a trial failed: {type(error).__name__}: {error}"


def _uncompiled(recipe: Recipe) -> Recipe:
    """The recipe without compiling, whose first pass would be taken for the pace of all others."""
    if not recipe.local.compile:
        return recipe
    return recipe.changed(local=replace(recipe.local, compile=False))


def _loads_quickly(spec: DataSpec) -> bool:
    """Whether images load quickly: they are decoded already, or generated rather than read."""
    reads = isinstance(spec, Published) or {"path", "sets"} & {one.name for one in fields(spec)}
    return not reads or spec.is_decoded()


def _measured(recipe: Recipe, folder: Path, verdict: bool) -> Estimate:
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    public = load_public(recipe, dataset.train.shape)
    # Drawing noise and adding masks take little time; a trial does without them.
    runtime = replace(
        make_runtime(recipe, dataset, split, folder, public), masks=None, noise="simulated"
    )
    trial = _Trial(recipe, runtime, split.examples, folder)
    trial.run()
    one_evaluation, last = _evaluation(
        recipe, evaluation_data(dataset, split), runtime.method, verdict
    )
    cohort = recipe.participation.asked(recipe.training)
    beside = max(1, min(recipe.workers, cohort, os.cpu_count() or 1))
    first, later = trial.rounds[0], trial.rounds[-1]
    of_rounds = partial(in_all_rounds, clients=recipe.training, cohort=cohort, rounds=recipe.rounds)
    sent = {
        way: trial.setup.sent[way] * recipe.training + of_rounds(first.sent[way], later.sent[way])
        for way in ("down", "up")
    }
    due = sum(recipe.evaluate.due(n, recipe.rounds) for n in range(1, recipe.rounds + 1))
    begin, before_evaluation = (
        trial.measuring(plan, cohort, beside)
        for plan in (runtime.method.begin, runtime.method.before_evaluation)
    )
    return Estimate(
        setup=trial.setup.server + trial.setup.client * recipe.training / beside,
        training=later.server * recipe.rounds + of_rounds(first.client, later.client) / beside,
        evaluation=one_evaluation * (1 + due) + begin + before_evaluation * due + last,
        rounds=recipe.rounds,
        bytes_down=round(sent["down"]),
        bytes_up=round(sent["up"]),
        assumed=_assumed(recipe, trial, beside, cohort),
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
    clients = counted(len(trial.cohort), "client")
    started = "the start of worker processes is not counted"
    assumptions = [
        f"training at the pace of up to {BATCHES} batches at {clients} of the {cohort} of a round",
        f"{counted(beside, 'client')} trained at once, with nothing else running on this machine",
        "evaluations at the pace of a sample of the images",
        *([started] if recipe.engine.workers != 0 else []),
    ]
    if recipe.participation.unreliable:
        assumptions.append("no client drops out")
    if recipe.stop.patience is not None:
        assumptions.append("all rounds, though stop.patience may end the run before")
    if recipe.privacy.masks is not None:
        assumptions.append("no secure aggregation")
    if recipe.engine.kind != "local":
        assumptions.append("the local engine")
    return tuple(assumptions)


# ---- the trial -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """The cost of a plan: seconds at the server, seconds and bytes for each client asked."""

    server: float
    client: float
    sent: dict[str, float]


class _Trial:
    """A run's setup and two of its rounds, abridged, with a few of its clients."""

    def __init__(
        self, recipe: Recipe, runtime: ClientRuntime, examples: dict[ClientId, int], folder: Path
    ) -> None:
        self.recipe, self.method = recipe, runtime.method
        mean = float(np.mean(list(examples.values())))
        near = sorted(examples, key=lambda client: abs(examples[client] - mean))
        self.cohort = sorted(near[: min(CLIENTS, recipe.participation.asked(recipe.training))])
        # These have more or fewer images than clients have on average.
        self._scale = mean / max(1.0, float(np.mean([examples[c] for c in self.cohort])))
        shared = self.method.blueprint.shared()
        self._server = Server(examples, shared, public=runtime.public, device=devices.current())
        self._meter = _Meter()
        self._engine = _TimedEngine(runtime, folder, self._meter)
        self._ledger = Ledger()
        self._driver = Driver(self.method, self._engine, self._ledger)
        self.setup = _Cost(0.0, 0.0, {"down": 0.0, "up": 0.0})
        self.rounds: list[_Cost] = []

    def run(self) -> None:
        """Measure the setup, the first round, and a second one while there is time."""
        with send_events_to(self._meter.event), abridged(self._meter.enough):
            self.setup = self._cost(0)
            for number in range(1, min(2, self.recipe.rounds) + 1):
                if number == 1 or not self._meter.is_late:
                    self.rounds.append(self._cost(number))

    def measuring(
        self, plan: Callable[[Server, Sequence[ClientId]], Plan], cohort: int, beside: int
    ) -> float:
        """Seconds of a plan in which clients measure, extrapolated to all clients that it asks."""
        engine, server = self._engine, self._server
        engine.tasks.clear()
        engine.of_all = 0.0
        engine.only, engine.everyone, engine.cohort = self.cohort, len(server.everyone), cohort
        began, extrapolated = time.perf_counter(), self._meter.extrapolated
        with send_events_to(self._meter.event), abridged(self._meter.enough):
            self._driver.drive(plan(server, self.cohort), server)
        whole = time.perf_counter() - began + self._meter.extrapolated - extrapolated
        at_clients = sum(engine.tasks)
        return max(0.0, whole - at_clients) + engine.of_all * self._scale / beside

    def _cost(self, number: int) -> _Cost:
        began, extrapolated = time.perf_counter(), self._meter.extrapolated
        self._engine.tasks.clear()
        server = replace(self._server, round=number)
        self._server = self._driver.drive(self.method.run_plan(server, self.cohort), server)
        whole = time.perf_counter() - began + self._meter.extrapolated - extrapolated
        tasks, sent = sum(self._engine.tasks), dict(self._ledger.totals)
        self._ledger.take()
        share = self._scale / len(self.cohort)
        return _Cost(
            max(0.0, whole - tasks),
            tasks * share,
            {way: sent.get(way, 0) / len(self.cohort) for way in ("down", "up")},
        )


class _TimedEngine(LocalEngine):
    """The local engine; it records the seconds that every task would take in full."""

    def __init__(self, runtime: ClientRuntime, folder: Path, meter: _Meter) -> None:
        super().__init__(runtime, folder, workers=0, devices=(devices.current(),))
        self.tasks: list[float] = []
        self.only: Sequence[ClientId] | None = None  # clients that stand for all
        self.everyone, self.cohort = 0, 0  # numbers of all clients and of a round's
        self.of_all = 0.0  # seconds of all clients asked
        self._meter = meter

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Ask all clients, or only the few that stand for all."""
        if self.only is None:
            yield from super().deliver(ask, turn)
            return
        few = [client for client in ask.to if client in self.only]
        before = sum(self.tasks)
        yield from super().deliver(replace(ask, to=few), turn)
        all_asked = ask.step in MEASURING or len(ask.to) > len(few)
        asked = self.everyone if all_asked else self.cohort
        self.of_all += (sum(self.tasks) - before) * asked / max(1, len(few))

    def _in_process(self, task: Task, broadcast: bytes) -> codec.Tree:
        began, extrapolated = time.perf_counter(), self._meter.extrapolated
        done = super()._in_process(task, broadcast)
        self.tasks.append(time.perf_counter() - began + self._meter.extrapolated - extrapolated)
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


def _evaluation(
    recipe: Recipe, dataset: Dataset, method: Method, verdict: bool
) -> tuple[float, float]:
    """Seconds of one evaluation during training, and of the final one with all its probes."""
    encoder, settings = initial_encoder(method, dataset), recipe.evaluate
    evaluator = Evaluator(settings, dataset, method.views, recipe.seed, encoder)
    some = 64
    pace = _seconds(lambda: _features(encoder, evaluator, dataset.train, some)) / some
    some = int(min(1000, max(some, EVALUATED / pace)))
    parts = {name: _first(getattr(dataset, name), some) for name in ("train", "validation", "test")}
    few = replace(
        evaluator, data=replace(dataset, labelled=_first(dataset.labelled, some), **parts)
    )
    bank, queries = settings.bank, settings.queries
    one = _seconds(lambda: few.validate(encoder))
    whole = min(bank, len(dataset.train)) + min(queries, len(dataset.validation))
    sampled = min(bank, len(few.data.train)) + min(queries, len(few.data.validation))
    last = _seconds(lambda: few.test(encoder).figures) if verdict else 0.0
    counts = [sum(len(getattr(d, name)) for name in parts) for d in (dataset, few.data)]
    own = settings.clients if method.has_own_encoders else 1
    kinds = own + 1 + 2  # trained, untrained, and two kinds of raw pixels
    return one * whole / max(1, sampled), last * counts[0] / max(1, counts[1]) * kinds


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
