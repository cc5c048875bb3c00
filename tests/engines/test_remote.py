"""The server's side of a federation, against real sites over a messenger that does its worst.

The messenger is in memory and time is played: waiting an hour takes no time. Sites, runtimes, seals
and logs are the real ones.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core import codec, files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import EngineError, HarmoniumError, NotEnoughReplies
from harmonium.data.images import Dataset
from harmonium.data.partition import Split, make_split
from harmonium.data.splits.iid import IID
from harmonium.engines import remote
from harmonium.engines.local import LocalEngine
from harmonium.engines.remote import TRIES, Answer, RemoteEngine, RemoteSite, SealedMessage, Waits
from harmonium.engines.runtime import ClientRuntime, StateRef
from harmonium.engines.seal import seal
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import EXAMPLES, Ask, exchange, scalar, statistic, weights
from harmonium.learning.client import Decline
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import RunLoop
from harmonium.runs.open_run import make_runtime
from harmonium.runs.rounds import RunInputs
from harmonium.runs.start import register
from harmonium.sites.policy import Policy
from harmonium.sites.site import Identity, Site
from harmonium.testing import TINY

CLIENTS = 4
SERVER = ec.generate_private_key(ec.SECP384R1())
KEYS = {client: ec.generate_private_key(ec.SECP384R1()) for client in range(CLIENTS)}
ABOUT = {"federation": "f" * 32, "run": "0" * 32}
WAITS = Waits(deadline=1000.0, patience=100.0)
GONE = "its node is gone"


@dataclass(frozen=True)
class Adding(Method):
    """Adds the client's number to the model, counts at the client, releases a noisy mean."""

    declines: int = -1
    keeps = {"count": "scalar"}

    @exchange(
        down={"model": weights()},
        up={
            "model": weights(by=EXAMPLES),
            "mean": statistic("each", guarded=True),
            "loss": scalar("mean"),
        },
    )
    def train(self, client, got):  # type: ignore[no-untyped-def]
        if client.id == self.declines:
            raise Decline("it does not want to")
        client.state["count"] = client.state.get("count", 0) + 1
        add = client.id + client.state["count"]
        model = {k: v + add if v.is_floating_point() else v for k, v in got.model.items()}
        mean = client.examples.pixels().double().mean(dim=(0, 1, 2))
        noisy = client.release("mean", mean, sensitivity=0.1, sigma=1.0)
        return {"model": model, "mean": noisy, "loss": float(client.state["count"])}


@dataclass(frozen=True)
class Personal(Method):
    """Keeps its projector and a count at the client."""

    share = {"projector": "local"}
    keeps = {"count": "scalar"}

    @exchange(down={"model": weights()}, up={"model": weights(), "loss": scalar()})
    def train(self, client, got):  # type: ignore[no-untyped-def]
        client.state["count"] = client.state.get("count", 0) + 1
        return super().train(client, got)


