"""The server of a federation: it registers the sites, runs the rounds and sends the encoder.

A federation's run has a folder like any other. Its `about.json` also lists the participants: which
sites take part, as which clients, and with how many images. Sites are registered before the first
round. A site that goes offline later is left out of rounds by name and continues with its state
when it is back. A site that was offline, or refused, gets another handshake when a round begins,
and takes part from the first round that it accepts. To a method it is a client whose answers were
all lost until then: it has no state, and took no part in the setup.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonium.core import devices, files
from harmonium.core.callbacks import Callback, called
from harmonium.core.errors import ConfigError, NotEnoughReplies, StoreError, counted
from harmonium.core.notes import Level, Note
from harmonium.core.types import ClientId
from harmonium.data.images import Dataset
from harmonium.engines.remote import (
    NEEDS_FLOWER,
    REFUSED,
    Messenger,
    RemoteEngine,
    RemoteSite,
    Waits,
)
from harmonium.federation.driver import Turn
from harmonium.federation.filters import arrival
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.federation.secure_aggregation.client import STEPS
from harmonium.federation.wire import Ask
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Result, RunLoop
from harmonium.runs.open_run import load_public, public_notes, read_about, read_recipe
from harmonium.runs.rounds import RunInputs
from harmonium.runs.start import add_rounds, changed_recipe, holds, locked, new_folder, register
from harmonium.sites.activity import ServerActivity, WatchedMessenger
from harmonium.sites.certificates import expiries
from harmonium.sites.folder import Federation, RegisteredSite
from harmonium.sites.metrics import of_server, rendered, served, with_disk
from harmonium.sites.plan import frame_of, method_of, planned, public_digest
from harmonium.sites.settings import SiteSettings
from harmonium.sites.upkeep import SERVING, owner_only, restrict_to_owner, single_instance

if TYPE_CHECKING:
    from harmonium.engines.flower.link import Link

MOST_IMAGES = 10**9  # of one site
RETRY_PAUSE = 2.0  # seconds between two handshakes with sites that are offline
JOIN_WAIT = 3.0  # seconds that a round waits for the answer to a new handshake
SHORTEST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds until a site that refused is asked again


@dataclass(frozen=True)
class ListenSettings:
    """Where the server listens for sites, and for how long it waits for them to take part."""

    host: str = "0.0.0.0"
    port: int | None = None  # none: the federation's
    insecure: bool = False  # no TLS; on loopback only
    wait: float | None = None  # seconds until the run begins without sites that are offline

    def __post_init__(self) -> None:
        if self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"--insecure listens on loopback only, not at {self.host}: use --listen 127.0.0.1, "
                "or leave --insecure out"
            )


@dataclass(frozen=True)
class Participant:
    """A site that takes part in a run."""

    client: ClientId  # in this run
    number: int  # in the federation
    name: str
    fingerprint: str  # of its key
    examples: int = 0  # images it takes part with; 0: it does not take part yet


def start(
    recipe: Recipe,
    folder: Path,
    *,
    out: Path | None = None,
    watcher: Callback | None = None,
    listening: ListenSettings | None = None,
) -> Result:
    """Run a recipe with the sites of a federation; continue the run if `out` already holds it."""
    federation = read_federation(folder)
    plan, dataset = planned(recipe, len(federation.sites))
    path = out if out is not None else new_folder(plan)
    with owner_only(), locked(path):
        resumed = holds(path, plan)
        return _serve(path, plan, dataset, federation, resumed, watcher, listening)


def resume(
    path: Path,
    *changes: str,
    watcher: Callback | None = None,
    listening: ListenSettings | None = None,
) -> Result:
    """Continue a federation's run that stopped, with the sites that it began with.

    `rounds=N` trains it further. Every site checks the longer plan against its policy; one that
    refuses it is left out of the rounds, by name.
    """
    plan = changed_recipe(path, changes, further=True)
    federation = read_federation(folder_of(path))
    plan, dataset = planned(plan, plan.clients)
    with owner_only(), locked(path):
        restrict_to_owner(path)
        add_rounds(path, plan)
        return _serve(path, plan, dataset, federation, True, watcher, listening)


def folder_of(path: Path) -> Path:
    """The folder of the federation that a run is of."""
    read_recipe(path)  # a folder without a run is refused by name
    about = read_about(path)["federation"]
    if not about:
        raise ConfigError(f"{path} is not a run of a federation: use harmonium resume {path}")
    return Path(about["folder"])


def read_federation(folder: Path) -> Federation:
    """A federation that has sites."""
    federation = Federation.read(folder)
    if not federation.sites:
        raise ConfigError(f"{folder} has no sites: add them with harmonium server add NAME")
    return federation


def _serve(
    path: Path,
    plan: Recipe,
    dataset: Dataset | None,
    federation: Federation,
    resumed: bool,
    watcher: Callback | None,
    listening: ListenSettings | None,
) -> Result:
    _ = plan.engine.devices  # a device that is not here is refused before any site is asked
    reporter = ServerActivity(federation.folder, (site.name for site in federation.sites))
    with called([watcher or Callback(), reporter]) as every:
        loop = RunLoop(path, plan, every)
        if resumed and loop.is_complete():
            return loop.result()
        about = {"folder": str(path.absolute()), "rounds": plan.rounds, "complete": False}
        reporter.about_run(**about, method=plan.method.name, plan=plan.digest)
        with connected(loop, dataset, federation, resumed, listening, reporter) as both:
            session, engine = both
            session.admit_newcomers(engine)
            return loop.run(session.inputs(), engine, simulate=False)


@contextmanager
def connected(
    loop: RunLoop,
    dataset: Dataset | None,
    federation: Federation,
    resumed: bool,
    listening: ListenSettings | None,
    reporter: ServerActivity,
) -> Iterator[tuple[Session, RemoteEngine]]:
    """Listen for the sites of a run, and register those of a new one.

    Args:
        loop: the run.
        dataset: the images that the server evaluates with, if any.
        federation: whose sites they are.
        resumed: whether the run has begun before, with the sites that its folder names.
        listening: where; none: everywhere, at the federation's port.
        reporter: told what happens, for the status and the metrics.
    """
    settings = SiteSettings.read(federation.folder, limited=False)
    ends = {"authority": federation.authority, "server": federation.certificate}
    listens = listening or ListenSettings()

    def text() -> str:
        facts = reporter.activity.snapshot() | {"certificates": expiries(ends)}
        return rendered(of_server(with_disk(facts, loop.path)))

    with (
        single_instance(federation.folder, SERVING, f"server of {federation.folder}"),
        served(settings.metrics, text),
        reporter.activity.running(),
        _listening(loop, dataset, federation, resumed, listens, reporter) as both,
        devices.use_device(loop.recipe.engine.devices[0]),
    ):
        yield both


@contextmanager
def _listening(
    loop: RunLoop,
    dataset: Dataset | None,
    federation: Federation,
    resumed: bool,
    listening: ListenSettings,
    reporter: ServerActivity,
) -> Iterator[tuple[Session, RemoteEngine]]:
    """The session and the engine, while the server can be reached."""
    try:
        from harmonium.engines.flower.link import Link
        from harmonium.engines.flower.messenger import FlowerMessenger
    except ImportError:
        raise ConfigError(NEEDS_FLOWER) from None
    note, method = loop.watcher.note, method_of(loop.recipe)
    arrival.check_declared(method)
    if resumed:
        loop.folder.newest_readable(with_states=False)  # a damaged run fails before it is announced
    shape = (method.world.side, method.world.side, method.world.channels)
    public = load_public(loop.recipe, shape)
    participants = (
        _Participants.read(loop.path, federation) if resumed else _Participants.new(federation)
    )
    session = Session(loop, method, federation, participants, dataset, public, reporter)
    for text in federation.notes:
        note(text)
    note(f"run {participants.run[:8]}, plan {loop.recipe.digest}")
    if not resumed:
        limit = "" if listening.wait is None else f" for up to {listening.wait:g} s"
        note(f"waiting{limit} for {_names(session.sites.values())}")
    port = federation.port if listening.port is None else listening.port
    pair = (federation.certificate, federation.certificate_key)
    restrict_to_owner(federation.folder)
    with (
        _link_folder(federation.folder / "link") as folder,
        Link(folder, listening.host, port, None if listening.insecure else pair) as link,
    ):
        note(f"listening at {listening.host}:{port} for {_names(session.sites.values())}")
        reachable = _remote_sites(link, {**session.sites, **session.added_later})
        engine = session.engine(FlowerMessenger(link), reachable)
        reporter.joined(one.name for one in participants.joined)
        if not resumed:
            session.register_sites(engine, listening.wait)
        if warning := _dominance_warning(loop.recipe, participants.joined):
            note(warning)
        engine.set_members(one.client for one in participants.joined)
        yield session, engine


@dataclass
class Session:
    """A run while its server is up: the sites, and those of them that take part."""

    loop: RunLoop
    method: Method
    federation: Federation
    participants: _Participants
    dataset: Dataset | None  # that the server evaluates with
    public: Dataset | None
    reporter: ServerActivity

    def __post_init__(self) -> None:
        invited = self.participants.invited
        self.sites = _remaining_sites(self.federation, invited)
        self.added_later = _added_later(self.federation, invited, self.loop.recipe.clients)
        self.public_digest = public_digest(self.public.train if self.public else None)
        self.examples = {one.client: one.examples for one in self.participants.joined}

    def engine(
        self, messenger: Messenger, reachable: Mapping[ClientId, RemoteSite]
    ) -> RemoteEngine:
        """The engine that asks the sites."""
        plan, joined = self.loop.recipe, self.participants.joined
        about = {"federation": self.federation.id, "run": self.participants.run}
        names = {site.node: site.name for site in reachable.values()}
        engine = RemoteEngine(
            WatchedMessenger(messenger, self.reporter, names),
            reachable,
            self.federation.signing_key(),
            {**about, "plan": plan.digest},
            frame_of(plan),
            Waits(plan.engine.deadline, plan.engine.patience),
            wanted=lambda ask, turn: _enough(plan.participation, len(joined), ask, turn),
            note=self.loop.watcher.note,
            limits=lambda step, client: arrival.limits(
                self.method, step, self.examples.get(client, 0), len(self.sites)
            ),
        )
        engine.heard = lambda client, site: self.reporter.heard(reachable[client].name, site)
        return engine

    def register_sites(self, engine: RemoteEngine, wait: float | None) -> None:
        """Register the sites of a new run, and write the participants to about.json."""
        plan, note, joined = self.loop.recipe, self.loop.watcher.note, self.participants.joined
        accepted, absent = _register_sites(
            engine,
            self.sites,
            self.public_digest,
            wait,
            note,
            self.reporter.absent,
            lambda name: self.reporter.joined([name]),
        )
        joined += accepted
        _check_enough_sites(plan, joined)
        if absent:
            sites = len(self.sites)
            note(f"{len(joined)} of {sites} sites take part; others may join in a later round")
        self.examples |= {one.client: one.examples for one in joined}
        self.reporter.joined(one.name for one in joined)
        register(
            self.loop.path,
            plan,
            self.method,
            **{"data": self.dataset.digest if self.dataset else None, "split": None},
            public=self.public.digest if self.public else None,
            cache={"data": None, "public": None},
            clients=[one.name for one in joined],
            notes=[
                *plan.notes,
                *absent,
                *(self.dataset.notes if self.dataset else ()),
                *public_notes(plan, self.public),
            ],
            federation=self.participants.plain(self.federation),
        )

    def admit_newcomers(self, engine: RemoteEngine) -> None:
        """Let the engine contact the other sites before each round; those that accept join."""
        watcher, joined = self.loop.watcher, self.participants.joined
        everyone = {**self.sites, **self.added_later}
        clients = self.loop.recipe.clients
        late = _LateJoiners(
            engine, everyone, self.public_digest, clients, watcher.note, self.reporter.absent
        )

        def newcomers(round: int) -> dict[ClientId, int]:
            present = {one.client for one in joined}
            joining = late.handshake([c for c in late.sites if c not in present], round)
            if joining:
                joined[:] = sorted([*joined, *joining], key=lambda one: one.client)
                self.participants.write(self.loop.path, self.federation)  # before they are asked
                watcher.names = {one.client: one.name for one in joined}
                self.examples.update({one.client: one.examples for one in joining})
                self.reporter.joined(one.name for one in joining)
            return {one.client: one.examples for one in joining}

        engine.newcomers = newcomers
        watcher.names = {one.client: one.name for one in joined}

    def inputs(self) -> RunInputs:
        """The inputs of the run loop: clients and data."""
        return RunInputs(
            self.method,
            dict(self.examples),
            self.dataset,
            self.public.train.without_labels() if self.public else None,
            tuple(public_notes(self.loop.recipe, self.public)),
        )


@contextmanager
def _link_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for the link; its database of messages is deleted afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        for path in folder.glob("flower.db*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Participants:
    """A run's random name, the sites that it invited, and those that take part."""

    run: str
    invited: list[Participant]  # all sites of the federation when the run began, by client
    joined: list[Participant]  # those that take part, by client; grows

    @classmethod
    def new(cls, federation: Federation) -> _Participants:
        """Those of a new run; its clients are the sites in the order of their numbers."""
        invited = [
            Participant(client, site.number, site.name, site.fingerprint)
            for client, site in enumerate(federation.sites)
        ]
        return cls(secrets.token_hex(16), invited, [])

    @classmethod
    def read(cls, path: Path, federation: Federation) -> _Participants:
        """Those of an earlier run; earlier versions recorded only the sites that take part."""
        about = read_about(path)["federation"]
        try:
            if about["id"] != federation.id:
                raise ConfigError(f"{path} is a run of another federation than {federation.folder}")
            joined = [Participant(**one) for one in about["roll"]]
            invited = [Participant(**one) for one in about.get("called", about["roll"])]
            return cls(about["run"], invited, joined)
        except (KeyError, TypeError):
            raise StoreError(f"{path / 'about.json'} is damaged: start a new run") from None

    def plain(self, federation: Federation) -> dict[str, Any]:
        """The participants as about.json has them."""
        return {
            "id": federation.id,
            "folder": str(federation.folder.absolute()),
            "run": self.run,
            "called": [asdict(one) for one in self.invited],
            "roll": [asdict(one) for one in self.joined],
        }

    def write(self, path: Path, federation: Federation) -> None:
        """Update about.json with those that take part now."""
        about = files.read_sealed(path / "about.json")
        about["federation"] = self.plain(federation)
        about["clients"] = [one.name for one in self.joined]
        files.write_atomic(path / "about.json", files.sealed(about))


