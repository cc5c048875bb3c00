"""Clients that fail on purpose: how often, always the same ones, and with what effect."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from harmonium.core.errors import NotEnoughReplies
from harmonium.data.partition import make_split
from harmonium.engines.local import LocalEngine
from harmonium.engines.unreliable import JITTER, Unreliable
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.sampling import Participation
from harmonium.federation.wire import EXAMPLES, Ask, exchange, scalar, weights
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.storage import state_store
from harmonium.storage.run_folder import RunFolder
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

EQUAL = dict.fromkeys(range(20), 50)


@dataclass
class Echo:
    """An engine that answers with the client's name, and notes whom it ran."""

    ran: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        for client in reversed(ask.to):
            self.ran.append(client)
            yield Reply(client, {"n": client})

    def accept(self, reply: Reply) -> None:
        self.accepted.append(reply.client)

    def snapshot(self) -> dict[int, str]:
        return {0: "state"}

    def restore(self, snapshot: object) -> None:
        self.accepted = [-1]

    def state_of(self, client: int) -> str:
        return f"of {client}"


def failing(examples: dict[int, int] = EQUAL, seed: int = 0, **settings: float) -> Unreliable:
    return Unreliable(Echo(), Participation(**settings), seed, examples)  # type: ignore[arg-type]


def lost(engine: Unreliable, to: list[int], round: int, ask: int = 0) -> dict[int, str]:
    """Who gave no answer and why, by what is delivered."""
    replies = list(engine.deliver(Ask("train", to), Turn(round, ask)))
    assert sorted(reply.client for reply in replies) == sorted(to)
    assert all((reply.up is None) == bool(reply.why) for reply in replies)
    return {reply.client: reply.why for reply in replies if reply.up is None}


def test_drop_outs_are_as_frequent_as_said_and_not_always_the_same() -> None:
    engine, counts = failing(dropout=0.3), [0] * 20
    for round in range(300):
        for client, why in lost(engine, list(range(20)), round).items():
            assert why == "dropped out (simulated)"
            counts[client] += 1
    assert sum(counts) / 6000 == pytest.approx(0.3, abs=0.02)  # 3.4 deviations
    assert all(55 < count < 125 for count in counts)


def test_lost_tasks_are_not_run_and_the_others_pass_unchanged() -> None:
    engine = failing(dropout=0.5)
    ask = Ask("train", list(range(20)), each={3: {"x": 1.0}})
    replies = list(engine.deliver(ask, Turn(1, 0)))
    gone = [reply.client for reply in replies if reply.up is None]
    stay = [reply for reply in replies if reply.up is not None]
    assert 3 < len(gone) < 17
    assert engine.engine.ran == [reply.client for reply in stay]  # type: ignore[attr-defined]
    kept = replace(ask, to=[client for client in ask.to if client not in gone])
    assert stay == list(Echo().deliver(kept, Turn(1, 0)))


def test_chance_follows_from_seed_round_ask_and_client_alone() -> None:
    everyone = list(range(20))
    first = lost(failing(dropout=0.5), everyone, 3)
    assert lost(failing(dropout=0.5), everyone[::-1], 3) == first
    half = lost(failing(dropout=0.5), everyone[:10], 3)  # also if others are asked beside it
    assert half == {client: why for client, why in first.items() if client < 10}
    for other in (
        lost(failing(dropout=0.5), everyone, 4),
        lost(failing(dropout=0.5), everyone, 3, ask=1),
        lost(failing(dropout=0.5, seed=1), everyone, 3),
    ):
        assert other != first


def test_the_slow_are_the_same_throughout_and_miss_the_deadline() -> None:
    engine = failing(stragglers=0.25, slowdown=10.0, deadline=3.0)
    slow = set(engine.slow)
    assert len(slow) == 5 and slow < set(EQUAL)
    for round in range(0, 30):
        late = lost(engine, list(range(20)), round)
        assert set(late) == slow
        assert all(why.endswith("of at most 3 (simulated)") for why in late.values())
        assert all(5 < float(why.split()[2]) < 20 for why in late.values())
    assert failing(stragglers=0.25, seed=1).slow != slow
    assert not lost(failing(stragglers=0.25), list(range(20)), 1)  # nobody hurries


def test_time_grows_with_examples_and_jitters_mildly() -> None:
    sizes = {0: 10, 1: 20, 2: 60}
    engine = failing(sizes)
    for client, size in sizes.items():
        logs = [math.log(engine.time(client, Turn(r, 0)) / (size / 30)) for r in range(1, 2001)]
        mean = sum(logs) / len(logs)
        assert mean == pytest.approx(0.0, abs=0.02)
        spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs))
        assert spread == pytest.approx(JITTER, rel=0.1)
    late = lost(failing(sizes, deadline=1.3), [0, 1, 2], 1)
    assert set(late) == {2}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_of_those_to_spare_the_fastest_are_kept(dropout: float) -> None:
    engine = failing(number=8, over=0.5, dropout=dropout)
    for round in range(1, 40):
        cohort = engine.participation.cohort(range(20), round, 0)
        gone = lost(engine, cohort, round)
        answering = [c for c in cohort if gone.get(c) != "dropped out (simulated)"]
        times = {client: engine.time(client, Turn(round, 0)) for client in answering}
        kept = set(sorted(times, key=times.__getitem__)[:8])
        assert len(cohort) == 12 and set(cohort) - set(gone) == kept
        surplus = [gone[client] for client in set(answering) - kept]
        assert set(surplus) <= {"not needed: 8 had answered before it (simulated)"}
        assert len(kept) == 8 or dropout