@dataclass(frozen=True)
class Comparing(Method):
    """Asks everyone at the start and twice a round, and tells each client what the others said."""

    keeps = {"told": "statistic"}
    remembers = {"means": "statistic"}

    def setup(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("describe", server.everyone, {"model": server.model})
        return replace(server, memory={"means": got.mean})

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("describe", cohort, {"model": server.model})
        means = {**server.memory["means"], **got.mean}
        total = torch.stack([means[client] for client in sorted(means)]).sum(0)
        each = {client: {"others": total - means[client]} for client in got.ids}
        done = yield Ask("train", got.ids, {"model": server.model}, each)
        return replace(self.merge(server, done.model), memory={"means": means})

    @exchange(down={"model": weights()}, up={"mean": statistic("each", guarded=True)})
    def describe(self, client, got):  # type: ignore[no-untyped-def]
        parts = self.pull(client, got.model).eval()
        with torch.no_grad():
            batches = [parts["encoder"](b.plain).mean(0) for b in client.batches(1, 6, least=1)]
        mean = torch.stack(batches).mean(0).double()
        return {"mean": client.release("mean", mean, sensitivity=0.1, sigma=0.01)}

    @exchange(
        down={"model": weights(), "others": statistic()},
        up={"model": weights(by=EXAMPLES), "loss": scalar("mean")},
    )
    def train(self, client, got):  # type: ignore[no-untyped-def]
        before = client.state.get("told", torch.zeros_like(got.others))
        client.state["told"] = 0.5 * (before + got.others)
        return super().train(client, got)


@dataclass
class Clock:
    """What the engine takes for time."""

    now: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


Came = Answer | str


@dataclass
class Carrier:
    """A messenger in memory that loses, delays, doubles, reorders, edits and swaps on demand."""

    clock: Clock
    nodes: dict[int, Callable[[bytes, list[bytes]], Answer]]
    slow: dict[int, float] = field(default_factory=dict)  # seconds that a node needs
    away: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # when, from now on
    unsent: int = 0  # messages that cannot be sent
    silent: bool = False  # a node that was away is not told of: it is back before anyone looks
    on_ask: Callable[[SealedMessage], SealedMessage] = lambda message: message
    on_answer: Callable[[SealedMessage, Answer], Sequence[Came]] = lambda message, answer: [answer]
    order: Callable[[list[str]], list[str]] = list
    stray: list[tuple[str, Came]] = field(default_factory=list)  # comes beside what was asked for
    messages: list[SealedMessage] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    given: int = 0
    _due: dict[str, tuple[float, float, SealedMessage]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock.now

    def push(self, messages: Sequence[SealedMessage]) -> list[str | None]:
        tickets: list[str | None] = []
        for message in messages:
            if self.unsent:
                self.unsent -= 1
                tickets.append(None)
                continue
            self.messages.append(message)
            ticket = f"ticket {len(self.messages)}"
            due = self.clock.now + self.slow.get(message.node, 0.1)
            self._due[ticket] = (self.clock.now, due, message)
            tickets.append(ticket)
        return tickets

    def pull(self, tickets: Iterable[str]) -> Iterator[tuple[str, Came]]:
        yield from self.stray
        here = [ticket for ticket in tickets if ticket in self._due]
        for ticket in self.order(sorted(here, key=lambda one: self._due[one][1])):
            sent, due, message = self._due[ticket]
            breaks = [
                start for start, end in self._away(message.node) if start < due and end > sent
            ]
            if breaks and self.silent:
                continue
            if breaks and self.clock.now >= min(breaks):
                del self._due[ticket]
                yield ticket, GONE
            elif not breaks and self.clock.now >= due:
                del self._due[ticket]
                for came in self._carried(message):
                    self.given += 1
                    yield ticket, came

    def online(self) -> dict[int, str]:
        now = self.clock.now
        return {
            node: f"after {sum(end <= now for _, end in self._away(node))} absences"
            for node in self.nodes
            if not any(start <= now < end for start, end in self._away(node))
        }

    def _away(self, node: int) -> list[tuple[float, float]]:
        return [(self.began + a, self.began + b) for a, b in self.away.get(node, [])]

    def _carried(self, message: SealedMessage) -> Sequence[Came]:
        asked = self.on_ask(message)
        try:
            answer = self.nodes[message.node](asked.sealed, list(asked.bodies))
        except HarmoniumError as error:
            return [f"its node reports: {error}"]
        self.answers.append((message.node, answer))
        return self.on_answer(message, answer)


def node_of(client: int) -> int:
    return 100 + client


def client_of(node: int) -> int:
    return node - 100


def plan(
    method: type[Method] | str = Adding,
    noise: str = "simulated",
    secure: bool = False,
    **options: Any,
) -> Recipe:
    name = method if isinstance(method, str) else f"{method.__module__}:{method.__qualname__}"
    tree = {**TINY, "data": {"name": "sites", "size": 12}, "split": "iid", "clients": CLIENTS}
    tree["rounds"] = 5
    tree |= {"method": {"name": name, **options}, "privacy": {"noise": noise}}
    if secure:
        tree["privacy"]["secure_aggregation"] = True
        tree["objective"] = {"name": "simclr", "norm": "none"}  # counters cannot be hidden
    if name == "scaffold":
        tree["local"] = {**TINY["local"], "optimiser": "sgd", "momentum": 0.0, "clip": None}
    return Recipe.from_tree(tree)


@cache
def pictures() -> tuple[Dataset, Split]:
    dataset = Recipe.from_tree({"data": TINY["data"]}).data.load()
    return dataset, make_split(IID(), dataset, None, CLIENTS, 0)


def host_of(recipe: Recipe, folder: Path) -> ClientRuntime:
    return make_runtime(recipe, *pictures(), folder)


class Federation:
    """An engine, its carrier and a site for every client."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe | None = None,
        waits: Waits = WAITS,
        wanted: Callable[[Ask, Turn], int | None] = lambda ask, turn: None,
        policy: Policy | None = None,
    ) -> None:
        self.folder, self.recipe, self.policy = folder, recipe or plan(), policy
        self.clock = Clock()
        self.carrier = Carrier(self.clock, {})
        self.sites: dict[int, Site] = {}
        for client in range(CLIENTS):
            self.restart(client)
        self.notes: list[str] = []
        self.waits, self.wanted = waits, wanted
        self.engine = self.new_engine()
        self.host = host_of(self.recipe, folder / "server")
        self.method = self.host.method
        self.ledger = Ledger()

    def new_engine(self) -> RemoteEngine:
        """As after a restart of the server."""
        members = {
            client: RemoteSite(f"site {client}", 10 + client, node_of(client), key.public_key())
            for client, key in KEYS.items()
        }
        return RemoteEngine(
            self.carrier,
            members,
            SERVER,
            {**ABOUT, "plan": self.recipe.digest},
            json.dumps(self.recipe.tree()).encode(),
            self.waits,
            self.wanted,
            note=self.notes.append,
        )

    def restart(self, client: int) -> None:
        """A site's process begins anew, with what its folder holds."""
        site = Site(
            Identity(ABOUT["federation"], 10 + client, KEYS[client], SERVER.public_key()),
            self.folder / f"site-{client}",
            lambda recipe, folder, _: host_of(recipe, folder),
            self.policy,
        )
        self.sites[client] = site
        self.carrier.nodes[node_of(client)] = site.answer

    def live(self, folder: Path, there: Sequence[int]) -> Path:
        """A whole run, begun by some of the clients, as the server plays it."""
        named: dict[str, Any] = {"data": None, "split": None, "public": None, "notes": []}
        register(folder, self.recipe, self.method, cache={"data": None, "public": None}, **named)
        self.engine.set_members(there)
        inputs = RunInputs(self.method, dict.fromkeys(there, 12), None)
        RunLoop(folder, self.recipe, Callback()).run(inputs, self.engine, simulate=False)
        return folder

    def deliver(
        self, round: int = 1, to: Sequence[int] = range(CLIENTS), ask: int = 0
    ) -> dict[int, Reply]:
        """One ask without a method's plan; what counts is accepted."""
        down = {"model": self.method.blueprint.shared()}
        replies: dict[int, Reply] = {}
        for reply in self.engine.deliver(Ask("train", to, down), Turn(round, ask)):
            assert reply.client not in replies and (reply.up is None) == bool(reply.why)
            replies[reply.client] = reply
            if reply.up is not None:
                self.engine.accept(reply)
        assert sorted(replies) == sorted(to)
        return replies

    @property
    def passed(self) -> float:
        return self.clock.now - self.carrier.began


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Federation]]:
    def make(*args: Any, **settings: Any) -> Federation:
        made = Federation(tmp_path / "sites", *args, **settings)
        monkeypatch.setattr(remote, "time", made.clock)
        return made

    yield make


