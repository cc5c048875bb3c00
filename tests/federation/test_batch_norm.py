"""What becomes of BatchNorm: who sends, keeps or measures its statistics."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harmonium.core.errors import NotEnoughReplies
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.batch_norm import measure, moments, pooled
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.server_optimisers import Adam, Average
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Part, Parts
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.alone import Alone
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import load_encoder
from harmonium.runs.loop import initial_encoder
from harmonium.runs.start import run
from harmonium.testing import TINY, check_method

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")


@dataclass(frozen=True)
class Normed(Encoder):
    """One BatchNorm right on the pixels, so that its statistics are those of the images."""

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


def go(
    policy: Any, folder: Path, rounds: int = 2, **changes: Any
) -> tuple[Method, Server, LocalEngine, Ledger]:
    method = Method(
        **{"objective": SimCLR(norm="none", out=4), **changes},
        world=World(clients=2, rounds=rounds, channels=1, side=2),
        encoder=Normed(),
        local=Local(epochs=1, batch=8),
        batch_norm=policy,
    )
    host = ClientRuntime(method, Images(PIXELS, np.full(32, -1)), SHARES, folder)
    engine, ledger = LocalEngine(host, folder, 0), Ledger()
    server = Server({0: 8, 1: 24}, method.blueprint.shared())
    for number in range(1, rounds + 1):
        server = Server(server.examples, server.model, number, server.memory, server.moments)
        driver = Driver(method, engine, ledger)
        server = driver.drive(method.run_plan(server, [0, 1]), server)
    server = driver.drive(method.before_evaluation(server, [0, 1]), server)
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


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_recalibrated_statistics_are_those_of_all_images(tmp_path: Path, weighting: Any) -> None:
    """However clients weigh in the model's average, and over however many batches."""
    settings = {"server_optimiser": Average(weighting=weighting)}
    method, server, engine, ledger = go("recalibrate", tmp_path, **settings)
    assert not {MEAN, VAR} & set(server.model) and engine.snapshot() == {}
    found = method.represent(server)[1]  # type: ignore[index]
    pictures = method.views.plain(torch.from_numpy(PIXELS)).flatten(1)
    torch.testing.assert_close(found.running_mean, pictures.mean(0))
    # Each client's variance is the unbiased one, which for 8 images is an eighth more.
    torch.testing.assert_close(found.running_var, pictures.var(0), rtol=0.03, atol=0.0)
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
    network[0].running_mean.fill_(7.0)
    batches = [5 + batches[0], batches[1][:2]]  # batches of other means and sizes
    assert measure(network, batches) == 8
    together = torch.cat(batches)
    torch.testing.assert_close(network[0].running_mean, together.mean(0))
    torch.testing.assert_close(network[0].running_var, together.var(0))
    assert measure(network, []) == 0
    torch.testing.assert_close(network[0].running_mean, together.mean(0))
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


@pytest.mark.parametrize("policy", ["average", "local", "fedbn", "recalibrate"])
def test_the_policy_is_about_what_is_shared(policy: Any) -> None:
    """An encoder that stays at the client keeps its statistics whatever the policy."""
    parts = Alone(encoder=Normed(), batch_norm=policy).blueprint
    assert {MEAN, VAR, SCALE} <= set(parts.kept()) and not parts.shared()


def test_statistics_belong_to_the_model_they_were_measured_on(tmp_path: Path) -> None:
    method, server, engine, ledger = go("recalibrate", tmp_path)
    assert "statistics" in server.memory
    later = Driver(method, engine, Ledger()).drive(method.run_plan(server, [0, 1]), server)
    assert "statistics" not in later.memory
    with pytest.raises(NotEnoughReplies, match="not measured"):
        method.represent(later)


