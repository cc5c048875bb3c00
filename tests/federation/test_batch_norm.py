"""What becomes of BatchNorm: who sends, keeps or measures its statistics."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.data.images import Images
from harmonium.encoders import Encoder
from harmonium.engines.host import Host
from harmonium.engines.local import LocalEngine
from harmonium.federation.batch_norm import measure, moments, pooled
from harmonium.federation.client import Local
from harmonium.federation.drive import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.world import World
from harmonium.methods.alone import Alone
from harmonium.objectives.simclr import SimCLR
from harmonium.runs import run
from harmonium.testing import TINY, check_method


@dataclass(frozen=True)
class Normed(Encoder):
    """One BatchNorm right on the pixels, so that its statistics are those of the pictures."""

    @property
    def features(self) -> int:
        return 4

    def build(self, channels: int, side: int) -> nn.Module:
        size = channels * side * side
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.Linear(size, 4))


def bright(count: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(low).integers(low, high, (count, 2, 2, 1)).astype(np.uint8)


PIXELS = np.concatenate([bright(8, 0, 100), bright(24, 150, 250)])  # two clients, 1 to 3
SHARES = [np.arange(8), np.arange(8, 32)]


def go(policy: Any, folder: Path, rounds: int = 2) -> tuple[Method, Server, LocalEngine, Ledger]:
    method = Method(
        world=World(clients=2, rounds=rounds, channels=1, side=2),
        encoder=Normed(),
        objective=SimCLR(norm="none", out=4),
        local=Local(epochs=1, batch=8),
        batch_norm=policy,
    )
    host = Host(method, Images(PIXELS, np.full(32, -1)), SHARES, folder)
    engine, ledger = LocalEngine(host, folder, 0), Ledger()
    server = Server({0: 8, 1: 24}, method.blueprint.shared())
    for number in range(1, rounds + 1):
        server = Server(server.examples, server.model, number, server.memory, server.moments)
        plan = method.play(server, [0, 1], judged=number == rounds)
        server = Driver(method, engine, ledger).drive(plan, server)
    return method, server, engine, ledger


MEAN, VAR, SCALE = (f"encoder.1.{name}" for name in ("running_mean", "running_var", "weight"))


def sent(ledger: Ledger, step: str = "train") -> int:
    lines = [json.loads(line) for line in ledger.lines]
    return max(line["up"]["model"] for line in lines if line["step"] == step)


def test_averaged_statistics_travel_with_the_model(tmp_path: Path) -> None:
    method, server, engine, ledger = go("average", tmp_path)
    assert {MEAN, VAR, SCALE, "encoder.1.num_batches_tracked"} <= set(server.model)
    assert server.model["encoder.1.num_batches_tracked"] == 2 * 3  # the largest, over two rounds
    assert engine.snapshot() == {} and not method.has_own_encoders


def test_local_statistics_stay_and_differ(tmp_path: Path) -> None:
    method, server, engine, ledger = go("local", tmp_path)
    assert not {MEAN, VAR} & set(server.model) and SCALE in server.model
    dark, light = (engine.state_of(client)["parts"] for client in (0, 1))
    assert set(dark) == {MEAN, VAR, "encoder.1.num_batches_tracked"}
    assert (light[MEAN] > dark[MEAN]).all()
    assert method.has_own_encoders
    mine = method.represent(server, {"parts": light})
    assert torch.equal(mine[1].running_mean, light[MEAN])  # type: ignore[index]
    assert torch.equal(mine[1].weight, server.model[SCALE])  # type: ignore[index]


def test_fedbn_keeps_whole_layers(tmp_path: Path) -> None:
    method, server, engine, _ = go("fedbn", tmp_path)
    assert not any(key.startswith("encoder.1.") for key in server.model)
    dark, light = (engine.state_of(client)["parts"] for client in (0, 1))
    assert not torch.equal(dark[SCALE], light[SCALE]) and "encoder.2.weight" not in dark


def test_recalibrated_statistics_are_those_of_all_pictures(tmp_path: Path) -> None:
    """Clients of one batch each: the pooled statistics are those of all pictures together."""
    method, server, engine, ledger = go("recalibrate", tmp_path)
    assert not {MEAN, VAR} & set(server.model) and engine.snapshot() == {}
    found = method.represent(server)[1]  # type: ignore[index]
    pictures = method.views.plain(torch.from_numpy(PIXELS)).flatten(1)
    torch.testing.assert_close(found.running_mean, pictures.mean(0))
    # Within batches of 8 the means vary a little, and the variances are unbiased ones.
    torch.testing.assert_close(found.running_var, pictures.var(0), rtol=0.15, atol=0.02)
    steps = [json.loads(line)["step"] for line in ledger.lines]
    assert steps == ["train"] * 4 + ["calibrate"] * 2  # once, before it is judged
    assert "calibrate" not in go("average", tmp_path / "other")[0].exchanges()


def test_statistics_cost_no_bytes_unless_they_are_averaged(tmp_path: Path) -> None:
    costs = {p: sent(go(p, tmp_path / p)[3]) for p in ("average", "local", "fedbn", "recalibrate")}
    statistics, layer = 4 * (4 + 4) + 8, 4 * (4 + 4)
    assert costs["local"] == costs["recalibrate"] == costs["average"] - statistics
    assert costs["fedbn"] == costs["local"] - layer


def test_measuring_changes_nothing_but_the_statistics() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3, momentum=0.1), nn.Dropout(0.5)).eval()
    batches = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    measure(network, list(batches))
    torch.testing.assert_close(network[0].running_mean, batches.mean((0, 1)))
    torch.testing.assert_close(network[0].running_var, batches.var(1).mean(0))
    assert not network.training and not network[0].training and network[0].momentum == 0.1


def test_pooling_is_exact_for_clients_of_equal_weight() -> None:
    a, b = torch.randn(2, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def of(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return moments({"n.running_mean": x.mean(0), "n.running_var": x.var(0, correction=0)})

    mean = {key: (value + of(b)[key]) / 2 for key, value in of(a).items()}
    both = torch.cat([a, b])
    torch.testing.assert_close(pooled(mean)["n.running_mean"], both.mean(0))
    torch.testing.assert_close(pooled(mean)["n.running_var"], both.var(0, correction=0))


def test_a_method_without_a_shared_encoder_measures_nothing() -> None:
    assert not Alone(encoder=Normed(), batch_norm="recalibrate").recalibrates


@pytest.mark.parametrize("policy", ["average", "local", "fedbn", "recalibrate"])
def test_every_policy_passes_the_contract(policy: str) -> None:
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    check_method("fedavg", encoder=encoder, batch_norm=policy)


@pytest.mark.parametrize("policy", ["local", "recalibrate"])
def test_a_run_judges_and_hands_over_by_the_policy(policy: str, tmp_path: Path) -> None:
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    evaluate = {"k": 5, "health": 32, "labels_per_class": []}
    settings = {**TINY, "encoder": encoder, "batch_norm": policy, "evaluate": evaluate}
    found = run("fedavg", out=tmp_path / "run", **{**settings, "engine": {"workers": 0}})
    assert 0 <= found.figures["knn"] <= 1
    assert (tmp_path / "run" / "encoder.safetensors").exists() == (policy == "recalibrate")
