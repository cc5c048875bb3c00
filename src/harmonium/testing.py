"""The contract that every method must pass, built in or yours.

    from harmonium.testing import check_method
    check_method("mypackage.mymethod:MyMethod")

Each check runs the method for two rounds on a few procedural images with a tiny encoder; all checks
take some seconds. A violation raises `ContractError`, which says what to change.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core import codec, files
from harmonium.core.errors import HarmoniumError
from harmonium.data.images import Dataset, Images
from harmonium.data.partition import Split, make_split
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.card import card
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.spending import recount
from harmonium.federation.wire import MASKS, STEPS, Ask, Exchange, Field
from harmonium.privacy.account import Account
from harmonium.recipe.presets import load_tree
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import load_public, make_runtime

if TYPE_CHECKING:
    from harmonium.sites.flower_pair import FlowerPair

TINY: dict[str, Any] = {
    "data": {"name": "shapes", "count": 60, "test_count": 10, "size": 12, "validation": 0.2},
    "encoder": {"name": "cnn-small", "width": 4, "out": 16},
    "split": {"name": "dirichlet", "alpha": 1.0},
    "local": {"epochs": 1, "batch": 6},
    "clients": 4,
    "rounds": 2,
}
FEW: dict[str, Any] = {"name": "shapes", "count": 30, "test_count": 4, "size": 12}


class ContractError(AssertionError):
    """A method breaks the contract; the message says how to fix it."""


@dataclass(frozen=True)
class RecordedAsk:
    """One ask of a trial and all replies to it."""

    ask: Ask
    turn: Turn
    server: Server
    replies: list[Reply]

    def replayed(self, method: Method, *others: Reply) -> tuple[str, dict[int, dict[str, Any]]]:
        """Digest of the folded replies, some replaced by `others`, and ledger entries by client."""
        replies = {reply.client: reply for reply in (*self.replies, *others)}
        driver = Driver(method, _Replaying(list(replies.values())), Ledger())
        ask = replace(self.ask, least=0)
        folded = driver._ask(ask, self.turn, replace(self.server, account=Account()))
        entries = map(json.loads, driver.ledger.lines)
        return files.digest_of(codec.encode(vars(folded))), {one["client"]: one for one in entries}


@dataclass
class Trial:
    """One way of running a method for two rounds; `digest` covers its final state."""

    recipe: Recipe
    dataset: Dataset
    split: Split
    wrap: Callable[[Any], Any] = field(default=lambda engine: engine)
    engine: Callable[[Recipe, ClientRuntime, Path], Any] = field(
        default=lambda recipe, runtime, folder: LocalEngine(runtime, folder, workers=0)
    )
    reload: bool = False  # discard everything between the rounds and restore it
    server: Server = field(init=False)
    method: Method = field(init=False)
    states: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    lines: list[str] = field(init=False, default_factory=list)
    recorded: list[RecordedAsk] = field(init=False, default_factory=list)

    def go(self) -> Trial:
        """Run setup and the rounds."""
        with tempfile.TemporaryDirectory() as folder:
            public = load_public(self.recipe, self.dataset.train.shape)
            runtime = make_runtime(self.recipe, self.dataset, self.split, Path(folder), public)
            server = Server(
                self.split.examples,
                runtime.method.blueprint.shared(),
                public=runtime.public,
                account=self._account(),
            )
            engine = self.engine(self.recipe, runtime, Path(folder))
            server = self._drive(runtime, engine, server, 0)
            for number in range(1, self.recipe.rounds + 1):
                server = self._drive(runtime, engine, replace(server, round=number), number)
                if self.reload:
                    runtime, engine, server = self._restored(runtime, engine, server, Path(folder))
            self.server, self.method = server, runtime.method
            self.states = {client: engine.state_of(client) for client in server.everyone}
        return self

    def again(self, **changes: Any) -> Trial:
        """Run the same trial again, with some fields changed."""
        same = {"recipe": self.recipe, "dataset": self.dataset, "split": self.split}
        return Trial(**{**same, **changes}).go()

    @cached_property
    def shuffled(self) -> Trial:
        """The same trial with the answers in another order."""
        return self.again(wrap=_Shuffling)

    def _drive(self, runtime: ClientRuntime, engine: Any, server: Server, number: int) -> Server:
        ledger = Ledger()
        masks = self.recipe.privacy.masks
        recording = _Recording(self.wrap(engine), server, self.recorded)
        driver = Driver(runtime.method, recording, ledger, masks=masks)
        cohort = self.recipe.participation.cohort(server.everyone, number, self.recipe.seed)
        server = driver.drive(runtime.method.run_plan(server, cohort), server)
        if number == 0:
            server = driver.drive(runtime.method.begin(server, cohort), server)
        if number == self.recipe.rounds:
            server = driver.drive(runtime.method.before_evaluation(server, cohort), server)
        self.lines += ledger.lines
        return server

    def _restored(
        self, runtime: ClientRuntime, engine: Any, server: Server, folder: Path
    ) -> tuple[ClientRuntime, Any, Server]:
        """Runtime, engine and server as a new process would restore them from a checkpoint."""
        fields = codec.decode(codec.encode({key: getattr(server, key) for key in _KEPT}))
        snapshot = codec.decode(codec.encode(engine.snapshot()))
        method = self.recipe.build_method(self.dataset)
        runtime = replace(runtime, method=method)
        engine = self.engine(self.recipe, runtime, folder)
        engine.restore(snapshot)
        entries = map(json.loads, self.lines)
        account = recount(self._account(), method, server.examples, entries)
        return (
            runtime,
            engine,
            Server(server.examples, public=server.public, account=account, **fields),
        )

    def _account(self) -> Account:
        return Account(self.recipe.privacy.epsilon, self.recipe.privacy.delta)

    @property
    def digest(self) -> str:
        """SHA-256 over the server's and the clients' states."""
        server = {key: getattr(self.server, key) for key in _KEPT}
        return files.digest_of(codec.encode({"server": server, "clients": self.states}))


_KEPT = ("model", "round", "memory", "moments")


def first_trial(method: str | type[Method], /, **settings: Any) -> Trial:
    """A method's two rounds on the local engine, as the checks run them."""
    # The preset of a method says which objective and views it needs.
    own: dict[str, Any] = load_tree(method) if isinstance(method, str) else {"method": method}
    if own.get("public"):
        own["public"] = FEW
    tree = {**own, **TINY, **settings}
    tree["privacy"] = {"noise": "simulated", **tree.get("privacy", {})}  # bits are compared
    recipe = Recipe.from_tree(tree)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    return Trial(recipe, dataset, split).go()


