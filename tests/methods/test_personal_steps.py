"""Personalised methods against their algorithms written out: two numbers a client, absences too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.data.augment.views import plain
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.apfl import APFL
from harmonium.methods.ditto import Ditto
from harmonium.methods.fedprox import FedProx

PIXELS = np.array([0, 0, 255, 255, 204, 204], np.uint8).reshape(6, 1, 1, 1)
AIMS = plain(torch.from_numpy(PIXELS)).flatten().double().tolist()[::2]  # -1, 1 and about 0.6
KEY = "encoder.1.weight"
COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
RATE = 0.05


@dataclass(frozen=True)
class OneWeight(Encoder):
    """x -> w x, in double precision."""

    @property
    def features(self) -> int:
        return 1

    def build(self, channels: int, side: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False)).double()


@dataclass(frozen=True)
class Lopsided(Objective):
    """Projections w and 2 w of two views; their losses (z1 - x)^2 / 2 and (z2 + x)^2 differ."""

    views = (2, 2)

    def build(self, modules, dim, world):  # type: ignore[no-untyped-def]
        return {}

    def see(self, parts, batch):  # type: ignore[no-untyped-def]
        w = parts["encoder"](torch.ones_like(batch.plain).double())
        return Seen(batch, [w, w], [w, 2 * w])

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        x = seen.batch.plain.flatten(1).double()
        return (seen.z[0] - x).square().mean() / 2 + (seen.z[1] + x).square().mean()


def by_z(first: float, second: float, x: float) -> tuple[float, float]:
    """The derivatives of the loss by the two projections."""
    return first - x, 2 * (second + x)


def slope(w: float, x: float) -> float:
    """The derivative of the loss by the weight."""
    one, two = by_z(w, 2 * w, x)
    return one + 2 * two


def rounds(folder: Path, method: type[Method], **settings: Any) -> list[tuple[float, dict]]:
    """The server's weight and the clients' states after each round."""
    local = Local(epochs=3, batch=2, lr=RATE, momentum=0.0, schedule="constant", clip=None)
    world = World(clients=3, rounds=9, channels=1, side=1)
    settings = {"local": local, **settings}
    made = method(world=world, encoder=OneWeight(), objective=Lopsided(), **settings)
    shares = [np.arange(0, 2), np.arange(2, 4), np.arange(4, 6)]
    engine = LocalEngine(
        ClientRuntime(made, Images(PIXELS, np.full(6, -1)), shares, folder), folder, 0
    )
    server = Server(dict.fromkeys(range(3), 2), made.blueprint.shared())
    found = [(server.model[KEY].item(), {})]
    for number, cohort in enumerate(COHORTS, 1):
        server = replace(server, round=number)
        server = Driver(made, engine, Ledger()).drive(made.run_plan(server, cohort), server)
        found.append((server.model[KEY].item(), {c: engine.state_of(c) for c in range(3)}))
    return found


Turn = Callable[[int, float, float, float], tuple[float, float]]  # client, x, w, v -> sent, kept


def compare(found: list[tuple[float, dict]], turn: Turn) -> None:
    """Hold every round against a client's turn written out; absent clients stay as they are."""
    w = found[0][0]
    own = [w, w, w]
    for cohort, (server, states) in zip(COHORTS, found[1:], strict=True):
        sent = []
        for i in cohort:
            up, own[i] = turn(i, AIMS[i], w, own[i])
            sent.append(up)
        w = sum(sent) / len(sent)
        assert server == pytest.approx(w, abs=1e-12)
        for i, state in states.items():
            if state:
                assert state["mine"][KEY].item() == pytest.approx(own[i], abs=1e-12)
            else:
                assert own[i] == found[0][0]


def shared(w: float, x: float) -> float:
    for _ in range(3):
        w -= RATE * slope(w, x)
    return w


def test_fedprox_that_keeps_its_model(tmp_path: Path) -> None:
    found = rounds(tmp_path, FedProx, mu=0.7, init_from_global=False)

    def turn(_: int, x: float, w: float, v: float) -> tuple[float, float]:
        for _step in range(3):
            v -= RATE * (slope(v, x) + 0.7 * (v - w))
        return v, v

    compare(found, turn)


@pytest.mark.parametrize(("towards", "epochs"), [("received", None), ("updated", 2)])
def test_ditto(tmp_path: Path, towards: str, epochs: int | None) -> None:
    found = rounds(tmp_path, Ditto, mu=2.0, towards=towards, personal_epochs=epochs)

    def turn(_: int, x: float, w: float, v: float) -> tuple[float, float]:
        up = shared(w, x)
        near = w if towards == "received" else up
        for _step in range(epochs or 3):
            v -= RATE * (slope(v, x) + 2.0 * (v - near))
        return up, v

    compare(found, turn)


def mixed(mixing: str, a: float, w: float, v: float, x: float) -> tuple[float, float]:
    """Derivatives of the mixture's loss by v and by the share of v."""
    if mixing == "weights":
        at = slope(a * v + (1 - a) * w, x)
        return a * at, (v - w) * at
    mine = (2 * v, v) if mixing == "crossed" else (v, 2 * v)
    both = [(1 - a) * z + a * m for z, m in zip((w, 2 * w), mine, strict=True)]
    first, second = by_z(both[0], both[1], x)
    growth = (2, 1) if mixing == "crossed" else (1, 2)
    by_v = a * (growth[0] * first + growth[1] * second)
    return by_v, first * (mine[0] - w) + second * (mine[1] - 2 * w)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mixing", ["crossed", "straight", "weights"])
def test_apfl(tmp_path: Path, mixing: str, adaptive: bool) -> None:
    """Both steps start from what was before either; alpha moves once a round, from its start."""
    found = rounds(tmp_path, APFL, mixing=mixing, alpha=0.3, adaptive=adaptive)
    shares = [0.3, 0.3, 0.3]

    def turn(i: int, x: float, w: float, v: float) -> tuple[float, float]:
        for step in range(3):
            by_v, by_share = mixed(mixing, shares[i], w, v, x)
            w, v = w - RATE * slope(w, x), v - RATE * by_v
            if adaptive and not step:
                shares[i] = min(max(shares[i] - RATE * by_share, 0.0), 1.0)
        return w, v

    compare(found, turn)
    held = [state.get("alpha") for state in found[-1][1].values()]
    assert held == (pytest.approx(shares, abs=1e-12) if adaptive else [None] * 3)


def test_alpha_stays_within_0_and_1(tmp_path: Path) -> None:
    local = Local(epochs=1, batch=2, lr=50.0, momentum=0.0, schedule="constant", clip=1e-4)
    found = rounds(tmp_path, APFL, alpha=0.5, adaptive=True, local=local)
    assert {state["alpha"] for state in found[-1][1].values()} <= {0.0, 1.0}


def test_gradients_are_shortened_apart(tmp_path: Path) -> None:
    """Each model by its own length: with steps of length one only the signs are left."""
    local = Local(epochs=1, batch=2, lr=0.1, momentum=0.0, schedule="constant", clip=1e-3)
    found = rounds(tmp_path, APFL, mixing="straight", alpha=0.5, local=local)
    start = found[0][0]
    for state in found[1][1].values():
        assert abs(state["mine"][KEY].item() - start) == pytest.approx(1e-4, rel=1e-3)
