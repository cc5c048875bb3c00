"""What a running server or client does, in memory for metrics and in a file for `status`.

The file is `status.json`: in a federation's folder, and among the files that a client keeps in its
kit. It is replaced every few seconds while something changes, and at least twice a minute. It has
no names of images; it stays on its machine.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import DataError, HarmoniumError, StoreError, one_line
from harmonium.engines.protocol import Speaker
from harmonium.engines.remote import REFUSED, Answer, Messenger, SealedMessage

if TYPE_CHECKING:
    from harmonium.federation.driver import Reply
    from harmonium.recipe.schema import Recipe
    from harmonium.runs.loop import Result

FILE = "status.json"
SOON, LATEST = 3.0, 30.0  # seconds until a change is written, and between two writes at most
FORMAT = 1
CLOCKS = 10  # answers whose times are compared with the server's
FINISHED = "the run is over"  # why a client with `--once` ends


class Activity:
    """Plain facts that several threads change, and a thread that writes them to a file."""

    def __init__(self, path: Path, **facts: Any) -> None:
        """Start with `facts`; nothing is written before `running`."""
        self.path = path
        self._facts: dict[str, Any] = {"format": FORMAT, **facts}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()

    @contextmanager
    def changing(self, *, soon: bool = True) -> Iterator[dict[str, Any]]:
        """The facts, to be changed inside the block; `soon` is whether the file should follow."""
        with self._lock:
            yield self._facts
        if soon:
            self._changed.set()

    def snapshot(self) -> dict[str, Any]:
        """A copy of the facts."""
        with self._lock:
            copied: dict[str, Any] = json.loads(json.dumps(self._facts))
        return copied

    @contextmanager
    def running(self) -> Iterator[Activity]:
        """Keep the file up to date inside the block; at its end the file says why it ended."""
        speaker, now = Speaker(), time.time()
        with self.changing() as facts:
            facts |= {"pid": os.getpid(), "host": socket.gethostname(), "started": now}
            facts |= {"ended": None, "why": "", **speaker.stated()}
        self._write()
        thread = threading.Thread(target=self._keep, name="harmonium-status", daemon=True)
        thread.start()
        why = ""
        try:
            yield self
        except BaseException as error:
            why = _reason(error)
            raise
        finally:
            self._over.set()
            self._changed.set()
            thread.join()
            with self.changing() as facts:
                facts |= {"ended": time.time(), "why": facts.get("why") or why}
            self._write()

    def _keep(self) -> None:
        while not self._over.wait(SOON):
            self._changed.wait(LATEST - SOON)
            if not self._over.is_set():
                self._write()

    def _write(self) -> None:
        """Replace the file; a full disk must not end a run, and `status` shows how old it is."""
        self._changed.clear()
        with suppress(StoreError):
            tree = {**self.snapshot(), "updated": time.time()}
            files.write_atomic(self.path, json.dumps(tree).encode(), private=True)


def _reason(error: BaseException) -> str:
    """Why a process ended, without texts that may name files."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped"
    shown = isinstance(error, HarmoniumError) and not isinstance(error, DataError)
    return one_line(error) if shown else type(error).__name__


def read(folder: Path) -> dict[str, Any] | None:
    """What a server or client wrote last; none if it never did, or the file cannot be read."""
    try:
        facts = json.loads((folder / FILE).read_bytes())
        return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else None
    except (OSError, ValueError):
        return None


# ---- the server ----------------------------------------------------------------------------------

NEW_SITE: Mapping[str, Any] = {
    "online": False,  # when the server last looked
    "seen": None,  # when it was last online
    "joined": False,  # takes part in the run
    "answer": None,  # when its last answer arrived
    "answered": 0,  # asks, since the server started
    "refused": 0,
    "declined": 0,
    "why": "",  # of the last ask without a counted answer
    "why_at": None,
    "version": "",
    "protocol": None,
    "clock": None,  # seconds that it is ahead of the server's, at least
}