def check_method(method: str | type[Method], /, **settings: Any) -> list[str]:
    """Run every check of the contract on a method; return the names of the checks passed.

    Args:
        method: a registered name, an import path `package.module:Class`, or the class itself.
        settings: recipe sections that the method needs, e.g. `objective="byol"`.
    """
    plain = first_trial(method, **settings)
    passed = []
    for check in CHECKS:
        what = check.__name__.removeprefix("_check_").replace("_", " ")
        try:
            check(plain)
        except HarmoniumError as error:
            raise ContractError(f"{what}: {error}") from error
        passed.append(what)
    return passed


def check_parity(method: str | type[Method], together: FlowerPair, /, **settings: Any) -> None:
    """Refuse a method whose result over Flower differs in any bit from the local engine's.

    Args:
        method: as for `check_method`.
        together: an open `harmonium.sites.flower_pair.FlowerPair`, which needs Flower.
        settings: recipe sections that the method needs.
    """
    plain = first_trial(method, **settings)
    flower = plain.again(engine=together.engine, reload=True)
    _need(flower.digest == plain.digest, "its result over Flower differs from the local engine's")
    _need(flower.lines == plain.lines, "its ledger over Flower differs from the local engine's")


def _need(truth: bool, message: str) -> None:
    if not truth:
        raise ContractError(message)


def _check_two_rounds_are_finite(plain: Trial) -> None:
    for key, tensor in plain.server.model.items():
        finite = bool(torch.isfinite(tensor.float()).all())
        _need(finite, f"after two rounds {key} is not finite; check the loss for log(0) or 0/0")


def _check_sent_is_declared(plain: Trial) -> None:
    """The ledger holds exactly the fields that the exchanges declare, and at least one ask."""
    exchanges = plain.method.exchanges()
    _need(bool(plain.lines), "the plans ask no client for anything in two rounds")
    for line in plain.lines:
        entry = json.loads(line)
        if entry["step"] in STEPS:
            continue
        declared = exchanges[entry["step"]]
        _need(
            set(entry.get("up", {})) == set(declared.up)
            and set(entry.get("down", {})) - {MASKS} == set(declared.down),
            f"`{entry['step']}` carried {entry}, which is not what it declares",
        )


def _check_same_seed_same_bits(plain: Trial) -> None:
    """A run with shuffled answers has shown this, too, if it ended alike."""
    _need(
        plain.shuffled.digest == plain.digest or plain.again().digest == plain.digest,
        "two runs of one seed differ: draw every random number from client.rng or torch's "
        "generator inside a handler, and from seeds.torch_rng(...) in a plan",
    )


