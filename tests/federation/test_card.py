from dataclasses import dataclass

from harmonium.federation.card import card
from harmonium.federation.method import Method
from harmonium.federation.wire import exchange, per_example, scalar, statistic, weights
from harmonium.federation.world import World
from harmonium.methods.alone import Alone
from harmonium.methods.fedavg import FedAvg
from harmonium.objectives.simclr import SimCLR


def test_bytes_follow_from_the_parts() -> None:
    """cnn-small with its projector: 454,688 and 98,688 parameters of four bytes."""
    found = card(FedAvg(objective=SimCLR(norm="none")))
    assert found.bytes_down == found.bytes_up == 4 * (454_688 + 98_688)
    assert found.secure_aggregation and not found.per_example and not found.keeps


def test_what_stays_is_named() -> None:
    text = card(Alone(world=World(clients=3))).text()
    assert "encoder local" in text and "weights: encoder, projector" in text
    assert "Model weights leave" not in text
    assert "model to one client 0" in text


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
    assert "Rows that belong to single pictures leave the clients." in text
    assert "corr statistic GUARDED" in text
    assert "secure aggregation cannot hide them" in text