@dataclass
class _LateJoiners:
    """Contacts sites that do not take part yet; after a refusal it pauses, each time longer."""

    engine: RemoteEngine
    sites: Mapping[ClientId, RegisteredSite]
    public: str
    clients: int  # of the plan: a site that was added after the run began has no place in it
    note: Callable[[str], None]
    absent: Callable[[str, str], None] = lambda name, why: None
    _noted: dict[ClientId, str] = field(default_factory=dict)
    _next: dict[ClientId, tuple[float, float]] = field(default_factory=dict)  # time, pause

    def handshake(self, clients: Sequence[ClientId], round: int) -> list[Participant]:
        """Contact these clients; return those that take part from this round on."""
        joining, now = list[Participant](), time.monotonic()
        due = [client for client in clients if now >= self._next.get(client, (now, 0.0))[0]]
        for client, outcome in self.engine.handshake(due, JOIN_WAIT, round) if due else ():
            if isinstance(outcome, str):  # it went offline, or could not read the handshake
                continue
            site, up = self.sites[client], outcome["up"]
            why = outcome["why"] if up is None else _handshake_fault(up, self.public)
            if not why and client >= self.clients:
                why = f"the run was planned for {counted(self.clients, 'site')} before it was added"
            if not why:
                note = f"{site.name} joins with {counted(up['examples'], 'image')}"
                joining.append(_participant(client, site, up))
            else:
                note = Note(f"{site.name} does not take part yet: {why}", "warning")
                self.absent(site.name, why)
                before = self._next.get(client, (0.0, 0.0))[1]
                pause = max(SHORTEST_PAUSE, min(2 * before, LONGEST_PAUSE))
                self._next[client] = (time.monotonic() + pause, pause)
            if self._noted.get(client) != note:
                self.note(note)
            self._noted[client] = note
        return joining


