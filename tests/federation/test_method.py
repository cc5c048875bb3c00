"""FedAvg by hand: exact small numbers and the equivalences that define it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError, WireError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.server_optimisers import Adam, Average, Sgd
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.parts import Part, Parts
from harmonium.learning.terms import Term
from harmonium.learning.terms.proximal import Proximal
from harmonium.learning.training import Local
from harmonium.learning.world import World


@dataclass(frozen=True)
class Flat(Encoder):
    """A linear encoder, so that a step can be written down by hand."""

    @property
    def features(self) -> int:
        return 2

    def build(self, channels: int, side: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 2, bias=False))


@dataclass(frozen=True)
class Pull(Objective):
    """Mean squared feature: its gradient is linear in the weights."""

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {}

    def see(self, parts, batch):  # type: ignore[no-untyped-def]
        return Seen(batch, [parts["encoder"](batch.plain)], [])

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return seen.h[0].square().sum(1).mean()


@dataclass(frozen=True)
class WithRows(Pull):
    """Adds a table with one row a client, a local part and one made anew each time."""

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {
            "table": Part(nn.Linear(2, world.clients, bias=False), "row"),
            "mine": Part(nn.Linear(2, 2), "local"),
            "queue": Part(nn.Linear(2, 2), "fresh"),
        }

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        out = parts["mine"](seen.h[0]) + parts["queue"](seen.h[0])
        own = parts["table"].weight[context.me]
        return (seen.h[0] * own).sum(1).square().mean() + out.square().mean()


SIZES = (4, 12)
METHOD = Method(
    world=World(clients=2, rounds=3, channels=1, side=3),
    encoder=Flat(),
    objective=Pull(),
    local=Local(epochs=1, batch=100, lr=0.1, momentum=0.0, clip=None),
)


def pictures() -> Images:
    pixels = np.random.default_rng(0).integers(0, 255, (16, 3, 3, 1), dtype=np.uint8)
    return Images(pixels, np.full(16, -1))


def federation(method: Method, folder: Path, sizes: tuple[int, ...] = SIZES) -> LocalEngine:
    cuts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    host = ClientRuntime(replace(method, views=preset("none")), pictures(), cuts, folder)
    return LocalEngine(host, folder, workers=0)


def rounds(
    method: Method, folder: Path, count: int = 1, sizes: tuple[int, ...] = SIZES
) -> tuple[Server, LocalEngine, Ledger]:
    engine = federation(method, folder, sizes)
    server = Server(dict(enumerate(sizes)), method.blueprint.shared())
    ledger = Ledger()
    driver = Driver(method, engine, ledger)
    for number in range(1, count + 1):
        server = replace(server, round=number)
        server = driver.drive(method.round(server, server.everyone), server)
    return server, engine, ledger


def weight(server: Server) -> torch.Tensor:
    return server.model["encoder.1.weight"]


def pooled_step(method: Method, lr: float) -> torch.Tensor:
    """One gradient step on all images together."""
    model = method.blueprint.copy_from()
    x = preset("none").plain(torch.from_numpy(pictures().pixels[:16]))
    model["encoder"](x).square().sum(1).mean().backward()
    start = model["encoder"][1].weight
    return start.detach() - lr * start.grad


def test_one_full_batch_step_equals_the_pooled_gradient(tmp_path: Path) -> None:
    """Weighted by examples, the average of the clients' steps is the step on all images."""
    server, _, _ = rounds(METHOD, tmp_path)
    assert torch.allclose(weight(server), pooled_step(METHOD, 0.1), atol=1e-6)


def test_uniform_weights_are_another_average(tmp_path: Path) -> None:
    uniform = replace(METHOD, server_optimiser=Average(weighting="uniform"))
    server, _, _ = rounds(uniform, tmp_path)
    assert not torch.allclose(weight(server), pooled_step(METHOD, 0.1), atol=1e-6)


def test_one_client_is_centralised_training(tmp_path: Path) -> None:
    server, _, _ = rounds(METHOD, tmp_path, sizes=(16,))
    assert torch.allclose(weight(server), pooled_step(METHOD, 0.1), atol=1e-7)


def test_server_sgd_of_rate_one_without_momentum_is_fedavg(tmp_path: Path) -> None:
    plain, _, _ = rounds(METHOD, tmp_path / "a", 3)
    sgd = replace(METHOD, server_optimiser=Sgd(lr=1.0, momentum=0.0))
    stepped, _, _ = rounds(sgd, tmp_path / "b", 3)
    assert torch.allclose(weight(plain), weight(stepped), atol=1e-6)


