"""The learning rate over rounds: each schedule against its formula written out here."""

import math

import pytest

from harmonium.core.errors import ConfigError
from harmonium.federation.server_optimisers import Adagrad, Adam, Average, Sgd, Yogi
from harmonium.learning.schedules import factor
from harmonium.learning.training import Local


@pytest.mark.parametrize("rounds", [1, 7, 100])
def test_the_default_of_clients_is_the_cosine_to_the_bit(rounds: int) -> None:
    local = Local(lr=0.3)
    for round in range(1, rounds + 1):
        assert local.rate(round, rounds) == 0.3 * 0.5 * (
            1 + math.cos(math.pi * (round - 1) / rounds)
        )


def test_the_default_of_servers_is_constant() -> None:
    assert Average().rate(7, 10) == 1.0
    assert {Sgd(lr=0.7).rate(round, 10) for round in range(11)} == {0.7}


def test_linear_steps_and_exponential() -> None:
    linear = Local(lr=2.0, schedule="linear")
    assert [linear.rate(round, 4) for round in (1, 2, 3, 4)] == [2.0, 1.5, 1.0, 0.5]
    step = Local(lr=8.0, schedule="step", decay=0.5, milestones=(0.25, 0.5))
    assert [step.rate(round, 8) for round in range(1, 9)] == [8, 8, 4, 4, 2, 2, 2, 2]
    falling = Sgd(lr=8.0, schedule="exponential", decay=0.5)
    assert [falling.rate(round, 99) for round in (1, 2, 3, 4)] == [8, 4, 2, 1]


def test_without_a_decay_each_schedule_has_its_own() -> None:
    assert Local(lr=1.0, schedule="step").rate(60, 100) == pytest.approx(0.1)
    assert Local(lr=1.0, schedule="step").rate(100, 100) == pytest.approx(0.01)
    assert Local(lr=1.0, schedule="exponential").rate(11, 100) == pytest.approx(0.99**10)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step", "exponential"])
def test_a_warmup_grows_evenly_and_the_schedule_has_the_rest(schedule: str) -> None:
    warm = Local(lr=0.8, schedule=schedule, warmup=4)  # type: ignore[arg-type]
    assert [warm.rate(round, 20) for round in (1, 2, 3, 4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    plain = Local(lr=0.8, schedule=schedule)  # type: ignore[arg-type]
    for round in range(1, 17):
        assert warm.rate(4 + round, 20) == plain.rate(round, 16)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step", "exponential"])
def test_what_is_before_the_first_round_counts_as_the_first(schedule: str) -> None:
    for warmup in (0, 3):
        first = factor(schedule, 1, 9, warmup)  # type: ignore[arg-type]
        assert factor(schedule, 0, 9, warmup) == first  # type: ignore[arg-type]
        assert first == (1 / 3 if warmup else 1.0)


def test_a_warmup_longer_than_the_run_is_all_there_is() -> None:
    assert [factor("cosine", round, 2, 4) for round in (1, 2)] == [0.25, 0.5]


@pytest.mark.parametrize("owner", [Local, Sgd, Adam, Yogi, Adagrad])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosin"}, r"schedule is cosin: did you mean 'cosine'\?"),
        ({"warmup": -1}, "warmup is -1"),
        ({"decay": 0.0}, "decay is 0.0"),
        ({"decay": 1.5}, "decay is 1.5"),
        ({"decay": math.nan}, "decay is nan"),
        ({"milestones": (0.5, 30)}, "milestones has 30; each is a share"),
    ],
)
def test_impossible_schedules_are_refused(owner, settings, message) -> None:  # type: ignore[no-untyped-def]
    section = "local" if owner is Local else "server"
    with pytest.raises(ConfigError, match=rf"{section}\.{message}"):
        owner(**settings)


def test_scaling_to_another_federation() -> None:
    """Orchestra: E K' / K epochs, and lr times the root of R' / R."""
    chosen = Local(epochs=10, lr=0.003, for_clients=100, for_fraction=0.5)
    scaled = chosen.scaled(clients=400, fraction=0.125)
    assert scaled.epochs == 40 and scaled.lr == pytest.approx(0.0015)
    assert scaled.for_clients is None and scaled.for_fraction is None
    assert scaled.scaled(clients=7, fraction=0.1) == scaled
    same = chosen.scaled(clients=100, fraction=0.5)
    assert (same.epochs, same.lr, same.batch) == (10, 0.003, chosen.batch)


@pytest.mark.parametrize(("clients", "epochs"), [(1, 1), (15, 2), (24, 2), (25, 3), (35, 4)])
def test_scaled_epochs_are_rounded_half_up_and_at_least_one(clients: int, epochs: int) -> None:
    assert Local(epochs=1, for_clients=10).scaled(clients, 1.0).epochs == epochs


def test_each_rule_works_without_the_other() -> None:
    assert Local(epochs=4, lr=0.1, for_clients=2).scaled(4, 0.1).lr == 0.1
    assert Local(epochs=4, lr=0.1, for_fraction=0.5).scaled(4, 0.1).epochs == 4


@pytest.mark.parametrize(
    "settings", [{"for_clients": 0}, {"for_fraction": 0.0}, {"for_fraction": 1.1}]
)
def test_impossible_federations_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"local.{next(iter(settings))} is"):
        Local(**settings)  # type: ignore[arg-type]
