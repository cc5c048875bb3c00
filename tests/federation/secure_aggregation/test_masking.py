"""Secure aggregation, clients and server together: the sum comes out, and nothing else does."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harmonium.core import codec
from harmonium.core.errors import NotEnoughReplies, WireError
from harmonium.data.images import Images
from harmonium.data.partition import make_split
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import KEYS, ClientRuntime
from harmonium.federation.card import card
from harmonium.federation.driver import Driver, Engine, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.secure_aggregation import client as masking
from harmonium.federation.secure_aggregation import shamir
from harmonium.federation.secure_aggregation.client import (
    SECRET,
    Keyring,
    Roster,
    add_stream,
    bytes_of,
    pair_key,
)
from harmonium.federation.secure_aggregation.fixed_point import KINDS, Masks, Reach
from harmonium.federation.server_optimisers import Average
from harmonium.federation.wire import (
    EXAMPLES,
    MASKS,
    STEPS,
    Ask,
    Field,
    exchange,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Decline
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.world import World
from harmonium.recipe.schema import Recipe
from harmonium.runs import start
from harmonium.testing import CHECKS, TINY, Trial, check_method

FLOATS = {"name": "simclr", "norm": "none"}
ON = {"secure_aggregation": True}
SIZES = (3, 1, 4, 2, 5)  # examples of the clients
MEAN = {"x": statistic("mean")}
NO_MODEL = Reach({}, ())  # nothing was sent, so nothing is known about how far an answer may be
Answer = Callable[[int], dict[str, Any]]


def number(client: int) -> dict[str, Any]:
    """Every client answers with its own number, twice."""
    return {"x": torch.full((2,), float(client))}


# ---- a federation without training -----------------------------------------------------------


@dataclass
class Wrapped:
    """An engine around the clients; the tests change what it carries."""

    engine: LocalEngine

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        return self.engine.deliver(ask, turn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def losing(**lost: Sequence[int]) -> Callable[[LocalEngine], Engine]:
    """Answers to some steps get lost on the way, though the clients gave them."""

    class Losing(Wrapped):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in super().deliver(ask, turn):
                gone = reply.client in lost.get(ask.step, ())
                yield Reply(reply.client, None, "lost") if gone else reply

    return Losing


def changing(
    step: str,
    client: int,
    up: Callable[[dict[str, Any]], Any],
    under: Callable[[LocalEngine], Engine] = Wrapped,
) -> Callable[[LocalEngine], Engine]:
    """One client's answer to one step is another one."""

    class Changing(Wrapped):
        def __init__(self, engine: LocalEngine) -> None:
            super().__init__(under(engine))  # type: ignore[arg-type]

        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in super().deliver(ask, turn):
                mine = ask.step == step and reply.client == client
                yield replace(reply, up=up(dict(reply.up or {}))) if mine else reply

    return Changing


