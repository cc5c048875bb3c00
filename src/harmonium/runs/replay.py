"""All rounds of a run without its training: every message, from the answers of a few tasks.

The method's own plans ask the cohorts that a run would ask, and each client answers what one of the
measured clients did. So bytes, drop-outs, refused releases and what the server keeps are those of
the run, as far as sizes of messages do not depend on a client's images.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch

from harmonium.core import codec, devices
from harmonium.core.errors import BudgetSpent, NotEnoughReplies
from harmonium.core.types import ClientId
from harmonium.data.images import Images
from harmonium.engines.unreliable import Unreliable
from harmonium.federation import spending
from harmonium.federation.driver import Driver, Engine, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.secure_aggregation.client import traffic
from harmonium.federation.wire import MASKS, STEPS, Ask, Field, changes_model, is_measuring
from harmonium.learning.client import abridged
from harmonium.privacy.account import Account
from harmonium.privacy.library import together
from harmonium.recipe.schema import Recipe

PATIENCE = 2.0  # seconds after which the remaining rounds are taken to be like those before
LEAST = 3  # rounds that are replayed whatever they take, the setup included
ASKED_LINE = 60  # bytes of a line of asked.jsonl, about

WAYS = ("down", "up", "measuring")

Answers = Mapping[str, Sequence[Mapping[ClientId, Mapping[str, Any]]]]
"""By step: for the first, second ... time that clients were asked, what each sent."""


@dataclass(frozen=True)
class Traffic:
    """Bytes between the server and the clients of a run, as its ledger will count them."""

    down: int  # in all
    up: int
    measuring: int  # in both directions, to measure the model; counted apart from the above
    client_down: int  # the mean over clients, of the whole run
    client_up: int
    round_down: int  # the mean over the clients asked, of a round after the first
    round_up: int
    exact: bool  # whether nothing was extrapolated and no size depends on the images


@dataclass(frozen=True)
class Spending:
    """What the noisy releases of clients will amount to."""

    worst: float  # epsilon of the client with the largest
    median: float
    delta: float
    budget: float | None
    neighbours: str  # between which epsilon holds
    clients: int  # that release anything
    refused: Mapping[str, tuple[int, int]]  # step -> clients left out of it, and since which round
    ends: int | None  # the round before which the run ends, because nobody can pay for it


@dataclass(frozen=True)
class Replay:
    """What a replay has found out."""

    traffic: Traffic
    spending: Spending | None  # none: nothing is released with noise
    rounds: int  # that were replayed, without the setup
    last: int  # the round that the run ends with
    failed: int  # of them, rounds with too few answers
    failure: str  # why the first of these failed
    server: int  # bytes of the server's state at the end
    ledger: int  # bytes of the ledger's lines and those of asks for noisy releases
    asked: int  # clients that are asked at least once


@dataclass
class _Row:
    """The bytes of a round's training, or of the asks before an evaluation."""

    sent: Counter[str] = field(default_factory=Counter)  # down, up, measuring
    ledger: int = 0
    refused: bool = False  # an answer did not pass the checks of a client with fewer images

    @property
    def key(self) -> tuple[int, ...]:
        """What two rows of the same bytes have in common."""
        return tuple(self.sent[way] for way in WAYS)


class _Recorded:
    """An engine whose clients answer what measured clients sent."""

    def __init__(self, method: Method, examples: Mapping[ClientId, int], answers: Answers) -> None:
        self._method, self._examples, self._answers = method, examples, answers
        self._times = Counter[tuple[str, ClientId]]()

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Copies of what was recorded of the step's first time, or of the last."""
        known = self._answers[ask.step]
        for client in ask.to:
            times = self._times[ask.step, client]
            self._times[ask.step, client] += 1
            sent = known[min(times, len(known) - 1)]
            yield copied(self._method, ask.step, client, self._examples, sent)

    def accept(self, reply: Reply) -> None:
        """Clients keep nothing."""

    def snapshot(self) -> codec.Tree:
        """There are no states."""
        return {}

    def restore(self, snapshot: codec.Tree) -> None:
        """There are no states."""


def copied(
    method: Method,
    step: str,
    client: ClientId,
    examples: Mapping[ClientId, int],
    sent: Mapping[ClientId, Mapping[str, Any]],
) -> Reply:
    """The reply of a client that answers what another one sent.

    Args:
        method: whose step it is.
        step: that the client was asked for.
        client: its number.
        examples: of all clients.
        sent: the measured answers, of which that of the client most like it is taken.
    """
    count, declared = examples[client], method.exchanges()[step]
    if not sent or (changes_model(declared) and not method.local.steps(count)):
        return Reply(client, None, "too few examples for one step")
    near = min(sent, key=lambda one: abs(examples[one] - count))
    paid = spending.records(spending.paid_here(method, step, count))
    return Reply(client, sent[near], releases=tuple(paid))