def test_server_momentum_matches_torch(tmp_path: Path) -> None:
    _against_torch(Sgd(lr=0.7, momentum=0.9), torch.optim.SGD, {"lr": 0.7, "momentum": 0.9})


def test_server_adam_matches_torch(tmp_path: Path) -> None:
    _against_torch(Adam(lr=0.02), torch.optim.Adam, {"lr": 0.02})


def _against_torch(ours, theirs, settings) -> None:  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(0)
    current = torch.randn(5, generator=draw)
    parameter = nn.Parameter(current.clone())
    optimiser, memory = theirs([parameter], **settings), {}
    for _ in range(4):
        average = torch.randn(5, generator=draw)
        parameter.grad = parameter.detach() - average
        optimiser.step()
        model, memory = ours.step({"w": current}, {"w": average}, {"w"}, memory, ours.lr)
        current = model["w"]
        assert torch.allclose(current, parameter, atol=1e-6)


def test_buffers_are_averaged_and_never_stepped() -> None:
    average = {"bn.running_mean": torch.ones(2)}
    for optimiser in (Sgd(lr=0.1), Adam()):
        model, _ = optimiser.step({"bn.running_mean": torch.zeros(2)}, average, set(), {}, 0.1)
        assert torch.equal(model["bn.running_mean"], torch.ones(2))


def test_a_proximal_pull_of_zero_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    plain, _, _ = rounds(METHOD, tmp_path / "a", 2)
    pulled, _, _ = rounds(replace(METHOD, terms=(Proximal(mu=0.0),)), tmp_path / "b", 2)
    assert torch.equal(weight(plain), weight(pulled))


def test_a_proximal_pull_adds_mu_times_the_gap(tmp_path: Path) -> None:
    """Two full-batch steps: in the second the pull's gradient is mu (w1 - w0)."""
    two = replace(METHOD, local=Local(epochs=2, batch=100, lr=0.1, momentum=0.0, clip=None))
    plain, _, _ = rounds(two, tmp_path / "a", sizes=(16,))
    pulled, _, _ = rounds(replace(two, terms=(Proximal(mu=0.5),)), tmp_path / "b", sizes=(16,))
    gap = pooled_step(METHOD, 0.1) - METHOD.blueprint["encoder"][1].weight.detach()
    assert torch.allclose(weight(plain) - weight(pulled), 0.1 * 0.5 * gap, atol=1e-6)


def test_every_part_goes_where_its_rule_says(tmp_path: Path) -> None:
    method = replace(METHOD, objective=WithRows())
    server, engine, ledger = rounds(method, tmp_path, 2)
    assert set(server.model) == {"encoder.1.weight", "table.weight"}
    start = method.blueprint["table"].weight
    assert not torch.equal(server.model["table.weight"][0], start[0])
    states = [engine.state_of(client) for client in (0, 1)]
    assert all(set(state["parts"]) == {"mine.weight", "mine.bias"} for state in states)
    assert not torch.equal(states[0]["parts"]["mine.weight"], states[1]["parts"]["mine.weight"])


def test_a_client_sends_only_its_own_row(tmp_path: Path) -> None:
    method = replace(METHOD, objective=WithRows())
    _, _, ledger = rounds(method, tmp_path)
    import json

    entry = json.loads(ledger.lines[0])
    encoder, row = 2 * 9 * 4, 2 * 4
    assert entry["up"]["model"] == encoder + row
    assert entry["down"]["model"] == encoder + 2 * row


def test_absent_clients_keep_their_row_and_their_state(tmp_path: Path) -> None:
    method = replace(METHOD, objective=WithRows())
    engine = federation(method, tmp_path)
    server = Server(dict(enumerate(SIZES)), method.blueprint.shared())
    driver = Driver(method, engine, Ledger())
    server = driver.drive(method.round(replace(server, round=1), [0, 1]), replace(server, round=1))
    row, kept = server.model["table.weight"][1].clone(), engine.state_of(1)
    server = driver.drive(method.round(replace(server, round=2), [0]), replace(server, round=2))
    assert torch.equal(server.model["table.weight"][1], row)
    assert torch.equal(engine.state_of(1)["parts"]["mine.bias"], kept["parts"]["mine.bias"])


def test_the_model_is_drawn_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = METHOD.blueprint.shared()
    torch.manual_seed(2)
    again = replace(METHOD).blueprint.shared()
    other = replace(METHOD, world=replace(METHOD.world, seed=5)).blueprint.shared()
    assert torch.equal(first["encoder.1.weight"], again["encoder.1.weight"])
    assert not torch.equal(first["encoder.1.weight"], other["encoder.1.weight"])


