import pytest

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.sampling import Participation


def test_cohorts_are_sorted_and_follow_from_the_seed() -> None:
    half = Participation(fraction=0.5)
    everyone = list(range(0, 40, 2))
    cohort = half.cohort(everyone, 3, 0)
    assert cohort == sorted(cohort) and len(set(cohort)) == 10 and set(cohort) <= set(everyone)
    assert cohort == half.cohort(everyone, 3, 0)
    assert cohort != half.cohort(everyone, 4, 0) and cohort != half.cohort(everyone, 3, 1)


def test_everybody_has_the_same_chance() -> None:
    counts = [0] * 10
    for round in range(2000):
        for client in Participation(number=3).cohort(range(10), round, 0):
            counts[client] += 1
    assert all(540 < count < 660 for count in counts)


def test_at_least_one_takes_part() -> None:
    assert Participation(fraction=0.01).size(5) == 1


@pytest.mark.parametrize(
    "settings", [{"fraction": 0}, {"fraction": 1.1}, {"number": 0}, {"quorum": 0}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="participation"):
        Participation(**settings)  # type: ignore[arg-type]


def test_a_quorum_above_the_cohort_is_refused() -> None:
    with pytest.raises(ConfigError, match="quorum is 5.*3"):
        Participation(number=3, quorum=5).size(10)


def test_nothing_to_spare_asks_exactly_those_wanted() -> None:
    drawn = seeds.numpy_rng(3, "cohort", 5).choice(20, 4, replace=False)
    assert Participation(number=4).cohort(range(20), 5, 3) == sorted(drawn)
    failing = Participation(number=4, dropout=0.5, stragglers=0.5, deadline=2.0)
    assert failing.cohort(range(20), 5, 3) == sorted(drawn)


@pytest.mark.parametrize(
    ("number", "over", "clients", "asked"),
    [(10, 0.3, 100, 13), (50, 0.1, 100, 55), (5, 0.01, 100, 6), (10, 0.3, 12, 12), (3, 2.0, 9, 9)],
)
def test_some_to_spare_are_asked(number: int, over: float, clients: int, asked: int) -> None:
    sparing = Participation(number=number, over=over)
    assert sparing.asked(clients) == asked and sparing.size(clients) == number
    cohort = sparing.cohort(range(clients), 1, 0)
    assert len(set(cohort)) == asked and cohort == sorted(cohort)


def test_only_what_loses_answers_is_unreliable() -> None:
    assert not Participation(fraction=0.1, quorum=1, slowdown=3.0).unreliable
    for settings in ({"over": 0.1}, {"dropout": 0.1}, {"stragglers": 0.1}, {"deadline": 2.0}):
        assert Participation(**settings).unreliable  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"over": -0.1}, "over is -0.1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"stragglers": 1.5}, "stragglers is 1.5"),
        ({"slowdown": 0.5}, "slowdown is 0.5"),
        ({"deadline": 0.0}, "deadline is 0.0"),
    ],
)
def test_impossible_failures_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=f"participation.{words}"):
        Participation(**settings)  # type: ignore[arg-type]