def test_only_the_whole_cohort_of_a_round_has_some_to_spare() -> None:
    engine = failing(number=8, over=0.5)
    cohort = engine.participation.cohort(range(20), 2, 0)
    assert len(lost(engine, cohort, 2, ask=1)) == 4  # also a later ask to all of them
    assert not lost(engine, cohort[:-1], 2)  # those who answered a first ask, for instance
    assert not lost(engine, list(range(20)), 2)
    assert not lost(engine, engine.participation.cohort(range(20), 0, 0), 0)  # before round 1
    assert not lost(engine, engine.participation.cohort(range(20), 3, 0), 2)


def test_everything_else_is_the_engine_s() -> None:
    engine = failing(dropout=0.1)
    engine.accept(Reply(4, {}))
    assert engine.engine.accepted == [4] and engine.snapshot() == {0: "state"}  # type: ignore[attr-defined]
    engine.restore({})
    assert engine.engine.accepted == [-1] and engine.state_of(2) == "of 2"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = engine.nonsense
    assert not lost(failing(dict.fromkeys(range(3), 0), deadline=1.0), [0, 1, 2], 1)


@dataclass(frozen=True)
class Counting(Method):
    """Counts at the client how often it trained; a client adds its own number to the model."""

    keeps = {"count": "scalar"}

    @exchange(down={"model": weights()}, up={"model": weights(by=EXAMPLES), "loss": scalar("mean")})
    def train(self, client, got):  # type: ignore[no-untyped-def]
        client.state["count"] = client.state.get("count", 0) + 1
        model = {k: v + client.id if v.is_floating_point() else v for k, v in got.model.items()}
        return {"model": model, "loss": 0.0}


def federation(folder: Path, participation: Participation) -> tuple[Driver, Server, LocalEngine]:
    recipe = Recipe.from_tree({**TINY, "clients": 6, "method": Counting})
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, 6, 0)
    host = make_runtime(recipe, dataset, split, folder)
    examples = {client: len(index) for client, index in enumerate(split.indices)}
    engine = LocalEngine(host, folder, workers=0)
    wrapped = Unreliable(engine, participation, 0, examples)
    server = Server(examples, host.method.blueprint.shared())
    return Driver(host.method, wrapped, Ledger()), server, engine


def test_a_run_counts_those_who_answered_and_leaves_the_others_as_they_were(
    tmp_path: Path,
) -> None:
    driver, server, engine = federation(tmp_path, Participation(dropout=0.4))
    times = dict.fromkeys(server.everyone, 0)
    seen: set[str] = set()
    for number in range(1, 5):
        server = replace(server, round=number)
        before = dict(server.model)
        server = driver.drive(driver.method.round(server, server.everyone), server)
        entries = [json.loads(line) for line in driver.ledger.take()]
        here = [e["client"] for e in entries if e["outcome"] == "answered"]
        seen |= {e["why"] for e in entries if e["outcome"] == "no answer"}
        for client in here:
            times[client] += 1
        total = sum(server.examples[client] for client in here)
        moved = sum(server.examples[client] * client for client in here) / total
        for key, value in server.model.items():
            if value.is_floating_point():
                assert torch.allclose(value, before[key] + moved, atol=1e-5)
    assert seen == {"dropped out (simulated)"}
    counts = {client: engine.state_of(client).get("count", 0) for client in server.everyone}
    assert counts == times and 0 < sum(times.values()) < 24


def test_a_round_below_its_quorum_says_why(tmp_path: Path) -> None:
    driver, server, _ = federation(tmp_path, Participation(stragglers=1.0, deadline=0.01))
    server = replace(server, round=1)
    with pytest.raises(NotEnoughReplies, match="0 of 6.*too late.*of at most 0.01"):
        driver.drive(driver.method.round(server, server.everyone), server)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_run_goes_on_when_a_round_has_too_few_answers(method: str, tmp_path: Path) -> None:
    """Nothing of such a round counts, also not what its clients would have kept."""
    from harmonium.runs.start import run

    settings = {
        **TINY,
        "clients": 2,
        "rounds": 6,
        "participation": {"dropout": 0.5, "quorum": 2},
        "evaluate": {"k": 5, "health": 32, "labels_per_class": [], "every": 6},
        "engine": {"workers": 0},
    }
    found = run(method, out=tmp_path / "run", **settings)
    answered = [row["answered"] for row in found.rounds[1:]]
    assert min(answered) < 2 and max(answered) == 2
    again = run(method, out=tmp_path / "again", **settings)
    assert again.figures == found.figures
    if method == "scaffold":  # its server's variate is the mean of all clients', always
        commit, _ = RunFolder(tmp_path / "run").newest_readable()
        assert commit is not None
        states = [
            state_store.read(tmp_path / "run" / "clients" / held["file"], held["digest"]).state
            for held in commit.clients.values()
        ]
        for key, mean in commit.server["memory"]["control"].items():
            own = torch.stack([state["control"][key] for state in states]).sum(0) / 2
            torch.testing.assert_close(mean, own, rtol=1e-4, atol=1e-6)
    lines = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert "dropped out (simulated)" in lines
    assert lines == (tmp_path / "again" / "ledger.jsonl").read_text()


def test_a_run_without_a_single_round_says_so(tmp_path: Path) -> None:
    from harmonium.runs.start import run

    settings = {**TINY, "participation": {"deadline": 1e-6}, "engine": {"workers": 0}}
    with pytest.raises(NotEnoughReplies, match="enough answers"):
        run("fedavg", out=tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "result.json").exists()
