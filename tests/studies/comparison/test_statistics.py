"""Intervals, paired tests and ranks, held against scipy and by hand."""

import numpy as np
import pytest
from scipy import stats

from harmonium.studies.comparison import statistics
from harmonium.studies.comparison.statistics import differences, holm, mean_ranks, summary


def drawn(count: int = 5) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(0)
    base = rng.normal(0.6, 0.05, count)
    rows = {"a": base, "b": base + rng.normal(0.03, 0.01, count), "c": rng.normal(0.6, 0.1, count)}
    return {label: dict(enumerate(map(float, values))) for label, values in rows.items()}


def test_a_summary_has_students_interval() -> None:
    values = list(drawn()["c"].values())
    found = summary(dict(enumerate(values)))
    assert found.stderr == pytest.approx(stats.sem(values)) and found.seeds == 5
    asked = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(asked)


def test_differences_are_paired_and_corrected() -> None:
    rows = drawn()
    found = differences(rows, "a")
    raw = {k: stats.ttest_rel(list(rows[k].values()), list(rows["a"].values())) for k in "bc"}
    p = sorted((one.pvalue, label) for label, one in raw.items())
    assert found[p[0][1]].p == pytest.approx(min(1, 2 * p[0][0]))
    assert found[p[1][1]].p == pytest.approx(max(2 * p[0][0], p[1][0]))
    for label, one in raw.items():
        low, high = one.confidence_interval()
        assert (found[label].low, found[label].high) == pytest.approx((low, high))


def test_only_seeds_of_both_are_paired() -> None:
    rows = drawn()
    del rows["b"][1], rows["a"][4]
    found = differences(rows, "a")["b"]
    assert found.seeds == 3
    assert found.mean == pytest.approx(np.mean([rows["b"][s] - rows["a"][s] for s in (0, 2, 3)]))


@pytest.mark.parametrize("apart", [0.0, -0.006])
def test_the_same_difference_each_time_has_no_p(apart: float) -> None:
    rows = {"a": {0: 0.88, 1: 0.9, 2: 0.1}, "c": drawn()["c"]}
    rows["b"] = {seed: value + apart for seed, value in rows["a"].items()}
    found = differences(rows, "a")
    assert found["b"].p is None and found["b"].low is None
    assert found["b"].mean == pytest.approx(apart, abs=1e-12) and found["b"].seeds == 3
    alone = differences({"a": rows["a"], "c": rows["c"]}, "a")
    assert found["c"].p == alone["c"].p  # it was no test, so nothing is corrected for it


def test_ranks_are_those_of_scipy() -> None:
    rows = {"a": {0: 0.5, 1: 0.7}, "b": {0: 0.5, 1: 0.6}, "c": {0: 0.9, 1: 0.1, 2: 0.0}}
    table = np.array([[rows[k][seed] for seed in (0, 1)] for k in "abc"])
    places = stats.rankdata(-table, axis=0).mean(1)
    assert mean_ranks(rows) == pytest.approx(dict(zip("abc", places, strict=True)))


def test_holm_never_falls_and_ends_at_one() -> None:
    assert holm({"a": 0.04, "b": 0.03, "c": 0.9, "d": 0.6}) == pytest.approx(
        {"b": 0.12, "a": 0.12, "d": 1.0, "c": 1.0}
    )


def test_the_best_has_equals_by_digits_and_by_test():
    rows = {
        "best": {0: 0.80, 1: 0.82, 2: 0.81, 3: 0.83},
        "same digits": {0: 0.8002, 1: 0.8198, 2: 0.8101, 3: 0.8297},
        "noisy": {0: 0.70, 1: 0.90, 2: 0.75, 3: 0.89},
        "worse": {0: 0.70, 1: 0.72, 2: 0.71, 3: 0.7301},
        "one seed": {9: 0.5},
    }
    found = statistics.standing(rows)
    assert found.best == ("best", "same digits") and found.near == ("noisy",)
    assert statistics.standing({"a": {}}).best == ()


def test_plots_draw_students_interval_and_of_two_seeds_the_range():
    values = [0.5, 0.6, 0.8]
    low, high = stats.t.interval(0.95, 2, 0.0, stats.sem(values))
    half = statistics.half_width(float(stats.sem(values)), 3)
    assert half == pytest.approx(high) and -half == pytest.approx(low)
    assert statistics.half_width(float(stats.sem([0.5, 0.7])), 2) == pytest.approx(0.1)