def test_a_silent_cohort_is_replaced_by_whoever_answers(tmp_path: Path) -> None:
    method, server, engine, ledger = go("recalibrate", tmp_path)
    server = replace(server, memory={})

    class Deaf:
        def deliver(self, ask: Any, turn: Any) -> Any:
            return iter(()) if turn.ask < 3 else engine.deliver(ask, turn)

        def accept(self, reply: Any) -> None:
            engine.accept(reply)

    driver = Driver(method, Deaf(), Ledger())  # type: ignore[arg-type]
    settled = driver.drive(method.before_evaluation(server, [0]), server)
    assert driver.ledger.answered == {0, 1} and "statistics" in settled.memory


def test_a_client_that_can_measure_nothing_declines(tmp_path: Path) -> None:
    method, server, _, _ = go("recalibrate", tmp_path)
    host = ClientRuntime(
        method, Images(PIXELS, np.full(32, -1)), [np.arange(1), np.arange(8, 32)], tmp_path
    )
    driver = Driver(method, LocalEngine(host, tmp_path, 0), Ledger())
    driver.drive(
        method.before_evaluation(replace(server, memory={}), [0, 1]), replace(server, memory={})
    )
    assert driver.ledger.answered == {1} and "too few to measure" in driver.ledger.last_reason


def test_a_run_with_lost_answers_hands_over_measured_statistics(tmp_path: Path) -> None:
    encoder = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
    settings = {
        **TINY,
        "encoder": encoder,
        "batch_norm": "recalibrate",
        "clients": 2,
        "rounds": 4,
        "seed": 7,
        "participation": {"dropout": 0.8},
        "evaluate": {"k": 5, "health": 32, "labels_per_class": [], "every": 4},
        "engine": {"workers": 0},
    }
    found = run("fedavg", out=tmp_path / "run", **settings)
    assert any(row.get("failed") for row in found.rounds)
    assert all(row["loss"] is None for row in found.rounds if row.get("failed"))
    assert all(row["answered"] + row["missing"] <= 2 for row in found.rounds)
    network = load_encoder(tmp_path / "run")
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and all(norm.running_mean.abs().sum() > 0 for norm in norms)  # type: ignore[union-attr]


@pytest.mark.parametrize("owner", ["mean", "local"])
def test_a_server_optimiser_does_not_steer_a_twin(owner: Any, tmp_path: Path) -> None:
    """Adam moves every weight by its rate; the averaged twin moves as its clients moved it."""
    byol = BYOL(target=owner, norm="none")
    _, plain, _, _ = go("average", tmp_path / "b", 1, objective=byol)
    _, adam, _, _ = go("average", tmp_path / "c", 1, objective=byol, server_optimiser=Adam(lr=0.1))
    keys = [key for key in plain.model if key.startswith("target.")]
    assert bool(keys) == (owner == "mean")
    assert all(torch.equal(plain.model[key], adam.model[key]) for key in keys)
    assert not torch.equal(plain.model["projector.0.weight"], adam.model["projector.0.weight"])


def test_a_variance_is_never_negative() -> None:
    """Moments of robust aggregations need not belong together."""
    found = pooled({"n.running_mean": torch.ones(1), "n.running_var": torch.full((1,), 0.5)})
    assert found["n.running_var"].item() == 0.0


def test_the_untrained_encoder_is_judged_with_statistics_of_its_images() -> None:
    recipe = Recipe.from_tree({**TINY, "encoder": {"name": "cnn-small", "norm": "batch"}})
    dataset = recipe.data.load()
    encoder = initial_encoder(recipe.build_method(dataset), dataset)
    norms = [module for module in encoder.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.running_mean.abs().sum() > 0 for norm in norms)  # type: ignore[union-attr]


def test_rows_of_single_clients_have_no_control_variate() -> None:
    made = {"encoder": Part(nn.Linear(2, 2)), "table": Part(nn.Linear(2, 3, bias=False), "row")}
    parts = Parts(made, {})
    assert "table.weight" in parts.layouts()["model"]
    assert set(parts.layouts()["parameters"]) == {"encoder.weight", "encoder.bias"}
