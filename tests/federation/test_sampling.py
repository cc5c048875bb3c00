import pytest

from harmonium.errors import ConfigError
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
    with pytest.raises(ConfigError, match="quorum is 5, but a round asks only 3"):
        Participation(number=3, quorum=5).size(10)
