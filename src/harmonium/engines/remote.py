"""The remote engine: asks clients at sites, over any messenger that carries sealed messages.

The server knows each site by a node number, never by an address. A site that dies is asked again
when it comes back within the deadline; its task is the same and so is its answer. A site that stays
away is left out by name, and from then on asked only while it is online. When a round
begins, sites that do not take part yet get a `hello` handshake and may join. An answer counts only
if the site signed it for this ask.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from harmonium.core import codec, files
from harmonium.core.errors import EngineError, WireError, one_line
from harmonium.core.types import ClientId, Weights
from harmonium.engines.protocol import Speaker, protocol_fault
from harmonium.engines.runtime import StateRef
from harmonium.engines.seal import must_match, nonce, seal, unseal
from harmonium.engines.state_versions import StateVersions
from harmonium.federation.driver import Reply, Turn
from harmonium.federation.wire import Ask

NEEDS_FLOWER = "Flower is not installed: pip install 'harmonium[flower]'"
REFUSED = "its answer was refused"
TRIES = 5  # how often a task may be lost with its node before the site is left out
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between two polls for answers
PRESENCE_INTERVAL = 1.0  # seconds between two polls of who is online


@dataclass(frozen=True)
class SealedMessage:
    """A sealed message to one node."""

    node: int
    kind: str  # for the messenger's own records
    sealed: bytes
    bodies: tuple[bytes, ...]
    seconds: float  # how long it can still be delivered


Answer = tuple[bytes, list[bytes]]  # a seal and its bodies
Outcome = dict[str, Any] | str  # the content of an answer, or why there is none


class Messenger(Protocol):
    """Carries sealed messages to nodes and brings back their answers."""

    def push(self, messages: Sequence[SealedMessage]) -> list[str | None]:
        """Send messages; a ticket for each, or None if it could not be sent."""

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """What has arrived, by ticket: an answer, or why there will be none."""

    def online(self) -> Mapping[int, str]:
        """The nodes that are online, each with a session mark that changes when it reconnects."""


@dataclass(frozen=True)
class RemoteSite:
    """A site as the engine reaches it."""

    name: str
    number: int  # in its federation
    node: int  # by which the messenger reaches it
    key: ec.EllipticCurvePublicKey  # verifies its answers


@dataclass(frozen=True)
class Waits:
    """How long the server waits, in seconds."""

    deadline: float = 3600.0  # for an answer
    patience: float = 120.0  # for a site that is offline, within the deadline


class _Body:
    """Bytes that are sent to many clients and hashed once."""

    def __init__(self, data: bytes) -> None:
        self.data, self.digest = data, files.digest_of(data)


@dataclass
class _PendingTask:
    """A task for one client, and the state of its delivery."""

    header: dict[str, Any]
    bodies: tuple[bytes, ...]
    digests: tuple[str, ...]
    ticket: str | None = None
    session: str = ""  # the node's session mark when the task was sent
    tries: int = 0
    since: float = 0.0  # when it became ready to be sent, or was lost
    why: str = "it was offline"


class RemoteEngine(StateVersions):
    """Runs clients at sites."""

    is_remote = True

    def __init__(
        self,
        messenger: Messenger,
        members: Mapping[ClientId, RemoteSite],
        key: ec.EllipticCurvePrivateKey,
        about: Mapping[str, str],
        plan: bytes,
        waits: Waits,
        wanted: Callable[[Ask, Turn], int | None] = lambda ask, turn: None,
        read_state: Callable[[StateRef | None], dict[str, Any]] | None = None,
        note: Callable[[str], None] = lambda text: None,
        limits: Callable[[str, ClientId], codec.Limits] = lambda step, client: codec.LIMITS,
    ) -> None:
        """Ask `members` over `messenger`.

        Args:
            messenger: carries the messages.
            members: the sites by client number.
            key: the server's signing key.
            about: `federation`, `run` and `plan` (a digest), which every message names.
            plan: the recipe that sites check against their policies, as JSON.
            waits: how long to wait for answers and for sites that are offline.
            wanted: how many answers to an ask are enough; None: all.
            read_state: reads the state of a client, where the server has access to it.
            note: called with each message for the user.
            limits: the largest answer of a client to a step; a larger one is refused unread.
        """
        super().__init__()
        self._messenger = messenger
        self._members: Mapping[ClientId, RemoteSite] = members
        self._key = key
        self._about = dict(about)
        self._plan = _Body(plan)
        self._waits = waits
        self._wanted = wanted
        self._read_state = read_state
        self._note = note
        self._limits = limits
        self._needed: dict[ClientId, list[str]] = {}
        self._away: set[ClientId] = set()  # did not answer; asked only while online
        self._others: dict[ClientId, RemoteSite] = {}  # may still join
        self._handshakes: dict[ClientId, _PendingTask] = {}  # not answered yet
        self.newcomers: Callable[[int], dict[ClientId, int]] = lambda round: {}  # join in a round
        self.heard: Callable[[ClientId, Speaker], None] = lambda client, site: None  # an answer

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Replies as they arrive; clients without an answer are named, with the reason."""
        frame = _Body(codec.encode(dict(ask.down)))
        present = [client for client in ask.to if client in self._members]
        tasks = {c: self._task(ask.step, turn, c, frame, ask.each.get(c, {})) for c in present}
        for client in set(ask.to) - set(present):
            yield Reply(client, None, "it no longer belongs to the federation")
        enough = self._wanted(ask, turn)
        for client, outcome in self._collect(tasks, enough):
            if isinstance(outcome, str):
                yield Reply(client, None, outcome, unreadable=outcome.startswith(REFUSED))
                continue
            state = outcome.get("state")
            why = "" if outcome["up"] is not None else outcome["why"] or "it gave no reason"
            yield Reply(
                client,
                outcome["up"],
                why,
                tuple(outcome.get("releases", ())),
                StateRef(**state) if state else None,
            )

    def send_step(
        self,
        step: str,
        down: Mapping[str, Any],
        clients: Iterable[ClientId] | None = None,
        seconds: float = math.inf,
    ) -> Iterator[tuple[ClientId, Outcome]]:
        """Send `hello` or `finish`, which no method declares; yield outcomes within `seconds`."""
        frame = _Body(codec.encode(dict(down)))
        chosen = list(self._members if clients is None else clients)
        tasks = {c: self._task(step, Turn(0, 0), c, frame, {}) for c in chosen}
        yield from self._collect(tasks, seconds=seconds)

    def set_members(self, clients: Iterable[ClientId]) -> None:
        """Ask only these clients from now on; the others may join later."""
        everyone, staying = {**self._members, **self._others}, set(clients)
        self._members = {c: everyone[c] for c in sorted(everyone) if c in staying}
        self._others = {c: everyone[c] for c in sorted(everyone) if c not in staying}

    def joined(self, round: int) -> dict[ClientId, int]:
        """The clients that join in a round, each with its number of examples."""
        new = self.newcomers(round)
        if new:
            self.set_members([*self._members, *new])
        return new

    def handshake(
        self, clients: Iterable[ClientId], seconds: float, round: int = 0
    ) -> Iterator[tuple[ClientId, Outcome]]:
        """Send `hello` before a round to those clients that are online; yield the outcomes.

        New handshakes are awaited for at most `seconds`. A later answer is yielded by a later
        call, so that no round waits for a site that reads its images for an hour.
        """
        began = time.monotonic()
        fresh = self._send_handshakes(clients, round)
        pause = SHORTEST_PAUSE
        while self._handshakes:
            yield from self._pull_handshakes()
            pause = min(1.3 * pause, LONGEST_PAUSE)
            if not fresh & self._handshakes.keys() or time.monotonic() - began >= seconds:
                return
            time.sleep(pause)

    def _send_handshakes(self, clients: Iterable[ClientId], round: int) -> set[ClientId]:
        """Send to the clients that are online and have no pending handshake; return them."""
        now, online = time.monotonic(), self._messenger.online()
        frame, fresh = _Body(codec.encode({})), dict[ClientId, _PendingTask]()
        for client in clients:
            pending, session = self._handshakes.get(client), online.get(self._others[client].node)
            if session is None or (pending is not None and pending.session != session):
                self._handshakes.pop(client, None)  # it was lost with the connection
            if session is not None and client not in self._handshakes:
                fresh[client] = self._task("hello", Turn(round, 0), client, frame, {})
        if fresh:
            self._push(fresh, online, now, self._waits.deadline)
            self._handshakes |= {c: task for c, task in fresh.items() if task.ticket}
        return set(fresh)

    def _pull_handshakes(self) -> Iterator[tuple[ClientId, Outcome]]:
        """The outcomes of handshakes that have arrived."""
        tickets = {str(task.ticket): client for client, task in self._handshakes.items()}
        for ticket, arrived in self._messenger.pull(list(tickets)):
            if (client := tickets.pop(ticket, None)) is None:
                continue
            task = self._handshakes.pop(client)
            if isinstance(arrived, str):
                yield client, one_line(arrived)
            else:
                yield client, self._read_answer(client, task, arrived)

    @property
    def shows_states(self) -> bool:
        """Whether the states of clients can be read here."""
        return self._read_state is not None

    def state_of(self, client: ClientId) -> dict[str, Any]:
        """The state that a client keeps, for personal evaluation."""
        if self._read_state is None:
            raise EngineError("the state of a client never leaves its site")
        return self._read_state(self._states.get(client))

    def finish(
        self, model: Weights, statistics: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Send the final model and the run's `results` to every site that is online."""
        self._away |= set(self._members)  # do not wait for sites that are offline
        names = [member.name for member in self._members.values()]
        text = json.dumps({**results, "participants": names})
        down = {"model": model, "statistics": dict(statistics), "told": text}
        for client, outcome in self.send_step("finish", down):
            why = outcome if isinstance(outcome, str) else outcome["why"]
            if why:
                self._note(f"{self._members[client].name} did not receive the encoder: {why}")

    def prune(self, *snapshots: codec.Tree) -> None:
        """Let sites delete every state version that none of these snapshots refers to."""
        needed: dict[ClientId, list[str]] = {}
        for snapshot in snapshots:
            for client, version in snapshot.items():
                needed.setdefault(int(client), []).append(version["file"])
        self._needed = needed

    def _task(
        self, step: str, turn: Turn, client: ClientId, frame: _Body, own: Mapping[str, Any]
    ) -> _PendingTask:
        state = self._states.get(client)
        facts = {
            "down": dict(own),
            "state": asdict(state) if state else None,
            "keep": sorted(set(self._needed.get(client, []))),
            **Speaker().stated(),
        }
        header = {**self._about, "round": turn.round, "ask": turn.ask, "step": step}
        bodies = (self._plan, frame, _Body(codec.encode(facts)))
        header |= {"client": client, "site": self._member(client).number}
        return _PendingTask(header, tuple(b.data for b in bodies), tuple(b.digest for b in bodies))

    def _member(self, client: ClientId) -> RemoteSite:
        return self._members[client] if client in self._members else self._others[client]

    def _collect(
        self,
        tasks: dict[ClientId, _PendingTask],
        enough: int | None = None,
        seconds: float = math.inf,
    ) -> Iterator[tuple[ClientId, Outcome]]:
        """Send tasks, poll, and resend lost ones, until each is answered or given up."""
        began, limit = time.monotonic(), min(seconds, self._waits.deadline)
        end, checked = began + limit, began - PRESENCE_INTERVAL
        answered, pause = 0, SHORTEST_PAUSE
        online: Mapping[int, str] = {}
        for task in tasks.values():
            task.since = began
        while tasks:
            now = time.monotonic()
            if now - checked >= PRESENCE_INTERVAL:
                online, checked = self._messenger.online(), now
            self._push(tasks, online, checked, end - now)
            arrived = False
            for client, outcome in self._pull(tasks):
                arrived = True
                if outcome is None:  # lost: it will be resent
                    continue
                answered += not isinstance(outcome, str) and outcome["up"] is not None
                yield client, outcome
                if enough is not None and answered >= enough:
                    break
            self._withdraw_lost(tasks, online)
            if enough is not None and answered >= enough:
                for client in list(tasks):
                    del tasks[client]
                    yield client, f"not needed: {enough} had answered before it"
            yield from self._give_up(tasks, end, f"no answer within {limit:g} s")
            if tasks:
                pause = SHORTEST_PAUSE if arrived else min(1.3 * pause, LONGEST_PAUSE)
                time.sleep(pause)

    def _pull(
        self, tasks: dict[ClientId, _PendingTask]
    ) -> Iterator[tuple[ClientId, Outcome | None]]:
        """Answers that have arrived, removed from `tasks`; None for a task that failed or was lost.

        A lost task stays among `tasks`, without a ticket and with the reason.
        """
        tickets = {task.ticket: client for client, task in tasks.items() if task.ticket}
        for ticket, arrived in self._messenger.pull(list(tickets)) if tickets else ():
            if (client := tickets.pop(ticket, None)) is None:  # a duplicate, or not ours
                continue
            if isinstance(arrived, str):  # the node is gone, or failed
                task = tasks[client]
                task.ticket, task.why, task.since = None, one_line(arrived), time.monotonic()
                yield client, None
            else:
                yield client, self._read_answer(client, tasks.pop(client), arrived)

    def _withdraw_lost(
        self, tasks: Mapping[ClientId, _PendingTask], online: Mapping[int, str]
    ) -> None:
        """Take back tasks whose node has reconnected since they were sent.

        A node that died and came back between two polls was never seen offline, and its message is
        not delivered twice: only the new session mark shows that the answer will not come.
        """
        for client, task in tasks.items():
            session = online.get(self._member(client).node)
            if task.ticket is not None and session is not None and session != task.session:
                task.ticket, task.why = None, "its node reconnected"
                task.since = time.monotonic()

    def _give_up(
        self, tasks: dict[ClientId, _PendingTask], end: float, late: str
    ) -> Iterator[tuple[ClientId, str]]:
        """Remove and yield the clients that are no longer worth waiting for, with the reason."""
        now = time.monotonic()
        for client in [c for c in tasks if self._is_lost(c, tasks[c], now, end)]:
            task = tasks.pop(client)
            self._away.add(client)
            yield client, late if task.ticket else task.why

    def _push(
        self,
        tasks: Mapping[ClientId, _PendingTask],
        online: Mapping[int, str],
        checked: float,
        seconds: float,
    ) -> None:
        """Send tasks without a ticket, ready since before `checked`, to nodes that are `online`."""
        ready = [
            client
            for client, task in tasks.items()
            if self._member(client).node in online
            and task.ticket is None
            and task.since <= checked
            and task.tries < TRIES
        ]
        messages = []
        for client in ready:
            task = tasks[client]
            task.header["nonce"] = nonce()  # a site answers each nonce once
            sealed = seal("ask", task.header, task.digests, self._key)
            node, kind = self._member(client).node, f"train.{task.header['step']}"
            task.session = online[node]
            messages.append(SealedMessage(node, kind, sealed, task.bodies, max(seconds, 1.0)))
        tickets = self._messenger.push(messages) if messages else ()
        for client, ticket in zip(ready, tickets, strict=True):
            tasks[client].ticket = ticket
            tasks[client].tries += ticket is not None
            self._away.discard(client)

    def _is_lost(self, client: ClientId, task: _PendingTask, now: float, end: float) -> bool:
        """Whether waiting longer for a client is of no use."""
        if task.ticket is not None:
            return now >= end
        absent_before = client in self._away
        patient = task.since + self._waits.patience
        return absent_before or task.tries >= TRIES or now >= min(end, patient)

    def _read_answer(self, client: ClientId, task: _PendingTask, answer: Answer) -> Outcome:
        """The content of an answer that the site signed for this ask, or why it is refused."""
        sealed, bodies = answer
        try:
            header = unseal("answer", sealed, bodies, self._member(client).key)
            must_match(header, task.header)
            site = Speaker.of(header)
            self.heard(client, site)
            if fault := protocol_fault(Speaker(), site):
                raise WireError(fault)
            limits = self._limits(task.header["step"], client)
            content: dict[str, Any] = codec.decode(bodies[0], limits)
            if fault := _answer_fault(content):
                raise WireError(f"malformed reply: {fault}")
            return {**content, "why": one_line(content["why"])}
        except Exception as error:  # noqa: BLE001  (a site may send anything)
            kind = "" if isinstance(error, WireError) else f"{type(error).__name__}: "
            return f"{REFUSED}: {kind}{one_line(error)}"


def _answer_fault(content: Any) -> str:
    """What is wrong with the structure of an answer; empty if nothing is.

    The fields of `up` are checked later, against the exchange's declaration.
    """
    if not isinstance(content, dict):
        return f"a {type(content).__name__} in place of named fields"
    if missing := [field for field in ("up", "why") if field not in content]:
        return f"missing fields: {', '.join(missing)}"
    for field, is_valid in (("up", _is_up), ("state", _is_state), ("releases", _is_releases)):
        if field in content and not is_valid(content[field]):
            return f"invalid field `{field}`"
    return ""


def _is_up(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and _is_plain(value, 2))


def _is_state(value: Any) -> bool:
    if value is None:
        return True
    named = isinstance(value, dict) and set(value) == {"file", "digest"}
    return named and all(isinstance(text, str) for text in value.values())


def _is_releases(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(release, dict)
        and _is_plain(release, 1)
        and not any(isinstance(item, Tensor) for item in release.values())
        for release in value
    )


def _is_plain(tree: Any, depth: int) -> bool:
    """Whether a tree has only tensors, texts and numbers by name, at most `depth` levels deep."""
    if isinstance(tree, dict):
        named = all(isinstance(key, str) for key in tree)
        return depth > 0 and named and all(_is_plain(value, depth - 1) for value in tree.values())
    small = not isinstance(tree, int) or abs(tree) < 2**63  # a larger one overflows as a float
    return small and isinstance(tree, Tensor | str | float | int | None)
