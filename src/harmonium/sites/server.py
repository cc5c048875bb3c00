"""The server of a federation: it greets the sites, plays the run and hands the encoder out.

A run of a federation lies in a folder like any other. Beside the recipe it has the roll: which
sites take part, under which client's number, and with how many images. The roll is called before
the first round. A site that is away later is left out of rounds by name and continues with its
state when it is back. A site that did not come, or refused, is greeted again when a round begins,
and takes part from the round on before which it accepts. To a method it is a client whose answers
were all lost until then: it has no state, and was not heard in the setup.
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
from harmonium.engines.remote import NEEDS_FLOWER, RemoteEngine, RemoteSite, Waits
from harmonium.federation.driver import Turn
from harmonium.federation.filters import arrival
from harmonium.federation.sampling import Participation
from harmonium.federation.secure_aggregation.client import STEPS
from harmonium.federation.wire import Ask
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Ground, Result, RunLoop
from harmonium.runs.open_run import load_public, public_notes, read_about
from harmonium.runs.start import changed_recipe, go_further, holds, locked, new_folder, register
from harmonium.sites.folder import Federation, RegisteredSite
from harmonium.sites.plan import frame_of, method_of, planned, public_digest
from harmonium.sites.upkeep import SERVING, owner_only, restrict_to_owner, single_instance

if TYPE_CHECKING:
    from harmonium.engines.flower.link import Link

MOST_IMAGES = 10**9  # of one site
AGAIN = 2.0  # seconds between two looks for sites that are not there yet
JOINING = 3.0  # seconds that a round waits for a site that was just greeted
SOONEST, LATEST = 5.0, 60.0  # seconds until a site that refused is asked again, twice as many each


@dataclass(frozen=True)
class Listening:
    """Where the server listens for sites, and for how long it calls the roll."""

    host: str = "0.0.0.0"
    port: int | None = None  # none: the federation's
    insecure: bool = False  # no TLS; on loopback only
    wait: float | None = None  # seconds until the run begins without those who are not there

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
    """Run a recipe with the sites of a federation; `out` that holds this very run continues it."""
    federation = _read(folder)
    plan, dataset = planned(recipe, len(federation.sites))
    path = out if out is not None else new_folder(plan)
    with owner_only(), locked(path):
        held = holds(path, plan)
        return _serve(path, plan, dataset, federation, held, watcher, listening)


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
        raise ConfigError(f"{path} is no run of a federation: use harmonium resume {path}")
    federation = _read(Path(about["folder"]))
    plan, dataset = planned(plan, plan.clients)
    with owner_only(), locked(path):
        restrict_to_owner(path)
        go_further(path, plan)
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
    held: bool,
    watcher: Callback | None,
    listening: Listening | None,
) -> Result:
    life = RunLoop(path, plan, watcher or Callback())
    if held and life.is_complete():
        return life.result()
    with single_instance(federation.folder, SERVING, f"server of {federation.folder}"):
        return _play(life, dataset, federation, held, listening or Listening())


def _play(
    life: RunLoop,
    dataset: Dataset | None,
    federation: Federation,
    held: bool,
    listening: Listening,
) -> Result:
    """Call the roll, if it was not called before, and play what is left of the run."""
    try:
        from harmonium.engines.flower.link import Link
        from harmonium.engines.flower.messenger import FlowerMessenger
    except ImportError:
        raise ConfigError(NEEDS_FLOWER) from None
    plan, path = life.recipe, life.path
    note, method = life.watcher.note, method_of(plan)
    arrival.check_declared(method)
    for text in federation.notes:
        note(text)
    public = load_public(plan, (method.world.side, method.world.side, method.world.channels))
    begun = _Participants.read(path, federation) if held else _Participants.new(federation)
    run, roll, sites = begun.run, begun.roll, _remaining_sites(federation, begun.called)
    examples = {one.client: one.examples for one in roll}
    port = federation.port if listening.port is None else listening.port
    pair = (federation.certificate, federation.certificate_key)
    restrict_to_owner(federation.folder)
    with (
        _link_folder(federation.folder / "link") as place,
        Link(place, listening.host, port, None if listening.insecure else pair) as link,
    ):
        note(f"run {run[:8]}, plan {plan.digest}")
        note(f"listening at {listening.host}:{port} for {_names(sites.values())}")
        strangers = _added_later(federation, begun.called, plan.clients)
        engine = RemoteEngine(
            FlowerMessenger(link),
            _members(link, {**sites, **strangers}),
            federation.signing_key(),
            {"federation": federation.id, "run": run, "plan": plan.digest},
            frame_of(plan),
            Waits(plan.engine.deadline, plan.engine.patience),
            wanted=lambda ask, turn: _enough(plan.participation, len(roll), ask, turn),
            note=note,
            limits=lambda step, client: arrival.limits(
                method, step, examples.get(client, 0), len(sites)
            ),
        )
        shown = public_digest(public.train if public else None)
        if not held:
            found, absent = _call_roll(engine, sites, shown, listening.wait, note)
            roll += found
            _check_roll(plan, roll)
            if absent:
                note(
                    f"{len(roll)} of {len(sites)} sites take part; others may join in a later round"
                )
            examples |= {one.client: one.examples for one in roll}
            register(
                path,
                plan,
                method,
                **{"data": dataset.digest if dataset else None, "split": None},
                public=public.digest if public else None,
                cache={"data": None, "public": None},
                clients=[one.name for one in roll],
                notes=[
                    *plan.notes,
                    *absent,
                    *(dataset.notes if dataset else ()),
                    *public_notes(plan, public),
                ],
                federation=begun.plain(federation),
            )
        if heavy := _dominance_warning(plan, roll):
            note(heavy)
        engine.keep(one.client for one in roll)
        late = _LateJoiners(engine, {**sites, **strangers}, shown, plan.clients, note)

        def newcomers(round: int) -> dict[ClientId, int]:
            absent = [c for c in late.sites if c not in {one.client for one in roll}]
            if found := late.greet(absent, round):
                roll[:] = sorted([*roll, *found], key=lambda one: one.client)
                begun.write(path, federation)  # before anything is asked of them
                life.watcher.names = {one.client: one.name for one in roll}
                examples.update({one.client: one.examples for one in found})
            return {one.client: one.examples for one in found}

        engine.newcomers = newcomers
        life.watcher.names = {one.client: one.name for one in roll}
        ground = Ground(
            method,
            dict(examples),
            dataset,
            public.train.without_labels() if public else None,
            tuple(public_notes(plan, public)),
        )
        return life.play(ground, engine, simulate=False)


@contextmanager
def _link_folder(place: Path) -> Iterator[Path]:
    """A place for the link. Its messages are models and answers, and serve nobody afterwards."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        yield place
    finally:
        for path in place.glob("flower.db*"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Participants:
    """A run's name among its sites, whom it called, and who takes part."""

    run: str
    called: list[Enrolled]  # every site that belonged when the run began, by client
    roll: list[Enrolled]  # those that take part, by client; grows

    @classmethod
    def new(cls, federation: Federation) -> _Participants:
        """A run that begins now; sites are its clients in the order of their numbers."""
        called = [
            Enrolled(client, site.number, site.name, site.fingerprint)
            for client, site in enumerate(federation.sites)
        ]
        return cls(secrets.token_hex(16), called, [])

    @classmethod
    def read(cls, path: Path, federation: Federation) -> _Participants:
        """A run that was begun before; one of an earlier version called who took part."""
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
        """As about.json has it."""
        return {
            "id": federation.id,
            "folder": str(federation.folder.absolute()),
            "run": self.run,
            "called": [asdict(one) for one in self.called],
            "roll": [asdict(one) for one in self.roll],
        }

    def write(self, path: Path, federation: Federation) -> None:
        """Write down who takes part now."""
        about = files.read_sealed(path / "about.json")
        about["federation"] = self.plain(federation)
        about["clients"] = [one.name for one in self.roll]
        files.write_atomic(path / "about.json", files.sealed(about))


@dataclass
class _LateJoiners:
    """Greets sites that do not take part yet; one that refused is asked again after a while."""

    engine: RemoteEngine
    sites: Mapping[ClientId, RegisteredSite]
    public: str
    clients: int  # of the plan: a site that was added after the run began has no place in it
    note: Callable[[str], None]
    _said: dict[ClientId, str] = field(default_factory=dict)
    _next: dict[ClientId, tuple[float, float]] = field(default_factory=dict)  # time, pause

    def greet(self, clients: Sequence[ClientId], round: int) -> list[Enrolled]:
        """Those of these clients who take part from a round on."""
        found, now = list[Enrolled](), time.monotonic()
        due = [client for client in clients if now >= self._next.get(client, (now, 0.0))[0]]
        for client, got in self.engine.greet(due, JOINING, round) if due else ():
            if isinstance(got, str):  # it left, or did not understand
                continue
            site, up = self.sites[client], got["up"]
            why = got["why"] if up is None else _greeting_fault(up, self.public)
            if not why and client >= self.clients:
                why = f"the run was planned for {counted(self.clients, 'site')} before it was added"
            if not why:
                note = f"{site.name} joins with {counted(up['examples'], 'image')}"
                found.append(_enrolled(client, site, up))
            else:
                note = f"{site.name} does not take part yet: {why}"
                pause = max(SOONEST, min(2 * self._next.get(client, (0.0, 0.0))[1], LATEST))
                self._next[client] = (time.monotonic() + pause, pause)
            if self._said.get(client) != note:
                self.note(note)
            self._said[client] = note
        return found


def _enrolled(client: ClientId, site: RegisteredSite, up: Mapping[str, Any]) -> Enrolled:
    return Enrolled(client, site.number, site.name, site.fingerprint, up["examples"])


def _added_later(
    federation: Federation, called: Sequence[Enrolled], clients: int
) -> dict[ClientId, RegisteredSite]:
    """Sites that were added after a run began, by numbers that no client of it has.

    They are let in and greeted, so that they learn why nothing is asked of them.
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


def _members(link: Link, sites: Mapping[ClientId, RegisteredSite]) -> dict[ClientId, RemoteSite]:
    nodes = link.admit({client: site.public_key for client, site in sites.items()})
    return {
        client: RemoteSite(site.name, site.number, nodes[client], site.public_key)
        for client, site in sites.items()
    }


def _enough(participation: Participation, sites: int, ask: Ask, turn: Turn) -> int | None:
    """How many answers of an ask are enough: of a cohort with some to spare, those wanted."""
    later = STEPS[1:]  # who began a masked ask must stay
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
    """Greet every site: the roll of those who accept the plan, and why the others do not."""
    waiting, said = dict(sites), dict[ClientId, str]()
    roll: list[Enrolled] = []
    absent: list[str] = []
    end = time.monotonic() + (float("inf") if wait is None else wait)
    while waiting and (left := end - time.monotonic()) > 0:
        for client, got in engine.say("hello", {}, list(waiting), left):
            name = sites[client].name
            if isinstance(got, str):  # not there, or it did not understand
                if said.get(client) != got:
                    note(f"{name}: {got}; waiting for it")
                said[client] = got
                continue
            site, up = waiting.pop(client), got["up"]
            if why := got["why"] if up is None else _greeting_fault(up, public):
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
    """Why a greeting cannot be accepted; nothing if it can. Images weigh averages."""
    count = up.get("examples")
    if type(count) is not int or not 1 <= count <= MOST_IMAGES:
        return f"it says that it has {str(count)[:20]} images"
    return "" if up.get("public") == public else "its public images are not the server's"


def _check_roll(plan: Recipe, roll: Sequence[Enrolled]) -> None:
    """Refuse to begin with too few."""
    if not roll:
        raise NotEnoughReplies("no site takes part: see the reasons above")
    try:
        wanted = plan.participation.check(len(roll))
        if plan.privacy.masks is not None:
            plan.privacy.masks.check(method_of(plan), wanted)
    except ConfigError as error:
        raise NotEnoughReplies(f"{counted(len(roll), 'site')} came, too few: {error}") from None


def _dominance_warning(plan: Recipe, roll: Sequence[Enrolled]) -> str:
    """A warning where one of several sites weighs more than all others; nothing where none does.

    How many images a site has is what it says, and averages are weighted by it.
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