def _participant(client: ClientId, site: RegisteredSite, up: Mapping[str, Any]) -> Participant:
    return Participant(client, site.number, site.name, site.fingerprint, up["examples"])


def _added_later(
    federation: Federation, invited: Sequence[Participant], clients: int
) -> dict[ClientId, RegisteredSite]:
    """Sites that were added after a run began, by numbers that none of its clients has.

    They are admitted, so that they learn why they are not asked.
    """
    known = {one.fingerprint for one in invited}
    new = [site for site in federation.sites if site.fingerprint not in known]
    return dict(enumerate(new, max(clients, len(invited))))


def _remaining_sites(
    federation: Federation, joined: Sequence[Participant]
) -> dict[ClientId, RegisteredSite]:
    """The participants that still belong to the federation, by client."""
    known = {site.fingerprint: site for site in federation.sites}
    return {one.client: known[one.fingerprint] for one in joined if one.fingerprint in known}


def _remote_sites(
    link: Link, sites: Mapping[ClientId, RegisteredSite]
) -> dict[ClientId, RemoteSite]:
    nodes = link.admit({client: site.public_key for client, site in sites.items()})
    return {
        client: RemoteSite(site.name, site.number, nodes[client], site.public_key)
        for client, site in sites.items()
    }


def _enough(participation: Participation, sites: int, ask: Ask, turn: Turn) -> int | None:
    """How many answers to an ask are enough; None: all. Fewer than all only with `over`."""
    later = STEPS[1:]  # all that began a masked ask must answer
    if not participation.over or turn.round == 0 or ask.step in later:
        return None
    return participation.size(sites) if len(ask.to) == participation.asked(sites) else None


