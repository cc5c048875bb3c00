"""Execution of a method: `handle` runs its client half, `Driver` its plans at the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

import torch

from harmonium.core import codec, devices, seeds
from harmonium.core.errors import Diverged, NotEnoughReplies, WireError, counted, one_line, suggest
from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.core.types import ClientId
from harmonium.federation import contract, spending
from harmonium.federation.filters import Asked, Chain, filters_of
from harmonium.federation.fold import Tally
from harmonium.federation.ledger import Ledger, LedgerEntry, by_part, sizes
from harmonium.federation.method import Method, Server
from harmonium.federation.secure_aggregation.client import fresh
from harmonium.federation.secure_aggregation.fixed_point import Masks, Reach
from harmonium.federation.secure_aggregation.server import TRIES, SecureSum, Shut
from harmonium.federation.wire import (
    SCORE,
    STEPS,
    Ask,
    Exchange,
    Folded,
    Plan,
    is_measuring,
    is_spoiled,
)
from harmonium.learning.client import Client
from harmonium.learning.contract import called


@dataclass(frozen=True)
class Turn:
    """When an ask happens: the round, and which ask of that round it is."""

    round: int
    ask: int


@dataclass(frozen=True)
class Reply:
    """The outcome of one client's task."""

    client: ClientId
    up: Mapping[str, Any] | None  # None: no answer
    why: str = ""  # the reason when there is no answer
    releases: tuple[Mapping[str, Any], ...] = ()
    state: Any = None  # the engine's own reference to the client's new state
    unreadable: bool = False  # the client did answer, but its answer could not be decoded
    measuring: bool = False  # of an ask that only measures, which is no part of the round

    @property
    def absence(self) -> str:
        """What a client without an answer did not do, and why."""
        where = " in an evaluation" if self.measuring else ""
        return f"did not take part{where}: {self.why}"


Counting = Callable[[], None]  # adds a checked reply to what is counted
Take = Callable[[Reply, Mapping[str, Any]], Counting]  # checks a reply; WireError if it is wrong
Item = TypeVar("Item")


class Engine(Protocol):
    """Where clients run. A method cannot tell which engine carries its asks."""

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """One reply for each client asked, in any order and with bounded memory."""

    def accept(self, reply: Reply) -> None:
        """The reply was counted: the client's new state is now its state."""

    def snapshot(self) -> codec.Tree:
        """Which states clients have now; part of the checkpoint."""

    def restore(self, snapshot: codec.Tree) -> None:
        """Go back to the states of a checkpoint."""


