"""The remote engine: asks to sites, over any post that carries sealed letters.

The server knows each site by a number of its own, never by an address. A site that dies is asked
again when it comes back within the deadline; its task is the same and so is its answer. A site that
stays away is left out by name, and from then on asked only while it is there. A site that does not
take part yet is greeted when a round begins, and may join it. An answer counts only if the site
signed it for this very ask.
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
from harmonium.engines.runtime import StateRef
from harmonium.engines.seal import must_match, nonce, seal, unseal
from harmonium.engines.state_versions import States
from harmonium.federation.driver import Reply, Turn
from harmonium.federation.wire import Ask

NEEDS_FLOWER = "Flower is not installed: pip install 'harmonium[flower]'"
REFUSED = "its answer was refused"
TRIES = 5  # how often a task may be lost with its node before the site is left out
SHORTEST, LONGEST = 0.02, 0.5  # seconds between two looks for answers
LOOK = 1.0  # seconds between two looks at who is there


@dataclass(frozen=True)
class Letter:
    """One sealed message to one node."""

    node: int
    kind: str  # for the carrier's own records
    sealed: bytes
    bodies: tuple[bytes, ...]
    seconds: float  # how long it is worth delivering


Answer = tuple[bytes, list[bytes]]  # a seal and its bodies


class Post(Protocol):
    """What carries letters to nodes and brings back answers."""

    def push(self, letters: Sequence[Letter]) -> list[str | None]:
        """Send letters; a ticket for each, or nothing if it could not be sent."""

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """What has come since, by ticket: an answer, or why there will be none."""

    def online(self) -> Mapping[int, str]:
        """The nodes that are there now, each with a mark that changes when it connects anew."""


@dataclass(frozen=True)
class Member:
    """A site as the server knows it."""

    name: str
    number: int  # in its federation
    node: int  # by which the post reaches it
    key: ec.EllipticCurvePublicKey  # by which its answers are known


@dataclass(frozen=True)
class Waits:
    """How long the server waits; seconds."""

    deadline: float = 3600.0  # for an answer
    patience: float = 120.0  # for a site that is not there or went away, within the deadline


class _Body:
    """Bytes that are sent to many and hashed once."""

    def __init__(self, data: bytes) -> None:
        self.data, self.digest = data, files.digest_of(data)


@dataclass
class _Task:
    """What one client was asked, and how that goes."""

    header: dict[str, Any]
    bodies: tuple[bytes, ...]
    digests: tuple[str, ...]
    ticket: str | None = None
    session: str = ""  # the mark of the node's connection when it was sent
    tries: int = 0
    since: float = 0.0  # when it was to be sent, or was lost
    why: str = "it was not there"


class RemoteEngine(States):
    """Clients at sites."""

    is_remote = True

    def __init__(
        self,
        post: Post,
        members: Mapping[ClientId, Member],
        key: ec.EllipticCurvePrivateKey,
        about: Mapping[str, str],
        plan: bytes,
        waits: Waits,
        wanted: Callable[[Ask, Turn], int | None] = lambda ask, turn: None,
        read_state: Callable[[StateRef | None], dict[str, Any]] | None = None,
        note: Callable[[str], None] = lambda text: None,
        limits: Callable[[str, ClientId], codec.Limits] = lambda step, client: codec.LIMITS,
    ) -> None:
        """Ask `members` over `post`.

        Args:
            post: what carries letters.
            members: the sites by client number.
            key: what the server signs with.
            about: `federation`, `run` and `plan` (a digest), which every letter names.
            plan: the recipe that sites check against their policies, as JSON.
            waits: how long.
            wanted: how many answers of an ask are enough, if fewer than all.
            read_state: how to read what clients keep, where the server can.
            note: told what a reader should know.
            limits: the most that a client's answer to a step can hold; more is left unread.
        """
        super().__init__()
        self._post = post
        self._members: Mapping[ClientId, Member] = members
        self._key = key
        self._about = dict(about)
        self._plan = _Body(plan)
        self._waits = waits
        self._wanted = wanted
        self._read_state = read_state
        self._note = note
        self._limits = limits
        self._needed: dict[ClientId, list[str]] = {}
        self._away: set[ClientId] = set()
        self._others: dict[ClientId, Member] = {}  # who may still join
        self._greeted: dict[ClientId, _Task] = {}  # greetings that are not answered yet
        self.newcomers: Callable[[int], dict[ClientId, int]] = lambda round: {}  # who joins it

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """Replies as they come; those who do not answer are named, with the reason."""
        frame = _Body(codec.encode(dict(ask.down)))
        there = [client for client in ask.to if client in self._members]
        tasks = {c: self._task(ask.step, turn, c, frame, ask.each.get(c, {})) for c in there}
        for client in set(ask.to) - set(there):
            yield Reply(client, None, "it no longer belongs to the federation")
        enough = self._wanted(ask, turn)
        for client, got in self._collect(tasks, enough):
            if isinstance(got, str):
                yield Reply(client, None, got, unreadable=got.startswith(REFUSED))
                continue
            state = got.get("state")
            why = "" if got["up"] is not None else got["why"] or "it gave no reason"
            yield Reply(
                client,
                got["up"],
                why,
                tuple(got.get("releases", ())),
                StateRef(**state) if state else None,
            )

    def say(
        self,
        step: str,
        down: Mapping[str, Any],
        clients: Iterable[ClientId] | None = None,
        seconds: float = math.inf,
    ) -> Iterator[tuple[ClientId, dict[str, Any] | str]]:
        """Something that is no exchange of a method, `hello` or `finish`; ends in these seconds."""
        frame = _Body(codec.encode(dict(down)))
        chosen = list(self._members if clients is None else clients)
        tasks = {c: self._task(step, Turn(0, 0), c, frame, {}) for c in chosen}
        yield from self._collect(tasks, seconds=seconds)

    def keep(self, clients: Iterable[ClientId]) -> None:
        """From now on these take part; the others may join later."""
        everyone, staying = {**self._members, **self._others}, set(clients)
        self._members = {c: everyone[c] for c in sorted(everyone) if c in staying}
        self._others = {c: everyone[c] for c in sorted(everyone) if c not in staying}

    def joined(self, round: int) -> dict[ClientId, int]:
        """Who takes part from a round on and did not before, each with its number of examples."""
        new = self.newcomers(round)
        if new:
            self.keep([*self._members, *new])
        return new

    def greet(
        self, clients: Iterable[ClientId], seconds: float, round: int = 0
    ) -> Iterator[tuple[ClientId, dict[str, Any] | str]]:
        """Say `hello` before a round to those of the others who are there; wait for nobody else.

        Answers to new greetings are waited for a few seconds. One that comes later is given by a
        later call, so that a site which reads its images for an hour holds nobody up.
        """
        now, online = time.monotonic(), self._post.online()
        frame, fresh = _Body(codec.encode({})), dict[ClientId, _Task]()
        for client in clients:
            held, mark = self._greeted.get(client), online.get(self._others[client].node)
            if mark is None or (held is not None and held.session != mark):
                self._greeted.pop(client, None)  # it went away with its greeting
            if mark is not None and client not in self._greeted:
                fresh[client] = self._task("hello", Turn(round, 0), client, frame, {})
        if fresh:
            self._push(fresh, online, now, self._waits.deadline)
            self._greeted |= {c: task for c, task in fresh.items() if task.ticket}
        pause = SHORTEST
        while self._greeted:
            tickets = {str(task.ticket): client for client, task in self._greeted.items()}
            for ticket, came in self._post.pull(list(tickets)):
                if (who := tickets.pop(ticket, None)) is None:
                    continue
                task = self._greeted.pop(who)
                yield (
                    who,
                    one_line(came) if isinstance(came, str) else self._opened(who, task, came),
                )
            pause = min(1.3 * pause, LONGEST)
            if not fresh.keys() & self._greeted.keys() or time.monotonic() - now >= seconds:
                return
            time.sleep(pause)

    @property
    def shows_states(self) -> bool:
        """Whether what clients keep can be read here."""
        return self._read_state is not None

    def state_of(self, client: ClientId) -> dict[str, Any]:
        """What a client keeps now, for personal evaluation."""
        if self._read_state is None:
            raise EngineError("what a site keeps never leaves it")
        return self._read_state(self._states.get(client))

    def finish(
        self, model: Weights, statistics: Mapping[str, Any], told: Mapping[str, Any]
    ) -> None:
        """Hand the final model to every site that is there, with what is told of the run."""
        self._away |= set(self._members)  # wait for nobody who is not there
        names = [member.name for member in self._members.values()]
        text = json.dumps({**told, "participants": names})
        down = {"model": model, "statistics": dict(statistics), "told": text}
        for client, got in self.say("finish", down):
            why = got if isinstance(got, str) else got["why"]
            if why:
                self._note(f"{self._members[client].name} did not take the encoder: {why}")

    def prune(self, *snapshots: codec.Tree) -> None:
        """Sites may forget every version that none of these snapshots needs."""
        needed: dict[ClientId, list[str]] = {}
        for snapshot in snapshots:
            for client, held in snapshot.items():
                needed.setdefault(int(client), []).append(held["file"])
        self._needed = needed

    def _task(
        self, step: str, turn: Turn, client: ClientId, frame: _Body, own: Mapping[str, Any]
    ) -> _Task:
        state = self._states.get(client)
        facts = {
            "down": dict(own),
            "state": asdict(state) if state else None,
            "keep": sorted(set(self._needed.get(client, []))),
        }
        header = {**self._about, "round": turn.round, "ask": turn.ask, "step": step}
        bodies = (self._plan, frame, _Body(codec.encode(facts)))
        header |= {"client": client, "site": self._member(client).number}
        return _Task(header, tuple(b.data for b in bodies), tuple(b.digest for b in bodies))

    def _member(self, client: ClientId) -> Member:
        return self._members[client] if client in self._members else self._others[client]

    def _collect(
        self,
        tasks: dict[ClientId, _Task],
        enough: int | None = None,
        seconds: float = math.inf,
    ) -> Iterator[tuple[ClientId, dict[str, Any] | str]]:
        """Push, poll, push again what was lost; end with everyone answered or given up."""
        began, limit = time.monotonic(), min(seconds, self._waits.deadline)
        end, looked = began + limit, began - LOOK
        answered, pause = 0, SHORTEST
        online: Mapping[int, str] = {}
        for task in tasks.values():
            task.since = began
        while tasks:
            now = time.monotonic()
            if now - looked >= LOOK:
                online, looked = self._post.online(), now
            self._push(tasks, online, looked, end - now)
            tickets = {task.ticket: client for client, task in tasks.items() if task.ticket}
            heard = False
            for ticket, came in self._post.pull(list(tickets)) if tickets else ():
                if (client := tickets.pop(ticket, None)) is None:  # it came twice, or is not ours
                    continue
                heard = True
                if isinstance(came, str):  # the node is gone, or could not do it
                    task = tasks[client]
                    task.ticket, task.why, task.since = None, one_line(came), time.monotonic()
                    continue
                got = self._opened(client, tasks.pop(client), came)
                answered += not isinstance(got, str) and got["up"] is not None
                yield client, got
                if enough is not None and answered >= enough:
                    break
            self._lose(tasks, online)
            if enough is not None and answered >= enough:
                for client in list(tasks):
                    del tasks[client]
                    yield client, f"not needed: {enough} had answered before it"
            now = time.monotonic()
            for client in [c for c in tasks if self._is_lost(c, tasks[c], now, end)]:
                task = tasks.pop(client)
                self._away.add(client)
                late = f"no answer within {limit:g} s"
                yield client, late if task.ticket else task.why
            if tasks:
                pause = SHORTEST if heard else min(1.3 * pause, LONGEST)
                time.sleep(pause)

    def _lose(self, tasks: Mapping[ClientId, _Task], online: Mapping[int, str]) -> None:
        """Take back what went to a connection that is no more.

        A node that died and came back between two looks never was gone, and its message is not
        delivered twice: only the new connection tells that the answer will not come.
        """
        for client, task in tasks.items():
            mark = online.get(self._member(client).node)
            if task.ticket is not None and mark is not None and mark != task.session:
                task.ticket, task.why = None, "its node connected anew"
                task.since = time.monotonic()

    def _push(
        self,
        tasks: Mapping[ClientId, _Task],
        online: Mapping[int, str],
        looked: float,
        seconds: float,
    ) -> None:
        """Send what has no ticket to those who were there when last looked at, after any loss."""
        ready = [
            client
            for client, task in tasks.items()
            if self._member(client).node in online
            and task.ticket is None
            and task.since <= looked
            and task.tries < TRIES
        ]
        letters = []
        for client in ready:
            task = tasks[client]
            task.header["nonce"] = nonce()  # a site answers each once
            sealed = seal("ask", task.header, task.digests, self._key)
            node, kind = self._member(client).node, f"train.{task.header['step']}"
            task.session = online[node]
            letters.append(Letter(node, kind, sealed, task.bodies, max(seconds, 1.0)))
        for client, ticket in zip(ready, self._post.push(letters) if letters else (), strict=True):
            tasks[client].ticket = ticket
            tasks[client].tries += ticket is not None
            self._away.discard(client)

    def _is_lost(self, client: ClientId, task: _Task, now: float, end: float) -> bool:
        """Whether there is no use in waiting longer for a client."""
        if task.ticket is not None:
            return now >= end
        absent_before = client in self._away
        patient = task.since + self._waits.patience
        return absent_before or task.tries >= TRIES or now >= min(end, patient)

    def _opened(self, client: ClientId, task: _Task, came: Answer) -> dict[str, Any] | str:
        """What a site said, provided that it is the site and says it to this ask."""
        sealed, bodies = came
        try:
            must_match(unseal("answer", sealed, bodies, self._member(client).key), task.header)
            limits = self._limits(task.header["step"], client)
            got: dict[str, Any] = codec.decode(bodies[0], limits)
            if not _is_answer(got):
                raise WireError("the answer is not made as an answer is")
            return {**got, "why": one_line(got["why"])}
        except Exception as error:  # noqa: BLE001  (a site may send anything)
            kind = "" if isinstance(error, WireError) else f"{type(error).__name__}: "
            return f"{REFUSED}: {kind}{one_line(error)}"


def _is_answer(got: Any) -> bool:
    """Whether a tree has the form of an answer; its fields are checked against their exchange."""
    if not isinstance(got, dict) or not {"up", "why"} <= set(got):
        return False
    up, state, releases = got["up"], got.get("state"), got.get("releases", [])
    return (
        (up is None or (isinstance(up, dict) and _is_plain(up, 2)))
        and (state is None or (isinstance(state, dict) and set(state) == {"file", "digest"}))
        and all(isinstance(value, str) for value in (state or {}).values())
        and isinstance(releases, list)
        and all(isinstance(one, dict) and _is_plain(one, 1) for one in releases)
        and not any(isinstance(value, Tensor) for one in releases for value in one.values())
    )


def _is_plain(tree: Any, depth: int) -> bool:
    """Whether a tree is tensors, text and numbers by name, not deeper than this."""
    if isinstance(tree, dict):
        named = all(isinstance(key, str) for key in tree)
        return depth > 0 and named and all(_is_plain(value, depth - 1) for value in tree.values())
    small = not isinstance(tree, int) or abs(tree) < 2**63  # else it would be no float
    return small and isinstance(tree, Tensor | str | float | int | None)
