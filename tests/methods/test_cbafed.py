"""CBAFed: its formulas by hand, its invariants, what is sent and what it weighs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method, Server
from harmonium.learning.client import Client, Decline, Examples
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.terms import Term
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.cbafed import CBAFed, accept, shares, thresholds
from harmonium.methods.fedavg import FedAvg
from harmonium.methods.pseudo_labels import class_probabilities
from harmonium.privacy.mechanisms import Noise
from harmonium.testing import check_method

LOCAL = Local(epochs=2, batch=8, lr=0.05, momentum=0.5, schedule="constant", clip=None)
COMMON: dict[str, Any] = {
    "world": World(clients=3, channels=1, side=8, classes=3),
    "encoder": CnnSmall(width=4, out=8),
    "objective": Supervised(),
    "local": LOCAL,
    "views": preset("fedsimclr"),
}
LABELS = [0, -1, 2, -1, -1, 1, -1, -1, 0, -1, 2, -1]
NOTHING, ALL = torch.full((3,), 2.0), torch.zeros(3)  # thresholds that accept so much


def client_of(made: Method, labels: list[int]) -> Client:
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 8, 8, 1), dtype=np.uint8)
    rng = torch.Generator().manual_seed(0)
    images = Images(pixels, np.array(labels))
    examples = Examples(images, np.arange(len(labels)), uses_labels=made.reads_labels)
    return Client(0, 1, 1, examples, made.views, rng, Noise("simulated", rng))


def trained(made: Method, labels: list[int], limits: torch.Tensor, p: float = 0.1) -> Any:
    down = {"thresholds": limits, "shares": torch.full((3,), p)}
    got = SimpleNamespace(model=made.blueprint.shared(), **down)
    return made.train(client_of(made, labels), got)


# ---- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_a_uniform_histogram_gives_all_classes_the_base_and_a_tenth(classes: int) -> None:
    p = shares(torch.full((classes,), 7.0))
    torch.testing.assert_close(thresholds(p, 0.84, 0.95), torch.full((classes,), 0.94))


def test_thresholds_follow_the_formula_and_never_exceed_the_upper() -> None:
    counts = np.array([500.0, 20.0, 3.0, 0.0, 77.0])
    p = counts / counts.sum() * 5 / 10
    want = np.minimum(p + 0.84 - p.std(ddof=1), 0.95)
    got = thresholds(shares(torch.from_numpy(counts)), 0.84, 0.95)
    assert got.tolist() == pytest.approx(want.tolist())
    assert got[0] == 0.95
    assert got.argmin() == 3  # the rarer, the lower
    assert thresholds(torch.tensor([0.1]), 0.84, 0.95).tolist() == pytest.approx([0.94])


def test_second_choices_count_only_if_rare_and_only_below_the_threshold() -> None:
    q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.5, 0.1, 0.4], [0.1, 0.6, 0.3]])
    limits = torch.tensor([0.6, 0.9, 0.9])
    none, second = torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])
    assert accept(q, limits, none).tolist() == [0, -1, -1, -1]
    assert accept(q, limits, second).tolist() == [0, 1, -1, -1]
    assert accept(q, limits, ~second).tolist() == [0, -1, 2, 2]
    at = torch.tensor([[0.5, 0.25, 0.25]])
    assert accept(at, torch.full((3,), 0.5), none).tolist() == [-1]  # above, not at
    assert accept(torch.ones(1, 1), torch.ones(1), torch.ones(1, dtype=torch.bool)).tolist() == [-1]


# ---- clients -------------------------------------------------------------------------------------


def test_without_accepted_images_it_is_the_supervised_step() -> None:
    made = CBAFed(**COMMON)
    up = trained(made, LABELS, NOTHING)
    fast = FedAvg(**COMMON | {"local": replace(LOCAL, lr=0.1)})  # the sum of two views, not a mean
    want = trained(fast, LABELS, NOTHING)
    assert all(torch.equal(up["model"][key], value) for key, value in want["model"].items())
    assert up["used"] == 5
    assert up["accepted"].tolist() == [0, 0, 0]


def test_accepted_images_train_like_labelled_ones_and_are_counted() -> None:
    made = CBAFed(**COMMON)
    up = trained(made, LABELS, ALL)
    start = made.blueprint.copy_from()
    guess = class_probabilities(start, client_of(made, LABELS), 3).argmax(1)
    filled = [int(g) if y == -1 else y for y, g in zip(LABELS, guess, strict=True)]
    told = trained(made, filled, NOTHING)  # as if the guesses had been labels
    assert all(torch.equal(up["model"][key], value) for key, value in told["model"].items())
    assert up["used"] == told["used"] == 12
    unlabelled = torch.tensor(LABELS) == -1
    assert up["accepted"].tolist() == torch.bincount(guess[unlabelled], minlength=3).tolist()
    assert up["accepted"].sum() == 7


def test_rare_second_choices_are_used() -> None:
    made = CBAFed(**COMMON)
    up = trained(made, LABELS, NOTHING, p=0.02)
    q = class_probabilities(made.blueprint.copy_from(), client_of(made, LABELS), 3)
    second = q[torch.tensor(LABELS) == -1].sort(1).indices[:, 1]
    assert up["accepted"].tolist() == torch.bincount(second, minlength=3).tolist()
    assert trained(made, LABELS, NOTHING, p=0.03)["accepted"].sum() == 0


def test_clients_with_nothing_to_train_on_decline_and_others_do_not() -> None:
    made = CBAFed(**COMMON)
    with pytest.raises(Decline, match=r"0 examples to train on"):
        trained(made, [-1] * 12, NOTHING)
    assert trained(made, [-1] * 12, ALL)["used"] == 12
    assert trained(made, [0, 1, 2] * 4, ALL)["accepted"].sum() == 0


SEEN: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Watcher(Term):
    """Notes what a term is given."""

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        SEEN.append({**vars(context), "h": seen.h, "index": seen.batch.index})
        return seen.h[0].sum() * 0


def test_labels_stay_for_the_round_and_terms_see_two_views() -> None:
    SEEN.clear()
    made = CBAFed(**COMMON | {"terms": (Watcher(),), "local": replace(LOCAL, epochs=3, lr=0.5)})
    trained(made, LABELS, ALL)
    assert len(SEEN) == 6
    assert all(torch.equal(seen["target"], SEEN[0]["target"]) for seen in SEEN)
    assert all([h.shape for h in seen["h"]] == [(len(seen["index"]), 8)] * 2 for seen in SEEN)
    assert all(seen["me"] == 0 for seen in SEEN)


# ---- rounds --------------------------------------------------------------------------------------


def test_the_servers_histogram_and_weights(tmp_path: Path) -> None:
    made = CBAFed(**COMMON | {"world": replace(COMMON["world"], rounds=2)}, base=0.0, upper=0.37)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    labels = np.array([0, 1, 2, 2, -1, -1, -1, -1, -1, -1] * 2 + [-1] * 10)
    host = ClientRuntime(made, Images(pixels, labels), np.split(np.arange(30), 3), tmp_path)
    engine, ledger = LocalEngine(host, tmp_path, 0), Ledger()
    server = Server(dict.fromkeys(range(3), 10), made.blueprint.shared())
    server = Driver(made, engine, ledger).drive(made.run_plan(server, [0, 1]), server)
    assert server.memory["labelled"].tolist() == [2, 2, 4]  # of all clients, not of the cohort
    assert server.memory["accepted"].tolist() == [0, 0, 0]

    def reply(client: int, server: Server) -> Any:
        """What a client answers to the server's state, found without the engine."""
        p = shares(server.memory["labelled"] + server.memory["accepted"])
        parts = made.blueprint.copy_from(server.model)
        own = host.images.subset(np.arange(10 * client, 10 * client + 10))
        examples = Examples(own, np.arange(10), uses_labels=True)
        rng = torch.Generator()
        asked = Client(client, 1, 1, examples, made.views, rng, Noise("simulated", rng))
        q = class_probabilities(parts, asked, 3)
        guess = accept(q, thresholds(p, 0.0, 0.37), p < 0.03)
        return made.counts(torch.where(examples.labels() == -1, guess, -1))

    for number, cohort in ((1, [0, 2]), (2, [1, 2])):
        before = replace(server, round=number)
        server = Driver(made, engine, ledger).drive(made.run_plan(before, cohort), before)
        want = sum(reply(client, before) for client in cohort)
        assert torch.equal(server.memory["accepted"], want)  # of the last round alone
        assert want.sum() > 0
    sent = [json.loads(line) for line in ledger.lines]
    asked = [entry for entry in sent if entry["step"] == "count"]
    assert [entry["up"] for entry in asked] == [{"labelled": 12}] * 3
    assert sent[-1]["up"].keys() == {"model", "loss", "used", "accepted"}
    assert sent[-1]["down"] | {"model": 0} == {"model": 0, "shares": 12, "thresholds": 12}