def _register_sites(
    engine: RemoteEngine,
    sites: Mapping[ClientId, RegisteredSite],
    public: str,
    wait: float | None,
    note: Callable[[str], None],
    absence: Callable[[str, str], None] = lambda name, why: None,
    presence: Callable[[str], None] = lambda name: None,
) -> tuple[list[Participant], list[str]]:
    """Contact every site; return those that accept, and why the others do not take part."""
    waiting, noted = dict(sites), dict[ClientId, str]()
    joined: list[Participant] = []
    absent: list[str] = []
    end = time.monotonic() + (float("inf") if wait is None else wait)
    while waiting and (left := end - time.monotonic()) > 0:
        for client, outcome in engine.send_step("hello", {}, list(waiting), left):
            name = sites[client].name
            if isinstance(outcome, str):  # it is offline, or could not read the handshake
                if noted.get(client) != outcome:
                    level: Level = "warning" if outcome.startswith(REFUSED) else "info"
                    note(Note(f"{name}: {outcome}; waiting for it", level))
                noted[client] = outcome
                continue
            site, up = waiting.pop(client), outcome["up"]
            if why := outcome["why"] if up is None else _handshake_fault(up, public):
                absent.append(f"{name} does not take part: {why}")
                note(Note(absent[-1], "warning"))
                absence(name, why)
                continue
            joined.append(_participant(client, site, up))
            presence(name)
            note(f"{name} takes part with {up['examples']:,} images")
        if waiting:
            time.sleep(min(RETRY_PAUSE, max(0.0, end - time.monotonic())))
    for client in waiting:
        absent.append(
            f"{sites[client].name} does not take part: it did not connect within {wait:g} s"
        )
        note(Note(absent[-1], "warning"))
        absence(sites[client].name, f"it did not connect within {wait:g} s")
    return sorted(joined, key=lambda one: one.client), absent