class _Rounds:
    """The rounds of a run, as `runs.rounds` drives them."""

    def __init__(
        self,
        recipe: Recipe,
        method: Method,
        examples: Mapping[ClientId, int],
        answers: Answers,
        delta: float,
    ) -> None:
        self.recipe, self.method, self.examples = recipe, method, examples
        self.answers = answers
        self.account = Account(recipe.privacy.epsilon, delta)
        engine: Engine = _Recorded(method, examples, answers)
        if recipe.participation.unreliable:
            engine = Unreliable(engine, recipe.participation, recipe.seed, examples)
        quorum = recipe.participation.least(len(examples))
        self.driver = Driver(method, engine, Ledger(), quorum)
        self.rows: list[_Row] = []  # of the setup and of rounds
        self.evaluations: list[_Row] = []  # the first at initialisation
        self.refused: dict[str, tuple[set[ClientId], int]] = {}
        self.failed, self.failure = 0, ""
        self.ends: int | None = None

    def run(self, public: Images | None) -> Server:
        """Replay rounds while there is time, and return the server as it is then."""
        shared, began = self.method.blueprint.shared(), time.perf_counter()
        server = Server(
            self.examples, shared, public=public, account=self.account, device=devices.current()
        )
        spending.check_first(self.method, self.account, self.examples)
        with abridged(lambda batches: batches >= 1):
            for number in range(self.recipe.rounds + 1):
                late = time.perf_counter() - began > PATIENCE
                if self.ends is not None or (late and number >= LEAST):
                    break
                server = self._round(replace(server, round=number))
        return server

    def _round(self, server: Server) -> Server:
        number, driver = server.round, self.driver
        cohort = self.recipe.participation.cohort(server.everyone, number, self.recipe.seed)
        try:
            server = driver.drive(self.method.run_plan(server, cohort), server)
        except BudgetSpent as error:
            if number <= 1:
                raise BudgetSpent(f"{error}: nothing would be learned") from None
            self.ends = number
        except NotEnoughReplies as error:
            self.failed += 1
            self.failure = self.failure or str(error)
        self.rows.append(self._row(driver.ledger.take()))
        plan = self.method.begin if number == 0 else self.method.before_evaluation
        if number == 0 or (self.recipe.evaluate.due(number, self.recipe.rounds) and not self.ends):
            server = driver.drive(plan(server, cohort), server)
            self.evaluations.append(self._row(driver.ledger.take()))
        for step, clients in self.account.refused.items():
            before, since = self.refused.get(step, (set(), number))
            self.refused[step] = (before | clients, since)
        self.account.refused.clear()
        driver.reported.clear()
        return server

    def _row(self, lines: Sequence[str]) -> _Row:
        """The bytes that lines of the ledger have."""
        row, groups = _Row(), dict[tuple[int, str], list[dict[str, Any]]]()
        for line in lines:
            entry = json.loads(line)
            groups.setdefault((entry["ask"], entry["step"]), []).append(entry)
            row.ledger += len(line) + 1
            row.refused |= entry["outcome"] == "refused"
            releases = bool(entry.get("releases"))
            row.ledger += ASKED_LINE * (releases and self.recipe.privacy.noise == "system")
        if self.recipe.privacy.masks is not None:
            row.ledger *= 3  # a line for each ask around it, which are shorter
        for (_, step), entries in groups.items():
            down = sum(sum(entry.get("down", {}).values()) for entry in entries)
            up = sum(sum(entry.get("up", {}).values()) for entry in entries)
            if self.recipe.privacy.masks is not None and self.method.exchanges()[step].up:
                down, up = self._masked(step, entries, down)
            if is_measuring(step, entries[0]["round"]):
                row.sent["measuring"] += down + up
            else:
                row.sent += Counter(down=down, up=up)
        return row

    def _masked(
        self, step: str, entries: Sequence[Mapping[str, Any]], down: int
    ) -> tuple[int, int]:
        """Bytes of an ask under secure aggregation, with the asks around it, if all stay."""
        extra, count = traffic(len(entries)), len(entries)
        sample = next(iter(self.answers[step][-1].values()))
        # Masks take the place of rounding, and every number becomes a whole one of 8 bytes.
        around = {way: sum(extra[one][way] for one in (*STEPS, MASKS)) for way in ("down", "up")}
        return down + count * around["down"], count * (around["up"] + _numbers(sample) * 8)


