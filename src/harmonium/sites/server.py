"""The server of a federation: it greets the sites, runs the rounds and hands out the encoder.

A federation's run lies in a folder like any other. Its `about.json` also has the roll: which sites
take part, as which clients, and with how many images. The roll is called before the first round. A
site that is away later is left out of rounds by name and continues with its state when it is back.
A site that did not come, or refused, is greeted again when a round begins, and takes part from the
first round that it accepts. To a method it is a client whose answers were all lost until then: it
has no state, and took no part in the setup.
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

from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, NotEnoughReplies, StoreError, counted
from harmonium.core.types import ClientId
from harmonium.data.images import Dataset
from harmonium.engines.remote import NEEDS_FLOWER, Messenger, RemoteEngine, RemoteSite, Waits
from harmonium.federation.driver import Turn
from harmonium.federation.filters import arrival
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.federation.secure_aggregation.client import STEPS
from harmonium.federation.wire import Ask
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Result, RunLoop
from harmonium.runs.open_run import load_public, public_notes, read_about
from harmonium.runs.rounds import RunInputs
from harmonium.runs.start import add_rounds, changed_recipe, holds, locked, new_folder, register
from harmonium.sites.folder import Federation, RegisteredSite
from harmonium.sites.plan import frame_of, method_of, planned, public_digest
from harmonium.sites.upkeep import SERVING, owner_only, restrict_to_owner, single_instance

if TYPE_CHECKING:
    from harmonium.engines.flower.link import Link

MOST_IMAGES = 10**9  # of one site
AGAIN = 2.0  # seconds between two greetings of sites that are offline
JOINING = 3.0  # seconds that a round waits for a site that was just greeted
SOONEST, LATEST = 5.0, 60.0  # seconds until a site that refused is greeted again; they double


@dataclass(frozen=True)
class Listening:
    """Where the server listens for sites, and for how long it waits for them to take part."""

    host: str = "0.0.0.0"
    port: int | None = None  # none: the federation's
    insecure: bool = False  # no TLS; on loopback only
    wait: float | None = None  # seconds until the run begins without sites that did not come

    def __post_init__(self) -> None:
        if self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"--insecure listens on loopback only, not at {self.host}: use --listen 127.0.0.1, "
                "or leave --insecure out"
            )


@dataclass(frozen=True)
class Enrolled:
    """One line of a run's roll."""

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
    listening: Listening | None = None,
) -> Result:
    """Run a recipe with the sites of a federation; continue the run if `out` already holds it."""
    federation = _read(folder)
    plan, dataset = planned(recipe, len(federation.sites))
    path = out if out is not None else new_folder(plan)
    with owner_only(), locked(path):
        resumed = holds(path, plan)
        return _serve(path, plan, dataset, federation, resumed, watcher, listening)


def resume(
    path: Path,
    *changes: str,
    watcher: Callback | None = None,
    listening: Listening | None = None,
) -> Result:
    """Continue a federation's run that stopped, with the sites that it began with.

    `rounds=N` trains it further. Every site checks the longer plan against its policy; one that
    refuses it is left out of the rounds, by name.
    """
    plan, about = changed_recipe(path, changes, further=True), read_about(path)["federation"]
    if not about:
        raise ConfigError(f"{path} is not a run of a federation: use harmonium resume {path}")
    federation = _read(Path(about["folder"]))
    plan, dataset = planned(plan, plan.clients)
    with owner_only(), locked(path):
        restrict_to_owner(path)
        add_rounds(path, plan)
        return _serve(path, plan, dataset, federation, True, watcher, listening)


def _read(folder: Path) -> Federation:
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
    listening: Listening | None,
) -> Result:
    loop = RunLoop(path, plan, watcher or Callback())
    if resumed and loop.is_complete():
        return loop.result()
    with single_instance(federation.folder, SERVING, f"server of {federation.folder}"):
        return _run(loop, dataset, federation, resumed, listening or Listening())


