"""Both engines end with the same bits: every method over real Flower messages, in this process.

The node is a thread here and answers for all clients; deployments with processes of their own are
in tests/e2e/test_deployment.py and tests/deploy.
"""

import json
import re
import socket
import ssl
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import EngineError
from harmonium.engines.flower.node import answer_messages, refusal
from harmonium.federation.driver import Turn
from harmonium.federation.method import TRAINED, Method
from harmonium.federation.whitening import whitening_of
from harmonium.federation.wire import EXAMPLES, Ask, exchange, statistic, weights
from harmonium.learning.client import Decline
from harmonium.methods import methods
from harmonium.runs.open_run import make_runtime
from harmonium.sites import certificates as made
from harmonium.sites.flower_pair import FlowerPair
from harmonium.testing import ContractError, check_parity, first_trial

QUICK = {  # settings that are made for real runs, and slow
    "fedca": {"method": {"name": "fedca", "align_epochs": 2}},
    "fedstyle": {"method": {"name": "fedstyle", "style_epochs": 1}},
    "fedsc": {"objective": {"name": "spectral", "form": "fedsc", "out": 16, "norm": "none"}},
    "fedsc-control": {
        "objective": {"name": "spectral", "form": "fedsc", "out": 16, "norm": "none"}
    },
    "orchestra": {"method": {"name": "orchestra", "clusters": 8, "global_steps": 5}},
}


@pytest.fixture(scope="module")
def together() -> Iterator[FlowerPair]:
    with FlowerPair() as opened:
        yield opened


@pytest.mark.parametrize(
    ("enrolled", "words"),
    [(False, "does not know this site's key"), (True, r"will admit the site in about \d+ s")],
)
def test_a_node_that_is_not_let_in_learns_why(
    enrolled: bool, words: str, together: FlowerPair
) -> None:
    """Flower has one code for a key that it does not know and one that is connected."""
    key = together._node if enrolled else ec.generate_private_key(ec.SECP384R1())
    notes, ended = list[str](), threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        ended.set()

    address = f"127.0.0.1:{together._link.settings.port}"
    answer_messages(lambda sealed, bodies: (b"", []), address, key, None, note, ended)
    assert re.search(words, notes[0]), notes


SERVERS = "Wed, 18 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("code", "headers", "late", "words"),
    [
        (401, {"date": SERVERS}, -600, "clock is 10 minutes behind the server's; up to 305 s"),
        (401, {"date": SERVERS}, 30, "clock is 30 s ahead of the server's; .* 5 s ahead"),
        (401, {"date": SERVERS}, 2, "does not accept this site's signature"),
        (401, {}, -600, "does not accept this site's signature"),
        (412, {"x-harmonium-why": "unknown"}, 0, "harmonium server add"),
        (412, {"x-harmonium-why": "connected 17"}, 0, "in about 17 s,"),
        (503, {}, 0, "HTTP code 503: .*proxy"),
    ],
)
def test_every_cause_of_a_refusal_has_its_own_words(code, headers, late, words) -> None:
    now = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp() + late
    assert re.search(words, said := refusal(code, headers, now)) and "\n" not in said