@dataclass
class Federation:
    """Clients that answer one exchange, `collect`, with given values."""

    folder: Path
    up: Mapping[str, Field]
    answer: Answer
    sizes: Sequence[int] = SIZES
    masks: Masks | None = Masks()
    wrap: Callable[[LocalEngine], Engine] = Wrapped
    weighting: str = "examples"
    keeps: bool = False
    sends_model: bool = False

    def __post_init__(self) -> None:
        given, keeps, folder = self.answer, self.keeps, self.folder
        down = {"y": scalar()} | ({"model": weights()} if self.sends_model else {})

        @exchange(down=down, up=dict(self.up))
        def collect(self, client, got):  # type: ignore[no-untyped-def]
            if keeps:
                client.state["count"] = client.state.get("count", 0) + 1
            return given(client.id)

        members = {"collect": collect, "keeps": {"count": "scalar"}, "__annotations__": {}}
        cls = dataclass(frozen=True)(type("Collecting", (Method,), members))
        method = cls(
            world=World(clients=len(self.sizes), rounds=1, channels=1, side=2),
            encoder=CnnSmall(width=1, out=2),
            objective=SimCLR(norm="none", hidden=2, out=2),
            server_optimiser=Average(weighting=self.weighting),  # type: ignore[arg-type]
        )
        ends = np.cumsum(self.sizes)
        indices = [np.arange(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        images = Images(np.zeros((int(ends[-1]), 2, 2, 1), np.uint8), np.full(int(ends[-1]), -1))
        host = ClientRuntime(method, images, indices, folder / "clients", masks=self.masks)
        self.engine, self.method = LocalEngine(host, folder, workers=0), method
        self.ledger, self.taken = Ledger(), list[int]()

    def ask(self, round: int = 1, **how: Any) -> Any:
        """What the server has in the end."""
        examples = dict(enumerate(self.sizes))
        server = Server(examples, self.method.blueprint.shared(), round=round)
        driver = Driver(self.method, self.wrap(self.engine), self.ledger, masks=self.masks)
        driver.watch = lambda reply: self.taken.append(reply.client)
        got: list[Any] = []

        down = {"y": 1.0} | ({"model": server.model} if self.sends_model else {})

        def plan():  # type: ignore[no-untyped-def]
            got.append((yield Ask("collect", server.everyone, down, **how)))
            return server

        driver.drive(plan(), server)
        return got[0]

    def reasons(self, what: str = "why") -> dict[tuple[str, int], str]:
        """Why somebody was left out, by step and client."""
        entries = [json.loads(line) for line in self.ledger.lines]
        return {(e["step"], e["client"]): e[what] for e in entries if what in e}

    def numbers(self) -> list[int]:
        """The numbers of the asks, each once, in the order of asking."""
        return list(dict.fromkeys(json.loads(line)["ask"] for line in self.ledger.lines))


def both(folder: Path, up: Mapping[str, Field], answer: Answer, **how: Any) -> tuple[Any, Any]:
    """What the server has with masks and without."""
    return (
        Federation(folder / "masked", up, answer, **how).ask(),
        Federation(folder / "plain", up, answer, masks=None, **how).ask(),
    )


# ---- the sum ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS.values(), ids=KINDS)
def test_every_fold_gives_what_it_gives_without_masks(tmp_path: Path, dtype: torch.dtype) -> None:
    """Within half a last place a client, and then the type's own rounding."""
    up = {
        "plain": statistic("mean"),
        "weighed": statistic("mean", by=EXAMPLES),
        "own": statistic("mean", by="n"),
        "summed": statistic("sum"),
        "loss": scalar("mean", by=EXAMPLES),
        "n": scalar("sum"),
    }

    def answer(client: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(client)
        low = 0 if dtype == torch.uint8 else -20
        values = [
            (torch.rand((3, 2), generator=rng) * (20 - low) + low).to(dtype) for _ in range(4)
        ]
        names = ("plain", "weighed", "own", "summed")
        return {**dict(zip(names, values, strict=True)), "loss": 0.1 * client, "n": SIZES[client]}

    masked, plain = both(tmp_path, up, answer)
    assert masked.ids == plain.ids == [0, 1, 2, 3, 4]
    for name in up:
        ours, theirs = (torch.as_tensor(getattr(got, name)) for got in (masked, plain))
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        step = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
        error = (ours.double() - theirs.double()).abs().max().item()
        assert error <= 5 * 2.0**-33 + (100 * step if ours.dtype != torch.float64 else 0)
    assert isinstance(masked.n, float) and masked.n == sum(SIZES)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_models_are_averaged_as_without_masks(tmp_path: Path, weighting: str) -> None:
    def answer(client: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(client)
        return {
            name: {
                key: torch.randn(slot.shape, generator=rng, dtype=slot.dtype)
                for key, slot in shapes[of].items()
            }
            for name, of in (("model", "model"), ("change", "parameters"))
        }

    up = {"model": weights(by=EXAMPLES), "change": weights(of="parameters")}
    shapes = Federation(tmp_path / "shapes", up, answer).method.blueprint.layouts()
    masked, plain = both(tmp_path, up, answer, weighting=weighting)
    for name in up:
        ours, theirs = getattr(masked, name), getattr(plain, name)
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=2.0**-23, atol=5 * 2.0**-41)
    share = np.array(SIZES) / sum(SIZES) if weighting == "examples" else np.full(5, 0.2)
    key = next(iter(plain.model))
    by_hand = sum(w * answer(c)["model"][key].double() for c, w in enumerate(share.tolist()))
    torch.testing.assert_close(masked.model[key].double(), by_hand, rtol=1e-6, atol=1e-7)


def test_numbers_on_the_grid_add_up_to_the_bit(tmp_path: Path) -> None:
    exact = {"x": statistic("sum")}
    masked = Federation(tmp_path, exact, lambda c: {"x": torch.tensor([c - 2.0**-32, -c])}).ask()
    assert masked.x.double().tolist() == [10.0, -10.0]
    wide = Federation(
        tmp_path, exact, lambda c: {"x": torch.tensor([c - 2.0**-32], dtype=torch.float64)}
    ).ask()
    assert wide.x.item() == 10 - 5 * 2.0**-32


def test_answers_that_all_weigh_nothing_are_no_mean(tmp_path: Path) -> None:
    up = {"x": statistic("mean", by="n"), "n": scalar("sum")}
    federation = Federation(tmp_path, up, lambda c: {"x": torch.ones(1), "n": 0})
    with pytest.raises(NotEnoughReplies, match="every answer has weight 0"):
        federation.ask()


def test_asks_without_uploads_and_asks_of_nobody_need_no_masks(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {}, lambda c: {})
    assert federation.ask().ids == [0, 1, 2, 3, 4]
    assert {json.loads(line)["step"] for line in federation.ledger.lines} == {"collect"}


# ---- who leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [*STEPS, "collect"])
@pytest.mark.parametrize("gone", range(5))
def test_one_client_may_leave_at_any_step(tmp_path: Path, step: str, gone: int) -> None:
    """Of five at least four must stay; who leaves after its answer is counted."""
    federation = Federation(tmp_path, MEAN, number, wrap=losing(**{step: [gone]}))
    got = federation.ask()
    counted = [c for c in range(5) if c != gone or step == "unmask"]
    assert got.ids == counted
    assert got.x.tolist() == pytest.approx([sum(counted) / len(counted)] * 2, abs=1e-6)
    assert federation.reasons() == {(step, gone): "lost"}
    assert federation.ledger.answered == set(counted) and federation.ledger.missing == {gone}


def test_clients_may_leave_at_every_step_of_one_ask(tmp_path: Path) -> None:
    lost = losing(mask_keys=[0], mask_shares=[3], collect=[5, 8], unmask=[1])
    got = Federation(tmp_path, MEAN, number, sizes=[2] * 10, wrap=lost, masks=Masks(0.51)).ask()
    assert got.ids == [1, 2, 4, 6, 7, 9]
    assert got.x.tolist() == pytest.approx([29 / 6] * 2, abs=1e-6)


@pytest.mark.parametrize(
    ("step", "lost", "words"),
    [
        ("mask_keys", [0, 2, 4], "`mask_keys`: 2 of 5 clients answered, fewer than the 3 it needs"),
        ("mask_shares", [0, 4], "`mask_shares`: 3 of 5 clients answered, fewer than the 4"),
        ("collect", [1, 3], "`collect`: 3 of 5 clients answered, fewer than the 4 it needs"),
        ("unmask", [2, 3, 4], "`unmask`: 2 of 5 clients answered, fewer than the 4 it needs"),
    ],
)
def test_too_few_are_refused_by_name(
    tmp_path: Path, step: str, lost: list[int], words: str
) -> None:
    """And no state counts: the sum was never opened."""
    federation = Federation(tmp_path, MEAN, number, wrap=losing(**{step: lost}), keeps=True)
    with pytest.raises(NotEnoughReplies, match=f"round 1, {words}.*Client {lost[-1]}: lost"):
        federation.ask()
    assert federation.engine.snapshot() == {}


def test_states_count_once_the_sum_is_open(tmp_path: Path) -> None:
    federation = Federation(tmp_path, MEAN, number, wrap=losing(collect=[1]), keeps=True)
    federation.ask()
    assert [federation.engine.state_of(c) for c in range(3)] == [{"count": 1}, {}, {"count": 1}]


def test_an_ask_that_may_fail_gives_nothing_rather_than_an_error(tmp_path: Path) -> None:
    federation = Federation(tmp_path, MEAN, number, wrap=losing(unmask=[0, 1, 2]), keeps=True)
    assert federation.ask(least=0).ids == []
    assert federation.engine.snapshot() == {}


def test_two_clients_cannot_hide_each_other(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughReplies, match=r"asks 2, fewer clients than the 3"):
        Federation(tmp_path, MEAN, number, sizes=[2, 2]).ask()


# ---- what the server sees --------------------------------------------------------------------


def chi_square(data: bytes) -> float:
    """Of bytes against all alike; 255 with a deviation of 22.6 if they are uniform."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_mask_is_one_long_stream_that_never_repeats() -> None:
    """Long vectors are masked piece by piece: the pieces are those of the cipher's one stream."""
    count = 2 * masking._CHUNK + 5
    vector, key = np.arange(count, dtype=np.uint64), bytes(range(32))
    add_stream(vector, key, 1)
    mask = np.frombuffer(masking.stream(key, 8 * count), dtype="<u8")
    assert np.array_equal(vector, np.arange(count, dtype=np.uint64) + mask)
    assert len(np.unique(mask)) == count
    assert masking.stream(bytes(32), 8).hex() == "76b8e0ada0f13d90"  # RFC 8439, A.1, vector 1
    add_stream(vector, key, -1)
    assert np.array_equal(vector, np.arange(count, dtype=np.uint64))


@dataclass
class Curious(Wrapped):
    """An engine that writes down all that reaches the server."""

    def __post_init__(self) -> None:
        self.seen: dict[tuple[str, int], Any] = {}
        self.sent: dict[str, Ask] = {}

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        self.sent[ask.step] = ask
        for reply in super().deliver(ask, turn):
            self.seen[ask.step, reply.client] = reply.up
            yield reply


def watched(folder: Path, answer: Answer, lost: Sequence[int] = ()) -> tuple[Any, Curious]:
    made: list[Curious] = []

    def wrap(engine: LocalEngine) -> Engine:
        made.append(Curious(engine))
        return losing(collect=lost)(made[0])  # type: ignore[arg-type]

    got = Federation(folder, MEAN, answer, wrap=wrap).ask()
    return got, made[0]


def test_masked_answers_look_like_chance_and_differ_each_time(tmp_path: Path) -> None:
    """Answers of zeros: all that the server sees of them are masks."""
    zeros = lambda client: {"x": torch.zeros(20_000)}  # noqa: E731
    (first, seen), (second, again) = (watched(tmp_path / name, zeros) for name in "ab")
    assert torch.equal(first.x, second.x) and not first.x.any()
    vectors = [c.seen["collect", k]["x"]["float32"] for c in (seen, again) for k in range(5)]
    for vector in vectors:
        assert vector.dtype == torch.int64 and 130 < chi_square(vector.numpy().tobytes()) < 420
    for a, vector in enumerate(vectors):
        for other in vectors[:a]:  # no two share a mask, nor does one undo another
            for mixed in (vector - other, vector + other):
                assert 130 < chi_square(mixed.numpy().tobytes()) < 420


def test_an_answer_that_comes_too_late_stays_hidden(tmp_path: Path) -> None:
    """The server has its masked answer and its masking key, and still not its own mask's seed."""
    answer = lambda client: {"x": torch.full((20_000,), 1.0 + client)}  # noqa: E731
    _, server = watched(tmp_path, answer, lost=[2])
    told = {c: server.seen["unmask", c]["shares"] for c in (0, 1, 3, 4)}
    points = {c: c + 1 for c in told}
    shares = {points[c]: rows[2].numpy().tobytes() for c, rows in told.items()}
    key = shamir.join(shares, shamir.pulls(list(points.values())), SECRET)
    down = server.sent["mask_shares"].down
    roster = Roster.read(down, (0, 1, 0), Masks())
    assert masking.public_of(key) == roster.mask_key(2)
    vector = server.seen["collect", 2]["x"]["float32"].numpy().view(np.uint64).copy()
    for peer in (0, 1, 3, 4):
        add_stream(vector, pair_key(key, roster, peer), -masking.sign(2, peer))
    assert 130 < chi_square(vector.tobytes()) < 420


def test_an_answer_that_counts_stays_hidden_by_its_peers(tmp_path: Path) -> None:
    """The server has the seeds of all who answered: what is left are the masks between them."""
    answer = lambda client: {"x": torch.full((20_000,), 1.0 + client)}  # noqa: E731
    got, server = watched(tmp_path, answer)
    counts = shamir.pulls([1, 2, 3, 4])
    vectors = []
    for owner in range(5):
        told = {
            c + 1: server.seen["unmask", c]["shares"][owner].numpy().tobytes() for c in range(4)
        }
        vector = server.seen["collect", owner]["x"]["float32"].numpy().view(np.uint64).copy()
        seed = shamir.join(told, counts, 2 * SECRET)[:SECRET]
        add_stream(vector, seed, -1)
        vectors.append(vector)
    mixed = [*vectors, vectors[0] + vectors[1], sum(vectors[2:], vectors[1].copy())]
    assert all(130 < chi_square(vector.tobytes()) < 420 for vector in mixed)
    total = sum(vectors[1:], vectors[0].copy()).view(np.int64) / 2.0**40
    assert np.allclose(total, got.x.numpy()) and np.allclose(total, 3.0)


def test_shares_on_their_way_look_like_chance(tmp_path: Path) -> None:
    _, server = watched(tmp_path, number)
    sealed = [server.seen["mask_shares", c]["shares"].numpy().tobytes() for c in range(5)]
    assert 130 < chi_square(b"".join(sealed)) < 420 and len(set(sealed)) == 5


def test_no_client_is_told_what_another_has(tmp_path: Path) -> None:
    """Of examples a client learns the total and its own; its own is checked."""
    _, server = watched(tmp_path, number)
    ask = server.sent["mask_shares"]
    assert set(ask.down) == {"clients", "keys", "total"} and ask.down["total"].tolist() == [15]  # type: ignore[union-attr]
    assert {c: own["examples"].tolist() for c, own in ask.each.items()} == {  # type: ignore[union-attr]
        c: [size] for c, size in enumerate(SIZES)
    }


# ---- a client's own rules --------------------------------------------------------------------


class Clients:
    """Keyrings of some clients, taken through the steps by hand."""

    def __init__(self, folder: Path, count: int = 4, run: tuple[int, ...] = (0, 1, 0)) -> None:
        self.rings = [Keyring(folder / str(c) / KEYS, c, run, Masks()) for c in range(count)]
        keys = torch.stack([ring.answer("mask_keys", {}, 2)["keys"] for ring in self.rings])
        roster = Roster(tuple(range(count)), keys, 2 * count, run, Masks().shares(count))
        self.roster = {**roster.tree(), "examples": torch.tensor([2])}
        self.rows: list[Tensor] = []

    def deal(self) -> "Clients":
        dealt = [ring.answer("mask_shares", self.roster, 2) for ring in self.rings]
        self.rows = [each["shares"] for each in dealt]
        return self

    def mail(self, client: int, peers: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.stack([self.rows[peer][client] for peer in peers])
        return {"clients": torch.tensor(peers), "shares": rows}

    def open(self, client: int, asked: str = "x", peers: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        opened = self.rings[client].open(self.mail(client, peers), asked)
        up = {"x": torch.ones(4)}
        masked: Tensor = opened.mask(MEAN, up, NO_MODEL, uniform=True)["x"]["float32"]
        return masked

    def reveal(self, client: int, *counted: int) -> Tensor:
        down = {"counted": torch.tensor(counted, dtype=torch.int64)}
        return self.rings[client].answer("unmask", down, 2)["shares"]


def test_a_client_reveals_one_kind_of_share_of_each_peer_and_only_once(tmp_path: Path) -> None:
    clients = Clients(tmp_path).deal()
    clients.open(0)
    held = codec.decode((tmp_path / "0" / KEYS).read_bytes())
    pairs = [bytes.fromhex(held["shares"][peer]) for peer in range(4)]
    rows = clients.reveal(0, 0, 1, 3)
    for peer, row in enumerate(rows):
        kind = slice(shamir.WIDTH, None) if peer == 2 else slice(0, shamir.WIDTH)
        assert row.numpy().tobytes() == pairs[peer][kind]
    assert torch.equal(clients.reveal(0, 0, 1, 3), rows)  # the answer was lost: once more
    for others in ([0, 1, 2, 3], [0, 1, 2], [0, 2, 3]):
        with pytest.raises(Decline, match="already revealed"):
            clients.reveal(0, *others)


def test_secrets_are_gone_once_the_shares_are_told(tmp_path: Path) -> None:
    clients = Clients(tmp_path).deal()
    clients.open(0)
    path = tmp_path / "0" / KEYS
    held = codec.decode(path.read_bytes())
    secrets = [held[name] for name in ("sealing", "masking", "seed", "deal")]
    assert path.stat().st_mode & 0o077 == 0
    rows = clients.reveal(0, 0, 1, 2)
    left = path.read_bytes()
    assert not any(secret.encode() in left for secret in [*secrets, *held["shares"].values()])
    assert left.count(rows.numpy().tobytes()) == 1
    with pytest.raises(Decline, match="no keys"):
        clients.open(0)


@pytest.mark.parametrize("counted", [(1, 2, 3), (0, 1), (0, 0, 1), (0, 1, 9), (0, 1, 2, 2), ()])
def test_a_client_reveals_nothing_for_a_sum_that_hides_too_little(
    tmp_path: Path, counted: tuple[int, ...]
) -> None:
    """It must be in the sum itself, with two others at least, each once, who took part."""
    clients = Clients(tmp_path).deal()
    clients.open(0)
    with pytest.raises(Decline, match="reveals nothing"):
        clients.reveal(0, *counted)
    assert clients.reveal(0, 0, 1, 2).shape == (4, shamir.WIDTH)


def test_every_step_answers_the_same_message_alike_and_another_one_never(tmp_path: Path) -> None:
    clients = Clients(tmp_path).deal()
    first = clients.rows[0]
    assert torch.equal(clients.deal().rows[0], first)
    fewer = {**clients.roster, "total": clients.roster["total"] - 1}
    with pytest.raises(Decline, match="another roster"):
        clients.rings[0].answer("mask_shares", fewer, 2)
    masked = clients.open(0)
    assert torch.equal(clients.open(0), masked)
    for asked, peers in (("another", (0, 1, 2, 3)), ("x", (0, 1, 2)), ("x", (1, 0, 2, 3))):
        with pytest.raises(Decline, match="another message"):
            clients.open(0, asked, peers)


def test_every_secret_is_dealt_with_chance_of_its_own(tmp_path: Path) -> None:
    """Two polynomials that had a factor in common would show how their secrets differ."""
    clients = Clients(tmp_path).deal()
    for client in range(4):
        clients.open(client)
    held = [codec.decode((tmp_path / str(c) / KEYS).read_bytes())["shares"] for c in range(4)]
    factors = []
    for dealer in range(4):
        pairs = [bytes.fromhex(held[c][dealer]) for c in range(4)]
        for kind in (slice(0, shamir.WIDTH), slice(shamir.WIDTH, None)):
            at = [int.from_bytes(pair[kind], "big") for pair in pairs]
            first, second = at[1] - at[0], at[2] - at[1]  # of b x + c x^2: b + 3c, b + 5c
            half = pow(2, -1, shamir.PRIME)
            square = (second - first) * half % shamir.PRIME
            assert (at[3] - at[2] - second - 2 * square) % shamir.PRIME == 0  # threshold 3
            factors += [square, (first - 3 * square) % shamir.PRIME]
    assert len(set(factors)) == 16 and min(factors) > 2**400


def test_new_keys_for_the_same_ask_are_other_keys(tmp_path: Path) -> None:
    clients = Clients(tmp_path).deal()
    masked = clients.open(0)
    again = Clients(tmp_path)
    assert not torch.equal(again.roster["keys"], clients.roster["keys"])
    with pytest.raises(Decline, match="its keys are not"):
        clients.deal()
    assert not torch.equal(again.deal().open(0), masked)


def test_an_answer_is_in_one_sum_only_even_when_the_ask_is_made_again(tmp_path: Path) -> None:
    """With new masks the answer is the same: two sums would show by how much they differ."""
    clients = Clients(tmp_path).deal()
    clients.open(0)
    clients.reveal(0, 0, 1, 2, 3)
    again = Clients(tmp_path).deal()
    again.open(0)
    with pytest.raises(Decline, match=r"clients \[0, 1, 2, 3\] already"):
        again.reveal(0, 0, 1, 2)
    again.reveal(0, 3, 2, 1, 0)
    other = Clients(tmp_path).deal()  # another model was sent: another answer
    other.open(0, "another model")
    other.reveal(0, 0, 1, 2)


def test_shares_of_another_roster_or_round_do_not_open(tmp_path: Path) -> None:
    """Old shares, sent again, are worth nothing; so are those meant for another client.

    Of one peer that is the peer's fault and nothing is revealed; of many it is the client's own.
    """
    clients, later = (Clients(tmp_path / n, run=(0, r, 0)).deal() for n, r in (("a", 1), ("b", 2)))
    for rows in (clients.rows[1][0], later.rows[1][3], later.rows[2][0]):
        mail = later.mail(0, [0, 1, 2, 3])
        mail["shares"][1] = rows
        later.rings[0].open(mail, "x")
        held = codec.decode((tmp_path / "b" / "0" / KEYS).read_bytes())["shares"]
        assert [peer for peer in range(4) if not any(bytes.fromhex(held[peer]))] == [1]
        mail["shares"][3] = rows
        with pytest.raises(Decline, match=r"the shares of clients \[1, 3\] do not open"):
            later.rings[0].open(mail, "x")
    with pytest.raises(Decline, match="no keys"):
        replace(later.rings[0], run=(0, 3, 0)).open(later.mail(0, [0, 1, 2, 3]), "x")


def test_keys_follow_from_every_fact_of_the_roster(tmp_path: Path) -> None:
    roster = Roster.read(Clients(tmp_path).roster, (0, 1, 0), Masks())
    other_keys = roster.keys.clone()
    other_keys[3, 0] ^= 1
    changed = [
        {"total": 9},
        {"run": (0, 1, 1)},
        {"run": (1, 1, 0)},
        {"threshold": 4},
        {"keys": other_keys},
        {"clients": (0, 1, 2, 4)},
    ]
    found = {pair_key(bytes(range(32)), roster, 1)}
    found |= {pair_key(bytes(range(32)), replace(roster, **change), 1) for change in changed}  # type: ignore[arg-type]
    assert len(found) == 7


def test_each_seal_has_a_key_of_its_own(tmp_path: Path) -> None:
    """All share one nonce, so no two may share a key, not even the two ways between a pair."""
    clients = Clients(tmp_path).deal()
    same = b"".join(row.numpy().tobytes()[:16] for rows in clients.rows for row in rows)
    assert len({same[k : k + 16] for k in range(0, len(same), 16)}) == 16
    roster = Roster.read(clients.roster, (0, 1, 0), Masks())
    key = bytes.fromhex(codec.decode((tmp_path / "0" / KEYS).read_bytes())["sealing"])
    there, back = (masking._box(key, roster, 0, *ends) for ends in ((0, 1), (1, 0)))
    assert there.encrypt(bytes(12), bytes(64), None) != back.encrypt(bytes(12), bytes(64), None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"examples": torch.tensor([3])}, "it has 2 examples, not 3 of 8"),
        ({"examples": torch.tensor([], dtype=torch.int64)}, "it has 2 examples, not None"),
        ({"total": torch.tensor([1])}, "it has 2 examples, not 2 of 1"),
        ({"keys": torch.zeros(4, 64, dtype=torch.uint8)}, "its keys are not the ones it sent"),
        ({"keys": torch.zeros(4, 63, dtype=torch.uint8)}, r"`keys` must be .* of shape \(4, 64\)"),
        ({"clients": torch.tensor([0, 1, 1, 2])}, "must name every client once"),
        ({"clients": torch.tensor([5, 1, 2, 3])}, "client 0 has no part in this masked ask"),
        ({"clients": torch.tensor([0, -1, 2, 3])}, "`clients` has a number below 0"),
        ({"clients": torch.tensor([0.0, 1, 2, 3])}, "`clients` must be a list of whole numbers"),
    ],
)
def test_a_roster_that_is_not_right_is_refused(
    tmp_path: Path, change: dict[str, Tensor], words: str
) -> None:
    clients = Clients(tmp_path)
    with pytest.raises((Decline, WireError), match=words):
        clients.rings[0].answer("mask_shares", {**clients.roster, **change}, 2)
    clients.deal()  # nothing of it stays: the right one is answered


def test_too_small_a_roster_and_too_few_peers_are_declined(tmp_path: Path) -> None:
    two = Clients(tmp_path / "two", count=2)
    with pytest.raises(Decline, match="2 clients are too few"):
        two.deal()
    clients = Clients(tmp_path).deal()
    with pytest.raises(Decline, match="only 2 of 4 clients are left"):
        clients.open(0, peers=(0, 1))
    for wrong in ((1, 2, 3), (0, 0, 1, 2)):
        with pytest.raises(Decline, match="list of participants"):
            clients.open(0, peers=wrong)
    with pytest.raises(Decline, match="no masks"):
        clients.rings[0].open(None, "x")


def test_a_lost_or_damaged_keyring_declines(tmp_path: Path) -> None:
    clients = Clients(tmp_path).deal()
    (tmp_path / "0" / KEYS).write_bytes(b"damaged")
    with pytest.raises(Decline, match="no keys"):
        clients.open(0)
    with pytest.raises(Decline, match="missed the step before"):
        clients.reveal(1, 0, 1, 2)


def test_an_answer_never_leaves_without_masks(tmp_path: Path) -> None:
    """A server that leaves the masks out of a plan gets nothing."""
    federation = Federation(tmp_path, MEAN, number)
    federation.masks = None  # the server's; the clients keep theirs
    with pytest.raises(NotEnoughReplies, match="under secure aggregation.*no masks"):
        federation.ask()


@pytest.mark.parametrize("changed", ["model", "own", "state"])
def test_all_that_an_answer_depends_on_is_bound_to_its_masks(tmp_path: Path, changed: str) -> None:
    """Another model, another value or another state under the same masks would be seen."""

    class Twice(Wrapped):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            yield from super().deliver(ask, turn)
            if ask.step == "collect":
                if changed == "model":
                    ask = replace(ask, down={"y": 2.0})
                if changed == "own":
                    ask = replace(ask, each={c: {**own, "y": 2.0} for c, own in ask.each.items()})
                if changed == "state":
                    engine.accept(first[0])
                second.extend(super().deliver(ask, turn))
            elif ask.step == "mask_keys":
                first.extend(plain.deliver(replace(ask, step="collect", down={"y": 1.0}), turn))

    first: list[Reply] = []
    second: list[Reply] = []
    federation = Federation(tmp_path, MEAN, number, wrap=Twice, keeps=True)
    engine = federation.engine
    plain = LocalEngine(replace(engine.runtime, masks=None), tmp_path, workers=0)
    federation.ask()
    assert "another message" in second[0].why
    assert all(("another message" in reply.why) == (changed != "state") for reply in second[1:])


# ---- what goes wrong -------------------------------------------------------------------------


def test_values_that_cannot_be_summed_leave_their_client_out(tmp_path: Path) -> None:
    def answer(client: int) -> dict[str, Any]:
        odd = {1: math.nan, 3: 5e6}.get(client, float(client))
        return {"x": torch.tensor([odd, 0.0])}

    federation = Federation(tmp_path, MEAN, answer, masks=Masks(0.51))
    got = federation.ask()
    assert got.ids == [0, 2, 4] and got.x.tolist() == [2.0, 0.0]
    assert federation.reasons() == {
        ("collect", 1): "`x` is not finite",
        ("collect", 3): "`x` is 5e+06, beyond 4.1943e+06, the most secure aggregation can carry",
    }


SMALL = [  # points with which every key gives the same secret: of order 2, 4, 8 and 4 on the twist
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("ec" + "ff" * 30 + "7f"),
]
GOOD = masking.public_of(bytes(range(32)))


@pytest.mark.parametrize(
    ("step", "up", "words"),
    [
        *(
            ("mask_keys", lambda up, k=k: {"keys": bytes_of(k)}, "client 2 sent an invalid key")
            for point in SMALL
            for k in (point + GOOD, GOOD + point)
        ),
        ("mask_keys", lambda up: {"keys": up["keys"][:-1]}, r"`keys` must be .* of shape \(64,\)"),
        ("mask_keys", lambda up: {}, "`keys` must be torch.uint8"),
        ("mask_shares", lambda up: {**up, "shares": up["shares"][1:]}, "`shares` must be"),
        ("mask_shares", lambda up: {**up, "digests": up["digests"].long()}, "`digests` must be"),
        ("collect", lambda up: {"x": torch.ones(2)}, "`x` is not masked"),
        ("collect", lambda up: {"x": {"float32": torch.ones(2)}}, "`x` is not masked"),
        ("collect", lambda up: {"x": torch.ones(2).long()}, "`x` is not what is declared"),
        (
            "collect",
            lambda up: {"x": {"text": torch.ones(2).long()}},
            "`x` is not what is declared",
        ),
        ("collect", lambda up: {"y": 1}, "it sends y, not x"),
        ("unmask", lambda up: {"shares": up["shares"][1:]}, "`shares` must be"),
    ],
)
def test_a_client_elsewhere_may_send_anything(
    tmp_path: Path, step: str, up: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """It is refused by name and the others go on."""
    federation = Federation(tmp_path, MEAN, number, wrap=changing(step, 2, up))
    got = federation.ask()
    counted = [0, 1, 2, 3, 4] if step == "unmask" else [0, 1, 3, 4]
    assert got.ids == counted and got.x.tolist() == pytest.approx([2.0, 2.0], abs=1e-6)
    ((where, why),) = federation.reasons().items()
    assert where == (step, 2) and re.search(words, why), why


def test_a_model_that_is_cut_otherwise_is_refused(tmp_path: Path) -> None:
    def shorter(up: dict[str, Any]) -> dict[str, Any]:
        model = dict(up["m"])
        key = next(iter(model))
        return {"m": {**model, key: model[key].reshape(-1)[1:]}}

    up = {"m": weights()}
    shapes = Federation(tmp_path, up, number).method.blueprint.shared()
    federation = Federation(
        tmp_path, up, lambda c: {"m": shapes}, wrap=changing("collect", 0, shorter)
    )
    assert federation.ask().ids == [1, 2, 3, 4]
    assert federation.reasons() == {("collect", 0): "`m` is not what is declared"}


# ---- faults at every step --------------------------------------------------------------------


def third(client: int) -> dict[str, Any]:
    """An answer that no fixed point has exactly."""
    return {"x": torch.full((2,), client / 3, dtype=torch.float64)}


def rubbish(tensor: Tensor, rows: Any = slice(None)) -> Tensor:
    changed = tensor.clone()
    changed[rows] = 255 - changed[rows]
    return changed


def dealing(how: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Client 2 deals shares that agree with their digests, but not with its secrets."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        right, deal = shamir.split, Keyring._deal

        def split(secret: bytes, count: int, threshold: int, chance: bytes) -> list[bytes]:
            if how == "another":
                return right(bytes(len(secret)), count, threshold, chance)
            return right(secret, count, threshold + 1, 2 * chance)

        def false_deal(self: Keyring, down: Mapping[str, Any], examples: int) -> dict[str, Tensor]:
            with monkeypatch.context() as only:
                if self.client == 2:
                    only.setattr(shamir, "split", split)
                return deal(self, down, examples)

        monkeypatch.setattr(Keyring, "_deal", false_deal)

    return patch


def lost_once(step: str, *clients: int) -> Callable[[LocalEngine], Engine]:
    """Answers that are lost in the first try only."""

    class Once(Wrapped):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in super().deliver(ask, turn):
                gone = ask.step == step and turn.ask == 0 and reply.client in clients
                yield Reply(reply.client, None, "lost") if gone else reply

    return Once


class TwoFirst(Wrapped):
    """Client 2 is the first of all to answer, before anybody can say how an answer must look."""

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        yield from sorted(super().deliver(ask, turn), key=lambda reply: reply.client != 2)


ALL, HONEST = [0, 1, 2, 3, 4], [0, 1, 3, 4]
DEALT = "it dealt shares that do not belong together"
CONTRADICTS = "it dealt or revealed false shares: it contradicts"
FAULTS: dict[str, tuple[Any, str, str, list[int], int]] = {  # hostile, where, why, ids, tries
    "keys lost": (losing(mask_keys=[2]), "mask_keys", "lost", HONEST, 1),
    "keys cut": (
        changing("mask_keys", 2, lambda up: {"keys": up["keys"][1:]}),
        "mask_keys",
        "`keys` must be",
        HONEST,
        1,
    ),
    "keys of another": (
        changing("mask_keys", 2, lambda up: {"keys": bytes_of(GOOD + GOOD)}),
        "mask_shares",
        "its keys are not the ones it sent",
        HONEST,
        1,
    ),
    "shares lost": (losing(mask_shares=[2]), "mask_shares", "lost", HONEST, 1),
    "shares cut": (
        changing("mask_shares", 2, lambda up: {**up, "shares": up["shares"][1:]}),
        "mask_shares",
        "`shares` must be",
        HONEST,
        1,
    ),
    "shares that do not open": (
        changing("mask_shares", 2, lambda up: {**up, "shares": rubbish(up["shares"])}),
        "unmask",
        f"{CONTRADICTS} clients [0, 1, 2, 3, 4]",
        HONEST,
        2,
    ),
    "false digests": (
        changing("mask_shares", 2, lambda up: {**up, "digests": rubbish(up["digests"])}),
        "unmask",
        f"{CONTRADICTS} clients [0, 1, 2, 3, 4]",
        HONEST,
        2,
    ),
    "false digests of some": (
        changing("mask_shares", 2, lambda up: {**up, "digests": rubbish(up["digests"], [0, 1])}),
        "unmask",
        f"{CONTRADICTS} clients [0, 1]",
        HONEST,
        2,
    ),
    "shares of no polynomial": (dealing("none"), "unmask", DEALT, HONEST, 2),
    "shares of another seed": (dealing("another"), "unmask", DEALT, HONEST, 2),
    "answer lost": (losing(collect=[2]), "collect", "lost", HONEST, 1),
    "answer unmasked": (
        changing("collect", 2, lambda up: third(2)),
        "collect",
        "`x` is not masked",
        HONEST,
        1,
    ),
    "answer of another shape": (
        changing("collect", 2, lambda up: {"x": {"float64": torch.ones(3).long()}}, under=TwoFirst),
        "unmask",
        "`x` is float64 (3,), others float64 (2,)",
        HONEST,
        1,
    ),
    "answer of another type": (
        changing("collect", 2, lambda up: {"x": {"float32": torch.ones(2).long()}}),
        "unmask",
        "`x` is float32 (2,), others float64 (2,)",
        HONEST,
        1,
    ),
    "unmasking lost": (losing(unmask=[2]), "unmask", "lost", ALL, 1),
    "unmasking lost by two, once": (lost_once("unmask", 2, 3), "unmask", "lost", ALL, 2),
    "unmasking lost by two": (losing(unmask=[2, 3]), "unmask", "lost", [0, 1, 4], 3),
    "unmasking cut": (
        changing("unmask", 2, lambda up: {"shares": up["shares"][1:]}),
        "unmask",
        "`shares` must be",
        ALL,
        1,
    ),
    "unmasking false": (
        changing("unmask", 2, lambda up: {"shares": rubbish(up["shares"])}),
        "unmask",
        f"{CONTRADICTS} clients [0, 1, 2, 3, 4]",
        ALL,
        1,
    ),
    "unmasking false beside a loss": (
        changing(
            "unmask", 2, lambda up: {"shares": rubbish(up["shares"])}, under=losing(unmask=[0])
        ),
        "unmask",
        f"{CONTRADICTS} clients [0, 1, 2, 3, 4]",
        HONEST,
        2,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_client_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Whatever one of five does at whichever step; in two rounds, of which each has its sum."""
    hostile, step, why, ids, tries = FAULTS[fault]
    federation = Federation(tmp_path, MEAN, third)
    if fault.startswith("shares of"):
        hostile(monkeypatch)
    else:
        federation.wrap = hostile
    for round in (1, 2):
        federation.ledger.take()
        got = federation.ask(round=round)
        assert got.ids == ids
        right = sum(ids) / 3 / len(ids)
        assert got.x.tolist() == pytest.approx([right] * 2, abs=len(ids) * 2.0**-40)
        beside = {3} if "by two" in fault else {0} if "beside" in fault else set()
        assert {client for _, client in federation.reasons()} == {2} | beside
        assert why in federation.reasons()[step, 2]
        assert federation.ledger.answered == set(ids)
        assert len(federation.numbers()) == tries


def test_nobody_is_blamed_for_what_one_client_says_of_another(tmp_path: Path) -> None:
    """Either may lie, so both are told of, neither is left out, and the sum is opened."""
    for step, rows in (("mask_shares", 3), ("unmask", 3)):
        hostile = changing(step, 1, lambda up, r=rows: {**up, "shares": rubbish(up["shares"], r)})
        federation = Federation(tmp_path / step, MEAN, number, wrap=hostile)
        assert federation.ask().ids == ALL and federation.reasons() == {}
        words = "it and client {} contradict each other about a share"
        told = {("unmask", 1): words.format(3), ("unmask", 3): words.format(1)}
        assert federation.reasons("note") == told


def test_two_who_contradict_each_other_are_left_out_where_the_sum_stays_shut(
    tmp_path: Path,
) -> None:
    hostile = changing(
        "unmask",
        1,
        lambda up: {"shares": rubbish(up["shares"], 3)} if len(up["shares"]) == 6 else up,
        under=lost_once("unmask", 5),
    )
    masks = Masks(0.83)  # five of six
    federation = Federation(tmp_path, MEAN, number, sizes=[2] * 6, masks=masks, wrap=hostile)
    assert federation.ask().ids == [0, 2, 4, 5]


class Keys(Wrapped):
    """Writes down the keys of every try, and loses the shares of three clients."""

    seen: list[tuple[int, bytes]] = []  # noqa: RUF012

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for reply in super().deliver(ask, turn):
            if ask.step == "mask_keys":
                self.seen.append((turn.ask, reply.up["keys"].numpy().tobytes()))  # type: ignore[index]
            gone = ask.step == "unmask" and reply.client in (1, 3, 4)
            yield Reply(reply.client, None, "lost") if gone else reply


def test_a_sum_that_stays_shut_is_tried_with_new_keys_and_then_fails_by_name(
    tmp_path: Path,
) -> None:
    """And when the run is resumed, who is still away holds up nobody."""
    Keys.seen = []
    federation = Federation(tmp_path, MEAN, number, wrap=Keys, keeps=True)
    words = r"round 1, `unmask`: 2 of 5 clients answered, fewer than the 4 .* in 3 tries. Client 4"
    with pytest.raises(NotEnoughReplies, match=words):
        federation.ask()
    assert len({keys for _, keys in Keys.seen}) == 15 and len({n for n, _ in Keys.seen}) == 3
    assert federation.engine.snapshot() == {} and federation.ledger.answered == set()
    federation.engine.prune({})  # as at every start: what clients have told stays known to them
    for away in (1, 3):
        federation.wrap = losing(mask_keys=[away])
        assert federation.ask().ids == [c for c in ALL if c != away]
        assert federation.engine.state_of(0) == {"count": 1}
        federation.engine.restore({})


def test_secrets_outlast_a_round_and_end_with_the_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, MEAN, number, wrap=losing(unmask=[4]), keeps=True)
    federation.ask()
    federation.engine.prune(federation.engine.snapshot())
    paths = [tmp_path / "clients" / str(client) / KEYS for client in range(5)]
    assert all(path.exists() for path in paths)
    federation.engine.finish({}, {}, {})
    assert not any(path.exists() for path in paths)


# ---- sums that cannot be ---------------------------------------------------------------------


def shifted(field: str, by: float, places: int = 40) -> Callable[[dict[str, Any]], Any]:
    """A masked field to whose every number something is added, which the server cannot see."""

    def up(given: dict[str, Any]) -> dict[str, Any]:
        value, more = given[field], round(by * 2**places)
        if isinstance(value, Tensor):
            return {**given, field: value + more}
        return {**given, field: {key: tensor + more for key, tensor in value.items()}}

    return up


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (shifted("model", 50 / 5), r"`model` is \S+ from the one that was sent, beyond \d+"),
        (shifted("model", 2.0**18), r"`model` is \S+ from the one that was sent, beyond \d+"),
        (shifted("loss", 2.0**22), r"`loss` is \S+, beyond 4.194e\+06"),
        (shifted("n", 100, 32), "weight `n` is 1.., not within 0 and 15"),
        (shifted("n", -100, 32), "weight `n` is -.*, not within 0 and 15"),
        (shifted("table", 2.0**30, 32), r"`table` float32 is \S+, beyond"),
    ],
    ids=["+50", "2**58", "loss", "weight", "weight below 0", "sum"],
)
def test_a_sum_that_honest_clients_cannot_have_fails_the_round_by_name(
    tmp_path: Path, lie: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """No state counts, and a next round without the lie is as any other."""
    up = {
        "model": weights(by="n"),
        "loss": scalar("mean", by="n"),
        "n": scalar("sum"),
        "table": statistic("sum"),
    }
    model: dict[str, Tensor] = {}

    def answer(client: int) -> dict[str, Any]:
        more = {"loss": 0.5, "n": SIZES[client], "table": torch.ones(2)}
        return {"model": {key: tensor + 0.01 * client for key, tensor in model.items()}, **more}

    federation = Federation(tmp_path, up, answer, sends_model=True, keeps=True)
    model |= federation.method.blueprint.shared()
    federation.wrap = changing("collect", 3, lie)
    said = rf"round 1, `collect`: the sum over clients \[0, 1, 2, 3, 4\] is out of range: {words}"
    with pytest.raises(NotEnoughReplies, match=said):
        federation.ask()
    assert federation.engine.snapshot() == {}
    federation.wrap = Wrapped
    got = federation.ask(round=2)
    key = next(iter(model))
    shift = sum(0.01 * client * size for client, size in enumerate(SIZES)) / sum(SIZES)
    torch.testing.assert_close(got.model[key], model[key] + shift)


def test_a_client_that_would_go_too_far_declines(tmp_path: Path) -> None:
    """So that its honest but diverged model costs the others nothing."""
    up, model = {"model": weights(by=EXAMPLES)}, dict[str, Tensor]()

    def answer(client: int) -> dict[str, Any]:
        return {"model": {key: tensor + 50 * (client == 1) for key, tensor in model.items()}}

    federation = Federation(tmp_path, up, answer, sends_model=True)
    model |= federation.method.blueprint.shared()
    assert federation.ask().ids == [0, 2, 3, 4]
    assert "`model` is" in federation.reasons()["collect", 1]


# ---- kills, repeats, real runs ---------------------------------------------------------------


def test_a_client_that_was_killed_is_asked_again_and_answers_alike(tmp_path: Path) -> None:
    """Every task is performed twice, the second time by a new process's host."""

    class Again(Wrapped):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            fresh = LocalEngine(replace(self.engine.runtime), tmp_path, workers=0)
            once, twice = list(super().deliver(ask, turn)), list(fresh.deliver(ask, turn))
            for one, two in zip(once, twice, strict=True):
                if ask.step != "mask_keys":
                    assert codec.encode([one.up, one.why]) == codec.encode([two.up, two.why])
                    asked.append(ask.step)
                yield two

    asked: list[str] = []
    got = Federation(tmp_path, MEAN, number, wrap=Again).ask()
    assert got.ids == [0, 1, 2, 3, 4] and got.x.tolist() == pytest.approx([2.0, 2.0], abs=1e-6)
    assert {step: asked.count(step) for step in asked} == dict.fromkeys(
        ("mask_shares", "collect", "unmask"), 5
    )


def test_a_server_that_was_killed_asks_anew(tmp_path: Path) -> None:
    """It begins with new keys, whatever step it had reached, and has the same sum."""
    whole = Federation(tmp_path / "whole", MEAN, number).ask()
    for step in (*STEPS, "collect"):
        killed = Federation(tmp_path, MEAN, number, wrap=losing(**{step: range(5)}))
        with pytest.raises(NotEnoughReplies):
            killed.ask()
        assert torch.equal(Federation(tmp_path, MEAN, number).ask().x, whole.x)


def test_an_answer_whose_sum_was_opened_is_not_in_another_one(tmp_path: Path) -> None:
    """The server was killed with the sum in hand; then a client is away.

    The others do not open a second sum of the same answers: they train anew, with other draws.
    """
    federation = Federation(tmp_path, MEAN, number)
    federation.ask()
    federation.wrap = losing(mask_keys=[1])
    assert federation.ask().ids == [0, 2, 3, 4]
    assert "one over [0, 2, 3, 4] would show the difference" in federation.reasons()["unmask", 0]
    assert len(federation.numbers()) == 2
    federation.wrap = Wrapped
    assert federation.ask().ids == [0, 1, 2, 3, 4]


def test_masked_answers_are_added_as_they_come(tmp_path: Path) -> None:
    """None is held back for one that is slow; sum and ledger are those of the order of asking."""

    class Backwards(Wrapped):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in reversed(list(super().deliver(ask, turn))):
                yield Reply(9, {}, "a stranger's")
                yield reply
                yield replace(reply, up={"x": "a second answer"})

    there = Federation(tmp_path / "there", MEAN, number)
    back = Federation(tmp_path / "back", MEAN, number, wrap=Backwards)
    first, second = there.ask(), back.ask()
    assert (there.taken, back.taken) == ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
    assert torch.equal(first.x, second.x) and first.ids == second.ids
    assert there.ledger.lines == back.ledger.lines


def trial(**changes: Any) -> Trial:
    tree = {**TINY, "method": "scaffold", "objective": FLOATS, "privacy": ON, **changes}
    recipe = Recipe.from_tree(tree)
    dataset = recipe.data.load()
    return Trial(recipe, dataset, make_split(recipe.split, dataset, None, recipe.clients, 0)).go()


def test_who_reveals_shares_does_not_change_a_bit(tmp_path: Path) -> None:
    """Any threshold of the shares give the same masks: model and states end alike."""
    whole = trial()
    assert whole.again().digest == whole.digest
    for gone in (0, 3):
        assert whole.again(wrap=losing(unmask=[gone])).digest == whole.digest
    left = whole.again(wrap=losing(train=[1]))
    assert whole.again(wrap=losing(train=[1], unmask=[])).digest == left.digest != whole.digest
    with pytest.raises(NotEnoughReplies):  # of four, three must stay
        whole.again(wrap=losing(train=[1], unmask=[2]))


def test_masks_change_a_model_by_rounding_only() -> None:
    masked, plain = trial(), trial(privacy={})
    for key, value in masked.server.model.items():
        torch.testing.assert_close(value, plain.server.model[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_methods_keep_the_contract_under_masks(name: str) -> None:
    assert len(check_method(name, objective=FLOATS, privacy=ON)) == len(CHECKS)


def test_measured_batch_norm_keeps_the_contract_under_masks() -> None:
    """Two masked asks in a round, one of them weighed by what clients upload."""
    encoder = {"name": "resnet8", "norm": "batch", "width": 2}
    check_method("fedavg", encoder=encoder, batch_norm="recalibrate", privacy=ON)


def test_runs_repeat_to_the_bit_and_send_what_the_card_says(tmp_path: Path) -> None:
    """Whatever the masks and the workers; and `explain` knows every byte beforehand."""
    tree = {**TINY, "method": "scaffold", "objective": FLOATS, "privacy": ON}
    folders = {workers: tmp_path / f"run-{workers}" for workers in (0, 1)}
    for workers, folder in folders.items():
        start.run(Recipe.from_tree({**tree, "engine": {"workers": workers}}), out=folder)
    for file in ("encoder.safetensors", "ledger.jsonl"):
        assert len({(folder / file).read_bytes() for folder in folders.values()}) == 1
    recipe = Recipe.from_tree(tree)
    lines = (folders[0] / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len(entries) == 2 * 4 * (1 + len(STEPS))  # rounds, clients, asks
    known = card(recipe.build_method(recipe.data.load()), recipe.privacy.masks, 4).bytes
    for entry in entries:
        sent = {side: sum(entry.get(side, {}).values()) for side in ("down", "up")}
        assert sent == known[entry["step"]], entry
    assert all(MASKS in entry["down"] for entry in entries if entry["step"] == "train")
