"""The rounds of a run on any engine: setup, training, validation, commits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from harmonium.core import codec, devices
from harmonium.core.callbacks import Callback
from harmonium.core.errors import BudgetSpent, ConfigError, NotEnoughReplies
from harmonium.core.progress import SETUP, work
from harmonium.core.types import ClientId, Weights
from harmonium.data.images import Dataset, Images
from harmonium.engines.unreliable import Unreliable
from harmonium.evaluation.evaluator import Evaluator, average
from harmonium.federation import global_objective
from harmonium.federation.contract import checked_encoder, checked_numbers
from harmonium.federation.driver import Driver, Engine, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.spending import charged, check_first, notes_on_noise, recount
from harmonium.federation.whitening import whitening_of
from harmonium.federation.wire import fault
from harmonium.privacy.account import Account
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import ASKED, Commit, RunFolder


class RunEngine(Engine, Protocol):
    """An engine with everything else that a run needs."""

    @property
    def is_remote(self) -> bool:
        """Whether clients can actually go offline and reconnect."""

    @property
    def shows_states(self) -> bool:
        """Whether the server can read what clients keep."""

    def state_of(self, client: ClientId) -> dict[str, Any]:
        """The state that a client keeps now, for personal evaluation."""

    def prune(self, *snapshots: codec.Tree) -> None:
        """Delete every version of a client's state that none of these snapshots refers to."""

    def joined(self, round: int) -> dict[ClientId, int]:
        """Clients that take part from this round on, with their numbers of examples."""

    def finish(
        self, model: Weights, statistics: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Hand the final model and the run's `results` to the clients."""


@dataclass(frozen=True)
class RunInputs:
    """What a run needs besides its recipe: the method, its clients, and the server's images."""

    method: Method
    examples: Mapping[ClientId, int]  # the registered number of every client
    dataset: Dataset | None  # to evaluate encoders with; none: the server has no images
    public: Images | None = None
    notes: tuple[str, ...] = ()


class Rounds:
    """The remaining rounds of one run, after its last committed round.

    Each round is trained, validated if that is due, and committed. A process that is killed loses
    at most its current round.
    """

    def __init__(
        self,
        folder: RunFolder,
        recipe: Recipe,
        watcher: Callback,
        inputs: RunInputs,
        engine: RunEngine,
        evaluator: Evaluator | None,
        *,
        simulate: bool = True,
    ) -> None:
        """Restore the last committed round of a run's folder.

        `simulate` drops out clients as `participation` says; without it, failures are real.
        """
        self.folder, self.recipe, self.watcher = folder, recipe, watcher
        self.inputs, self.method, self.engine = inputs, inputs.method, engine
        self.evaluator, self._simulates = evaluator, simulate and recipe.participation.unreliable
        self._commit = self._restore()
        self._account = self._accounted()
        self._driver = self._make_driver()

    def run(self) -> Server:
        """Run the remaining rounds, and return the server's final state."""
        examples, commit = self.inputs.examples, self._commit
        about: dict[str, Any] = {"public": self.inputs.public, "account": self._account}
        about["device"] = devices.current()
        server = Server(examples, self.method.blueprint.shared(), **about)
        self._announce_run(commit.round if commit else 0)
        if commit is None:
            server = self._set_up(server)
        else:
            server = Server(examples, **about, **commit.server)
        rows = self.folder.read_log("metrics.jsonl")
        stopped = rows[-1].get("stopped", "") if rows else ""
        for number in range(server.round + 1, self.recipe.rounds + 1):
            if stopped:
                break
            server, stopped = self._round(server, number)
        if all(row.get("failed") for row in self.folder.read_log("metrics.jsonl")[1:]):
            raise NotEnoughReplies(
                "no round had enough answers, so nothing was learned: see participation.* and why "
                f"clients were left out in {self.folder.path / 'ledger.jsonl'}"
            )
        return server

    def encoders(self, server: Server) -> list[nn.Module]:
        """The encoders to evaluate: that of the federation, or those of some clients.

        Where every client has its own, these are clients that took part; none where their states
        never leave their sites.
        """
        method, engine = self.method, self.engine
        if not method.has_own_encoders:
            return [checked_encoder(method.represent(server), method)]
        if not engine.shows_states:
            return []
        clients = sorted(engine.snapshot())[: self.recipe.evaluate.clients]
        states = [engine.state_of(client) for client in clients or [0]]
        return [checked_encoder(method.represent(server, state), method) for state in states]

    # ---- before the first round ----------------------------------------------------------------

    def _restore(self) -> Commit | None:
        """The last intact commit, with the logs and the clients' states as they were then."""
        engine = self.engine
        commit, faults = self.folder.newest_readable(with_states=engine.shows_states)
        for why in faults:
            self.watcher.note(f"{why}; continuing from the round before")
        self.folder.rewind(commit)
        engine.restore(commit.clients if commit else {})
        engine.prune(*self.folder.snapshots())
        return commit

    def _accounted(self) -> Account:
        """The privacy account, charged with every release that clients have made so far."""
        account = Account(self.recipe.privacy.epsilon, self.recipe.privacy.delta)
        releases = charged(self.folder.read_log("ledger.jsonl"), self.folder.read_log(ASKED))
        recount(account, self.method, self.inputs.examples, releases)
        return account

    def _make_driver(self) -> Driver:
        recipe, examples = self.recipe, self.inputs.examples
        engine: Engine = self.engine
        if self._simulates:
            engine = Unreliable(self.engine, recipe.participation, recipe.seed, examples)
        driver = Driver(
            self.method,
            engine,
            Ledger(),
            self._quorum(examples),
            self.watcher.task,
            masks=recipe.privacy.masks,
        )
        if recipe.privacy.noise == "system":
            driver.announce = self._log_asked
        return driver

    def _log_asked(self, turn: Turn, step: str, clients: Iterable[ClientId]) -> None:
        """Log who is asked for a noisy release, before anything is sent.

        A kill may lose the answers but not the fact that they may have left the clients. Simulated
        noise is the same when it is drawn again, so there the ledger is enough.
        """
        about = {"round": turn.round, "ask": turn.ask, "step": step}
        lines = [json.dumps({**about, "client": client}) for client in clients]
        self.folder.log(ASKED, lines, sync=True)

    def _announce_run(self, done: int) -> None:
        """Call the watcher's `begin`, then its `note` with remarks on the run."""
        recipe, method, inputs = self.recipe, self.method, self.inputs
        cohort_size = recipe.participation.asked(len(inputs.examples))
        self.watcher.begin(recipe, self.folder.path, done, cohort_size)
        notes = [*inputs.notes, *(self.evaluator.notes if self.evaluator else ()), *recipe.notes]
        notes += [note for term in method.terms if (note := term.note(method, cohort_size))]
        notes += [note] if (note := global_objective.note(method)) else []
        notes += notes_on_noise(method, self._account, recipe.privacy.noise, inputs.examples)
        for note in notes:
            self.watcher.note(note)

    def _set_up(self, server: Server) -> Server:
        """The setup, which is committed as round 0, with the figures at initialisation."""
        method, evaluator = self.method, self.evaluator
        check_first(method, self._account, self.inputs.examples)
        started = time.perf_counter()
        with work(SETUP):
            figures = evaluator.validate(evaluator.untrained) if evaluator else {}
            server, _ = self._train(server)
            server = self._driver.drive(method.begin(server, self._cohort(server)), server)
        figures = {**figures, **method.report(server)}
        if (overall := figures.get(global_objective.KEY, {}).get("value")) is not None:
            self.watcher.note(f"global objective at initialisation {overall:.3f}")
        return self._finish(server, started, figures)

    # ---- one round -----------------------------------------------------------------------------

    def _round(self, server: Server, number: int) -> tuple[Server, str]:
        """Run one round; also returns why the run stops after it, empty if it does not."""
        started = time.perf_counter()
        if new := self.engine.joined(number):
            server = replace(server, examples=dict(sorted({**server.examples, **new}.items())))
            self._driver.quorum = self._quorum(server.examples)
        server, marks = self._train(replace(server, round=number))
        if reason := fault(server.model):
            raise ConfigError(
                f"round {number}: the model diverged: {reason}. Lower server.lr or local.lr."
            )
        figures, stopped = dict(marks), marks.get("stopped", "")
        if self._is_evaluated(number, last=number if stopped else self.recipe.rounds):
            server, validation = self._validate(server)
            figures |= validation
            if not stopped and number < self.recipe.rounds and (why := self._ends(number, figures)):
                self.watcher.note(f"the run ends after round {number}: {why}")
                figures["stopped"] = stopped = why
        return self._finish(server, started, figures), stopped

    def _ends(self, number: int, figures: Mapping[str, Any]) -> str:
        """Why the run ends after this round by `stop`, empty if it goes on."""
        if self.recipe.stop.patience is None:
            return ""
        row = {"round": number, "reported": self._driver.reported, **figures}
        return self.recipe.stop.why([*self.folder.read_log("metrics.jsonl"), row])

    def _train(self, server: Server) -> tuple[Server, dict[str, Any]]:
        """Run the plan of a round; also returns marks for the log if it changes nothing.

        Where failures are simulated, a round with too few answers is part of the study. Where they
        are real, it is tried again, and finally the run stops and can be resumed. Fewer answers
        than the quorum are never averaged. The run ends before a round that the privacy budget
        does not allow.
        """
        recipe, engine, driver = self.recipe, self.engine, self._driver
        before = engine.snapshot()
        simulated = self._simulates and server.round > 0
        tries = recipe.engine.tries if engine.is_remote and not simulated else 1
        for left in reversed(range(tries)):
            try:
                plan = driver.method.run_plan(server, self._cohort(server))
                return driver.drive(plan, server), {}
            except BudgetSpent as error:
                if server.round <= 1:
                    raise BudgetSpent(f"{error}: nothing would be learned") from None
                engine.restore(before)
                driver.reported.clear()
                self.watcher.note(f"the run ends before round {server.round}: {error}")
                return server, {"stopped": str(error)}
            except NotEnoughReplies as error:
                engine.restore(before)  # discard the training of clients that answered
                driver.reported.clear()
                if simulated:
                    self.watcher.note(f"round {server.round} changes nothing. {error}")
                    return server, {"failed": True}
                if not left:
                    raise
                self.watcher.note(f"round {server.round} is tried again. {error}")
        raise AssertionError("unreachable")

    def _is_evaluated(self, number: int, last: int) -> bool:
        """Whether a round ends with an evaluation, by the server's images or by the clients."""
        method = self.method
        by_clients = method.measured or method.appraisal or method.measures_objective
        return self.recipe.evaluate.due(number, last) and bool(
            self.evaluator
            or by_clients
            or method.whitening
            or method.site_evaluation
            or number == last
        )

    def _validate(self, server: Server) -> tuple[Server, dict[str, Any]]:
        """The figures of a round's encoders, and the server with the measured statistics.

        The encoder is prepared first (BatchNorm statistics, whitening, clients' measurements).
        """
        method, evaluator = self.method, self.evaluator
        server = self._driver.drive(method.before_evaluation(server, self._cohort(server)), server)
        figures: dict[str, Any] = {}
        if evaluator is not None:
            encoders = self.encoders(server)
            with work("validation figures"):
                whitening = whitening_of(server.memory, self.recipe.evaluate.directions)
                each = [evaluator.validate(encoder, whitening) for encoder in encoders]
            figures = average(each) if each else {}
        return server, {**figures, **method.report(server)}

    def _quorum(self, examples: Mapping[ClientId, int]) -> int:
        """The fewest answers that a round of these clients needs."""
        return self.recipe.participation.least(min(self.recipe.training, len(examples)))

    def _cohort(self, server: Server) -> list[ClientId]:
        """The clients that are asked in a round."""
        recipe = self.recipe
        return recipe.participation.cohort(server.everyone, server.round, recipe.seed)

    def _finish(self, server: Server, started: float, figures: Mapping[str, Any]) -> Server:
        """Log and commit a round, and return the server as a resumed run would read it.

        Times have a log of their own, so that the metrics of two runs can be compared byte by byte.
        """
        folder, ledger = self.folder, self._driver.ledger
        row = self._row(server, figures)
        seconds = time.perf_counter() - started
        folder.log("metrics.jsonl", [json.dumps(row)])
        folder.log("ledger.jsonl", ledger.take())
        timing = {"round": server.round, "seconds": seconds, **devices.cache_key()}
        folder.log("timings.jsonl", [json.dumps(timing)])
        state = {key: getattr(server, key) for key in ("model", "round", "memory", "moments")}
        stored = folder.commit(server.round, state, self.engine.snapshot())
        self.engine.prune(*folder.snapshots())
        if server.round:
            self.watcher.round(row, seconds)
        return replace(server, **stored)

    def _row(self, server: Server, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a round in metrics.jsonl."""
        driver, ledger = self._driver, self._driver.ledger
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
        return row

    def _refused(self, server: Server) -> dict[str, list[ClientId]]:
        """Clients left out of each step because their budget is spent; noted the first time."""
        refused = {step: sorted(clients) for step, clients in server.account.refused.items()}
        server.account.refused.clear()
        rows = self.folder.read_log("metrics.jsonl") if refused else []
        for step, clients in refused.items():
            if not any(step in row.get("refused", ()) for row in rows):
                self.watcher.note(
                    f"{len(clients)} of {len(server.examples)} clients can afford no further "
                    f"`{step}` from round {server.round} on: "
                    f"privacy.epsilon={server.account.limit:g}. The run continues without it"
                )
        return refused
