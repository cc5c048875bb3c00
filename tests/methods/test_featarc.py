"""FeatARC: the alignment by hand, its invariants, and clusters."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.driver import Driver, Reply
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.federation.server_optimisers import Adam
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.context import Context
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.featarc import AlignmentContext, FeatARC, FeatARCClustered, alignment
from harmonium.methods.fedavg import FedAvg
from harmonium.privacy.mechanisms import Noise
from harmonium.testing import check_method

COMMON: dict[str, Any] = {
    "world": World(clients=4, rounds=3, channels=1, side=8, classes=2),
    "encoder": CnnSmall(width=4, out=8),
    "objective": SimCLR(out=6),
    "local": Local(epochs=1, batch=4, lr=0.05, schedule="constant"),
}
PIXELS = np.random.default_rng(1).integers(0, 256, (32, 8, 8, 1), dtype=np.uint8)
SHARES = np.split(np.arange(32), [8, 18, 24])  # 8, 10, 6 and 8 images


def client_of(made: Method) -> Client:
    rng = torch.Generator().manual_seed(0)
    examples = Examples(Images(PIXELS, np.full(32, -1)), SHARES[0])
    return Client(0, 1, 1, examples, made.views, rng, Noise("simulated", rng))


@dataclass
class Play:
    """Some rounds of a method; `lost` are clients whose answers to `train` never arrive."""

    method: Method
    folder: Path
    lost: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        host = ClientRuntime(self.method, Images(PIXELS, np.full(32, -1)), SHARES, self.folder)
        self.engine = LocalEngine(host, self.folder, 0)
        self.asked: list[tuple[str, list[int]]] = []
        examples = {client: len(share) for client, share in enumerate(SHARES)}
        self.server = Server(examples, self.method.blueprint.shared())

    def deliver(self, ask: Any, turn: Any) -> Any:
        self.asked.append((ask.step, list(ask.to)))
        for reply in self.engine.deliver(ask, turn):
            gone = ask.step == "train" and reply.client in self.lost
            yield Reply(reply.client, None, "lost") if gone else reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"], name)

    def go(self, cohorts: list[list[int]]) -> Server:
        for cohort in cohorts:
            server = replace(self.server, round=self.server.round + 1)
            plan = self.method.run_plan(server, cohort)
            self.server = Driver(self.method, self, Ledger()).drive(plan, server)
        return self.server


COHORTS = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]


def same(one: Server, two: Server) -> bool:
    return all(torch.equal(value, two.model[key]) for key, value in one.model.items())


# ---- alignment -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["projector", "encoder"])
def test_the_loss_is_the_equation(target: Any) -> None:
    objective = SimCLR(out=8)
    made = FeatARC(**COMMON | {"objective": objective}, strength=0.3, target=target)
    client = client_of(made)
    parts = made.blueprint.copy_from()
    phi = made.features(parts, client)
    index = torch.tensor([5, 0, 3, 2])
    batch = Batch(index, client.examples, client.views, torch.Generator().manual_seed(4))
    got = made.loss(parts, AlignmentContext(me=0, targets=phi))(batch)
    plain = made.views.plain(client.examples.pixels(index))
    h = parts["encoder"](plain)
    wanted_phi = functional.normalize(parts["projector"](h) if target == "projector" else h)
    first, second = (parts["projector"](parts["encoder"](view)) for view in batch.views)
    cosine = torch.cosine_similarity
    meet = (cosine(first, wanted_phi).mean() + cosine(second, wanted_phi).mean()) / 2
    base = objective.score(parts, objective.see(parts, batch), Context(me=0))
    torch.testing.assert_close(got, base - 0.3 * meet)


def test_at_the_start_and_without_augmentation_the_alignment_is_complete() -> None:
    made = FeatARC(**COMMON, views=preset("none"))
    client = client_of(made)
    parts = made.blueprint.copy_from()
    phi = made.features(parts, client)
    batch = Batch(torch.arange(8), client.examples, client.views, torch.Generator())
    seen = made.see(parts, batch)
    aligned, plain = AlignmentContext(me=0, targets=phi), AlignmentContext(me=0, targets=None)
    added = made.score(parts, seen, aligned) - made.score(parts, seen, plain)
    assert added.item() == pytest.approx(-0.5, abs=1e-6)


def test_the_alignment_lies_between_minus_one_and_one() -> None:
    z, targets = torch.randn(2, 20, 5), functional.normalize(torch.randn(20, 5))
    assert -1 <= alignment(list(z), targets) <= 1
    assert alignment([targets * 3], targets).item() == pytest.approx(-1)
    assert alignment([-targets], targets).item() == pytest.approx(1)
    assert alignment([targets, -targets], targets).item() == pytest.approx(0)


def test_targets_are_the_received_models_and_stay_for_the_round() -> None:
    made = FeatARC(**COMMON | {"local": Local(epochs=3, batch=4, lr=0.5)})
    client, noted = client_of(made), []

    @dataclass(frozen=True)
    class Noting(FeatARC):
        def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
            noted.append(context.targets)
            return super().score(parts, seen, context)

    noting = Noting(**{key: getattr(made, key) for key in COMMON})
    noting.train(client, SimpleNamespace(model=made.blueprint.shared()))
    start = made.features(made.blueprint.copy_from(), client)
    assert len(noted) == 6
    assert all(torch.equal(phi, start) for phi in noted)
    assert not start.requires_grad


def test_without_strength_it_is_fedavg(tmp_path: Path) -> None:
    aligned = Play(FeatARC(**COMMON, strength=0.0), tmp_path / "a").go(COHORTS)
    alike = {**COMMON, "local": replace(COMMON["local"], joint_views=False)}  # as its code has it
    assert same(aligned, Play(FedAvg(**alike), tmp_path / "b").go(COHORTS))
    some = Play(FeatARC(**COMMON), tmp_path / "c").go(COHORTS)
    assert not same(some, aligned)


def test_what_cannot_be_aligned_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective=supervised makes none; .* objective=simclr"):
        _ = FeatARC(**COMMON | {"objective": Supervised()}).blueprint
    with pytest.raises(ConfigError, match="size 8 with projections of size 6: set objective.out=8"):
        _ = FeatARC(**COMMON, target="encoder").blueprint
    with pytest.raises(ConfigError, match=r"method.strength is -1"):
        FeatARC(**COMMON, strength=-1.0)
    with pytest.raises(ConfigError, match=r"method.clusters is 0"):
        FeatARCClustered(**COMMON, clusters=0)
    with pytest.raises(ConfigError, match="recalibrate.*not 2"):
        FeatARCClustered(**COMMON, batch_norm="recalibrate")


# ---- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", [None, Adam()])
def test_one_cluster_is_alignment_alone(tmp_path: Path, optimiser: Any) -> None:
    common = COMMON | ({"server_optimiser": optimiser} if optimiser else {})
    one = Play(FeatARCClustered(**common, clusters=1), tmp_path / "a")
    plain = Play(FeatARC(**common), tmp_path / "b")
    assert same(one.go(COHORTS), plain.go(COHORTS))
    assert one.asked == plain.asked  # nothing to choose, nothing asked


def test_clients_first_spread_by_number_and_clusters_are_averaged_apart(tmp_path: Path) -> None:
    play = Play(FeatARCClustered(**COMMON), tmp_path / "a")
    server = play.go([[0, 1, 2, 3]])
    steps = [("choose", [0, 1, 2, 3]), ("train", [0, 2]), ("train", [1, 3])]
    assert play.asked == steps
    assert server.memory["chosen"] == {0: 0, 2: 0, 1: 1, 3: 1}
    even, odd = (held["model"] for held in server.memory["clusters"])
    assert all(torch.equal(server.model[key], odd[key]) for key in odd)  # 18 images, not 14
    mine = [play.engine.state_of(client)["mine"] for client in range(4)]
    for key in even:
        if even[key].is_floating_point():
            mean = (8 * mine[0][key].double() + 6 * mine[2][key].double()) / 14
            torch.testing.assert_close(even[key].double(), mean, atol=1e-6, rtol=1e-5)
            mean = (10 * mine[1][key].double() + 8 * mine[3][key].double()) / 18
            torch.testing.assert_close(odd[key].double(), mean, atol=1e-6, rtol=1e-5)


def test_a_client_takes_the_model_that_agrees_most_with_its_own() -> None:
    made = FeatARCClustered(**COMMON, clusters=3)
    client = client_of(made)
    torch.manual_seed(3)
    models = [
        {key: v + 0.3 * torch.randn_like(v) if v.is_floating_point() else v for key, v in m.items()}
        for m in [made.blueprint.shared()] * 3
    ]
    sent = {f"{n}/{key}": value for n, model in enumerate(models) for key, value in model.items()}
    ask = SimpleNamespace(clusters=sent)
    assert made.choose(replace(client, id=4), ask) == {"cluster": 1}  # 4 modulo 3
    for number, model in enumerate(models):
        client.state = {"mine": model}
        assert made.choose(client, ask) == {"cluster": number}
    client.state = {"mine": made.blueprint.shared()}
    phis = [
        made.features(made.blueprint.copy_from(m), client) for m in (*models, client.state["mine"])
    ]
    agree = [float((phi * phis[3]).sum(1).mean()) for phi in phis[:3]]
    assert made.choose(client, ask) == {"cluster": agree.index(max(agree))}


def test_each_clients_encoder_is_its_clusters(tmp_path: Path) -> None:
    made = FeatARCClustered(**COMMON)
    play = Play(made, tmp_path)
    server = play.go([[0, 1, 2, 3]])
    assert made.has_own_encoders
    for client in range(4):
        own = made.represent(server, play.engine.state_of(client)).state_dict()
        held = server.memory["clusters"][client % 2]["model"]
        assert all(torch.equal(value, held[f"encoder.{key}"]) for key, value in own.items())
    common = made.represent(server).state_dict()
    assert all(torch.equal(value, server.model[f"encoder.{key}"]) for key, value in common.items())


def test_a_silent_cluster_keeps_its_model(tmp_path: Path) -> None:
    play = Play(FeatARCClustered(**COMMON), tmp_path, lost=(1, 3))
    server = play.go([[0, 1, 2, 3]])
    _, odd = server.memory["clusters"]
    start = play.method.blueprint.shared()
    assert all(torch.equal(odd["model"][key], value) for key, value in start.items())
    assert set(server.memory["chosen"]) == {0, 2}
    play.lost = (0, 1, 2, 3)
    with pytest.raises(Exception, match="any cluster"):
        play.go([[0, 1, 2, 3]])


def test_local_parts_and_other_objectives_work() -> None:
    check_method("featarc-clustered", objective={"name": "byol", "target": "local"})
    assert FeatARC(**COMMON | {"objective": BYOL(), "target": "encoder"}).blueprint
