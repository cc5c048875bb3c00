"""Whether a regime has headroom, and whether a claim holds: pure functions of figures by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harmonium.studies.comparison import statistics
from harmonium.studies.evidence.study_file import RuleLine

ERRORS = 3.0  # standard errors by which references must be apart
Verdict = Literal["holds", "does not hold", "not decidable here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "not decidable here"

Figures = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Check:
    """One requirement of headroom, and whether the runs meet it."""

    what: str
    value: str  # as measured
    met: bool


@dataclass(frozen=True)
class Decision:
    """One line of the rule in one condition."""

    line: RuleLine
    condition: str
    verdict: Verdict
    why: str  # where it is open
    mean: float | None = None  # how far the arm leads, in points of accuracy
    low: float | None = None  # of the 95 % interval
    high: float | None = None
    p: float | None = None  # corrected
    seeds: int = 0


def apart(upper: Figures, lower: Figures, what: str) -> Check:
    """Whether one row is above another by more than three standard errors, paired by seed.

    >>> apart({0: 50.0, 1: 52.0}, {0: 40.0, 1: 41.0}, "a over b")
    Check(what='a over b', value='+10.5, standard error 0.50', met=True)
    """
    shared = sorted(set(upper) & set(lower))
    if len(shared) < 2:
        return Check(what, f"{len(shared)} seeds in common, two are needed", False)
    gap = statistics.summary({seed: upper[seed] - lower[seed] for seed in shared})
    error = gap.stderr or 0.0
    return Check(
        what,
        f"{gap.mean:+.1f}, standard error {error:.2f}",
        gap.mean > 0 and gap.mean > ERRORS * error,
    )


def flat(changes: Figures, most: float, what: str) -> Check:
    """Whether curves have converged: their mean change over the last quarter is small enough.

    >>> flat({0: 0.4, 1: -0.2}, 1.0, "FedAvg converged").met
    True
    """
    if not changes:
        return Check(what, "no curve: validation images were not evaluated often enough", False)
    change = statistics.summary(changes)
    noise = "" if change.stderr is None else f", standard error {change.stderr:.1f}"
    text = f"{change.mean:+.1f} in the last quarter{noise}, at most {most:g}"
    if change.stderr is not None and change.stderr > most:
        text += " (lost in noise: use more seeds or more validation images)"
    return Check(what, text, abs(change.mean) <= most)


def decide(
    lines: Sequence[tuple[RuleLine, str]],
    figures: Mapping[tuple[str, str], Mapping[str, Figures]],
    undecidable: Mapping[str, str],
    seeds: Sequence[int],
) -> list[Decision]:
    """Every line of the rule in every condition; p values are corrected by Holm's rule.

    Args:
        lines: pairs of a line and a condition.
        figures: by condition and row, then by figure: values by seed.
        undecidable: conditions in which nothing is decided, and why.
        seeds: those that decide; a line is open where one of them is missing.
    """
    open_lines: dict[str, Decision] = {}
    tested: dict[str, Decision] = {}
    p_values: dict[str, float] = {}
    for number, (line, condition) in enumerate(lines):
        key = str(number)
        if why := undecidable.get(condition):
            open_lines[key] = Decision(line, condition, OPEN, why)
            continue
        better, than = (
            figures.get((condition, row), {}).get(line.by, {}) for row in (line.better, line.than)
        )
        if missing := [seed for seed in seeds if seed not in better or seed not in than]:
            why = f"no figure for seed {', '.join(map(str, missing))}"
            open_lines[key] = Decision(line, condition, OPEN, why)
            continue
        lead = statistics.summary({seed: line.sign * (better[seed] - than[seed]) for seed in seeds})
        p_values[key] = statistics.p_value(lead.mean - line.margin, lead.stderr or 0.0, len(seeds))
        tested[key] = Decision(
            line, condition, FAILS, "", lead.mean, lead.low, lead.high, None, len(seeds)
        )
    corrected = statistics.holm(p_values)
    for key, one in tested.items():
        assert one.mean is not None
        holds = corrected[key] < statistics.ALPHA and one.mean > one.line.margin
        tested[key] = Decision(
            one.line, one.condition, HOLDS if holds else FAILS, "",
            one.mean, one.low, one.high, corrected[key], one.seeds,
        )  # fmt: skip
    return [(open_lines | tested)[str(number)] for number in range(len(lines))]


def overall(decisions: Sequence[Decision]) -> str:
    """The verdict on the whole claim.

    The claim holds where every line does; it does not where one line fails.
    """
    verdicts = [one.verdict for one in decisions]
    if not verdicts:
        return "nothing to decide: the study has no rule"
    if all(one == HOLDS for one in verdicts):
        return HOLDS
    if FAILS not in verdicts:
        return OPEN if HOLDS not in verdicts else f"{HOLDS} where it could be decided"
    held, count = verdicts.count(HOLDS), len(verdicts)
    return FAILS if not held else f"{FAILS} in full: {held} of {count} parts hold"
