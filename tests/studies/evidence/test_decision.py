"""Headroom and verdicts as pure functions of figures."""

import pytest

from harmonium.studies.evidence.decision import FAILS, HOLDS, OPEN, apart, decide, flat, overall
from harmonium.studies.evidence.study_file import RuleLine

SEEDS = (1, 2, 3, 4, 5)


def line(margin: float = 0.0, by: str = "knn") -> RuleLine:
    return RuleLine("new", "old", by, margin, ("",))


def figures(new: list[float], old: list[float], by: str = "knn") -> dict:
    return {
        ("", "new"): {by: dict(zip(SEEDS, new, strict=False))},
        ("", "old"): {by: dict(zip(SEEDS, old, strict=False))},
    }


def test_references_must_be_three_standard_errors_apart() -> None:
    assert apart({1: 10.0, 2: 11.0, 3: 12.0}, {1: 1.0, 2: 2.0, 3: 3.1}, "").met
    assert not apart({1: 10.0, 2: 4.0, 3: 12.0}, {1: 9.0, 2: 2.0, 3: 3.0}, "").met
    assert not apart({1: 1.0, 2: 2.0}, {1: 3.0, 2: 4.0}, "").met  # below, not above
    assert not apart({1: 10.0}, {1: 1.0}, "").met  # one seed has no standard error


@pytest.mark.parametrize(
    ("changes", "met"), [({1: 0.5, 2: -0.5}, True), ({1: 3.0}, False), ({}, False)]
)
def test_a_curve_that_still_moves_has_not_converged(changes: dict[int, float], met: bool) -> None:
    assert flat(changes, 1.0, "").met == met


def test_a_change_that_is_lost_in_noise_says_so() -> None:
    assert "noise" in flat({0: 8.0, 1: -8.0}, 1.0, "").value
    assert "noise" not in flat({0: 0.4, 1: -0.2}, 1.0, "").value


def test_a_lead_holds_only_beyond_its_margin() -> None:
    data = figures([50, 52, 51, 53, 50], [40, 41, 42, 42, 40])
    assert [one.verdict for one in decide([(line(), "")], data, {}, SEEDS)] == [HOLDS]
    assert [one.verdict for one in decide([(line(20), "")], data, {}, SEEDS)] == [FAILS]
    assert [one.verdict for one in decide([(line(5), "")], data, {}, SEEDS)] == [HOLDS]


def test_a_lead_of_the_wrong_sign_does_not_hold_however_small_its_p() -> None:
    (one,) = decide([(line(), "")], figures([40, 41, 42], [50, 52, 51]), {}, SEEDS[:3])
    assert one.verdict == FAILS and one.p is not None and one.p < 0.05


def test_less_of_an_objective_is_better() -> None:
    data = figures([-2.7, -2.8, -2.7], [-1.8, -1.7, -1.8], "objective")
    (one,) = decide([(line(by="objective"), "")], data, {}, SEEDS[:3])
    assert one.verdict == HOLDS and one.mean == pytest.approx(0.9667, abs=1e-3)


def test_less_of_a_figure_of_a_measure_is_better_where_it_says_so() -> None:
    data = figures([10.0, 11.0, 10.5], [20.0, 22.0, 20.0], "angle")
    for less, verdict in ((True, HOLDS), (False, FAILS)):
        claim = RuleLine("new", "old", "angle", 0.0, ("",), less)
        (one,) = decide([(claim, "")], data, {}, SEEDS[:3])
        assert one.verdict == verdict


def test_nothing_is_decided_without_headroom_or_with_a_missing_seed() -> None:
    data = figures([50, 52, 51, 53, 50], [40, 41, 42, 42, 40])
    (one,) = decide([(line(), "")], data, {"": "no headroom"}, SEEDS)
    assert one.verdict == OPEN and one.p is None
    (one,) = decide([(line(), "")], figures([50, 52], [40, 41, 42]), {}, SEEDS[:3])
    assert one.verdict == OPEN and "3" in one.why


def test_p_values_are_corrected_for_all_lines() -> None:
    data = figures([50, 52, 51, 53, 50], [40, 41, 42, 42, 40])
    (alone,) = decide([(line(), "")], data, {}, SEEDS)
    twice = decide([(line(), ""), (line(1), "")], data, {}, SEEDS)
    assert twice[0].p == pytest.approx(2 * alone.p)


def test_a_claim_holds_where_all_its_lines_do() -> None:
    data = figures([50, 52, 51, 53, 50], [40, 41, 42, 42, 40])
    holds, fails = decide([(line(), ""), (line(20), "")], data, {}, SEEDS)
    (unsure,) = decide([(line(), "")], data, {"": "why"}, SEEDS)
    assert overall([holds, holds]) == HOLDS
    assert overall([fails]) == FAILS and overall([unsure]) == OPEN
    assert overall([holds, fails]).startswith(FAILS) and "1 of 2" in overall([holds, fails])
    assert overall([holds, unsure]) not in (HOLDS, FAILS, OPEN)
