import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from harmonium.federation.aggregation import Median
from harmonium.federation.card import NUMBER, card
from harmonium.federation.method import Method
from harmonium.federation.secure_aggregation.fixed_point import Masks
from harmonium.federation.server_optimisers import Adam
from harmonium.federation.wire import exchange, per_example, scalar, statistic, weights
from harmonium.learning.objectives import Objective
from harmonium.learning.objectives.byol import BYOL
from harmonium.learning.objectives.moco import MoCo
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.objectives.swav import SwAV
from harmonium.learning.world import World
from harmonium.methods.alone import Alone
from harmonium.methods.fedavg import FedAvg
from harmonium.methods.scaffold import Scaffold
from harmonium.privacy.mechanisms import Release

PLAIN = SimCLR(norm="none")
MODEL = 454_688 + 98_688  # parameters of cnn-small and of its projector


def test_bytes_follow_from_the_parts() -> None:
    """FedAvg: 4 bytes a parameter each way, and one number for the loss."""
    found = card(FedAvg(objective=PLAIN))
    assert found.bytes == {"train": {"down": 4 * MODEL, "up": 4 * MODEL + NUMBER}}
    assert found.secure_aggregation and not found.per_example and not found.keeps


def test_scaffold_sends_twice_the_model_each_way() -> None:
    found = card(Scaffold(objective=PLAIN))
    assert found.bytes == {"train": {"down": 8 * MODEL, "up": 8 * MODEL + NUMBER}}
    assert found.keeps == {"control": "weights"}
    assert found.remembers == {"the model": "weights", "control": "weights"}


def test_batch_norm_statistics_are_counted_apart() -> None:
    """256 means and variances of four bytes, and a counter of eight."""
    found = card(FedAvg(objective=SimCLR()))
    assert found.bytes["train"]["down"] == 4 * (MODEL + 2 * 256) + 4 * 2 * 256 + 8
    assert (
        found.batch_norm.startswith("average")
        and "batchnorm average (in projector)" in found.text()
    )
    kept = card(FedAvg(objective=SimCLR(), batch_norm="local"))
    assert kept.bytes["train"]["down"] == 4 * (MODEL + 2 * 256)
    assert kept.keeps == {"BatchNorm of projector": "statistic"}
    assert not card(FedAvg(objective=PLAIN)).batch_norm


def test_a_shared_twin_doubles_the_model() -> None:
    shared, own = (card(FedAvg(objective=BYOL(target=owner))) for owner in ("mean", "local"))
    twin = shared.parameters["target"]
    assert twin == shared.parameters["encoder"] + shared.parameters["projector"]
    assert shared.bytes["train"]["up"] - own.bytes["train"]["up"] >= 4 * twin
    assert own.keeps == {"target": "weights"} and not shared.keeps


def test_a_queue_that_is_kept_is_named_for_what_it_is() -> None:
    text = card(FedAvg(objective=MoCo(queue_owner="local"))).text()
    assert "queue (per_example)" in text
    assert "What clients keep includes rows that belong to single images." in text


def test_labels_of_an_objective_are_named() -> None:
    method = FedAvg(world=World(classes=3), objective=Supervised())
    assert card(method).uses_labels and "labels    used at clients" in card(method).text()


def test_what_the_server_keeps_is_named() -> None:
    assert card(FedAvg(server_optimiser=Adam())).remembers == {
        "the model": "weights",
        "first": "weights",
        "second": "weights",
    }


def test_a_comparison_of_clients_rules_out_secure_aggregation() -> None:
    assert not card(FedAvg(aggregation=Median())).secure_aggregation


def test_what_stays_is_named() -> None:
    text = card(Alone(world=World(clients=3), server_optimiser=Adam())).text()
    assert "encoder local" in text and "keeps encoder (weights), projector (weights)" in text
    for untrue in ("Model weights leave", "combines", "first (weights)", "averaged"):
        assert untrue not in text
    assert "server    keeps nothing" in text and "batchnorm stays at the client" in text
    assert f"loss scalar (mean by examples); {NUMBER} bytes" in text


def test_noise_is_told_in_words_and_of_an_example_only_where_images_count() -> None:
    @dataclass(frozen=True)
    class Noisy(Method):
        shared: bool = True

        def costs(self, step: str, examples: int) -> Sequence[Release]:
            far = 1.0 if self.shared else 500 / examples
            some = Release("corr", "discrete-laplace", 1, 30.0, count=21)
            return (Release("corr", "gaussian", far, 2.5 * far), some) if step == "look" else ()

        @exchange(down={}, up={"corr": statistic("each", guarded=True)})
        def look(self, client, got):  # type: ignore[no-untyped-def]
            return {}

    laplace = "21 times discrete-laplace, scale 30 for a sensitivity of 1"
    gaussian = "gaussian, standard deviation 2.5 for a sensitivity of 1"
    assert card(Noisy()).noise == {"look": {"corr": f"{gaussian}; {laplace}"}}
    gaussian = "gaussian, standard deviation 1.25 for a sensitivity of 0.5"
    where = ", of a client with 1,000 images"
    found = card(Noisy(shared=False))
    assert f"noise     look.corr: {gaussian}; {laplace}{where}\n" in found.text()
    assert card(Method()).noise == {} and "noise " not in card(Method()).text()