def test_models_weigh_by_the_images_used(tmp_path: Path) -> None:
    """A client with two labels beside one with eight: a fifth of the average."""
    made = CBAFed(**COMMON, base=1.0, upper=1.0)  # certainty alone is accepted: nothing is
    pixels = np.random.default_rng(1).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    labels = np.array([0, 1] + [-1] * 8 + [0, 1, 2, 0, 1, 2, 0, 1, -1, -1])
    host = ClientRuntime(made, Images(pixels, labels), np.split(np.arange(20), 2), tmp_path)
    start = Server({0: 10, 1: 10}, made.blueprint.shared(), round=1)
    counts = {"labelled": torch.tensor([5.0, 4.0, 2.0]), "accepted": torch.zeros(3)}
    start = replace(start, memory=counts)

    def play(cohort: list[int]) -> Server:
        engine = LocalEngine(host, tmp_path, 0)
        return Driver(made, engine, Ledger()).drive(made.round(start, cohort), start)

    alone, other, both = play([0]), play([1]), play([0, 1])
    for key, value in both.model.items():
        mean = 0.2 * alone.model[key].double() + 0.8 * other.model[key].double()
        torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=1e-5)


def test_it_passes_the_contract_with_few_labels_and_under_masks() -> None:
    few = {"name": "dirichlet", "alpha": 1.0, "labels": 0.3}
    check_method("cbafed", split=few, privacy={"secure_aggregation": True})


def test_other_objectives_views_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="objective is simclr; set objective=supervised"):
        CBAFed(**COMMON | {"objective": SimCLR()})
    with pytest.raises(ConfigError, match="views=fedsimclr"):
        CBAFed(**COMMON | {"views": preset("semifed")})
    with pytest.raises(ConfigError, match=r"method.base is 1.5"):
        CBAFed(**COMMON, base=1.5)
    made = CBAFed(**COMMON)
    images = Images(np.zeros((6, 8, 8, 1), np.uint8), np.full(6, -1))
    host = ClientRuntime(made, images, np.split(np.arange(6), 3), tmp_path)
    server = Server(dict.fromkeys(range(3), 2), made.blueprint.shared())
    with pytest.raises(ConfigError, match="no client that answered"):
        Driver(made, LocalEngine(host, tmp_path, 0), Ledger()).drive(
            made.run_plan(server, [0]), server
        )