def _handshake_fault(up: Mapping[str, Any], public: str) -> str:
    """Why the answer to a handshake is not accepted; empty if it is."""
    count = up.get("examples")
    if type(count) is not int or not 1 <= count <= MOST_IMAGES:
        return f"it reports an invalid number of images: {str(count)[:20]}"
    return "" if up.get("public") == public else "its public images differ from the server's"


def _check_enough_sites(plan: Recipe, joined: Sequence[Participant]) -> None:
    """Refuse to start with too few sites."""
    if not joined:
        raise NotEnoughReplies("no site takes part: see the reasons above")
    try:
        wanted = plan.participation.check(len(joined))
        if plan.privacy.masks is not None:
            plan.privacy.masks.check(method_of(plan), wanted)
    except ConfigError as error:
        raise NotEnoughReplies(
            f"{counted(len(joined), 'site')} connected, too few: {error}"
        ) from None


def _dominance_warning(plan: Recipe, joined: Sequence[Participant]) -> str:
    """A warning if one of several sites weighs more than all others together; empty if none does.

    Averages are weighted by the number of images, which a site states itself.
    """
    total = sum(one.examples for one in joined)
    largest = max(joined, key=lambda one: one.examples)
    if len(joined) < 3 or plan.server.weighting == "uniform" or 2 * largest.examples <= total:
        return ""
    return (
        f"{largest.name} reports {largest.examples:,} of all {total:,} images, so it has more "
        "weight than all others together; server.weighting=uniform gives all sites the same weight"
    )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, False, False)
    """
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _names(sites: Any) -> str:
    return ", ".join(site.name for site in sites)