def why(replies: Mapping[int, Reply]) -> dict[int, str]:
    return {client: reply.why for client, reply in replies.items() if reply.up is None}


def play(
    recipe: Recipe, host: ClientRuntime, engine: Any, rounds: int = 2
) -> tuple[str, Any, list[str]]:
    """Setup and rounds; the bits of the server, the versions of the states and the ledger."""
    ledger = Ledger()
    examples = {client: len(index) for client, index in enumerate(host.indices)}
    server = Server(examples, host.method.blueprint.shared())
    driver = Driver(host.method, engine, ledger, masks=recipe.privacy.masks)
    for number in range(rounds + 1):
        server = replace(server, round=number)
        server = driver.drive(host.method.run_plan(server, server.everyone), server)
        engine.prune(engine.snapshot())
    tree = {"model": server.model, "memory": server.memory}
    return files.digest_of(codec.encode(tree)), engine.snapshot(), ledger.lines


@cache
def locally(name: str) -> tuple[str, Any, list[str]]:
    """The same on the local engine."""
    import tempfile

    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        host = host_of(recipe, Path(folder))
        return play(recipe, host, LocalEngine(host, Path(folder), workers=0))


RECIPES = {
    "adding": plan(),
    "state": plan(Personal),
    "start-up, two exchanges, state": plan(Comparing),
    "scaffold": plan("scaffold"),
    "masks": plan("fedavg", secure=True),
}


# ---- parity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_sites_end_with_the_bits_of_the_local_engine(
    name: str, build: Callable[..., Federation]
) -> None:
    fed = build(RECIPES[name])
    digest, states, lines = play(fed.recipe, fed.host, fed.engine)
    expected, kept, ledger = locally(name)
    assert digest == expected and states == kept and lines == ledger
    assert len(states) == (0 if name == "masks" else CLIENTS)
    logs = [entry for site in fed.sites.values() for entry in site.log.entries()]
    assert {entry["outcome"] for entry in logs} == {"sent"} and len(logs) == len(lines)


@pytest.mark.parametrize("name", ["adding", "start-up, two exchanges, state", "masks"])
def test_faults_that_pass_change_no_bit(name: str, build: Callable[..., Federation]) -> None:
    """Reordered, slow, doubled, lost before and after the work, nodes that restart."""
    fed = build(RECIPES[name])
    carrier, losses = fed.carrier, iter(range(10**6))
    carrier.slow = {node_of(client): 20.0 - 5 * client for client in range(CLIENTS)}
    carrier.away = {node_of(1): [(15.0, 30.0)], node_of(2): [(3.0, 8.0), (50.0, 60.0)]}
    carrier.order = lambda tickets: tickets[::-1]

    def lossy(message: SealedMessage, answer: Answer) -> Sequence[Came]:
        number = next(losses)
        if number % 3 == 1:
            fed.restart(client_of(message.node))
            return [GONE]
        return [answer, answer] if number % 3 else [answer]

    carrier.on_answer = lossy
    digest, states, lines = play(fed.recipe, fed.host, fed.engine)
    assert (digest, states, lines) == locally(name)
    for client, site in fed.sites.items():
        sent = [e["step"] for e in site.log.entries() if e["outcome"] == "sent"]
        asked = [entry["step"] for entry in map(json.loads, lines) if entry["client"] == client]
        for step in set(asked) - {"mask_keys"}:  # new keys are made each time
            assert sent.count(step) == asked.count(step)  # what was repeated came from the shelf
    again = sum(len(site.log.entries()) for site in fed.sites.values()) - len(lines)
    assert again >= 4


@dataclass
class Deaf:
    """An engine that hears nobody's shares in the first try of round 1."""

    engine: Any

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for reply in self.engine.deliver(ask, turn):
            gone = ask.step == "unmask" and turn == Turn(1, 0)
            yield Reply(reply.client, None, "lost") if gone else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("where", ["local", "sites"])
def test_secrets_of_masks_are_kept_and_deleted_alike(
    where: str, build: Callable[..., Federation], tmp_path: Path
) -> None:
    """A sum that stayed shut is tried anew; secrets outlast rounds and go with the run."""
    fed = build(RECIPES["masks"])
    local = LocalEngine(fed.host, fed.folder, workers=0)
    engine = local if where == "local" else fed.engine
    _, _, lines = play(fed.recipe, fed.host, Deaf(engine), rounds=1)
    asks = list(dict.fromkeys(json.loads(line)["ask"] for line in lines))
    assert len(asks) == 2 and asks[0] == 0 < asks[1]
    held = [path.parent.name for path in tmp_path.rglob("masks.safetensors")]
    assert sorted(held) == [str(client) for client in range(CLIENTS)]
    engine.finish({}, {}, {})
    assert not list(tmp_path.rglob("masks.safetensors"))


def test_a_server_that_resumes_gets_the_same_answers_and_costs_no_release_twice(
    build: Callable[..., Federation],
) -> None:
    fed = build(plan(noise="system"))
    fed.deliver(1)
    fed.engine.prune(held := fed.engine.snapshot())
    first = fed.deliver(2)
    fed.engine = fed.new_engine()  # killed in round 2, before it was committed
    fed.engine.restore(codec.decode(codec.encode(held)))
    fed.engine.prune({}, held)
    again = fed.deliver(2)
    for client in range(CLIENTS):
        for reply in (first[client], again[client]):
            assert reply.up is not None and reply.state == first[client].state
        assert torch.equal(first[client].up["mean"], again[client].up["mean"])  # type: ignore[index]
        assert len(fed.sites[client].log.releases()) == 2


# ---- what comes back is not what was sent ----------------------------------------------------


