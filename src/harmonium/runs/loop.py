"""The life of a run on any engine: rounds, evaluations, commits, the verdict."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from harmonium.core import codec, files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import BudgetSpent, ConfigError, NotEnoughReplies, StoreError
from harmonium.core.progress import SETUP, work
from harmonium.core.threads import single_thread
from harmonium.core.types import ClientId, Weights
from harmonium.data.images import Dataset, Images
from harmonium.engines.unreliable import Unreliable
from harmonium.evaluation.evaluator import Evaluator, average, figures_of
from harmonium.evaluation.references import GIVEN, references, validation_levels
from harmonium.evaluation.verdict import changes, reasons, verdict
from harmonium.federation.batch_norm import measure
from harmonium.federation.contract import checked_encoder, checked_numbers
from harmonium.federation.driver import Driver, Engine, Turn
from harmonium.federation.global_objective import KEY as GLOBAL_OBJECTIVE
from harmonium.federation.global_objective import note as note_on_objective
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.spending import charged, check_first, notes_on_noise, recount
from harmonium.federation.whitening import whitening_of
from harmonium.federation.wire import fault
from harmonium.privacy.account import Account
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import save_encoder
from harmonium.runs.extend import told as further
from harmonium.runs.open_run import check_recipe, read_about
from harmonium.storage.run_folder import ASKED, ENCODER, RESULT, Commit, RunFolder


class RunEngine(Engine, Protocol):
    """An engine with what a run needs beside asks."""

    @property
    def is_remote(self) -> bool:
        """Whether clients may be away for real, and come back."""

    @property
    def shows_states(self) -> bool:
        """Whether the server can read what clients keep."""

    def state_of(self, client: ClientId) -> dict[str, Any]:
        """What a client keeps now, for personal evaluation."""

    def prune(self, *snapshots: codec.Tree) -> None:
        """Every version of a state that none of these snapshots needs may go."""

    def joined(self, round: int) -> dict[ClientId, int]:
        """Clients that take part from a round on and did not before, with their examples."""

    def finish(
        self, model: Weights, statistics: Mapping[str, Any], told: Mapping[str, Any]
    ) -> None:
        """The run is over: clients may take the model home, with what is `told` of the run."""


@dataclass(frozen=True)
class Result:
    """What a finished run has to show.

    `print(result.summary())` is a run in a few lines, and a notebook shows a table. `metrics` has
    one flat row a round, `plot` draws them, `load_encoder(result.folder)` is the encoder.
    """

    folder: Path
    recipe: Recipe
    figures: Mapping[str, Any]  # of the final encoder, on the test part
    untrained: Mapping[str, Any]  # of the encoder as first drawn, on the same
    rounds: tuple[Mapping[str, Any], ...] = field(repr=False)  # the lines of metrics.jsonl
    notes: tuple[str, ...] = ()  # on the data, e.g. files that were left out
    batch_norm: str = ""  # what became of BatchNorm; empty where there is none
    references: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """Figures by the same probes of the commonest class, raw pixels and whitened pixels."""
    against: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """How the encoder stands against them: `text`, `reasons`, and `probes` with every margin."""
    whitened: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """With `evaluate.whiten`: `figures` of whitened features, and what `changes` by probe."""
    levels: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The validation kNN of the same references, beside which `metrics` has that of rounds."""

    @property
    def verdict(self) -> str:
        """Whether the encoder beats its references, in one sentence; empty without labels."""
        return str(self.against.get("text", ""))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is probably no better, where it is not, by figures that need no labels."""
        return tuple(self.against.get("reasons", ()))

    @property
    def stopped(self) -> str:
        """Why the run ended before its last round; empty if it did not."""
        return self.rounds[-1].get("stopped", "") if self.rounds else ""

    @property
    def bounds(self) -> Mapping[str, Any]:
        """Bounds of mutual information at the end, of a run with user verification; else empty."""
        return self.rounds[-1].get("bounds", {}) if self.rounds else {}

    @property
    def global_objective(self) -> Mapping[str, Any]:
        """The loss over all clients' images at the end, where it was measured; else empty.

        `value` is it, `local` the mean over clients of the same loss on their own images,
        `by_client` each of them, `gradient_norm` the norm of its gradient with respect to the
        model. Of InfoNCE with user verification it is the bound of all clients, as a loss.
        """
        return self.rounds[-1].get(GLOBAL_OBJECTIVE, {}) if self.rounds else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One flat row for each round: loss, traffic, and figures where the round was evaluated.

        Nested figures have dotted names, such as `health.spread`.
        """
        from harmonium.report.results import tidy

        return [tidy(row) for row in self.rounds]

    def to_pandas(self) -> Any:
        """`metrics` as a pandas table; pandas is not installed with Harmonium."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError(
                "to_pandas needs pandas, which is not installed: pip install pandas"
            ) from None
        return pandas.DataFrame(self.metrics)

    def plot(self, path: str | Path | None = None) -> Path:
        """Draw loss and figures over rounds, and return the file.

        Args:
            path: where to, by its ending PNG, PDF or SVG; `run.png` in the run's folder if
                left out.
        """
        place = Path(path) if path is not None else self.folder / "run.png"
        _draw(place, self.recipe, self.rounds, self.levels)
        return place

    def summary(self) -> str:
        """A few lines of text: figures beside those at initialisation, warnings, notes."""
        from harmonium.report.results import summary

        return summary(self)

    def __repr__(self) -> str:
        from harmonium.report.results import line

        return line(self)

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        from harmonium.report.results import html

        return html(self)


@dataclass(frozen=True)
class Ground:
    """What a run stands on: the method, who takes part, and what the server can judge with."""

    method: Method
    examples: Mapping[ClientId, int]  # registered number of every client
    dataset: Dataset | None  # to judge with; none: the server has no images
    public: Images | None = None
    notes: tuple[str, ...] = ()


def local_steps(method: Method, examples: Iterable[int], rounds: int) -> float:
    """How many steps the model goes through at clients, one after another, over all rounds."""
    counts = list(examples)
    batches = math.ceil(sum(counts) / max(1, len(counts)) / method.local.batch)
    return rounds * method.local.epochs * method.workload * batches


def as_drawn(method: Method, dataset: Dataset) -> nn.Module:
    """The encoder at initialisation; statistics of its BatchNorms fit the images, to be fair.

    Given weights have no part in it.
    """
    method = method if method.initial is None else replace(method, initial=None)
    encoder = method.blueprint.copy_from().eval()["encoder"]
    pixels = torch.from_numpy(
        np.array(dataset.train.batch(np.arange(min(512, len(dataset.train)))))
    )
    with single_thread():
        measure(encoder, [method.views.plain(pixels)])
    return encoder


def _planned_shape(recipe: Recipe, method: Method) -> tuple[int, int, int]:
    """Of the images at sites: a plan names the size to which every site brings its own."""
    side = recipe.data.size or method.world.side
    return side, side, method.world.channels


def _draw(
    path: Path,
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    levels: Mapping[str, float],
) -> None:
    """The plot of a run: loss and figures over rounds, and the validation kNN of references."""
    from harmonium.report.plots import plot_run

    title = f"{recipe.method.name} on {recipe.data.name}, seed {recipe.seed}"
    plot_run(path, rows, title, levels)


class RunLoop:
    """One process's work on a run."""

    def __init__(self, folder: Path, recipe: Recipe, watcher: Callback) -> None:
        self.folder, self.recipe, self.watcher = RunFolder(folder), recipe, watcher
        self.path = folder
        self._levels: dict[str, float] = {}

    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        if not (self.path / RESULT).exists():
            return False
        try:
            self.folder.newest(with_states=not read_about(self.path)["federation"])
            for name in (ENCODER, RESULT):
                self.folder.check(name, "it is made again")
            self._read_result()
        except StoreError as error:
            self.watcher.note(str(error))
            return False
        self.watcher.note(f"{self.path} is complete already")
        return True

    def play(self, ground: Ground, engine: RunEngine, *, simulate: bool = True) -> Result:
        """All rounds that are left, on any engine, then the verdict."""
        recipe, path, method, dataset = self.recipe, self.path, ground.method, ground.dataset
        check_recipe(path)
        if "files" not in self.folder.about():
            self.watcher.note(
                f"{path} was begun by an earlier version, which kept no digests of its files: "
                "damage to them may go unnoticed"
            )
        judge = None
        if dataset is not None:
            first = as_drawn(method, dataset)
            warns = not method.reads_labels
            judge = Evaluator(recipe.evaluate, dataset, method.views, recipe.seed, first, warns)
        server = self._rounds(ground, engine, judge, simulate)
        shown: dict[str, Any] = {"figures": {}, "untrained": {}}
        white = whitening_of(server.memory, recipe.evaluate.directions)
        if judge is not None:
            self.watcher.note("evaluating the final encoder on the test part")
            encoders = self._encoders(method, server, engine)
            with work("test figures"):
                shown = self._judged(judge, encoders, ground, white)
            self._levels = shown.get("levels", {})
        ends: dict[str, str] = {}
        if not method.has_own_encoders:
            name = dataset.name if dataset else recipe.data.name
            encoder = method.represent(server)
            shape = dataset.train.shape if dataset else _planned_shape(recipe, method)
            ends[ENCODER] = save_encoder(
                path / ENCODER, encoder, recipe, method, name, shape, white
            )
        told = {"round": server.round, **shown, "metrics": self.folder.read_log("metrics.jsonl")}
        engine.finish(server.model, server.memory.get("statistics", {}), told)
        with work("drawing run.png"):
            self._plot()
        shutil.rmtree(path / "scratch", ignore_errors=True)
        text = json.dumps(shown, indent=1).encode()
        self._seal({**ends, RESULT: files.digest_of(text)})
        files.write_atomic(path / RESULT, text)
        return self.result()

    def _seal(self, ends: Mapping[str, str]) -> None:
        """Write down the digests of the files that a run ends with, before the last of them."""
        about = self.folder.about()
        if "files" in about:  # else of an earlier version
            self.folder.tell({**about, "files": {**about["files"], **ends}})

    def _read_result(self) -> dict[str, Any]:
        with files.reading(self.path / RESULT, self.folder.again):
            held: dict[str, Any] = json.loads((self.path / RESULT).read_bytes())
            return {**held, "figures": held["figures"], "untrained": held["untrained"]}

    def _judged(
        self,
        judge: Evaluator,
        encoders: Sequence[nn.Module],
        ground: Ground,
        white: nn.Module | None = None,
    ) -> dict[str, Any]:
        """The figures of final encoders, of what they stand beside, and how they compare."""
        tests = [judge.tested(encoder) for encoder in encoders]
        before = judge.tested(judge.untrained)
        figures = average([one.figures for one in tests]) if tests else {}
        shown: dict[str, Any] = {"figures": figures, "untrained": before.figures}
        if ground.method.train is None:  # nothing was to be learnt
            return shown
        beside = references(judge)
        if beside and ground.method.initial is not None:
            given = ground.method.blueprint.copy_from().eval()["encoder"]
            beside[GIVEN] = judge.tested(given).answers
        shown["references"] = {name: figures_of(one) for name, one in beside.items()}
        shown["levels"] = validation_levels(judge)
        losses = [row.get("loss") for row in self.folder.read_log("metrics.jsonl")]
        steps = local_steps(ground.method, ground.examples.values(), len(losses) - 1)
        compares = ground.method.objective.views[0] > 1
        why = reasons(figures.get("health", {}), losses, steps, compares_views=compares)
        answers = [one.answers for one in tests]
        if found := verdict(answers, {**beside, "untrained": before.answers}, why):
            shown["verdict"] = found.plain()
        if white is not None and judge.has_labels and all(answers):
            made = judge.answers(nn.Sequential(encoders[0], white))
            if made is not None:
                changed = changes(answers[0], made)
                shown["whitened"] = {"figures": figures_of(made), "changes": changed}
        return shown

    def _rounds(
        self, ground: Ground, engine: RunEngine, judge: Evaluator | None, simulate: bool
    ) -> Server:
        """From the last committed round to the last of all."""
        recipe, watcher, method = self.recipe, self.watcher, ground.method
        commit = self._restore(engine)
        asked: Engine = engine
        if simulate and recipe.participation.unreliable:
            asked = Unreliable(engine, recipe.participation, recipe.seed, ground.examples)
        account = Account(recipe.privacy.epsilon, recipe.privacy.delta)
        made = charged(self.folder.read_log("ledger.jsonl"), self.folder.read_log(ASKED))
        recount(account, method, ground.examples, made)
        driver = Driver(
            method,
            asked,
            Ledger(),
            self._quorum(ground.examples),
            watcher.task,
            masks=recipe.privacy.masks,
        )
        if recipe.privacy.noise == "system":
            driver.announce = self._announce
        known: dict[str, Any] = {"public": ground.public, "account": account}
        server = Server(ground.examples, method.blueprint.shared(), **known)
        cohort_size = recipe.participation.asked(len(ground.examples))
        watcher.begin(recipe, self.path, commit.round if commit else 0, cohort_size)
        warned = [*recipe.notes]
        warned += [note for term in method.terms if (note := term.note(method, cohort_size))]
        warned += [note] if (note := note_on_objective(method)) else []
        warned += notes_on_noise(method, account, recipe.privacy.noise, ground.examples)
        for note in (*ground.notes, *(judge.notes if judge else ()), *warned):
            watcher.note(note)
        if commit is None:
            check_first(method, account, ground.examples)
            started = time.perf_counter()
            with work(SETUP):
                figures = judge.look(judge.untrained) if judge else {}
                server, _ = self._try(driver, engine, server, simulate)
                server = driver.drive(method.begin(server, self._cohort(server)), server)
            figures = {**figures, **method.report(server)}
            if (overall := figures.get(GLOBAL_OBJECTIVE, {}).get("value")) is not None:
                watcher.note(f"global objective at initialisation {overall:.3f}")
            server = self._finish(server, driver, engine, started, figures)
        else:
            server = Server(ground.examples, **known, **commit.server)
        rows = self.folder.read_log("metrics.jsonl")
        stopped = rows[-1].get("stopped", "") if rows else ""
        for number in range(server.round + 1, recipe.rounds + 1):
            if stopped:
                break
            started = time.perf_counter()
            if new := engine.joined(number):
                server = replace(server, examples=dict(sorted({**server.examples, **new}.items())))
                driver.quorum = self._quorum(server.examples)
            server, marks = self._try(driver, engine, replace(server, round=number), simulate)
            stopped = marks.get("stopped", "")
            if reason := fault(server.model):
                raise ConfigError(
                    f"round {number}: the model broke: {reason}. Lower server.lr or local.lr."
                )
            figures, last = dict(marks), number if stopped else recipe.rounds
            due = recipe.evaluate.due(number, last)
            asks = method.measured or method.appraisal or method.measures_objective
            if due and (judge or asks or method.whitening or number == last):
                server = driver.drive(method.settle(server, self._cohort(server)), server)
                encoders = self._encoders(method, server, engine) if judge else []
                with work("validation figures"):
                    white = whitening_of(server.memory, recipe.evaluate.directions)
                    looks = [judge.look(encoder, white) for encoder in encoders] if judge else []
                figures |= {**(average(looks) if looks else {}), **method.report(server)}
            server = self._finish(server, driver, engine, started, figures)
        if all(row.get("failed") for row in self.folder.read_log("metrics.jsonl")[1:]):
            raise NotEnoughReplies(
                "no round had enough answers, so nothing was learned: see participation.* and why "
                f"clients were left out in {self.path / 'ledger.jsonl'}"
            )
        return server

    def _announce(self, turn: Turn, step: str, clients: Iterable[ClientId]) -> None:
        """Write down who is asked for a noisy release, before anything is sent.

        A kill may lose the answers but not the fact that they may have left the clients. Simulated
        noise is the same when it is drawn again, so there the ledger is enough.
        """
        about = {"round": turn.round, "ask": turn.ask, "step": step}
        lines = [json.dumps({**about, "client": client}) for client in clients]
        self.folder.log(ASKED, lines, sync=True)

    def _quorum(self, examples: Mapping[ClientId, int]) -> int:
        """The fewest answers that a round of these clients needs."""
        return self.recipe.participation.least(min(self.recipe.training, len(examples)))

    def _cohort(self, server: Server) -> list[ClientId]:
        recipe = self.recipe
        return recipe.participation.cohort(server.everyone, server.round, recipe.seed)

    def _try(
        self, driver: Driver, engine: RunEngine, server: Server, simulate: bool
    ) -> tuple[Server, dict[str, Any]]:
        """Play one round; why it changes nothing, if it does not, as its line in the log says it.

        Where failures are simulated, a round with too few answers is part of the study. Where they
        are real, it is tried again, and in the end the run stops and can be resumed: never is the
        average taken of fewer answers than the quorum. A round that the privacy budget forbids is
        the last one.
        """
        recipe, held = self.recipe, engine.snapshot()
        simulated = simulate and recipe.participation.unreliable and server.round > 0
        tries = recipe.engine.tries if engine.is_remote and not simulated else 1
        for left in reversed(range(tries)):
            try:
                plan = driver.method.play(server, self._cohort(server))
                return driver.drive(plan, server), {}
            except BudgetSpent as error:
                if server.round <= 1:
                    raise BudgetSpent(f"{error}: nothing would be learned") from None
                engine.restore(held)
                driver.reported.clear()
                self.watcher.note(f"the run ends before round {server.round}: {error}")
                return server, {"stopped": str(error)}
            except NotEnoughReplies as error:
                engine.restore(held)  # who had answered already trained for nothing
                driver.reported.clear()
                if simulated:
                    self.watcher.note(f"round {server.round} changes nothing. {error}")
                    return server, {"failed": True}
                if not left:
                    raise
                self.watcher.note(f"round {server.round} is tried again. {error}")
        raise AssertionError("unreachable")

    def _restore(self, engine: RunEngine) -> Commit | None:
        commit, faults = self.folder.last(with_states=engine.shows_states)
        for why in faults:
            self.watcher.note(f"{why}; continuing from the round before")
        self.folder.rewind(commit)
        engine.restore(commit.clients if commit else {})
        engine.prune(*self.folder.snapshots())
        return commit

    def _finish(
        self,
        server: Server,
        driver: Driver,
        engine: RunEngine,
        started: float,
        figures: Mapping[str, Any],
    ) -> Server:
        """Log and commit a round, tell of it, and go on with what a resumed run would go on with.

        Times have a log of their own, so that those of two runs can be compared to the byte.
        """
        ledger, folder = driver.ledger, self.folder
        means = driver.reported | checked_numbers(driver.method.noted(server), driver.method)
        driver.reported.clear()
        row: dict[str, Any] = {
            "round": server.round,
            "loss": means.pop("loss", None),
            **({"reported": means} if means else {}),
            "answered": len(ledger.answered),
            "missing": len(ledger.missing - ledger.answered),
            "bytes_down": ledger.totals["down"],
            "bytes_up": ledger.totals["up"],
            **({"bytes_measuring": spent} if (spent := ledger.totals["measuring"]) else {}),
            **figures,
        }
        if refused := self._refused(server):
            row["refused"] = refused
        seconds = time.perf_counter() - started
        folder.log("metrics.jsonl", [json.dumps(row)])
        folder.log("ledger.jsonl", ledger.take())
        folder.log("timings.jsonl", [json.dumps({"round": server.round, "seconds": seconds})])
        kept = {key: getattr(server, key) for key in ("model", "round", "memory", "moments")}
        stored = folder.commit(server.round, kept, engine.snapshot())
        engine.prune(*folder.snapshots())
        if server.round:
            self.watcher.round(row, seconds)
        return replace(server, **stored)

    def _refused(self, server: Server) -> dict[str, list[ClientId]]:
        """Who was left out of which step for want of budget; the first time, it is noted."""
        refused = {step: sorted(some) for step, some in server.account.refused.items()}
        server.account.refused.clear()
        rows = self.folder.read_log("metrics.jsonl") if refused else []
        for step, some in refused.items():
            if not any(step in row.get("refused", ()) for row in rows):
                self.watcher.note(
                    f"{len(some)} of {len(server.examples)} clients can afford no further `{step}` "
                    f"from round {server.round} on: privacy.epsilon={server.account.limit:g}. The "
                    "run goes on without it"
                )
        return refused

    def _encoders(self, method: Method, server: Server, engine: RunEngine) -> list[nn.Module]:
        """What to judge: the federation's encoder, or those of some clients that took part.

        None where clients have encoders of their own that never leave their sites.
        """
        if not method.has_own_encoders:
            return [checked_encoder(method.represent(server), method)]
        if not engine.shows_states:
            return []
        clients = sorted(engine.snapshot())[: self.recipe.evaluate.clients]
        states = [engine.state_of(client) for client in clients or [0]]
        return [checked_encoder(method.represent(server, one), method) for one in states]

    def _plot(self) -> None:
        rows = self.folder.read_log("metrics.jsonl")
        _draw(self.path / "run.png", self.recipe, rows, self._levels)

    def result(self) -> Result:
        """What a complete run has to show."""
        held = self._read_result()
        rounds = tuple(self.folder.read_log("metrics.jsonl"))
        about = read_about(self.path)
        result = Result(
            self.path,
            self.recipe,
            held["figures"],
            held["untrained"],
            rounds,
            (*about["notes"], *further(about["history"])),
            about["batch_norm"],
            held.get("references", {}),  # runs of earlier versions have none
            held.get("verdict", {}),
            held.get("whitened", {}),
            held.get("levels", {}),
        )
        self.watcher.end(result)
        return result