def _run(
    loop: RunLoop,
    dataset: Dataset | None,
    federation: Federation,
    resumed: bool,
    listening: Listening,
) -> Result:
    """Listen for the sites, call the roll of a new run, and run the rounds that are left."""
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
    session = _Session(loop, method, federation, participants, dataset, public)
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
        if not resumed:
            session.enrol(engine, listening.wait)
        if warning := _dominance_warning(loop.recipe, participants.roll):
            note(warning)
        engine.set_members(enrolled.client for enrolled in participants.roll)
        session.admit_newcomers(engine)
        return loop.run(session.inputs(), engine, simulate=False)


@dataclass
class _Session:
    """A run while its server is up: the sites, and those of them that take part."""

    loop: RunLoop
    method: Method
    federation: Federation
    participants: _Participants
    dataset: Dataset | None  # that the server evaluates with
    public: Dataset | None

    def __post_init__(self) -> None:
        called = self.participants.called
        self.sites = _remaining_sites(self.federation, called)
        self.added_later = _added_later(self.federation, called, self.loop.recipe.clients)
        self.public_digest = public_digest(self.public.train if self.public else None)
        self.examples = {one.client: one.examples for one in self.participants.roll}

    def engine(
        self, messenger: Messenger, reachable: Mapping[ClientId, RemoteSite]
    ) -> RemoteEngine:
        """The engine that asks the sites."""
        plan, roll = self.loop.recipe, self.participants.roll
        about = {"federation": self.federation.id, "run": self.participants.run}
        return RemoteEngine(
            messenger,
            reachable,
            self.federation.signing_key(),
            {**about, "plan": plan.digest},
            frame_of(plan),
            Waits(plan.engine.deadline, plan.engine.patience),
            wanted=lambda ask, turn: _enough(plan.participation, len(roll), ask, turn),
            note=self.loop.watcher.note,
            limits=lambda step, client: arrival.limits(
                self.method, step, self.examples.get(client, 0), len(self.sites)
            ),
        )

    def enrol(self, engine: RemoteEngine, wait: float | None) -> None:
        """Call the roll of a new run, and write it down."""
        plan, note, roll = self.loop.recipe, self.loop.watcher.note, self.participants.roll
        accepted, absent = _call_roll(engine, self.sites, self.public_digest, wait, note)
        roll += accepted
        _check_roll(plan, roll)
        if absent:
            sites = len(self.sites)
            note(f"{len(roll)} of {sites} sites take part; others may join in a later round")
        self.examples |= {one.client: one.examples for one in roll}
        register(
            self.loop.path,
            plan,
            self.method,
            **{"data": self.dataset.digest if self.dataset else None, "split": None},
            public=self.public.digest if self.public else None,
            cache={"data": None, "public": None},
            clients=[one.name for one in roll],
            notes=[
                *plan.notes,
                *absent,
                *(self.dataset.notes if self.dataset else ()),
                *public_notes(plan, self.public),
            ],
            federation=self.participants.plain(self.federation),
        )

    def admit_newcomers(self, engine: RemoteEngine) -> None:
        """Let the engine greet the other sites before each round; those that accept join."""
        watcher, roll = self.loop.watcher, self.participants.roll
        everyone = {**self.sites, **self.added_later}
        clients = self.loop.recipe.clients
        late = _LateJoiners(engine, everyone, self.public_digest, clients, watcher.note)

        def newcomers(round: int) -> dict[ClientId, int]:
            present = {one.client for one in roll}
            joining = late.greet([c for c in late.sites if c not in present], round)
            if joining:
                roll[:] = sorted([*roll, *joining], key=lambda one: one.client)
                self.participants.write(self.loop.path, self.federation)  # before they are asked
                watcher.names = {one.client: one.name for one in roll}
                self.examples.update({one.client: one.examples for one in joining})
            return {one.client: one.examples for one in joining}

        engine.newcomers = newcomers
        watcher.names = {one.client: one.name for one in roll}

    def inputs(self) -> RunInputs:
        """What the run loop needs to know of the clients and the data."""
        return RunInputs(
            self.method,
            dict(self.examples),
            self.dataset,
            self.public.train.without_labels() if self.public else None,
            tuple(public_notes(self.loop.recipe, self.public)),
        )