def _check_order_of_answers_is_irrelevant(plain: Trial) -> None:
    _need(
        plain.shuffled.digest == plain.digest,
        "the result depends on which client answers first: do not keep anything between tasks "
        "outside client.state",
    )


def _check_resume_is_exact(plain: Trial) -> None:
    resumed = plain.again(reload=True)
    _need(
        resumed.digest == plain.digest,
        "a run that is stopped and resumed ends differently: keep everything in Server.memory or "
        "client.state, as tensors and plain values",
    )


def _check_dropouts_are_survived(plain: Trial) -> None:
    lossy = plain.again(wrap=_Dropping)
    for key, tensor in lossy.server.model.items():
        finite = bool(torch.isfinite(tensor.float()).all())
        _need(finite, f"when a client does not answer, {key} is not finite; use only `got.ids`")


def lies(
    declared: Exchange, up: Mapping[str, Any], rng: random.Random
) -> Iterator[tuple[str, Any]]:
    """Generate endless malformed or implausible replies, as a hostile client might send them.

    Args:
        declared: the exchange of the reply.
        up: an honest reply.
        rng: chooses the field to change, and how.

    Yields:
        A description of the change, and the reply. A tensor of undeclared shape keeps its shape.
    """
    whole: list[tuple[str, Any]] = [
        *([("nothing", {})] if up else []),
        ("a list", [1, 2]),
        ("text", "hello"),
        ("an extra field", {**up, "more": 1.0}),
        ("a number as a field's name", {**up, 5: 1.0}),
    ]
    while True:
        if not up or rng.random() < 0.1:
            yield rng.choice(whole)
            continue
        name = rng.choice(sorted(up))
        what, value = _lie(declared.up[name], up[name], rng)
        others = {key: one for key, one in up.items() if key != name}
        yield f"`{name}` {what}", others if value is _GONE else {**others, name: value}


_GONE = object()


def _lie(part: Field, value: Any, rng: random.Random) -> tuple[str, Any]:
    """A false value for one field, after its description."""
    choices: list[tuple[str, Any]] = [
        ("left out", _GONE),
        ("none", None),
        ("text", "x" * 100),
        ("a list", [value]),
        ("true", True),
        ("a number beyond any float", 10**400),
        ("not a number", math.nan),
        ("infinite", -math.inf),
        ("a complex tensor", torch.ones(3, dtype=torch.complex64)),
    ]
    if isinstance(value, Mapping):
        key = rng.choice(sorted(value))
        what, tensor = _lying_tensor(value[key], rng, shaped=True)
        less = {k: v for k, v in value.items() if k != key}
        choices += [("without a tensor", less), ("with another", {**value, "more": tensor})]
        choices += 6 * [(f"{key} {what}", {**value, key: tensor})] + [
            ("no tensor", {**value, key: 1})
        ]
    elif isinstance(value, Tensor):
        choices = [*choices, *6 * [_lying_tensor(value, rng, shaped=part.shape is not None)]]
    else:
        choices += [("a tensor", torch.ones(2)), ("beyond any range", 1e300)]
    return rng.choice(choices)