def test_every_fault_of_a_certificate_has_its_own_words(tmp_path: Path) -> None:
    """Against real TLS: expired, not yet valid, of another authority, for another name."""
    authority, signer = made.make_authority("a")
    other, _ = made.make_authority("b")
    key = ec.generate_private_key(ec.SECP384R1())

    def met(kit: x509.Certificate, days: int, hosts: list[str], first: int = -2) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made, "datetime", _Shifted(timedelta(days=first)))
            shown, shown_key = made.make_server_certificate(authority, signer, hosts, days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, content in (
            ("crt", made.certificate_pem(shown)),
            ("key", made.private_pem(shown_key)),
            ("ca", made.certificate_pem(kit)),
        ):
            (tmp_path / name).write_bytes(content)
        context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
        with socket.create_server(("127.0.0.2", 0)) as listening:
            threading.Thread(target=_greets, args=(listening, context), daemon=True).start()
            notes, ended = list[str](), threading.Event()

            def note(text: str) -> None:
                notes.append(text)
                ended.set()

            address = f"127.0.0.2:{listening.getsockname()[1]}"
            try:
                answer_messages(lambda *_: (b"", []), address, key, tmp_path / "ca", note, ended)
            except EngineError as error:
                return str(error)
            return notes[0]

    mine = ["127.0.0.2"]
    assert "has expired, by this machine's clock" in met(authority, 1, mine)
    assert "is not valid yet, by this machine's clock" in met(authority, 9, mine, first=2)
    assert "signed by another authority" in met(other, 9, mine)
    assert "certificate for other names" in met(authority, 9, ["example.org"])


class _Shifted:
    """A clock that is off, for making certificates."""

    def __init__(self, by: timedelta) -> None:
        self.by = by

    def now(self, zone: Any) -> datetime:
        return datetime.now(zone) + self.by


def _greets(listening: socket.socket, context: ssl.SSLContext) -> None:
    with suppress(OSError), listening.accept()[0] as one, context.wrap_socket(one, True):
        pass


@pytest.mark.parametrize("name", methods.table())
def test_every_method_ends_with_the_same_bits(name: str, together: FlowerPair) -> None:
    before = together.asked
    check_parity(name, together, clients=2, **QUICK.get(name, {}))
    assert together.asked > before


def test_the_global_objective_is_measured_over_flower_as_well(together: FlowerPair) -> None:
    before = together.asked
    settings = {"clients": 2, **QUICK["fedsc"]}
    plain = first_trial("fedavg", **settings)
    there = plain.again(engine=together.engine)
    assert there.server.memory["global_objective"] == plain.server.memory["global_objective"]
    assert "gradient_norm" in there.server.memory["global_objective"] and together.asked > before
    assert there.lines == plain.lines  # before round 1, too
    first = [json.loads(line) for line in there.lines[:4]]
    steps = ["measure_objective"] * 2 + ["measure_gradient"] * 2
    assert [(line["round"], line["step"]) for line in first] == [(0, step) for step in steps]


def test_whitening_is_fitted_over_flower_with_the_same_bits(together: FlowerPair) -> None:
    before = together.asked
    plain = first_trial("fedavg", clients=2, evaluate={"whiten": True})
    there = plain.again(engine=together.engine, reload=True)
    assert whitening_of(there.server.memory, None) is not None and together.asked > before
    assert there.digest == plain.digest and there.lines == plain.lines
    steps = [json.loads(line)["step"] for line in there.lines]
    assert steps.count("measure_moments") == 2  # of every client, before its encoder is judged


@pytest.mark.parametrize("protocol", ["probe", "ridge"])
def test_evaluation_at_the_sites_has_the_same_bits_over_flower(
    protocol: str, together: FlowerPair
) -> None:
    before, evaluate = together.asked, {"sites": protocol, "sites_least": 1}
    check_parity("fedavg", together, clients=3, evaluate=evaluate)
    assert together.asked > before


def test_evaluation_at_the_sites_is_masked_over_flower(together: FlowerPair) -> None:
    masked = {"clients": 3, "privacy": {"secure_aggregation": True}}
    masked["evaluate"] = {"sites": "ridge", "sites_least": 1}
    plain = first_trial("fedavg", **masked)
    there = plain.again(engine=together.engine, reload=True)
    assert there.server.memory["site_evaluation"]["total"]["images"] > 0
    assert there.digest == plain.digest


# ---- methods of every shape ----------------------------------------------------------------------


@dataclass(frozen=True)
class TwoAsks(Method):
    """Asks for a guarded statistic, then trains those who answered, as FedSC does."""

    paper = "none"

    def round(self, server, cohort):
        first = yield Ask("correlate", cohort, {"model": server.model})
        got = yield Ask("pull_towards", first.ids, {"model": server.model, "total": first.matrix})
        return self.merge(server, got.model)

    @exchange(
        down={"model": weights()}, up={"matrix": statistic("mean", by=EXAMPLES, guarded=True)}
    )
    def correlate(self, client, got):
        encoder = self.pull(client, got.model).eval()["encoder"]
        with torch.no_grad():
            rows = torch.cat([encoder(batch.plain) for batch in client.batches(1, 8)])
        rows = torch.nn.functional.normalize(rows, dim=1)
        matrix = rows.T @ rows / len(rows)
        limit = 2**0.5 / len(rows)
        return {"matrix": client.release("matrix", matrix, sensitivity=limit, sigma=0.01)}

    @exchange(down={"model": weights(), "total": statistic()}, up=TRAINED)
    def pull_towards(self, client, got):
        parts = self.pull(client, got.model)
        scale = 1 + 0.01 * float(got.total.trace())
        done = self.fit(parts, client)
        model = {
            k: v * scale if v.is_floating_point() else v
            for k, v in self.push(client, parts).items()
        }
        return {"model": model, "loss": done.loss}


@dataclass(frozen=True)
class Stateful(Method):
    """Every client trains from a blend of the average and what it sent last."""

    paper = "none"
    keeps = {"last": "weights", "rounds": "scalar"}

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):
        if client.id == 3 and client.round == 1:
            raise Decline("it comes back in the next round")
        last = client.state.get("last", got.model)
        mixed = {
            key: (value + last[key]) / 2 if value.is_floating_point() else value
            for key, value in got.model.items()
        }
        parts = self.pull(client, mixed)
        done = self.fit(parts, client)
        sent = self.push(client, parts)
        client.state["last"] = {key: value.clone() for key, value in sent.items()}
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        return {"model": sent, "loss": done.loss}


