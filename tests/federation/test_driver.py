"""Planted violations: each is refused, and the message says how to mend it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from harmonium.core.errors import ConfigError, NotEnoughReplies, WireError
from harmonium.data.partition import make_split
from harmonium.data.splits.iid import IID
from harmonium.engines.local import LocalEngine
from harmonium.federation.driver import Driver, Reply, Turn
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, exchange, per_example, scalar, statistic, weights
from harmonium.learning.client import Decline
from harmonium.learning.context import Context
from harmonium.learning.training import fit
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.testing import TINY


def method_with(name: str, **attributes: object) -> type[Method]:
    return dataclass(frozen=True)(type(name, (Method,), {"__annotations__": {}, **attributes}))


def drive(
    cls: type[Method], folder: Path, wrap: Callable[[LocalEngine], object] = lambda e: e, **kw: int
) -> tuple[Server, Ledger, LocalEngine]:
    floats = {"name": "simclr", "norm": "none"}  # planted handlers do arithmetic on all
    recipe = Recipe.from_tree({**TINY, "method": cls, "split": "iid", "objective": floats})
    dataset = recipe.data.load()
    split = make_split(IID(), dataset, None, recipe.clients, 0)
    host = make_runtime(recipe, dataset, split, folder)
    engine, ledger = LocalEngine(host, folder, workers=0), Ledger()
    server = Server(
        {k: len(i) for k, i in enumerate(split.indices)}, host.method.blueprint.shared()
    )
    server = replace(server, round=1)
    driver = Driver(host.method, wrap(engine), ledger, **kw)
    return driver.drive(host.method.round(server, server.everyone), server), ledger, engine


def train(**declared: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return exchange(down={"model": weights()}, up={"model": weights(), **declared})  # type: ignore


def test_an_undeclared_field_does_not_leave(tmp_path: Path) -> None:
    @train()
    def leak(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model, "memory": client.examples.pixels().float()}

    leak.exchange = replace(leak.exchange, name="train")
    with pytest.raises(WireError) as error:
        drive(method_with("Leaky", train=leak), tmp_path)
    assert "sends `memory` to the server without declaring it" in str(error.value)
    assert "@exchange(up=...)" in str(error.value)


def test_a_declared_field_must_come(tmp_path: Path) -> None:
    @train(extra=scalar())
    def short(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model}

    short.exchange = replace(short.exchange, name="train")
    with pytest.raises(WireError, match="declares `extra`.*not send"):
        drive(method_with("Short", train=short), tmp_path)


def test_an_undeclared_field_does_not_reach_a_client(tmp_path: Path) -> None:
    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        yield Ask("train", cohort, {"model": server.model, "secret": 1})
        return server

    with pytest.raises(WireError, match="sends `secret` to the client"):
        drive(method_with("Chatty", round=round), tmp_path)


def test_a_field_must_be_of_its_kind(tmp_path: Path) -> None:
    @train(rows=per_example())
    def odd(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model, "rows": 3.0}

    odd.exchange = replace(odd.exchange, name="train")
    with pytest.raises(WireError, match="float.*per_example"):
        drive(method_with("Odd", train=odd), tmp_path)


@pytest.mark.parametrize("cheat", [False, True])
def test_a_guarded_field_needs_its_release(tmp_path: Path, cheat: bool) -> None:
    """Neither skipping the release nor releasing one value and sending another gets through."""

    @train(corr=statistic(guarded=True))
    def bare(self, client, got):  # type: ignore[no-untyped-def]
        value = torch.ones(3)
        if cheat:
            client.release("corr", value, sensitivity=1.0, sigma=1.0)
        return {"model": got.model, "corr": value}

    bare.exchange = replace(bare.exchange, name="train")
    with pytest.raises(WireError, match=r'client.release\("corr", ...\)'):
        drive(method_with("Bare", train=bare), tmp_path)


def test_a_released_field_is_sent_and_noted(tmp_path: Path) -> None:
    @train(corr=statistic(guarded=True))
    def noisy(self, client, got):  # type: ignore[no-untyped-def]
        sent = client.release("corr", torch.ones(3), sensitivity=0.5, sigma=2.0)
        return {"model": got.model, "corr": sent}

    noisy.exchange = replace(noisy.exchange, name="train")
    _, ledger, _ = drive(method_with("Noisy", train=noisy), tmp_path)
    (release,) = json.loads(ledger.lines[0])["releases"]
    assert (release["field"], release["sensitivity"], release["scale"]) == ("corr", 0.5, 2.0)


def test_labels_need_a_declaration(tmp_path: Path) -> None:
    @train(count=scalar())
    def peek(self, client, got):  # type: ignore[no-untyped-def]
        return {"model": got.model, "count": int(client.examples.labels().max())}

    peek.exchange = replace(peek.exchange, name="train")
    with pytest.raises(WireError, match="uses_labels = True"):
        drive(method_with("Peeking", train=peek), tmp_path)
    drive(method_with("Allowed", train=peek, uses_labels=True), tmp_path)


def test_client_state_needs_a_declaration(tmp_path: Path) -> None:
    @train()
    def hoard(self, client, got):  # type: ignore[no-untyped-def]
        client.state["pixels"] = client.examples.pixels()
        return {"model": got.model}

    hoard.exchange = replace(hoard.exchange, name="train")
    with pytest.raises(WireError, match="keeps `pixels` at the client"):
        drive(method_with("Hoarder", train=hoard), tmp_path)
    kept = method_with("Keeper", train=hoard, keeps={"pixels": "per_example"})
    _, _, engine = drive(kept, tmp_path)
    assert set(engine.state_of(0)) == {"pixels"}


def test_a_handler_cannot_change_what_others_receive(tmp_path: Path) -> None:
    @train(first=statistic("each"))
    def vandal(self, client, got):  # type: ignore[no-untyped-def]
        first = next(iter(got.model.values())).clone()
        for tensor in got.model.values():
            tensor.zero_()
        return {"model": got.model, "first": first}

    vandal.exchange = replace(vandal.exchange, name="train")
    seen: dict[int, torch.Tensor] = {}

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        seen.update(got.first)
        return server

    server, _, _ = drive(method_with("Vandal", train=vandal, round=round), tmp_path)
    assert all(torch.equal(value, seen[0]) and value.abs().sum() > 0 for value in seen.values())
    assert next(iter(server.model.values())).abs().sum() > 0


def test_a_client_that_declines_is_left_out_by_name(tmp_path: Path) -> None:
    @train()
    def picky(self, client, got):  # type: ignore[no-untyped-def]
        if client.id == 2:
            raise Decline("it has no time")
        return {"model": {key: value + client.id for key, value in got.model.items()}}

    picky.exchange = replace(picky.exchange, name="train")
    server, ledger, _ = drive(method_with("Picky", train=picky), tmp_path)
    entry = json.loads(ledger.lines[2])
    assert (entry["outcome"], entry["why"]) == ("no answer", "it has no time")
    assert ledger.answered == {0, 1, 3} and ledger.missing == {2}


def test_a_bad_upload_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    @train()
    def sick(self, client, got):  # type: ignore[no-untyped-def]
        factor = float("nan") if client.id == 1 else 1.0
        return {"model": {key: value * factor for key, value in got.model.items()}}

    sick.exchange = replace(sick.exchange, name="train")
    cls = method_with("Sick", train=sick)
    server, ledger, _ = drive(cls, tmp_path)
    assert all(torch.isfinite(value).all() for value in server.model.values())
    entry = json.loads(ledger.lines[1])
    assert entry["outcome"] == "refused" and "not finite" in entry["why"]
    with pytest.raises(NotEnoughReplies, match="3 of 4 clients answered.*Client 1.*not finite"):
        drive(cls, tmp_path, quorum=4)


@dataclass
class Losing:
    """An engine that never mentions client 0, though the client did its work."""

    engine: LocalEngine

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        return (reply for reply in self.engine.deliver(ask, turn) if reply.client != 0)

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)


def test_the_state_of_a_lost_answer_is_rolled_back(tmp_path: Path) -> None:
    @train()
    def counts(self, client, got):  # type: ignore[no-untyped-def]
        client.state["count"] = client.state.get("count", 0) + 1
        return {"model": got.model}

    counts.exchange = replace(counts.exchange, name="train")
    cls = method_with("Counting", train=counts, keeps={"count": "scalar"})
    _, ledger, engine = drive(cls, tmp_path, wrap=Losing)
    assert engine.state_of(0) == {} and engine.state_of(1) == {"count": 1}
    assert json.loads(ledger.lines[0])["why"] == "it did not reply"


def test_asking_nobody_is_fine_and_unknown_steps_are_not(tmp_path: Path) -> None:
    def quiet(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", [], {"model": server.model})
        assert got.ids == []
        return server

    drive(method_with("Quiet", round=quiet), tmp_path)

    def lost(self, server, cohort):  # type: ignore[no-untyped-def]
        yield Ask("trian", cohort, {"model": server.model})
        return server

    with pytest.raises(WireError, match="did you mean 'train'"):
        drive(method_with("Lost", round=lost), tmp_path)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({}, "declares"),
        ({"model": 3.0, "loss": 1.0}, "as float, but it is declared weights"),
        ({"model": {}, "loss": 1.0}, "lacks"),
        ({"model": {}, "loss": "text"}, "as str"),
        ({"model": {}, "loss": 1.0, "more": 1}, "without declaring it"),
    ],
)
def test_a_client_elsewhere_may_send_anything(
    tmp_path: Path, lie: dict[str, object], reason: str
) -> None:
    @dataclass
    class Lying(Losing):
        def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
            for reply in self.engine.deliver(ask, turn):
                yield replace(reply, up=lie) if reply.client == 0 else reply

    _, ledger, _ = drive(method_with("Plain"), tmp_path, wrap=Lying)
    entry = json.loads(ledger.lines[0])
    assert entry["outcome"] == "refused" and reason in entry["why"]
    assert ledger.answered == {1, 2, 3}


def test_an_ask_may_need_fewer_answers_than_a_round(tmp_path: Path) -> None:
    @exchange()
    def align(self, client, got):  # type: ignore[no-untyped-def]
        raise Decline("not today")

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        heard = yield Ask("align", cohort, least=0)
        assert heard.ids == []
        return server

    drive(method_with("Lenient", align=align, round=round), tmp_path)


def test_plans_train_on_public_images_with_keyed_chance(tmp_path: Path) -> None:
    def setup(self, server):  # type: ignore[no-untyped-def]
        parts = self.blueprint.copy_from()
        someone = self.at_server(server, "align")
        done = fit(parts, someone, self.loss(parts, Context(me=-1, anchor={})), self.local)
        return float(done.loss), float(torch.rand(()))

    seen = []

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        seen.append(setup(self, replace(server, public=public)))
        return server
        yield

    public = Recipe.from_tree(TINY).data.load().test
    torch.manual_seed(0)
    drive(method_with("Aligned", round=round), tmp_path)
    torch.manual_seed(1)
    drive(method_with("Aligned", round=round), tmp_path)
    assert seen[0] == seen[1]
    method = Recipe.from_tree(TINY).build_method(Recipe.from_tree(TINY).data.load())
    with pytest.raises(ConfigError, match="needs public images"):
        method.at_server(Server({0: 1}, {}), "align")