def resealed(answer: Answer, signer: int, bodies: list[bytes], **changes: Any) -> Answer:
    """An answer with another body or header, signed by the site itself."""
    about = json.loads(json.loads(answer[0])["header"])
    about.pop("bodies")
    digests = [files.digest_of(body) for body in bodies]
    return seal("answer", {**about, **changes}, digests, KEYS[signer]), bodies


def edited(answer: Answer, **changes: Any) -> Answer:
    """An answer whose header somebody edited on its way."""
    held = json.loads(answer[0])
    held["header"] = json.dumps({**json.loads(held["header"]), **changes})
    return json.dumps(held).encode(), answer[1]


BAD: dict[str, Callable[[Answer], Answer]] = {
    "body": lambda a: (a[0], [a[1][0][:-1] + bytes([a[1][0][-1] ^ 1])]),
    "longer": lambda a: (a[0], [a[1][0] + b"\0"]),
    "no body": lambda a: (a[0], []),
    "two bodies": lambda a: (a[0], a[1] * 2),
    "round": lambda a: edited(a, round=2),
    "nonce": lambda a: edited(a, nonce="0" * 32),
    "digest": lambda a: edited(a, bodies=["0" * 64]),
    "empty": lambda a: (b"", []),
    "garbage": lambda a: (b"\xff" * 100, [b"\x00" * 100]),
    "deep": lambda a: (b"[" * 100_000, a[1]),
    "oversize": lambda a: (a[0] + b" " * (1 << 21), a[1]),
    "other signer": lambda a: resealed(a, 3, a[1]),
    "own key, other round": lambda a: resealed(a, 1, a[1], round=2),
    "own key, other ask": lambda a: resealed(a, 1, a[1], ask=1),
    "own key, other step": lambda a: resealed(a, 1, a[1], step="describe"),
    "own key, other client": lambda a: resealed(a, 1, a[1], client=2),
    "own key, other site": lambda a: resealed(a, 1, a[1], site=12),
    "own key, other run": lambda a: resealed(a, 1, a[1], run="1" * 32),
    "own key, other plan": lambda a: resealed(a, 1, a[1], plan="1" * 64),
    "own key, other federation": lambda a: resealed(a, 1, a[1], federation="e" * 32),
    "own key, other nonce": lambda a: resealed(a, 1, a[1], nonce="1" * 32),
    "own key, no body": lambda a: resealed(a, 1, []),
}


@pytest.mark.parametrize("name", BAD)
def test_a_false_answer_is_refused_by_name_and_spoils_nothing(
    name: str, build: Callable[..., Federation]
) -> None:
    fed = build()
    fed.carrier.on_answer = lambda message, answer: [
        BAD[name](answer) if message.node == node_of(1) else answer
    ]
    got = why(fed.deliver())
    assert set(got) == {1} and got[1].startswith("its answer was refused: ")
    assert got[1].isprintable() and len(got[1]) < 200
    assert set(fed.engine.snapshot()) == {0, 2, 3}
    fed.carrier.on_answer = lambda message, answer: [answer]
    assert not why(fed.deliver(2))


def test_answers_swapped_between_sites_or_asks_are_refused(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.deliver(1)
    old = dict(fed.carrier.answers)
    fed.carrier.on_answer = lambda message, answer: [old[message.node]]
    got = why(fed.deliver(2))
    assert set(got) == set(range(CLIENTS))
    assert all("it belongs to another ask" in text for text in got.values())
    fed.carrier.on_answer = lambda message, answer: [old[node_of(3 - client_of(message.node))]]
    got = why(fed.deliver(3))
    assert all("not signed by" in text for text in got.values()) and len(got) == CLIENTS
    assert fed.engine.snapshot()[0]["file"].startswith("0/000001-")


def test_an_ask_that_was_given_back_is_no_answer(build: Callable[..., Federation]) -> None:
    fed = build()
    fed.carrier.on_answer = lambda message, answer: [(message.sealed, list(message.bodies))]
    assert all("not signed" in text for text in why(fed.deliver()).values())


@pytest.mark.parametrize("where", ["seal", 0, 1, 2, "swap", "old"])
def test_an_ask_that_was_changed_on_its_way_is_not_done_and_its_client_named(
    where: str | int, build: Callable[..., Federation]
) -> None:
    fed = build()
    fed.deliver(1)
    before = [len(site.log.entries()) for site in fed.sites.values()]
    earlier, latest = list(fed.carrier.messages), fed.carrier.messages

    def change(message: SealedMessage) -> SealedMessage:
        if message.node != node_of(1):
            return message
        if where == "seal":
            return replace(message, sealed=message.sealed.replace(b"train", b"other"))
        if where == "old":  # of round 1, to the same site
            return next(one for one in earlier if one.node == message.node)
        if where == "swap":
            return next(one for one in latest[CLIENTS:] if one.node == node_of(2))
        bodies = [body + b" " * (number == where) for number, body in enumerate(message.bodies)]
        return replace(message, bodies=tuple(bodies))

    fed.carrier.on_ask = change
    got = why(fed.deliver(2))
    assert set(got) == {1} and got[1].startswith("its node reports: the ask ")
    after = [len(site.log.entries()) for site in fed.sites.values()]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 1, 1]
    assert sum(message.node == node_of(1) for message in fed.carrier.messages) == 1 + TRIES