def handle(
    method: Method, step: str, client: Client, down: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Run one exchange on one client; every engine calls exactly this.

    The message passes the filters on its way to the handler, and the reply on its way out. Labels
    and undeclared state are refused, and torch's global generator (weight initialisation, dropout)
    is keyed like the client's own.
    """
    exchanges = method.exchanges()
    if step not in exchanges:
        raise WireError(f"{called(method)} has no exchange `{step}`: {suggest(step, exchanges)}")
    filters = filters_of(method, exchanges[step])
    down = filters.received(down)
    client.state = devices.tree_to_device(client.state, client.device)
    with devices.seeded(client.device, seeds.seed_of(seed, "torch")):
        answer = getattr(method, step)(
            client, Folded(**devices.tree_to_device(down, client.device))
        )
    answer, client.state = devices.to_host([answer, client.state])
    up = contract.checked_answer(answer, method, exchanges[step])
    reply = filters.reply(client, down, up)
    contract.check_kept(client.state, method.may_keep(), f"{called(method)}.{step}", "keeps")
    return dict(reply)


@dataclass
class Driver:
    """Carries a method's plans: sends asks, folds replies, counts bytes, writes the ledger."""

    method: Method
    engine: Engine
    ledger: Ledger
    quorum: int = 1
    watch: Callable[[Reply], None] = field(default=lambda reply: None)
    announce: Callable[[Turn, str, Iterable[ClientId]], None] = lambda *_: None  # noisy asks
    masks: Masks | None = None  # secure aggregation, if the recipe wants it
    reported: dict[str, float] = field(default_factory=dict)  # what scalars came to, by field

    def drive(self, plan: Plan, server: Server) -> Server:
        """Run a plan to its end; `server` has the round and the clients' numbers of examples."""
        got: Folded | None = None
        number = 0
        try:
            while True:
                turn = Turn(server.round, number)
                ask = self._next(plan, got, turn)
                got = self._ask(ask, turn, server)
                number += 1
        except StopIteration as stop:
            contract.check_finished(stop.value, Server, self.method, "before_evaluation")
            return cast(Server, stop.value)

    def _next(self, plan: Plan, got: Folded | None, turn: Turn) -> Ask:
        """The plan's next ask; one thread and a keyed generator, as in a handler."""
        seed = seeds.seed_of(self.method.world.seed, "plan", turn.round, turn.ask)
        with single_thread(), torch.random.fork_rng(devices=[]), work("server step"):
            torch.default_generator.manual_seed(seed)
            ask = plan.send(got)  # type: ignore[arg-type]
        contract.check_ask(ask, self.method)
        return ask

    def _ask(self, ask: Ask, turn: Turn, server: Server) -> Folded:
        """Send an ask and combine the replies."""
        exchange = self._exchange(ask)
        filters = filters_of(self.method, exchange)
        sent = filters.outgoing(ask)
        spending.check_ask(self.method, server, ask)
        if self.masks is not None and exchange.up and ask.to:
            # Not `sent`: masks take the place of rounding.
            folded = self._masked(self.masks, ask, exchange, turn, server)
        else:
            folded = self._plain(ask, sent, filters, turn, server)
        if folded.ids:
            folded = filters.folded(folded, server.examples, (turn.round, turn.ask))
            if ask.step == SCORE or not is_measuring(ask.step, turn.round):
                self._report_scalars(exchange, folded)
        return folded

    def _report_scalars(self, exchange: Exchange, folded: Folded) -> None:
        """Note the mean of every scalar that clients sent."""
        for name, declared in exchange.up.items():
            if declared.kind == "scalar":
                value = getattr(folded, name)
                mean = sum(value.values()) / len(value) if declared.fold == "each" else value
                self.reported[name] = float(mean)

    def _plain(self, ask: Ask, sent: Ask, filters: Chain, turn: Turn, server: Server) -> Folded:
        """Fold replies one by one; `sent` is the ask as it leaves the server."""
        tally = self._tally(ask, filters.exchange, server)

        def take(reply: Reply, up: Mapping[str, Any]) -> Counting:
            client = reply.client
            down = ask.message_to(client), sent.message_to(client)
            up = filters.arrived(Asked(client, server.examples[client], *down, tally), up)

            def count() -> None:
                tally.add(client, up)
                self.engine.accept(replace(reply, up=up))

            return count

        self._collect(sent, turn, take, server)
        folded = tally.result()
        self.reported |= tally.bounded
        for client, note in tally.left_out.items():
            entry = LedgerEntry(turn.round, turn.ask, ask.step, client, "answered", note=note)
            self.ledger.write(entry, aside=True)
        return folded

    def _masked(
        self, masks: Masks, ask: Ask, exchange: Exchange, turn: Turn, server: Server
    ) -> Folded:
        """The sum of masked replies; if it cannot be opened, another try with new keys.

        The next try leaves out the clients that are known to have lied.
        """
        method, least = self.method, self._least(ask)
        reach = Reach.of(method, exchange, ask.down)
        for left in reversed(range(TRIES)):
            total = SecureSum(
                masks,
                ask,
                exchange,
                method.blueprint.layouts(),
                server.examples,
                run=(method.world.seed, turn.round, turn.ask),
                reach=reach,
                uniform=_counts_alike(method),
                least=least,
            )
            try:
                return self._opened(total, ask, turn, server)
            except NotEnoughReplies as error:
                if isinstance(error, Shut) and left:
                    again = total.again(last=left == 1)
                    again = spending.affordable(method, server, ask.step, again)
                    ask, turn = replace(ask, to=again), replace(turn, ask=fresh(turn.ask))
                elif ask.least == 0:  # an ask that needs no reply
                    return self._tally(ask, exchange, server).result()
                elif isinstance(error, Shut):
                    why = f"{error}, in {TRIES} tries. {self.ledger.last_reason}"
                    raise NotEnoughReplies(why.rstrip()) from None
                else:
                    raise
        raise AssertionError("the last try returns or raises")

    def _opened(self, total: SecureSum, ask: Ask, turn: Turn, server: Server) -> Folded:
        """One try of a masked ask. States are accepted once the sum is open; liars are named."""
        replies, before = dict[ClientId, Reply](), set(self.ledger.answered)
        steps = total.steps()

        def take(reply: Reply, up: Mapping[str, Any]) -> Counting:
            if (refusal := count(reply.client, up)) is not None:
                raise WireError(refusal)
            if part.step == ask.step:
                replies[reply.client] = replace(reply, up={})  # its values are in the sum
            return lambda: None

        try:
            part, count = next(steps)
            while True:
                of = ask.step if part.step in STEPS else ""
                answered = self._collect(part, turn, take, server, at_once=True, of=of)
                part, count = steps.send(answered)
        except StopIteration as stop:
            folded: Folded = stop.value
            self.ledger.answered &= before | set(folded.ids)
            for client in folded.ids:
                self.engine.accept(replies[client])
            return folded
        except Shut:
            self.ledger.answered &= before
            raise
        finally:
            self._name_liars(total, ask, turn)

    def _name_liars(self, total: SecureSum, ask: Ask, turn: Turn) -> None:
        """Enter in the ledger who lied in a masked ask, and who may have."""
        for client, why in total.liars.items():
            self.watch(Reply(client, None, why))
            entry = LedgerEntry(turn.round, turn.ask, "unmask", client, "refused", why, of=ask.step)
            self.ledger.write(entry, aside=True)
        for client, note in total.doubts.items():
            entry = LedgerEntry(turn.round, turn.ask, "unmask", client, "answered", of=ask.step)
            self.ledger.write(replace(entry, note=note), aside=True)

    def _tally(self, ask: Ask, exchange: Exchange, server: Server) -> Tally:
        return Tally(
            exchange,
            self.method.blueprint.layouts(),
            server.examples,
            uniform=_counts_alike(self.method),
            aggregation=self.method.aggregation,
            reference=ask.down.get("model", server.model),  # type: ignore[arg-type]
        )

    def _collect(
        self,
        ask: Ask,
        turn: Turn,
        take: Take,
        server: Server,
        *,
        at_once: bool = False,
        of: str = "",
    ) -> list[ClientId]:
        """Deliver an ask and take the replies in the order of asking.

        `at_once` takes them as they arrive, where the order does not matter. The ledger has the
        order of asking either way. `of` is the method's step that an ask of secure aggregation
        belongs to.
        """
        method, examples = self.method, server.examples
        costs = {c: spending.costs(method, ask.step, examples[c]) for c in ask.to}
        if paying := [client for client in ask.to if costs[client]]:
            self.announce(turn, ask.step, paying)

        entries: dict[ClientId, LedgerEntry] = {}
        unreadable = set[ClientId]()

        def count(reply: Reply) -> LedgerEntry:
            entry = self._count(reply, ask, turn, take, examples[reply.client], of)
            if reply.unreadable:
                unreadable.add(reply.client)
            return entry

        with work(ask.step, len(ask.to), "clients") as at:
            replies = ((reply.client, reply) for reply in self._replies(ask, turn, at))
            if at_once:
                counted_now = ((client, count(reply)) for client, reply in replies)
                in_order = _in_order(ask.to, counted_now)
            else:
                in_order = ((c, count(reply)) for c, reply in _in_order(ask.to, replies))
            for client, entry in in_order:
                down = ask.message_to(client)
                entry.down, entry.parts["down"] = sizes(down), by_part(down)
                server.account.charge(client, costs[client])
                self.ledger.write(entry, aside=ask.step in STEPS)
                entries[client] = entry
        self._check_enough(ask, turn, entries, unreadable, of)
        return [client for client, entry in entries.items() if entry.outcome == "answered"]

    def _replies(self, ask: Ask, turn: Turn, at: Callable[[int], None]) -> Iterator[Reply]:
        """The first reply of each client, as they arrive; then an empty one for all others."""
        left = set(ask.to)
        silent = (Reply(client, None, "it did not reply") for client in ask.to)
        for reply in chain(self.engine.deliver(ask, turn), silent):
            if reply.client in left:
                left.remove(reply.client)
                at(len(ask.to) - len(left))
                yield reply

    def _check_enough(
        self,
        ask: Ask,
        turn: Turn,
        entries: Mapping[ClientId, LedgerEntry],
        unreadable: set[ClientId],
        of: str,
    ) -> None:
        """Raise an error if too few clients answered, or most of their replies were refused."""
        outcomes = Counter(entry.outcome for entry in entries.values())
        refused = [c for c, e in entries.items() if e.outcome == "refused" or c in unreadable]
        spoiled = sum(e.outcome == "refused" and is_spoiled(e.why) for e in entries.values())
        answered, asked, least = outcomes["answered"], len(ask.to), self._least(ask)
        where = f"round {turn.round}, `{ask.step}`"
        if answered < least and 0 < spoiled == asked - outcomes["no answer"]:
            raise Diverged(
                f"{where}: the answers of {counted(spoiled, 'client')} hold numbers that are not "
                f"finite or beyond any sane range. {self.ledger.last_reason} Training diverged: "
                "lower local.lr, set local.clip, or look for log(0) and 0/0 in the loss. Resuming "
                "repeats the same round"
            )
        if 2 * len(refused) > asked and not is_measuring(of or ask.step, turn.round):
            raise NotEnoughReplies(
                f"{where}: the answers of {len(refused)} of {asked} clients were refused, and a "
                f"round in which most are is not counted. {self.ledger.last_reason}"
            )
        if answered < least:
            raise NotEnoughReplies(
                f"{where}: {answered} of {asked} clients answered, fewer than the {least} it "
                f"needs. {self.ledger.last_reason}".rstrip()
            )

    def _least(self, ask: Ask) -> int:
        return min(self.quorum if ask.least is None else ask.least, len(ask.to))

    def _count(
        self, reply: Reply, ask: Ask, turn: Turn, take: Take, examples: int, of: str
    ) -> LedgerEntry:
        """Take one reply, and return its ledger entry with its releases.

        A client without a counted reply is charged as well: its reply may have left it.
        """
        entry = LedgerEntry(turn.round, turn.ask, ask.step, reply.client, "answered", of=of)
        reply = replace(reply, measuring=is_measuring(of or ask.step, turn.round))
        if reply.up is None:
            entry.outcome, entry.why = "no answer", reply.why
            self.watch(reply)
        else:
            self._take(reply, reply.up, ask.step, take, entry, examples)
        if entry.outcome == "answered":
            noise_at_server = spending.paid_at_server(self.method, ask.step)
            entry.releases = [*reply.releases, *noise_at_server]
        else:
            entry.releases = spending.records(spending.costs(self.method, ask.step, examples))
        return entry

    def _take(
        self,
        reply: Reply,
        up: Mapping[str, Any],
        step: str,
        take: Take,
        entry: LedgerEntry,
        examples: int,
    ) -> None:
        """Count a reply, or refuse it with a reason; the round continues in any case.

        A reply is checked completely before any of it is added up, so that a refused reply has no
        effect.
        """
        try:
            if not isinstance(up, Mapping):
                raise WireError(f"{called(self.method)}.{step} answers with no fields at all")
            expected = spending.paid_here(self.method, step, examples)
            if why := spending.fault(expected, reply.releases):
                raise WireError(f"{called(self.method)}.{step}: it {why}")
            entry.up, entry.parts["up"] = sizes(up), by_part(up)
            add_up = take(reply, up)
            entry.note = self._note(step, up)
        except WireError as error:
            entry.outcome, entry.why = "refused", one_line(error)
        except Exception as error:  # noqa: BLE001  (a client elsewhere may send anything)
            why = one_line(f"{type(error).__name__}: {error}")
            entry.outcome, entry.why = "refused", f"its answer cannot be read: {why}"
        if entry.outcome == "refused":
            self.watch(replace(reply, up=None, why=f"its answer was refused: {entry.why}"))
            return
        if step not in STEPS:
            self.watch(reply)
        add_up()

    def _note(self, step: str, up: Mapping[str, Any]) -> str:
        """The ledger's note on a reply: rows of single images in it, and the method's remark."""
        declared = self.method.exchanges().get(step)
        fields = declared.up if declared else {}
        rows = [name for name in up if name in fields and fields[name].kind == "per_example"]
        note = f"rows of single images left the client: {', '.join(rows)}" if rows else ""
        return "; ".join(filter(None, [note, self.method.remark(step, up)]))

    def _exchange(self, ask: Ask) -> Exchange:
        """The exchange that an ask is for."""
        exchanges = self.method.exchanges()
        if ask.step not in exchanges:
            raise WireError(
                f"{called(self.method)} asks for `{ask.step}`, which is not one of its exchanges: "
                f"{suggest(ask.step, exchanges)}"
            )
        if len(set(ask.to)) != len(ask.to):
            raise WireError(f"{called(self.method)}.{ask.step} asks a client twice")
        return exchanges[ask.step]


def _counts_alike(method: Method) -> bool:
    """Whether clients are weighted uniformly instead of by their numbers of examples."""
    return method.server_optimiser.weighting == "uniform"


def _in_order(
    order: Sequence[ClientId], items: Iterable[tuple[ClientId, Item]]
) -> Iterator[tuple[ClientId, Item]]:
    """Items of clients in a given order; those that come early wait."""
    waiting: dict[ClientId, Item] = {}
    clients = iter(order)
    awaited = next(clients, None)
    for client, item in items:
        waiting[client] = item
        while awaited in waiting:
            yield awaited, waiting.pop(awaited)
            awaited = next(clients, None)