def _lying_tensor(value: Tensor, rng: random.Random, *, shaped: bool) -> tuple[str, Tensor]:
    """A tensor that no honest client sends, after its description."""
    choices: list[tuple[str, Tensor]] = []
    if value.numel() and value.is_floating_point():
        place = rng.randrange(value.numel())
        for number in (math.nan, math.inf, -3e38, 3e38):
            spoiled = value.clone()
            spoiled.view(-1)[place] = number
            choices.append((f"has {number}", spoiled))
    if shaped or not choices:
        choices += [
            ("with an extra axis", value[None]),
            ("of longer rows", torch.cat([value, value], -1) if value.ndim else value[None]),
            (
                "many times",
                value[None].repeat(2 + 10_000 // (1 + value.numel()), *[1] * value.ndim),
            ),
            ("without axes", torch.zeros((), dtype=value.dtype) if value.ndim else value[None]),
            ("of another type", value.to(torch.int8)),
        ]
        honest = value.shape, value.dtype
        choices = [one for one in choices if (one[1].shape, one[1].dtype) != honest]
    return rng.choice(choices)


def _check_lies_are_refused(plain: Trial) -> None:
    """A malformed reply is refused by client name, and the round ends as if it had not arrived."""
    if plain.recipe.privacy.masks is not None:  # the server sees only sums of masked replies
        return
    exchanges, rng, seen = plain.method.exchanges(), random.Random(7), set[str]()
    for recorded in plain.recorded:
        answers = [reply for reply in recorded.replies if reply.up is not None]
        if recorded.ask.step in seen or len(answers) < 3:
            continue
        seen.add(recorded.ask.step)
        liar = answers[1]
        silent, _ = recorded.replayed(plain.method, Reply(liar.client, None, "lost"))
        for what, up in islice(lies(exchanges[recorded.ask.step], liar.up or {}, rng), 12):
            result, entries = recorded.replayed(plain.method, replace(liar, up=up))
            where = f"an answer to `{recorded.ask.step}` with {what}"
            _need(entries[liar.client]["outcome"] == "refused", f"{where} is accepted")
            _need(result == silent, f"{where} is refused, but changes the result")


def _check_labels_stay_out(plain: Trial) -> None:
    """A method without permission to read labels gives the same bits whatever they are."""
    if plain.method.reads_labels or plain.method.site_evaluation is not None:
        return
    train = plain.dataset.train
    wrong = Images(np.asarray(train.pixels), (np.asarray(train.labels) + 1) % 3, train.factors)
    other = plain.again(dataset=replace(plain.dataset, train=wrong))
    _need(other.digest == plain.digest, "labels change the result, but `uses_labels` is False")


def _check_state_is_declared(plain: Trial) -> None:
    allowed = plain.method.may_keep()
    for client, state in plain.states.items():
        extra = set(state) - allowed
        _need(not extra, f"client {client} keeps {extra}, which `keeps` does not declare")
    keeps_any = any(plain.states.values())
    _need(keeps_any or not plain.method.keeping(), "`keeps` declares what no client ever keeps")
    measured = {"statistics", "measured", "global_objective", "whitening", "site_evaluation"}
    extra = set(plain.server.memory) - {*plain.method.remembers, *measured}
    _need(not extra, f"the server keeps {extra}, which `remembers` does not declare")


def _check_settings_are_frozen(plain: Trial) -> None:
    parameters = getattr(type(plain.method), "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen and dataclasses.is_dataclass(plain.method)
    _need(frozen, "decorate the class with @dataclass(frozen=True)")
    fresh = plain.recipe.build_method(plain.dataset)
    _need(fresh == plain.method, "running the method changed its settings; keep state elsewhere")


def _check_card_renders(plain: Trial) -> None:
    text = card(plain.method).text()
    _need(all(step in text for step in plain.method.exchanges()), f"the card lacks a step:\n{text}")


def _check_file_cites(plain: Trial) -> None:
    module = sys.modules[type(plain.method).__module__]
    about = module.__doc__ or ""
    cites = any(word in about for word in ("et al.", " and ", "Paper"))
    years = any(str(year) in about for year in range(1990, 2100))
    _need(cites and years, f"the docstring of {module.__name__} must name the paper and its year")


CHECKS: tuple[Callable[[Trial], None], ...] = (
    _check_two_rounds_are_finite,
    _check_sent_is_declared,
    _check_same_seed_same_bits,
    _check_order_of_answers_is_irrelevant,
    _check_resume_is_exact,
    _check_dropouts_are_survived,
    _check_lies_are_refused,
    _check_labels_stay_out,
    _check_state_is_declared,
    _check_settings_are_frozen,
    _check_card_renders,
    _check_file_cites,
)


@dataclass
class _Shuffling:
    """An engine that delivers replies in random order."""

    engine: LocalEngine

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        order = random.Random(7).sample(list(ask.to), len(ask.to))
        replies = {r.client: r for r in self.engine.deliver(replace(ask, to=order), turn)}
        yield from (replies[client] for client in reversed(order))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class _Dropping(_Shuffling):
    """An engine that loses one client's reply to every ask, a different client each time."""

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        own = len(ask.to) > 1 and ask.step not in STEPS
        lost = ask.to[(turn.round + turn.ask) % len(ask.to)] if own else None
        for reply in self.engine.deliver(ask, turn):
            yield Reply(reply.client, None, "lost") if reply.client == lost else reply


@dataclass
class _Recording:
    """An engine that records asks and replies."""

    engine: Any
    server: Server
    recorded: list[RecordedAsk]

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        replies: list[Reply] = []
        self.recorded.append(RecordedAsk(ask, turn, self.server, replies))
        for reply in self.engine.deliver(ask, turn):
            replies.append(reply)
            yield reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class _Replaying:
    """An engine without clients that returns given replies."""

    replies: list[Reply]

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        yield from self.replies

    def accept(self, reply: Reply) -> None:
        """There is no client state to keep."""

    def snapshot(self) -> codec.Tree:
        return {}

    def restore(self, snapshot: codec.Tree) -> None:
        """There is no state to restore."""