HOSTILE: dict[str, Any] = {
    "nothing": None,
    "number": 3,
    "list": [1, 2],
    "no up": {"why": ""},
    "no why": {"up": {}},
    "up list": {"up": [], "why": ""},
    "up text": {"up": "x", "why": ""},
    "mixed keys": {"up": {3: 1.0, "x": 2.0}, "why": ""},
    "numbered tensors": {"up": {"model": {3: torch.ones(1), "a": torch.ones(1)}}, "why": ""},
    "deep": {"up": {"model": {"a": {"b": torch.ones(1)}}}, "why": ""},
    "a list within": {"up": {"loss": [[[1]]]}, "why": ""},
    "endless number": {"up": {"loss": 10**400}, "why": ""},
    "state text": {"up": {}, "why": "", "state": "x"},
    "state keys": {"up": {}, "why": "", "state": {"path": "x"}},
    "state extra": {"up": {}, "why": "", "state": {"file": "x", "digest": "y", "more": "z"}},
    "state numbers": {"up": {}, "why": "", "state": {"file": 1, "digest": 2}},
    "state list": {"up": {}, "why": "", "state": [1]},
    "releases": {"up": {}, "why": "", "releases": 5},
    "releases text": {"up": {}, "why": "", "releases": "text"},
    "release number": {"up": {}, "why": "", "releases": [5]},
    "release tensor": {"up": {}, "why": "", "releases": [{"x": torch.ones(1)}]},
    "release within": {"up": {}, "why": "", "releases": [{"x": {"y": 1}}]},
    "release keys": {"up": {}, "why": "", "releases": [{5: 1}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_site_that_signs_nonsense_is_named_and_the_round_goes_on(
    name: str, build: Callable[..., Federation]
) -> None:
    fed = build()
    body = codec.encode(HOSTILE[name])
    fed.carrier.on_answer = lambda message, answer: [
        resealed(answer, 1, [body]) if message.node == node_of(1) else answer
    ]
    server = Server(dict.fromkeys(range(CLIENTS), 12), fed.method.blueprint.shared(), round=1)
    driver = Driver(fed.method, fed.engine, fed.ledger)
    driver.drive(fed.method.round(server, server.everyone), server)
    lines = {entry["client"]: entry for entry in map(json.loads, fed.ledger.lines)}
    assert [entry["outcome"] for entry in lines.values()].count("answered") == CLIENTS - 1
    assert "malformed reply" in lines[1]["why"]
    assert set(fed.engine.snapshot()) == {0, 2, 3}


@pytest.mark.parametrize(
    "up",
    [
        {},
        {"more": 1.0},
        {"model": 3, "mean": 1.0, "loss": torch.ones(1)},
        {"model": {}, "mean": torch.ones(3), "loss": 1.0},
        {"model": {"x": torch.ones(2)}, "mean": torch.ones(3), "loss": float("nan")},
    ],
)
def test_answers_of_the_right_form_but_not_of_the_exchange_are_refused_by_the_driver(
    up: Any, build: Callable[..., Federation]
) -> None:
    fed = build()
    body = codec.encode({"up": up, "why": ""})
    fed.carrier.on_answer = lambda message, answer: [
        resealed(answer, 1, [body]) if message.node == node_of(1) else answer
    ]
    server = Server(dict.fromkeys(range(CLIENTS), 12), fed.method.blueprint.shared(), round=1)
    driver = Driver(fed.method, fed.engine, fed.ledger)
    driver.drive(fed.method.round(server, server.everyone), server)
    outcomes = [json.loads(line)["outcome"] for line in fed.ledger.lines]
    assert outcomes == ["answered", "refused", "answered", "answered"]


def test_reasons_are_one_harmless_line(build: Callable[..., Federation]) -> None:
    fed = build()
    evil = "\x1b[2J\nline two\u202e" + "x" * 10_000
    body = codec.encode({"up": None, "why": evil})

    def say(message: SealedMessage, answer: Answer) -> Sequence[Came]:
        client = client_of(message.node)
        return [evil] if client == 0 else [resealed(answer, client, [body])]

    fed.carrier.on_answer = say
    got = why(fed.deliver(to=[0, 1]))
    assert all(text.isprintable() and 100 < len(text) < 1100 for text in got.values())
    fed.carrier.on_answer = lambda message, answer: [
        resealed(answer, client_of(message.node), [codec.encode({"up": None, "why": ""})])
    ]
    assert why(fed.deliver(2, to=[2])) == {2: "it gave no reason"}
    # The parser of frames repeats what it does not know.
    odd = json.dumps({"x": {"dtype": evil, "shape": [0], "data_offsets": [0, 0]}}).encode()
    frame = len(odd).to_bytes(8, "little") + odd
    fed.carrier.on_answer = lambda message, answer: [resealed(answer, 3, [frame])]
    (text,) = why(fed.deliver(3, to=[3])).values()
    assert "?[2J line two" in text and text.isprintable() and len(text) < 1100


def test_what_comes_twice_or_was_never_asked_for_is_ignored(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.carrier.stray = [("ticket 999", GONE), ("", (b"", []))]
    fed.carrier.on_answer = lambda message, answer: [answer, answer, GONE, (b"", [])]
    assert not why(fed.deliver())
    fed.carrier.on_answer = lambda message, answer: [GONE, answer]  # given up, so asked again
    assert why(fed.deliver(2)) == dict.fromkeys(range(CLIENTS), GONE)


# ---- nodes that die, hang, or are not there --------------------------------------------------


def test_a_lost_answer_is_asked_for_again_with_a_new_nonce_and_counts_once(
    build: Callable[..., Federation],
) -> None:
    """Also with a site that did not restart: what it remembers must not shut out the server."""
    fed = build(plan(noise="system"))
    lost: list[Answer] = []

    def lose(message: SealedMessage, answer: Answer) -> Sequence[Came]:
        if message.node == node_of(2) and len(lost) < 2:
            lost.append(answer)
            return [GONE]
        return [answer]

    fed.carrier.on_answer = lose
    replies = fed.deliver()
    assert not why(replies)
    mine = [answer for node, answer in fed.carrier.answers if node == node_of(2)]
    assert len(mine) == 3 and len({answer[0] for answer in mine}) == 3
    assert {tuple(answer[1]) for answer in mine} == {tuple(lost[0][1])}
    messages = [message for message in fed.carrier.messages if message.node == node_of(2)]
    headers = [json.loads(json.loads(message.sealed)["header"]) for message in messages]
    assert len({header.pop("nonce") for header in headers}) == 3
    assert headers[0] == headers[1] == headers[2]
    assert len(fed.sites[2].log.releases()) == 1


def test_a_node_that_dies_is_asked_again_when_it_is_back(build: Callable[..., Federation]) -> None:
    fed = build()
    fed.carrier.slow = dict.fromkeys(fed.carrier.nodes, 10.0)
    fed.carrier.away = {node_of(0): [(5.0, 60.0)], node_of(1): [(5.0, 20.0), (25.0, 90.0)]}
    assert not why(fed.deliver())
    assert 100.0 < fed.passed < 110.0


def test_a_node_that_dies_long_after_the_beginning_is_waited_for_as_well(
    build: Callable[..., Federation],
) -> None:
    """Patience is for the time since it went away, not since it was asked."""
    fed = build()
    fed.carrier.slow = {node_of(1): 500.0}
    fed.carrier.away = {node_of(1): [(400.0, 450.0)]}
    assert not why(fed.deliver())
    assert 950.0 < fed.passed < 960.0


def test_a_node_that_stays_away_is_named_and_waited_for_once(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.carrier.slow = dict.fromkeys(fed.carrier.nodes, 10.0)
    fed.carrier.away = {node_of(0): [(5.0, 500.0)], node_of(3): [(0.0, 500.0)]}
    assert why(fed.deliver(1)) == {0: GONE, 3: "it was offline"}
    assert 105.0 <= fed.passed < 108.0
    for round in (2, 3):  # and from then on only while it is there
        before = fed.clock.now
        assert why(fed.deliver(round)) == dict.fromkeys((0, 3), "it was offline")
        assert fed.clock.now - before < 12.0
    fed.clock.now = fed.carrier.began + 500.0
    assert not why(fed.deliver(4))
    fed.carrier.away = {node_of(3): [(fed.passed + 1.0, fed.passed + 50.0)]}
    assert not why(fed.deliver(5))  # it is trusted again


def test_a_deadline_ends_patience(build: Callable[..., Federation]) -> None:
    fed = build(waits=Waits(deadline=30.0, patience=100.0))
    fed.carrier.away = {node_of(0): [(0.0, 500.0)]}
    assert why(fed.deliver()) == {0: "it was offline"}
    assert 30.0 <= fed.passed < 31.0


def test_a_node_that_hangs_is_named_with_its_deadline_and_its_late_answer_ignored(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.carrier.slow = {node_of(1): 5000.0}
    replies = fed.deliver(1)
    assert why(replies) == {1: "no answer within 1000 s"} and 1000.0 <= fed.passed < 1001.0
    fed.clock.now += 10_000.0  # its answer to round 1 has come by now
    fed.carrier.slow = {}
    assert not why(fed.deliver(2))
    assert fed.engine.snapshot()[1]["file"].startswith("1/000002-")
    assert len(fed.carrier.answers) == 2 * CLIENTS - 1  # nobody looked for the late one


def test_messages_are_not_worth_carrying_past_the_deadline(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.carrier.away = {node_of(1): [(0.0, 90.0)]}
    fed.deliver()
    seconds = {message.node: message.seconds for message in fed.carrier.messages}
    assert seconds[node_of(0)] == 1000.0 and 900.0 <= seconds[node_of(1)] <= 910.0
    assert {message.kind for message in fed.carrier.messages} == {"train.train"}


def test_a_node_that_always_dies_of_a_task_is_left_out(build: Callable[..., Federation]) -> None:
    fed = build()
    fed.carrier.on_answer = lambda message, answer: [
        "its process died" if message.node == node_of(1) else answer
    ]
    assert why(fed.deliver()) == {1: "its process died"}
    assert sum(message.node == node_of(1) for message in fed.carrier.messages) == TRIES
    assert len(fed.sites[1].log.releases()) == 1


def test_messages_that_could_not_be_sent_are_no_tries(build: Callable[..., Federation]) -> None:
    fed = build()
    fed.carrier.unsent = 10 * CLIENTS
    assert not why(fed.deliver())
    assert fed.passed < WAITS.patience
    fed.carrier.unsent = 10**9
    assert why(fed.deliver(2)) == dict.fromkeys(range(CLIENTS), "it was offline")


def test_a_site_that_refuses_is_heard_and_not_asked_again(
    build: Callable[..., Federation],
) -> None:
    fed = build(policy=Policy())
    got = why(fed.deliver())
    assert len(fed.carrier.messages) == CLIENTS == len(got)
    assert all("but `own_code` allows none" in text for text in got.values())
    assert not fed.engine.snapshot()


# ---- enough ----------------------------------------------------------------------------------


def test_the_slowest_are_left_out_by_name_once_enough_have_answered(
    build: Callable[..., Federation],
) -> None:
    fed = build(wanted=lambda ask, turn: 2 if turn.round else None)
    fed.carrier.slow = {node_of(0): 50.0, node_of(1): 5.0, node_of(2): 500.0, node_of(3): 5.0}
    text = "not needed: 2 had answered before it"
    assert why(fed.deliver(1)) == {0: text, 2: text}
    assert fed.passed < 6.0
    before = fed.clock.now
    assert not why(fed.deliver(0)) and fed.clock.now - before >= 500.0  # nobody to spare here
    assert set(fed.engine.snapshot()) == set(range(CLIENTS))


def test_no_more_than_enough_are_taken_also_if_all_come_at_once(
    build: Callable[..., Federation],
) -> None:
    fed = build(wanted=lambda ask, turn: 3)
    replies = fed.deliver()
    assert len(why(replies)) == 1 and fed.carrier.given == 3


def test_who_declines_or_is_refused_is_not_counted_as_an_answer(
    build: Callable[..., Federation],
) -> None:
    fed = build(plan(declines=0), wanted=lambda ask, turn: 2)
    fed.carrier.slow = {node_of(2): 5.0, node_of(3): 9.0}
    fed.carrier.on_answer = lambda message, answer: [
        BAD["body"](answer) if message.node == node_of(1) else answer
    ]
    got = why(fed.deliver())
    assert set(got) == {0, 1} and got[0] == "it does not want to"
    assert got[1].startswith("its answer was refused")


# ---- states and quorum -----------------------------------------------------------------------


class Losing:
    """A local engine that loses the answers of some clients in some rounds."""

    def __init__(self, engine: LocalEngine, lost: set[tuple[int, int]]) -> None:
        self.engine, self.lost = engine, lost

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for reply in self.engine.deliver(ask, turn):
            gone = (turn.round, reply.client) in self.lost
            yield Reply(reply.client, None, "lost") if gone else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_the_state_behind_a_lost_answer_rolls_back_as_on_the_local_engine(
    build: Callable[..., Federation], tmp_path: Path
) -> None:
    lost = {(1, 0), (2, 3), (3, 3)}
    fed = build()
    turn: dict[str, Any] = {}

    def lose(message: SealedMessage, answer: Answer) -> Sequence[Came]:
        turn.update(json.loads(json.loads(message.sealed)["header"]))
        gone = (turn["round"], turn["client"]) in lost
        return [BAD["garbage"](answer) if gone else answer]

    fed.carrier.on_answer = lose
    digest, states, _ = play(fed.recipe, fed.host, fed.engine, rounds=4)
    host = host_of(fed.recipe, tmp_path / "local")
    engine = Losing(LocalEngine(host, tmp_path / "local", workers=0), lost)
    assert (digest, states) == play(fed.recipe, host, engine, rounds=4)[:2]
    facts = [codec.decode(one.bodies[2]) for one in fed.carrier.messages if one.node == node_of(3)]
    named = [fact["state"] and fact["state"]["file"] for fact in facts]
    first = "3/000001-0-train.safetensors"
    assert named == [None, first, first, first]


def test_too_few_answers_end_the_round_and_its_states_go_back(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    server = Server(dict.fromkeys(range(CLIENTS), 12), fed.method.blueprint.shared(), round=1)
    driver = Driver(fed.method, fed.engine, fed.ledger, quorum=3)
    server = driver.drive(fed.method.round(server, server.everyone), server)
    held = fed.engine.snapshot()
    fed.carrier.away = {node_of(client): [(0.0, 10_000.0)] for client in (0, 1)}
    server = replace(server, round=2)
    with pytest.raises(NotEnoughReplies, match="2 of 4 clients answered.*it was offline"):
        driver.drive(fed.method.round(server, server.everyone), server)
    assert fed.engine.snapshot() != held
    fed.engine.restore(held)
    assert fed.engine.snapshot() == held
    fed.carrier.away = {}
    after = driver.drive(fed.method.round(server, server.everyone), server)
    named = [codec.decode(one.bodies[2])["state"] for one in fed.carrier.messages[-CLIENTS:]]
    assert named == [held[client] for client in range(CLIENTS)]
    counts = {json.loads(line)["client"] for line in fed.ledger.lines}
    assert counts == set(range(CLIENTS)) and after.model.keys() == server.model.keys()
    outcomes = [entry["outcome"] for entry in fed.sites[2].log.entries()]
    assert outcomes == ["sent", "sent", "stored answer sent again"]


def test_sites_are_told_which_versions_to_keep(build: Callable[..., Federation]) -> None:
    fed = build()
    snapshots: list[Any] = []
    for round in range(1, 6):
        fed.deliver(round)
        snapshots.append(fed.engine.snapshot())
        fed.engine.prune(*snapshots[-2:])
    kept = sorted((fed.folder / "site-1" / "runs").rglob("1/*.safetensors"))
    assert [path.name[:6] for path in kept] == ["000003", "000004", "000005"]
    fed.engine.restore(snapshots[3])
    assert not why(fed.deliver(5))


def test_states_are_kept_apart_and_never_leave(build: Callable[..., Federation]) -> None:
    fed = build()
    assert not fed.engine.shows_states and fed.engine.is_remote
    with pytest.raises(EngineError, match="never leaves"):
        fed.engine.state_of(0)
    fed.deliver(to=[1])
    snapshot = fed.engine.snapshot()
    assert set(snapshot) == {1} and set(snapshot[1]) == {"file", "digest"}
    fed.engine.restore({"2": {"file": "2/a", "digest": "b"}})
    assert fed.engine.snapshot() == {2: {"file": "2/a", "digest": "b"}}
    fed.engine.accept(Reply(3, {}, state=None))
    fed.engine.accept(Reply(0, {}, state=StateRef("0/a", "b")))
    assert list(fed.engine.snapshot()) == [0, 2]


# ---- the rest --------------------------------------------------------------------------------


def test_answers_are_handed_on_as_they_come(build: Callable[..., Federation]) -> None:
    """So the engine holds one answer at a time, however many clients there are."""
    fed = build()
    down = {"model": fed.method.blueprint.shared()}
    for number, reply in enumerate(fed.engine.deliver(Ask("train", range(4), down), Turn(1, 0)), 1):
        assert reply.up is not None and fed.carrier.given == number
        assert len(fed.carrier.answers) == number
    shared = {message.bodies[1] for message in fed.carrier.messages}
    assert len({id(message.bodies[1]) for message in fed.carrier.messages}) == len(shared) == 1


def test_what_the_logs_say_is_what_left(build: Callable[..., Federation]) -> None:
    fed = build(plan(noise="system"))
    losses = iter([True, False] * 50)
    fed.carrier.on_answer = lambda message, answer: [GONE if next(losses) else answer]
    _, _, lines = play(fed.recipe, fed.host, fed.engine)
    assert len(fed.carrier.answers) > len(lines)
    for client, site in fed.sites.items():
        left = [codec.decode(a[1][0]) for node, a in fed.carrier.answers if node == node_of(client)]
        said = [entry for entry in site.log.entries() if "up" in entry]
        assert len(left) == len(said) >= 2
        for tree, entry in zip(left, said, strict=True):
            sizes = {name: codec.payload_bytes(value) for name, value in tree["up"].items()}
            assert {name: about["bytes"] for name, about in entry["up"].items()} == sizes
        noises = {tree["up"]["mean"].numpy().tobytes() for tree in left}
        assert len(noises) == len(site.log.releases())


def test_greetings_and_the_end_reach_those_who_are_there(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    found = dict(fed.engine.send_step("hello", {}))
    assert [found[client]["up"]["examples"] for client in range(CLIENTS)] == [12] * CLIENTS  # type: ignore[index]
    assert set(dict(fed.engine.send_step("hello", {}, [2]))) == {2}
    fed.carrier.away = {node_of(3): [(0.0, 10_000.0)]}
    told: list[Any] = []
    for client, site in fed.sites.items():
        site.finish = lambda *facts, client=client: told.append((client, facts))
    fed.deliver(to=[0, 1, 2])
    before, model = fed.clock.now, fed.method.blueprint.shared()
    fed.engine.finish(model, {"x": torch.ones(1)}, {"round": 3})
    assert fed.notes == ["site 3 did not receive the encoder: it was offline"]
    assert fed.clock.now - before < 2.0
    assert [client for client, _ in told] == [0, 1, 2]
    for _, (_, _, _, said, kept) in told:
        assert set(said) == {"model", "statistics", "told"} and kept == {"count": 1}
        names = [f"site {client}" for client in range(CLIENTS)]
        assert json.loads(said["told"]) == {"round": 3, "participants": names}
        assert all(torch.equal(said["model"][key], value) for key, value in model.items())


def test_a_fault_at_the_end_is_noted_in_one_line(build: Callable[..., Federation]) -> None:
    fed = build()

    def broken(*_: Any) -> None:
        raise HarmoniumError("no room\n\x1b[2J")

    fed.sites[1].finish = broken
    fed.engine.finish({}, {}, {})
    assert fed.notes == ["site 1 did not receive the encoder: no room ?[2J"]


# ---- joining later ---------------------------------------------------------------------------


def test_a_node_that_is_back_before_anyone_looks_is_asked_again(
    build: Callable[..., Federation],
) -> None:
    """Flower delivers a message once, and says nothing of a node that reconnected since."""
    fed = build()
    fed.carrier.silent, fed.carrier.slow = True, {node_of(1): 5.0}
    fed.carrier.away = {node_of(1): [(2.1, 2.2)]}
    assert not why(fed.deliver()) and fed.passed < 15
    assert [message.node for message in fed.carrier.messages].count(node_of(1)) == 2


@pytest.mark.parametrize("name", [*RECIPES])
def test_a_site_joins_at_the_beginning_of_a_round(
    name: str, build: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states, start-ups and masks: it is like one whose answers were lost until then."""
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)
    fed = build(RECIPES[name].changed(rounds=3))
    rounds = iter([{}, {3: 12}, {}])
    fed.engine.newcomers = lambda round: next(rounds)
    folder = fed.live(tmp_path / "run", [0, 1, 2])
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["step"] == "train"]
    assert {line["outcome"] for line in lines} == {"answered"}
    assert [line["round"] for line in trained if line["client"] == 3] == [2, 3]
    assert [line["client"] for line in trained if line["round"] == 2] == [0, 1, 2, 3]
    assert [entry["outcome"] for entry in fed.sites[3].log.entries()][-1] == "finished"


def test_who_does_not_take_part_yet_gets_a_handshake_without_holding_anyone_up(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.engine.set_members([0])
    fed.carrier.away = {node_of(3): [(0.0, 10_000.0)]}
    fed.carrier.slow = {node_of(2): 60.0}  # it reads its images first
    assert [client for client, _ in fed.engine.handshake([1, 2, 3], 3.0)] == [1]
    assert 2.5 < fed.passed < 5
    asked = len(fed.carrier.messages)
    assert not list(fed.engine.handshake([2, 3], 3.0)) and fed.passed < 5
    assert len(fed.carrier.messages) == asked  # the first greeting still waits there
    fed.clock.now += 60
    ((client, got),) = fed.engine.handshake([2, 3], 3.0)
    assert client == 2 and isinstance(got, dict) and got["up"]["examples"] == 12


def test_a_greeting_that_went_with_its_connection_is_repeated(
    build: Callable[..., Federation],
) -> None:
    fed = build()
    fed.engine.set_members([0])
    fed.carrier.silent, fed.carrier.slow = True, {node_of(2): 8.0}
    fed.carrier.away = {node_of(2): [(5.0, 6.0)]}
    assert not list(fed.engine.handshake([2], 3.0))
    fed.clock.now += 60
    assert not list(fed.engine.handshake([2], 3.0))
    fed.clock.now += 60
    assert [client for client, _ in fed.engine.handshake([2], 3.0)] == [2]


def test_a_greeting_ends_when_it_is_to_end(build: Callable[..., Federation]) -> None:
    fed = build()
    fed.carrier.away = {node_of(1): [(0.0, 10_000.0)]}
    fed.carrier.slow = {node_of(2): 500.0}
    found = dict(fed.engine.send_step("hello", {}, None, 20.0))
    assert found[1] == "it was offline" and found[2] == "no answer within 20 s"
    assert 19 < fed.passed < 22


def test_nobody_to_ask_is_no_ask(build: Callable[..., Federation]) -> None:
    fed = build()
    assert fed.deliver(to=[]) == {} and not fed.carrier.messages and fed.passed == 0.0