def test_two_owners_of_one_part_are_refused() -> None:
    @dataclass(frozen=True)
    class Twice(Pull):
        def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
            return {"encoder": Part(nn.Linear(1, 1))}

    with pytest.raises(ConfigError, match="'encoder'"):
        _ = replace(METHOD, objective=Twice()).blueprint


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(WireError, match="did you mean 'encoder.1.weight'"):
        METHOD.blueprint.copy_from({"encoder.1.weigth": torch.ones(1)})
    with pytest.raises(WireError, match="shape"):
        METHOD.blueprint.copy_from({"encoder.1.weight": torch.ones(1)})


def test_copies_of_a_model_share_nothing_but_what_is_tied() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.tied = nn.Linear(2, 2)
            self.tied.weight = self.first.weight
            self.norm = nn.BatchNorm1d(2)
            self.first.bias.requires_grad_(False)
            self.history = [1, {"a": torch.ones(2)}]
            self.nothing = None
            self.register_buffer("fleeting", torch.ones(2), persistent=False)

    parts = Parts({"encoder": Part(Odd())}, {})
    twin = parts.copy_from({"encoder.norm.running_mean": torch.full((2,), 7.0)})
    ours, theirs = parts["encoder"], twin["encoder"]
    assert theirs.tied.weight is theirs.first.weight
    assert theirs.first.weight is not ours.first.weight
    assert [p.requires_grad for p in twin.parameters()] == [
        p.requires_grad for p in parts.parameters()
    ]
    assert theirs.norm.running_mean[0] == 7 and ours.norm.running_mean[0] == 0
    theirs.history[1]["a"].zero_()
    theirs.fleeting.zero_()
    assert ours.history[1]["a"].sum() == 2 and ours.fleeting.sum() == 2
    assert set(twin.state_dict()) == set(parts.state_dict())
    twin.train(False)
    assert ours.training and twin.rules == parts.rules


def test_a_share_table_that_names_no_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="`share` names projecter"):
        Parts({"projector": Part(nn.Linear(1, 1))}, {"projecter": "local"})


def test_an_objective_can_prepare_its_parts_from_what_was_received(tmp_path: Path) -> None:
    """A fresh twin starts from the received encoder in every round (MoCo's key encoder)."""

    @dataclass(frozen=True)
    class Twin(Pull):
        def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
            return {"twin": Part(nn.Sequential(nn.Flatten(), nn.Linear(9, 2, bias=False)), "fresh")}

        def prepare(self, parts, *, first):  # type: ignore[no-untyped-def]
            parts["twin"].load_state_dict(parts["encoder"].state_dict())

    method = replace(METHOD, objective=Twin())
    engine = federation(method, tmp_path)
    sent = {key: value + 1 for key, value in method.blueprint.shared().items()}
    parts = method.pull(method.at_server(Server({}, {}, public=pictures()), "x"), sent)
    assert torch.equal(parts["twin"][1].weight, sent["encoder.1.weight"])
    assert engine.snapshot() == {}


def test_an_empty_merge_forgets_nothing() -> None:
    for optimiser in (Sgd(), Adam()):
        _, memory = optimiser.step({"w": torch.ones(1)}, {"w": torch.zeros(1)}, {"w"}, {}, 0.1)
        _, later = optimiser.step({"w": torch.ones(1)}, {}, {"w"}, memory, 0.1)
        assert later == memory


@dataclass(frozen=True)
class Counting(Term):
    """Counts what happens after steps, in a buffer of its own."""

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        counter = nn.Module()
        counter.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return {"counter": Part(counter)}

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        return torch.zeros(())

    def after_step(self, parts, context):  # type: ignore[no-untyped-def]
        parts["counter"].steps += 1


def test_terms_are_told_of_every_step(tmp_path: Path) -> None:
    method = replace(METHOD, terms=(Counting(),), local=Local(epochs=3, batch=2, lr=0.1))
    host = ClientRuntime(method, pictures(), [np.arange(8), np.arange(8, 16)], tmp_path)
    with LocalEngine(host, tmp_path, 0) as engine:
        server = Server({0: 8, 1: 8}, method.blueprint.shared(), round=1)
        server = Driver(method, engine, Ledger()).drive(method.round(server, [0, 1]), server)
    assert server.model["counter.steps"] == 12


def test_a_part_with_length_zero_is_copied_too() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(3))

        def __len__(self) -> int:
            return 0

    blueprint = Parts({"queue": Part(Queue())}, {})
    blueprint.copy_from()["queue"].rows += 1
    assert blueprint["queue"].rows.sum() == 0
