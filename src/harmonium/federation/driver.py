"""Running a method's two halves: `handle` at a client, `drive` at the server. Engines use both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch

from harmonium.core import codec, seeds
from harmonium.core.errors import Diverged, NotEnoughReplies, WireError, counted, one_line, suggest
from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.core.types import ClientId
from harmonium.federation import arrival, contract, spending, transport
from harmonium.federation.fold import Tally
from harmonium.federation.ledger import Entry, Ledger, by_part, sizes
from harmonium.federation.method import Method, Server
from harmonium.federation.secure_aggregation.client import fresh
from harmonium.federation.secure_aggregation.fixed_point import Masks, Reach
from harmonium.federation.secure_aggregation.server import TRIES, SecureSum, Shut
from harmonium.federation.updates import covers, shielded
from harmonium.federation.wire import (
    SCORE,
    STEPS,
    Ask,
    Exchange,
    Folded,
    Plan,
    check,
    is_measuring,
    is_spoiled,
)
from harmonium.learning.client import Client
from harmonium.learning.contract import called
from harmonium.privacy.mechanisms import Release


@dataclass(frozen=True)
class Turn:
    """When an ask happens: the round, and which ask of that round it is."""

    round: int
    ask: int


@dataclass(frozen=True)
class Reply:
    """What became of one client's task."""

    client: ClientId
    up: Mapping[str, Any] | None  # None: no answer
    why: str = ""  # the reason when there is no answer
    releases: tuple[Mapping[str, Any], ...] = ()
    state: Any = None  # the engine's own note of the client's new state
    unreadable: bool = False  # it did answer, but nothing that could be opened


Counting = Callable[[], None]  # adds an answer up, once nothing is wrong with it
Take = Callable[[Reply, Mapping[str, Any]], Counting]  # checks an answer; raises what is wrong