@dataclass(frozen=True)
class Prepared(Stateful):
    """Before round 1 every client measures something that it keeps and something that it sends."""

    paper = "none"
    keeps = {**Stateful.keeps, "mean": "statistic"}
    remembers = {"centre": "statistic"}

    def setup(self, server, cohort):
        got = yield Ask("measure", server.everyone, each={c: {} for c in server.everyone})
        return replace(server, memory={"centre": got.centre})

    @exchange(up={"centre": statistic("concat")})
    def measure(self, client, got):
        mean = client.examples.pixels().float().mean(dim=(0, 1, 2))
        client.state["mean"] = mean
        return {"centre": mean[None] + torch.randn(1, generator=client.rng)}


@pytest.mark.parametrize("method", [TwoAsks, Stateful, Prepared])
def test_methods_of_every_shape_end_with_the_same_bits(
    method: type[Method], together: FlowerPair
) -> None:
    check_parity(method, together)


def test_clients_keep_their_state_over_flower(together: FlowerPair) -> None:
    plain = first_trial(Stateful)
    there = plain.again(engine=together.engine)
    assert [there.states[client]["rounds"] for client in range(4)] == [2, 2, 2, 1]
    assert there.digest == plain.digest


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "byol", "participation": {"number": 2}},
        {"objective": {"name": "simclr", "norm": "none"}, "privacy": {"secure_aggregation": True}},
        {"objective": "moco", "clients": 2},
        {
            "batch_norm": "recalibrate",
            "encoder": {"name": "resnet8", "norm": "batch"},
            "clients": 2,
        },
        {"objective": "semi-simsiam", "terms": "uv", "participation": {"number": 3}},
        {"transport": {"up": "int8", "down": "fp16"}, "participation": {"number": 3}},
    ],
    ids=["byol", "masked", "queue", "recalibrated", "verified", "rounded"],
)
def test_settings_end_with_the_same_bits(settings: dict, together: FlowerPair) -> None:
    check_parity("fedavg", together, **settings)


def test_federated_simclr_ends_with_the_same_bits(together: FlowerPair) -> None:
    check_parity("fsimclr", together, clients=2)


def test_a_lost_answer_leaves_the_state_as_it_was(together: FlowerPair) -> None:
    """The engine asks again from the version that was accepted; the site goes back to it."""

    class Losing:
        """Loses every first answer of client 1, after the site has done its work."""

        def __init__(self, engine):
            self.engine, self.lost = engine, set()

        def deliver(self, ask: Ask, turn: Turn):
            for reply in self.engine.deliver(ask, turn):
                if reply.client == 1 and turn.round == 1:
                    self.lost.add(turn)
                    yield replace(reply, up=None, why="lost")
                else:
                    yield reply

        def __getattr__(self, name):
            return getattr(self.engine, name)

    plain = first_trial(Stateful).again(wrap=Losing)
    there = plain.again(engine=together.engine, wrap=Losing, reload=True)
    assert there.states[1]["rounds"] == 1
    assert there.digest == plain.digest


def test_replayed_and_edited_asks_are_refused(together: FlowerPair, tmp_path: Path) -> None:
    """Whoever holds the SuperLink can push any message; the site answers none but the server's."""
    trial = first_trial("fedavg")
    host = make_runtime(trial.recipe, trial.dataset, trial.split, tmp_path)
    engine, sent = together.engine(trial.recipe, host, tmp_path), []
    messenger = engine._messenger
    push = messenger.push
    messenger.push = lambda messages: (sent.extend(messages), push(messages))[1]
    ask = Ask("train", [0], {"model": host.method.blueprint.shared()})
    (reply,) = engine.deliver(ask, Turn(1, 0))
    assert reply.up is not None
    (message,) = sent
    forged = message.sealed.replace(b'\\"round\\":1', b'\\"round\\":2')
    assert forged != message.sealed
    waiting = push([message, replace(message, sealed=forged)])
    told: dict[str, object] = {}
    while len(told) < 2:
        told |= dict(messenger.pull([ticket for ticket in waiting if ticket not in told]))
    assert "it is a replay" in str(told[waiting[0]])
    assert "not signed by" in str(told[waiting[1]])


@dataclass(frozen=True)
class Telling(Method):
    """Looks at where it runs."""

    paper = "none"

    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client, got):
        there = any(Path(frame.filename).name == "site.py" for frame in traceback.extract_stack())
        return {"model": {k: v + there for k, v in got.model.items()}, "loss": 0.0}


def test_a_method_that_can_tell_the_engines_apart_is_found(together: FlowerPair) -> None:
    with pytest.raises(ContractError, match="over Flower .*local engine"):
        check_parity(Telling, together)