@contextmanager
def _link_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for the link; its messages, models and answers, are deleted afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        for path in folder.glob("flower.db*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Participants:
    """A run's random name, the sites it called, and those that take part."""

    run: str
    called: list[Enrolled]  # all sites of the federation when the run began, by client
    roll: list[Enrolled]  # those that take part, by client; grows

    @classmethod
    def new(cls, federation: Federation) -> _Participants:
        """Of a new run; its clients are the sites in the order of their numbers."""
        called = [
            Enrolled(client, site.number, site.name, site.fingerprint)
            for client, site in enumerate(federation.sites)
        ]
        return cls(secrets.token_hex(16), called, [])

    @classmethod
    def read(cls, path: Path, federation: Federation) -> _Participants:
        """Of a run that began before; earlier versions recorded only the roll."""
        about = read_about(path)["federation"]
        try:
            if about["id"] != federation.id:
                raise ConfigError(f"{path} is a run of another federation than {federation.folder}")
            roll = [Enrolled(**one) for one in about["roll"]]
            called = [Enrolled(**one) for one in about.get("called", about["roll"])]
            return cls(about["run"], called, roll)
        except (KeyError, TypeError):
            raise StoreError(f"{path / 'about.json'} is damaged: start a new run") from None

    def plain(self, federation: Federation) -> dict[str, Any]:
        """The participants as about.json has them."""
        return {
            "id": federation.id,
            "folder": str(federation.folder.absolute()),
            "run": self.run,
            "called": [asdict(one) for one in self.called],
            "roll": [asdict(one) for one in self.roll],
        }

    def write(self, path: Path, federation: Federation) -> None:
        """Update about.json with those that take part now."""
        about = files.read_sealed(path / "about.json")
        about["federation"] = self.plain(federation)
        about["clients"] = [one.name for one in self.roll]
        files.write_atomic(path / "about.json", files.sealed(about))


@dataclass
class _LateJoiners:
    """Greets sites that do not take part yet; one that refused is greeted again after a while."""

    engine: RemoteEngine
    sites: Mapping[ClientId, RegisteredSite]
    public: str
    clients: int  # of the plan: a site that was added after the run began has no place in it
    note: Callable[[str], None]
    _said: dict[ClientId, str] = field(default_factory=dict)
    _next: dict[ClientId, tuple[float, float]] = field(default_factory=dict)  # time, pause

    def greet(self, clients: Sequence[ClientId], round: int) -> list[Enrolled]:
        """Those of these clients who take part from a round on."""
        joining, now = list[Enrolled](), time.monotonic()
        due = [client for client in clients if now >= self._next.get(client, (now, 0.0))[0]]
        for client, outcome in self.engine.handshake(due, JOINING, round) if due else ():
            if isinstance(outcome, str):  # it left, or could not read the greeting
                continue
            site, up = self.sites[client], outcome["up"]
            why = outcome["why"] if up is None else _greeting_fault(up, self.public)
            if not why and client >= self.clients:
                why = f"the run was planned for {counted(self.clients, 'site')} before it was added"
            if not why:
                note = f"{site.name} joins with {counted(up['examples'], 'image')}"
                joining.append(_enrolled(client, site, up))
            else:
                note = f"{site.name} does not take part yet: {why}"
                pause = max(SOONEST, min(2 * self._next.get(client, (0.0, 0.0))[1], LATEST))
                self._next[client] = (time.monotonic() + pause, pause)
            if self._said.get(client) != note:
                self.note(note)
            self._said[client] = note
        return joining


def _enrolled(client: ClientId, site: RegisteredSite, up: Mapping[str, Any]) -> Enrolled:
    return Enrolled(client, site.number, site.name, site.fingerprint, up["examples"])


def _added_later(
    federation: Federation, called: Sequence[Enrolled], clients: int
) -> dict[ClientId, RegisteredSite]:
    """Sites that were added after a run began, by numbers that none of its clients has.

    They are admitted and greeted, so that they learn why they are not asked.
    """
    known = {one.fingerprint for one in called}
    new = [site for site in federation.sites if site.fingerprint not in known]
    return dict(enumerate(new, max(clients, len(called))))


def _remaining_sites(
    federation: Federation, roll: Sequence[Enrolled]
) -> dict[ClientId, RegisteredSite]:
    """The sites of a roll that still belong to the federation, by client."""
    known = {site.fingerprint: site for site in federation.sites}
    return {one.client: known[one.fingerprint] for one in roll if one.fingerprint in known}


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


def _call_roll(
    engine: RemoteEngine,
    sites: Mapping[ClientId, RegisteredSite],
    public: str,
    wait: float | None,
    note: Callable[[str], None],
) -> tuple[list[Enrolled], list[str]]:
    """Greet every site; return the roll of those that accept, and why the others do not."""
    waiting, said = dict(sites), dict[ClientId, str]()
    roll: list[Enrolled] = []
    absent: list[str] = []
    end = time.monotonic() + (float("inf") if wait is None else wait)
    while waiting and (left := end - time.monotonic()) > 0:
        for client, outcome in engine.send_step("hello", {}, list(waiting), left):
            name = sites[client].name
            if isinstance(outcome, str):  # offline, or it could not read the greeting
                if said.get(client) != outcome:
                    note(f"{name}: {outcome}; waiting for it")
                said[client] = outcome
                continue
            site, up = waiting.pop(client), outcome["up"]
            if why := outcome["why"] if up is None else _greeting_fault(up, public):
                absent.append(f"{name} does not take part: {why}")
                note(absent[-1])
                continue
            roll.append(_enrolled(client, site, up))
            note(f"{name} takes part with {up['examples']:,} images")
        if waiting:
            time.sleep(min(AGAIN, max(0.0, end - time.monotonic())))
    for client in waiting:
        absent.append(f"{sites[client].name} does not take part: it did not come in {wait:g} s")
        note(absent[-1])
    return sorted(roll, key=lambda one: one.client), absent


def _greeting_fault(up: Mapping[str, Any], public: str) -> str:
    """Why an answer to a greeting cannot be accepted; empty if it can."""
    count = up.get("examples")
    if type(count) is not int or not 1 <= count <= MOST_IMAGES:
        return f"it says that it has {str(count)[:20]} images"
    return "" if up.get("public") == public else "its public images are not the server's"


def _check_roll(plan: Recipe, roll: Sequence[Enrolled]) -> None:
    """Refuse to begin with too few sites."""
    if not roll:
        raise NotEnoughReplies("no site takes part: see the reasons above")
    try:
        wanted = plan.participation.check(len(roll))
        if plan.privacy.masks is not None:
            plan.privacy.masks.check(method_of(plan), wanted)
    except ConfigError as error:
        raise NotEnoughReplies(f"{counted(len(roll), 'site')} came, too few: {error}") from None


def _dominance_warning(plan: Recipe, roll: Sequence[Enrolled]) -> str:
    """A warning if one of several sites weighs more than all others together; empty if none does.

    Averages are weighted by the number of images, which a site states itself.
    """
    total = sum(one.examples for one in roll)
    largest = max(roll, key=lambda one: one.examples)
    if len(roll) < 3 or plan.server.weighting == "uniform" or 2 * largest.examples <= total:
        return ""
    return (
        f"{largest.name} says that it has {largest.examples:,} of all {total:,} images, so it "
        "weighs more than all other sites together; server.weighting=uniform counts sites alike"
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