def test_what_reveals_much_is_said_in_words() -> None:
    @dataclass(frozen=True)
    class Revealing(Method):
        @exchange(
            down={"model": weights()},
            up={"rows": per_example(), "corr": statistic("each", guarded=True), "n": scalar()},
        )
        def look(self, client, got):  # type: ignore[no-untyped-def]
            return {}

    text = card(Revealing()).text()
    assert "Rows that belong to single images leave the clients." in text
    assert "corr statistic with noise" in text and "noise     look.corr: added before it" in text
    found = card(Revealing())
    assert not found.secure_aggregation and all(found.obstacles["look"].values())
    for name, why in (("rows", "rows of every client"), ("corr", "client by"), ("n", "client by")):
        assert re.search(f"look: cannot hide {name}: .*{why}.*declare a mean or a sum", text)
    assert "server must see look.rows, look.corr, look.n" in text
    assert f"{NUMBER} bytes and what depends on the data" in text


@pytest.mark.parametrize("policy", ["average", "local", "fedbn", "recalibrate"])
def test_the_card_says_what_becomes_of_batch_norm(policy: str) -> None:
    assert f"batchnorm {policy} (in projector): " in card(FedAvg(batch_norm=policy)).text()  # type: ignore[arg-type]


def test_what_could_be_hidden_is_said() -> None:
    for objective in (SimCLR(), PLAIN):  # BatchNorm's counter, which nothing reads, is no obstacle
        plain = card(FedAvg(objective=objective))
        assert plain.obstacles == {"train": {"model": "", "loss": ""}} and plain.secure_aggregation
        assert "secure    train: could hide model, loss\n" in plain.text()
        assert "secure aggregation could hide single clients: privacy.secure_agg" in plain.text()


def test_what_cannot_be_hidden_is_said() -> None:
    median = card(FedAvg(objective=PLAIN, aggregation=Median()))
    why = "aggregation=median looks at single clients; set aggregation=mean"
    assert median.obstacles["train"] == {"model": why, "loss": ""}
    assert "secure    train: could hide loss\n" in median.text()
    assert f"          train: cannot hide model: {why}\n" in median.text()
    assert "server must see train.model of single clients" in median.text()


def test_what_is_hidden_is_said_with_its_price() -> None:
    """Under masks a value has 8 bytes, whatever it was; four clients exchange keys and shares."""
    hidden = card(FedAvg(objective=PLAIN), Masks(0.75), 4)
    seal, digest, share = 2 * 66 + 16, 16, 66
    assert hidden.bytes == {
        "train": {"down": 4 * MODEL + 4 * (8 + seal), "up": 8 * MODEL + NUMBER},
        "mask_keys": {"down": 0, "up": 64},
        "mask_shares": {"down": 4 * (64 + 8) + 2 * 8, "up": 4 * (seal + 2 * digest)},
        "unmask": {"down": 4 * 8, "up": 4 * share},
    }
    text = hidden.text()
    assert "secure    train: hides model, loss\n" in text and "bytes, masked" in text
    assert "mask_keys, mask_shares, unmask: 336 bytes down, 1,048 up around each ask" in text
    assert "the server sees only their sum; a sum, too, can reveal" in text
    assert "sums over at least 3 clients and 75% of those who began" in text
    assert "as long as it keeps to the protocol. Clients that join it know their own" in text
    assert "could hide" not in text and "Nothing hides them" not in text


def test_asks_that_upload_nothing_cost_no_masks() -> None:
    @dataclass(frozen=True)
    class Telling(Method):
        @exchange(down={"n": scalar()})
        def tell(self, client, got):  # type: ignore[no-untyped-def]
            return {}

    found = card(Telling(objective=PLAIN), Masks(), 4)
    assert found.bytes["tell"] == {"down": NUMBER, "up": 0}
    assert "tell: hides" not in found.text()


def test_layers_that_stay_are_weights() -> None:
    assert card(FedAvg(objective=SimCLR(), batch_norm="fedbn")).keeps == {
        "BatchNorm of projector": "weights"
    }


@pytest.mark.parametrize("objective", [MoCo(), SwAV(), BYOL(target="fresh")])
def test_alone_trains_as_the_objective_says(objective: Objective) -> None:
    """What is made anew each round in a federation is made anew by a client alone."""
    rules = [method(objective=objective).blueprint.rules for method in (FedAvg, Alone)]
    fresh = [{name for name, rule in found.items() if rule == "fresh"} for found in rules]
    assert fresh[0] == fresh[1] != set()
