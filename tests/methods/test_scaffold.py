"""SCAFFOLD against its algorithm written out, and its invariant."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import plain
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Server
from harmonium.learning.context import Context
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.scaffold import Corrected, Scaffold


@dataclass(frozen=True)
class OneWeight(Encoder):
    """x -> w x, in double precision."""

    @property
    def features(self) -> int:
        return 1

    def build(self, channels: int, side: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False)).double()


@dataclass(frozen=True)
class Aim(Objective):
    """The mean of (w - x)^2 / 2: its gradient is w minus the mean of the images."""

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {}

    def see(self, parts, batch):  # type: ignore[no-untyped-def]
        return Seen(batch, [parts["encoder"](torch.ones_like(batch.plain).double())], [])

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        x = seen.batch.plain.flatten(1).double()
        return (seen.h[0] - x).square().mean() / 2


PIXELS = np.array([0, 0, 255, 255, 204, 204], np.uint8).reshape(6, 1, 1, 1)
AIMS = plain(torch.from_numpy(PIXELS)).flatten().double().tolist()[::2]  # -1, 1 and about 0.6
KEY = "encoder.1.weight"


def rounds(
    folder: Path, cohorts: list[list[int]], **changes: Any
) -> tuple[list[Server], list[dict[int, float]]]:
    local = Local(epochs=3, batch=2, lr=0.1, momentum=0.0, schedule="constant", clip=None)
    settings: dict[str, Any] = {"local": local, **changes}
    world = World(clients=3, rounds=9, channels=1, side=1)
    method = Scaffold(world=world, encoder=OneWeight(), objective=Aim(), **settings)
    shares = [np.arange(0, 2), np.arange(2, 4), np.arange(4, 6)]
    host = ClientRuntime(method, Images(PIXELS, np.full(6, -1)), shares, folder)
    engine = LocalEngine(host, folder, 0)
    servers = [Server(dict.fromkeys(range(3), 2), method.blueprint.shared())]
    kept = []
    for number, cohort in enumerate(cohorts, 1):
        server = replace(servers[-1], round=number)
        plan = method.run_plan(server, cohort)
        servers.append(Driver(method, engine, Ledger()).drive(plan, server))
        states = {c: engine.state_of(c).get("control", {KEY: torch.zeros(1)}) for c in range(3)}
        kept.append({client: state[KEY].item() for client, state in states.items()})
    return servers, kept


COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_it_is_the_algorithm(tmp_path: Path, momentum: float) -> None:
    """Algorithm 1, option II, on three parabolas; with momentum, a step counts as it reaches."""
    local = Local(epochs=3, batch=2, lr=0.1, momentum=momentum, schedule="constant", clip=None)
    servers, kept = rounds(tmp_path, COHORTS, local=local)
    x, c, own = servers[0].model[KEY].item(), 0.0, [0.0, 0.0, 0.0]
    for cohort, server, states in zip(COHORTS, servers[1:], kept, strict=True):
        ends, changes = [], []
        for i in cohort:
            y, velocity, reach = x, 0.0, 0.0
            for step in range(1, 4):
                velocity = momentum * velocity + (y - AIMS[i]) - own[i] + c
                y -= 0.1 * velocity
                reach += sum(momentum**j for j in range(step))
            new = own[i] - c + (x - y) / (reach * 0.1)
            ends.append(y)
            changes.append(new - own[i])
            own[i] = new
        x = sum(ends) / len(ends)
        c += sum(changes) / 3
        assert server.model[KEY].item() == pytest.approx(x, abs=1e-12)
        assert server.memory["control"][KEY].item() == pytest.approx(c, abs=1e-12)
        assert list(states.values()) == pytest.approx(own, abs=1e-12)


def test_the_servers_variate_is_the_mean_of_all_clients(tmp_path: Path) -> None:
    servers, kept = rounds(tmp_path, COHORTS)
    for server, states in zip(servers[1:], kept, strict=True):
        mean = sum(states.values()) / 3
        assert server.memory["control"][KEY].item() == pytest.approx(mean, abs=1e-15)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_variates_become_the_gradients_whatever_the_strength(
    tmp_path: Path, strength: float
) -> None:
    """At the end of a long run each c_i is its client's gradient at the common point."""
    servers, kept = rounds(tmp_path, [[0, 1, 2]] * 9, strength=strength)
    x = servers[-2].model[KEY].item()
    for client, control in kept[-1].items():
        assert control == pytest.approx(x - AIMS[client], rel=0.2, abs=0.1)


def test_a_reported_loss_is_the_objectives(tmp_path: Path) -> None:
    """The correction changes the gradient and not the value."""
    method = Scaffold(world=World(clients=3, channels=1, side=1), encoder=OneWeight())
    parts = method.blueprint.copy_from()
    gap = {KEY: torch.full((1, 1), 5.0, dtype=torch.float64)}
    method = replace(method, objective=Aim())
    batch = Seen(_Batch(), [parts["encoder"](torch.ones(2, 1, 1, 1).double())], [])  # type: ignore[arg-type]
    bare = method.objective.score(parts, batch, Context(me=0))
    corrected = method.score(parts, batch, Corrected(me=0, gap=gap))
    assert corrected.item() == bare.item()
    weight = parts["encoder"][1].weight  # type: ignore[index]
    first, second = (
        torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (bare, corrected)
    )
    assert (second - first).item() == pytest.approx(5.0)


class _Batch:
    plain = torch.zeros(2, 1, 1, 1)


def test_a_learning_rate_of_zero_moves_nothing(tmp_path: Path) -> None:
    local = Local(epochs=1, batch=2, lr=0.0, momentum=0.0, clip=None)
    servers, kept = rounds(tmp_path, [[0, 1]], local=local)
    assert torch.equal(servers[1].model[KEY], servers[0].model[KEY])
    assert set(kept[0].values()) == {0.0}


def test_adam_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local.optimiser is adam.*sgd"):
        Scaffold(local=Local(optimiser="adam"))
    with pytest.raises(ConfigError, match=r"method.strength is 2"):
        Scaffold(strength=2.0)