class ServerActivity(Callback):
    """The activity of a server: it follows the run, the engine and the messenger."""

    def __init__(self, folder: Path, sites: Iterable[str]) -> None:
        """Of the server of a federation's folder, with these sites.

        What an earlier process knew of them is kept, all but counts and reasons.
        """
        self._clocks: dict[str, deque[float]] = {}
        before = (read(folder) or {}).get("sites") or {}
        kept = ("seen", "answer", "version", "protocol", "clock")
        known = {}
        for name in sites:
            earlier = before.get(name, {})
            known[name] = {**NEW_SITE, **{key: earlier[key] for key in kept if key in earlier}}
        self.activity = Activity(
            folder / FILE, role="server", run=None, sites=known, bytes={"up": 0, "down": 0}
        )

    @contextmanager
    def site(self, name: str) -> Iterator[dict[str, Any]]:
        """The record of a site, to be changed inside the block."""
        with self.activity.changing() as facts:
            yield facts["sites"].setdefault(name, dict(NEW_SITE))

    def about_run(self, **about: Any) -> None:
        """Note something about the run."""
        with self.activity.changing() as facts:
            facts["run"] = {**(facts["run"] or {}), **about}

    def heard(self, name: str, speaker: Speaker) -> None:
        """An answer of a site arrived, whatever it says.

        The time that an answer was under way makes the site's clock look late, so the largest
        difference of some answers is the best one.
        """
        now = time.time()
        clocks = self._clocks.setdefault(name, deque(maxlen=CLOCKS))
        clocks += [] if speaker.time is None else [round(speaker.time - now, 1)]
        with self.site(name) as site:
            site |= {"answer": now, "seen": now, "clock": max(clocks, default=None)}
            site |= {"version": speaker.version, "protocol": speaker.protocol}

    def absent(self, name: str, why: str) -> None:
        """A site does not take part."""
        with self.site(name) as site:
            site |= {"joined": False, "why": why, "why_at": time.time()}

    def joined(self, names: Iterable[str]) -> None:
        """Sites take part."""
        for name in names:
            with self.site(name) as site:
                site |= {"joined": True, "why": "", "why_at": None}

    def online(self, names: Sequence[str]) -> None:
        """The sites that are online now."""
        now = time.time()
        with self.activity.changing(soon=False) as facts:
            for name, site in facts["sites"].items():
                site["online"] = name in names
                site["seen"] = now if name in names else site["seen"]
            facts["looked"] = now

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Note the run."""
        self.about_run(round=done, complete=False)

    def task(self, reply: Reply) -> None:
        """Count an answer, or the lack of one."""
        with self.site(self.names.get(reply.client, f"client {reply.client}")) as site:
            if reply.up is not None:
                site["answered"] += 1
                return
            site["refused" if reply.why.startswith(REFUSED) else "declined"] += 1
            why = f"evaluation: {reply.why}" if reply.measuring else reply.why
            site |= {"why": one_line(why), "why_at": time.time()}

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Note a committed round."""
        self.about_run(round=row["round"], seconds=seconds, committed=time.time(), loss=row["loss"])

    def end(self, result: Result) -> None:
        """Note that the run is complete."""
        self.about_run(complete=True)


class WatchedMessenger:
    """A messenger that reports who is online, and the bytes that it carries."""

    def __init__(
        self, messenger: Messenger, server: ServerActivity, names: Mapping[int, str]
    ) -> None:
        """Report to `server`; `names` are those of the sites by node."""
        self._messenger, self._server, self._names = messenger, server, names

    def push(self, messages: Sequence[SealedMessage]) -> list[str | None]:
        """Send messages."""
        tickets = self._messenger.push(messages)
        sent = (one for one, ticket in zip(messages, tickets, strict=True) if ticket)
        self._count("down", sum(_size(one.sealed, one.bodies) for one in sent))
        return tickets

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """What has arrived."""
        for ticket, arrived in self._messenger.pull(tickets):
            if not isinstance(arrived, str):
                self._count("up", _size(*arrived))
            yield ticket, arrived

    def online(self) -> Mapping[int, str]:
        """The nodes that are online."""
        nodes = self._messenger.online()
        self._server.online([self._names[node] for node in nodes if node in self._names])
        return nodes

    def _count(self, way: str, size: int) -> None:
        if size:
            with self._server.activity.changing() as facts:
                facts["bytes"][way] += size


def _size(sealed: bytes, bodies: Iterable[bytes]) -> int:
    return len(sealed) + sum(map(len, bodies))


# ---- a client ------------------------------------------------------------------------------------


class ClientActivity:
    """The activity of a client: it follows the site's answers and the connection."""

    def __init__(self, folder: Path, server: str, data: Mapping[str, Any], device: str) -> None:
        """Of a client that keeps its files in `folder` and answers a server with some data."""
        self._connected: bool | None = None  # not known yet
        self.activity = Activity(
            folder / FILE,
            role="client",
            server=server,
            data=dict(data),
            device=device,
            connected=False,
            since=None,  # of this connection, or of its loss
            contact=None,  # when the server last responded
            lost="",  # why there is no connection
            asks={},  # by outcome, since the client started
            sent={},  # bytes by kind
            received=0,
            seconds=0.0,  # of all asks
            last=None,  # the last ask
        )

    def images(self, count: int, unreadable: int) -> None:
        """Note how many images there are."""
        with self.activity.changing() as facts:
            facts["data"] |= {"images": count, "unreadable": unreadable}

    def contact(self, why: str | None) -> None:
        """The server responded (None), or the connection is lost for a reason."""
        now, new = time.time(), self._connected != (why is None)
        self._connected = why is None
        with self.activity.changing(soon=new) as facts:
            facts |= {"connected": why is None, "since": now} if new else {}
            facts |= {"contact": now, "lost": ""} if why is None else {"lost": why}

    def answered(self, entry: Mapping[str, Any]) -> None:
        """Count an ask by its line in the site's log."""
        keys = ("time", "run", "round", "step", "outcome", "why", "policy")
        outcomes, sizes = Counter({str(entry["outcome"]): 1}), Counter[str]()
        for about in entry.get("up", {}).values():
            sizes[about["kind"]] += about["bytes"]
        with self.activity.changing() as facts:
            facts["asks"] = dict(Counter(facts["asks"]) + outcomes)
            facts["sent"] = dict(Counter(facts["sent"]) + sizes)
            facts["received"] += entry.get("down", 0)
            facts["seconds"] += entry.get("seconds", 0.0)
            facts["last"] = {key: entry[key] for key in keys if key in entry}

    def finished(self, why: str) -> None:
        """The client ends because its work is done."""
        with self.activity.changing() as facts:
            facts["why"] = why