def replay(
    recipe: Recipe,
    method: Method,
    examples: Mapping[ClientId, int],
    answers: Answers,
    *,
    public: Images | None = None,
    delta: float,
) -> Replay:
    """Replay the rounds of a run; raises BudgetSpent where it could not train one round.

    Args:
        recipe: of the run.
        method: as the recipe makes it.
        examples: the number of images of every client that trains.
        answers: what measured clients sent.
        public: the public images.
        delta: at which epsilon is counted.
    """
    rounds = _Rounds(recipe, method, examples, answers, delta)
    server = rounds.run(public)
    last = recipe.rounds if rounds.ends is None else rounds.ends - 1
    left = range(len(rounds.rows), last + 1)
    due = [number for number in left if recipe.evaluate.due(number, recipe.rounds)]
    whole = rounds.rows if rounds.ends is None else rounds.rows[:-1]  # the last was cut short
    every, steady = [*rounds.rows, *rounds.evaluations], whole[2:] or whole[1:]
    more = [(steady, len(left)), (rounds.evaluations[1:], len(due))]
    total = {way: sum(row.sent[way] for row in every) for way in WAYS}
    ledger = float(sum(row.ledger for row in every))
    for rows, count in more:
        for way in WAYS if rows else ():
            total[way] += round(count * fmean(row.sent[way] for row in rows))
        ledger += count * fmean(row.ledger for row in rows) if rows else 0
    alike = all(len({row.key for row in rows}) <= 1 for rows, count in more if count)
    certain = not left or (alike and not recipe.participation.unreliable)
    cohort = recipe.participation.asked(len(examples))
    state = {key: getattr(server, key) for key in ("model", "round", "memory", "moments")}
    return Replay(
        Traffic(
            **total,
            client_down=round(total["down"] / len(examples)),
            client_up=round(total["up"] / len(examples)),
            round_down=round(fmean(row.sent["down"] for row in steady) / cohort),
            round_up=round(fmean(row.sent["up"] for row in steady) / cohort),
            exact=certain and not any(row.refused for row in every) and _is_fixed(method),
        ),
        _spending(rounds, left),
        len(rounds.rows) - 1,
        last,
        rounds.failed,
        rounds.failure,
        len(codec.encode(state)),
        round(ledger),
        len(_ever_asked(recipe, examples)),
    )


def _ever_asked(recipe: Recipe, examples: Mapping[ClientId, int]) -> set[ClientId]:
    """The clients that some cohort of the run has."""
    everyone, asked = sorted(examples), set[ClientId]()
    for number in range(recipe.rounds + 1):
        asked.update(recipe.participation.cohort(everyone, number, recipe.seed))
        if len(asked) == len(everyone):
            break
    return asked


def _spending(rounds: _Rounds, left: range) -> Spending | None:
    """Epsilon of all clients, those of the rounds left included, as the last round had them."""
    method, account, recipe = rounds.method, rounds.account, rounds.recipe
    most = max(1, *rounds.examples.values())
    paying = [step for step in method.exchanges() if spending.costs(method, step, most)]
    records = [
        one for step in paying for one in spending.records(spending.costs(method, step, most))
    ]
    everyone, began = sorted(rounds.examples), time.perf_counter()
    for number in left:
        for client in recipe.participation.cohort(everyone, number, recipe.seed):
            for step in paying:
                more = spending.costs(method, step, rounds.examples[client])
                if account.affords(client, more):
                    account.charge(client, more)
        if time.perf_counter() - began > PATIENCE and account.limit is not None:
            break
    epsilons = [spent for client in everyone if (spent := account.spent(client))]
    if not epsilons:
        return None
    return Spending(
        max(epsilons),
        median(epsilons),
        account.delta,
        account.limit,
        together(records),
        len(epsilons),
        {step: (len(clients), since) for step, (clients, since) in rounds.refused.items()},
        rounds.ends,
    )


def _is_fixed(method: Method) -> bool:
    """Whether the size of everything that clients send follows from the settings."""
    sent = [field for one in method.exchanges().values() for field in one.up.values()]
    return all(_has_one_size(method, field) for field in sent)


def _has_one_size(method: Method, declared: Field) -> bool:
    if declared.fold == "parts" or declared.kind == "scalar":
        return True
    if declared.shape is None:
        return False
    sizes = declared.shape(method, 1000)
    return not any(isinstance(size, range) for size in sizes) and sizes == declared.shape(method, 2)


def _numbers(tree: codec.Tree) -> int:
    """How many numbers a value has."""
    if isinstance(tree, torch.Tensor):
        return tree.numel()
    if isinstance(tree, Mapping):
        return sum(map(_numbers, tree.values()))
    return sum(map(_numbers, tree)) if isinstance(tree, list | tuple) else 1