class Engine(Protocol):
    """Where clients run. A method cannot tell which engine carries its asks."""

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """One reply for each client asked, in any order; bounded in what it holds at once."""

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

    The message is checked before and after, labels and undeclared state are refused, and torch's
    global generator (weight initialisation, dropout) is keyed like the client's own.
    """
    exchanges = method.exchanges()
    if step not in exchanges:
        raise WireError(f"{called(method)} has no exchange `{step}`: {suggest(step, exchanges)}")
    declared = exchanges[step]
    check(called(method), declared, "down", down)
    down = transport.received(method.transport, declared, down)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds.seed_of(seed, "torch"))
        answer = getattr(method, step)(client, Folded(**down))
    up = contract.checked_answer(answer, method, declared)
    check(called(method), declared, "up", up)
    if covers(declared):
        up["model"] = shielded(method, client, down["model"], up["model"])
    for name, part in declared.up.items():
        if part.guarded and not client.was_released(name, up[name]):
            raise WireError(
                f"{called(method)}.{step} declares `{name}` guarded but sends it without noise. "
                f'Send what client.release("{name}", ...) returns, unchanged.'
            )
    made = [asdict(release) for release in client.releases]
    if why := spending.fault(spending.paid_here(method, step, len(client.examples)), made):
        raise WireError(f"{called(method)}.{step} {why}. Let `costs` say what client.release does.")
    up = transport.answer(method, declared, client, down, up)  # noisy fields have their noise
    contract.check_kept(client.state, method.may_keep(), f"{called(method)}.{step}", "keeps")
    return up


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
        """Run a plan to its end; `server` says which round it is and who has how many examples."""
        got: SimpleNamespace | None = None
        number = 0
        try:
            while True:
                turn = Turn(server.round, number)
                ask = self._next(plan, got, turn)
                got = self._ask(ask, turn, server)
                number += 1
        except StopIteration as stop:
            contract.check_finished(stop.value, Server, self.method, "settle")
            return cast(Server, stop.value)

    def _next(self, plan: Plan, got: SimpleNamespace | None, turn: Turn) -> Ask:
        """Let the plan go on to its next ask: one thread and keyed chance, as in a handler."""
        seed = seeds.seed_of(self.method.world.seed, "plan", turn.round, turn.ask)
        with single_thread(), torch.random.fork_rng(devices=[]), work("server step"):
            torch.default_generator.manual_seed(seed)
            ask = plan.send(got)  # type: ignore[arg-type]
        contract.check_ask(ask, self.method)
        return ask

    def _ask(self, ask: Ask, turn: Turn, server: Server) -> SimpleNamespace:
        declared = self._declared(ask)
        spending.check_ask(self.method, server, ask)
        if self.masks is not None and declared.up and ask.to:
            folded = self._masked(self.masks, ask, declared, turn, server)
        else:
            folded = self._plain(ask, declared, turn, server)
        made = self.method.updates
        if made and made.noise and made.place == "server" and folded.ids and covers(declared):
            alike = _counts_alike(self.method) or declared.up["model"].by is None
            shares = {c: 1 if alike else server.examples[c] for c in folded.ids}
            path = (self.method.world.seed, turn.round, turn.ask)
            folded.model = made.at_server(folded.model, shares, path)
        reports = ask.step == SCORE or not is_measuring(ask.step, turn.round)
        for name, part in declared.up.items():
            if part.kind == "scalar" and folded.ids and reports:
                value = getattr(folded, name)
                mean = sum(value.values()) / len(value) if part.fold == "each" else value
                self.reported[name] = float(mean)
        return folded

    def _plain(self, ask: Ask, declared: Exchange, turn: Turn, server: Server) -> SimpleNamespace:
        """Fold answers one by one."""
        tally = self._tally(ask, declared, server)
        sent = transport.outgoing(self.method.transport, declared, ask)

        def take(reply: Reply, up: Mapping[str, Any]) -> Counting:
            client, examples = reply.client, server.examples[reply.client]
            check(called(self.method), declared, "up", up)
            up = transport.taken(self.method, declared, ask, sent, client, up)
            arrival.refuse_shapes(self.method, declared, examples, up)
            down = {**ask.down, **ask.each.get(client, {})}
            why = tally.refusal(client, up) or self.method.reply_fault(ask.step, down, up, examples)
            if why:
                raise WireError(why)

            def count() -> None:
                tally.add(client, up)
                self.engine.accept(replace(reply, up=up))

            return count

        self._collect(sent, turn, take, server)
        folded = tally.result()
        self.reported |= tally.bounded
        for client, note in tally.left_out.items():
            entry = Entry(turn.round, turn.ask, ask.step, client, "answered", note=note)
            self.ledger.write(entry, aside=True)
        return folded

    def _masked(
        self, masks: Masks, ask: Ask, declared: Exchange, turn: Turn, server: Server
    ) -> SimpleNamespace:
        """Have the sum of answers that nobody sees; if need be anew, with new keys and no liars."""
        method, least, tries = self.method, self._least(ask), TRIES
        reach = Reach.of(method, declared, ask.down)
        while True:
            total = SecureSum(
                masks,
                ask,
                declared,
                method.blueprint.layouts(),
                server.examples,
                run=(method.world.seed, turn.round, turn.ask),
                reach=reach,
                uniform=_counts_alike(method),
                least=least,
            )
            tries -= 1
            try:
                return self._opened(total, ask, turn, server)
            except NotEnoughReplies as error:
                if isinstance(error, Shut) and tries:
                    again = total.again(last=tries == 1)
                    again = spending.affordable(method, server, ask.step, again)
                    ask, turn = replace(ask, to=again), replace(turn, ask=fresh(turn.ask))
                elif ask.least == 0:  # no answer is one as well
                    return self._tally(ask, declared, server).result()
                elif isinstance(error, Shut):
                    why = f"{error}, and so in {TRIES} tries. {self.ledger.last_reason}"
                    raise NotEnoughReplies(why.rstrip()) from None
                else:
                    raise

    def _opened(self, total: SecureSum, ask: Ask, turn: Turn, server: Server) -> SimpleNamespace:
        """One try of a masked ask; states count once the sum is open. Liars are named."""
        held, before = dict[ClientId, Reply](), set(self.ledger.answered)
        steps = total.steps()

        def take(reply: Reply, up: Mapping[str, Any]) -> Counting:
            if (refusal := count(reply.client, up)) is not None:
                raise WireError(refusal)
            if part.step == ask.step:
                held[reply.client] = replace(reply, up={})  # the answer itself is in the sum
            return lambda: None

        try:
            part, count = next(steps)
            while True:
                of = ask.step if part.step in STEPS else ""
                answered = self._collect(part, turn, take, server, at_once=True, of=of)
                part, count = steps.send(answered)
        except StopIteration as stop:
            folded: SimpleNamespace = stop.value
            self.ledger.answered &= before | set(folded.ids)
            for client in folded.ids:
                self.engine.accept(held[client])
            return folded
        except Shut:
            self.ledger.answered &= before
            raise
        finally:
            for client, why in total.liars.items():
                self.watch(Reply(client, None, why))
                entry = Entry(turn.round, turn.ask, "unmask", client, "refused", why, of=ask.step)
                self.ledger.write(entry, aside=True)
            for client, note in total.doubts.items():
                entry = Entry(turn.round, turn.ask, "unmask", client, "answered", of=ask.step)
                self.ledger.write(replace(entry, note=note), aside=True)

    def _tally(self, ask: Ask, declared: Exchange, server: Server) -> Tally:
        return Tally(
            declared,
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
        """Deliver an ask and take the answers in the order of asking, whoever was first.

        `at_once` takes them as they come, where order does not matter, so that none is held back.
        The ledger has the order of asking either way. `of` is the step that an ask of secure
        aggregation is about.
        """
        left = set(ask.to)
        waiting: dict[ClientId, Reply | Entry] = {}
        order = iter(ask.to)
        awaited = next(order, None)
        answered: list[ClientId] = []
        method = self.method
        promised = {c: spending.costs(method, ask.step, server.examples[c]) for c in ask.to}
        here = {c: spending.paid_here(method, ask.step, server.examples[c]) for c in ask.to}
        more = spending.paid_at_server(method, ask.step)

        if paying := [client for client in ask.to if promised[client]]:
            self.announce(turn, ask.step, paying)

        spoiled, refused, silent = 0, 0, list[ClientId]()

        def count(reply: Reply) -> Entry:
            nonlocal spoiled, refused
            entry = self._count(reply, ask, turn, take, here[reply.client])
            entry.of = of
            spoiled += entry.outcome == "refused" and is_spoiled(entry.why)
            refused += entry.outcome == "refused" or reply.unreadable
            silent.extend([reply.client] if entry.outcome == "no answer" else [])
            if entry.outcome == "answered":
                entry.releases += more
            else:  # it may have left the client all the same
                entry.releases = spending.records(promised[reply.client])
            return entry

        with work(ask.step, len(ask.to), "clients") as at:
            for reply in chain(self.engine.deliver(ask, turn), _silent(ask)):
                if reply.client not in left:
                    continue
                left.remove(reply.client)
                at(len(ask.to) - len(left))
                waiting[reply.client] = count(reply) if at_once else reply
                while awaited in waiting:
                    one = waiting.pop(awaited)
                    entry = one if isinstance(one, Entry) else count(one)
                    down = {**ask.down, **ask.each.get(awaited, {})}
                    entry.down, entry.parts["down"] = sizes(down), by_part(down)
                    server.account.charge(awaited, promised[awaited])
                    self.ledger.write(entry, aside=ask.step in STEPS)
                    answered += [awaited] if entry.outcome == "answered" else []
                    awaited = next(order, None)
        least = self._least(ask)
        if len(answered) < least and 0 < spoiled == len(ask.to) - len(silent):
            raise Diverged(
                f"round {turn.round}, `{ask.step}`: the answers of {counted(spoiled, 'client')} "
                "hold numbers that are not finite or beyond any sane range. "
                f"{self.ledger.last_reason} Training diverged: "
                "lower local.lr, set local.clip, or look for log(0) and 0/0 in the loss. Resuming "
                "repeats the same round"
            )
        if 2 * refused > len(ask.to) and not is_measuring(of or ask.step, turn.round):
            raise NotEnoughReplies(
                f"round {turn.round}, `{ask.step}`: the answers of {refused} of {len(ask.to)} "
                f"clients were refused, and a round in which most are is not counted. "
                f"{self.ledger.last_reason}"
            )
        if len(answered) < least:
            raise NotEnoughReplies(
                f"round {turn.round}, `{ask.step}`: {len(answered)} of {len(ask.to)} clients "
                f"answered, fewer than the {least} it needs. {self.ledger.last_reason}".rstrip()
            )
        return answered

    def _least(self, ask: Ask) -> int:
        return min(self.quorum if ask.least is None else ask.least, len(ask.to))

    def _count(
        self, reply: Reply, ask: Ask, turn: Turn, take: Take, promised: Sequence[Release]
    ) -> Entry:
        """Take one reply, or say why not: whatever is wrong with it, the round goes on.

        An answer is checked to its end before any of it is added up, so that one which fails
        leaves nothing behind.
        """
        entry = Entry(turn.round, turn.ask, ask.step, reply.client, "answered")
        if reply.up is None:
            entry.outcome, entry.why = "no answer", reply.why
            self.watch(reply)
            return entry
        try:
            if not isinstance(reply.up, Mapping):
                raise WireError(f"{called(self.method)}.{ask.step} answers with no fields at all")
            if why := spending.fault(promised, reply.releases):
                raise WireError(f"{called(self.method)}.{ask.step}: it {why}")
            entry.up, entry.parts["up"] = sizes(reply.up), by_part(reply.up)
            add_up = take(reply, reply.up)
            entry.note = self._note(ask.step, reply.up)
        except WireError as error:
            entry.outcome, entry.why = "refused", one_line(error)
        except Exception as error:  # noqa: BLE001  (a client elsewhere may send anything)
            why = one_line(f"{type(error).__name__}: {error}")
            entry.outcome, entry.why = "refused", f"its answer cannot be read: {why}"
        if entry.outcome == "refused":
            self.watch(replace(reply, up=None, why=f"its answer was refused: {entry.why}"))
            return entry
        if ask.step not in STEPS:
            self.watch(reply)
        entry.releases = list(reply.releases)
        add_up()
        return entry

    def _note(self, step: str, up: Mapping[str, Any]) -> str:
        """A remark on rows of single images in an answer, and the method's own."""
        declared = self.method.exchanges().get(step)
        fields = declared.up if declared else {}
        rows = [name for name in up if name in fields and fields[name].kind == "per_example"]
        note = f"rows of single images left the client: {', '.join(rows)}" if rows else ""
        return "; ".join(filter(None, [note, self.method.remark(step, up)]))

    def _declared(self, ask: Ask) -> Exchange:
        exchanges = self.method.exchanges()
        if ask.step not in exchanges:
            raise WireError(
                f"{called(self.method)} asks for `{ask.step}`, which is no exchange of it: "
                f"{suggest(ask.step, exchanges)}"
            )
        declared = exchanges[ask.step]
        if len(set(ask.to)) != len(ask.to):
            raise WireError(f"{called(self.method)}.{ask.step} asks a client twice")
        for client in ask.to:
            sent = {**ask.down, **ask.each.get(client, {})}
            check(called(self.method), declared, "down", sent)
        return declared


def _counts_alike(method: Method) -> bool:
    return method.server_optimiser.weighting == "uniform"


def _silent(ask: Ask) -> Iterator[Reply]:
    """What is true of clients the engine says nothing about."""
    return (Reply(client, None, "nothing was heard of it") for client in ask.to)
