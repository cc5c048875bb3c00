"""Summary of a comparison: figures over seeds from the outcomes of its runs, and its files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harmonium.evaluation.evaluator import probes_of
from harmonium.evaluation.verdict import CONFIDENCE, Difference, sentence
from harmonium.report.writer import write_results
from harmonium.studies.comparison import plots, statistics
from harmonium.studies.comparison.cells import UNTRAINED, WHITENED, WITHOUT_RUN
from harmonium.studies.comparison.losses import measured_losses
from harmonium.studies.comparison.outcomes import Cell, Outcomes
from harmonium.studies.comparison.table import (
    BESIDE,
    OBJECTIVE,
    Comparison,
    Rows,
    lines_of_tests,
    tables,
)
from harmonium.studies.comparison.traffic import MEGA, WAYS, Point, mean_components, reached

LABEL_FREE = ("spread", "uniformity", "effective_rank")
TARGET_SHARE = 0.9  # of the best method's gain in kNN: the default target of costs
FEW_SEEDS = 5  # with fewer, a note warns that tests have little power

BySeed = Mapping[str, Mapping[int, float]]
"""Figure to seed to value, of one row."""


def write_comparison(folder: Path, outcomes: Outcomes) -> Comparison:
    """Summarise the outcomes, draw the plots, and write everything into a folder."""
    by_seed = _by_seed(outcomes)
    keys = _columns(outcomes, by_seed)
    target = _target(outcomes)
    comparison = _draw(_summarise(folder, outcomes, by_seed, keys, target), outcomes)
    _write(comparison, list(_run_lines(outcomes, by_seed, target)))
    return comparison


def _summarise(
    folder: Path,
    outcomes: Outcomes,
    by_seed: Mapping[str, BySeed],
    keys: Sequence[str],
    target: float | None,
) -> Comparison:
    """The comparison: rows with their means, and all details."""
    plan = outcomes.plan
    probe = "knn" if "knn" in keys else keys[0]
    details: dict[str, Any] = {
        "seeds": list(plan.seeds),
        "base": next(iter(plan.methods)),
        "probe": probe,
        "target": target,
        "unfair": outcomes.unfair,
        "failed": [
            {"encoder": label, "seed": seed, "why": why}
            for (label, seed), why in outcomes.failed.items()
        ],
        "names": dict(plan.names),
        "methods": list(plan.methods),
        "rows": {
            label: _row_details(outcomes, label, figures, target)
            for label, figures in by_seed.items()
        },
        "tests": _tests(outcomes, by_seed, ranked="knn" in keys),
    }
    for label, tested in details["tests"].get(probe, {}).get("rows", {}).items():
        details["rows"][label] |= tested
    for label, text in _verdicts(outcomes, by_seed, keys).items():
        details["rows"][label]["verdict"] = text
    rows = [
        {"encoder": label, **{key: _mean(figures.get(key)) for key in keys}}
        for label, figures in by_seed.items()
    ]
    warnings = {label: text for label in by_seed if (text := _warnings(outcomes, label))}
    notes = (*_notes(outcomes, target), *_missing_seeds(outcomes, by_seed, probe))
    one_line = tuple(" ".join(note.split()) for note in notes)  # an error may have several lines
    return Comparison(folder, tuple(rows), details, None, warnings, one_line)


def _draw(comparison: Comparison, outcomes: Outcomes) -> Comparison:
    """Draw the plots; returns the comparison with their files."""
    has_knn = comparison.details["probe"] == "knn"
    paths = list(plots.draw(comparison, outcomes)) if has_knn else []
    paths += plots.draw_objectives(comparison, outcomes) if outcomes.objectives else []
    first = paths[0] if paths and has_knn else None
    return replace(comparison, main_plot=first, plots=tuple(paths))


def probes(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The probes of a verdict; data without labels have label-free figures instead."""
    return probes_of(figures) or {key: figures["health"][key] for key in LABEL_FREE if figures}


def flat(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The probes, and beside each its balanced accuracy and AUROC as `balanced_knn`, `auroc_knn`.

    >>> flat({"knn": 0.5, "balanced": {"knn": 0.4}, "health": {}})
    {'knn': 0.5, 'balanced_knn': 0.4}
    """
    more = {
        f"{kind}_{key}": value for kind in BESIDE for key, value in figures.get(kind, {}).items()
    }
    return {**probes(figures), **more}


def _by_seed(outcomes: Outcomes) -> dict[str, BySeed]:
    """The finite figures of every row that has any, in the order of the table."""
    trained = [row for label in outcomes.plan.rows for row in (label, f"{label}{WHITENED}")]
    by_seed: dict[str, dict[str, dict[int, float]]] = {}
    for label in (*WITHOUT_RUN, *trained):
        for (row, seed), figures in outcomes.figures.items():
            if row != label:
                continue
            values_of = by_seed.setdefault(label, {})
            for key, value in flat(figures).items():
                values = values_of.setdefault(key, {})
                if value is not None and math.isfinite(value):
                    values[seed] = value
    return dict(by_seed)


def _columns(outcomes: Outcomes, by_seed: Mapping[str, BySeed]) -> list[str]:
    """The probes that the table shows: those of the untrained encoder, if they share any."""
    keys = list(dict.fromkeys(key for its in outcomes.figures.values() for key in probes(its)))
    return [key for key in keys if key in by_seed[UNTRAINED]] or keys


def _mean(values: Mapping[int, float] | None) -> float | None:
    return statistics.summary(values).mean if values else None


def _over_seeds(values: Mapping[int, float]) -> dict[str, Any]:
    """A figure's summary, and its values by seed."""
    return {**asdict(statistics.summary(values)), "by_seed": dict(values)}


def _row_details(
    outcomes: Outcomes, label: str, by_seed: BySeed, target: float | None
) -> dict[str, Any]:
    """The details of one row."""
    details: dict[str, Any] = {
        "figures": {key: _over_seeds(values) for key, values in by_seed.items() if values}
    }
    if objective := _global_objective(outcomes, label):
        details["global_objective"] = objective
    if label in outcomes.published:
        details["published"] = outcomes.published[label]._asdict()
    if outcomes.courses_of(label):
        course = outcomes.mean_course_of(label)
        point = None if target is None else reached(course, target)
        traffic = [sent for (row, _), sent in outcomes.traffic.items() if row == label]
        details |= {
            "traffic": mean_components(traffic),
            "course": [asdict(one) for one in course],
            "reached": point and asdict(point),
        }
    return details


def _global_objective(outcomes: Outcomes, label: str) -> dict[str, Any]:
    """The global objective at the end of a row's runs, over seeds; empty where not measured."""
    last = {seed: rows[-1] for (row, seed), rows in outcomes.objectives.items() if row == label}
    ends = {seed: row["global_objective"] for seed, row in last.items()}
    figures: dict[str, Any] = {}
    for key in OBJECTIVE:
        values = {seed: end[key] for seed, end in ends.items() if end.get(key) is not None}
        if values:
            figures[key] = _over_seeds(values)
    if not figures:
        return {}
    loss = measured_losses(outcomes)[label]
    return {"objective": next(iter(ends.values()))["objective"], "loss": loss, **figures}


def _target(outcomes: Outcomes) -> float | None:
    """The validation kNN at which costs are compared; none if neither given nor known."""
    if outcomes.plan.settings.target is not None:
        return outcomes.plan.settings.target / 100
    courses = _method_courses(outcomes)
    first, last = ([course[place].knn for course in courses] for place in (0, -1))
    before, after = ([knn for knn in some if knn is not None] for some in (first, last))
    if not before or not after:
        return None
    start = sum(before) / len(before)
    return start + TARGET_SHARE * (max(after) - start)


def _method_courses(outcomes: Outcomes) -> list[list[Point]]:
    """The mean courses of all methods that have one."""
    courses = [outcomes.mean_course_of(label) for label in outcomes.plan.methods]
    return [course for course in courses if course]


def _tests(
    outcomes: Outcomes, by_seed: Mapping[str, BySeed], *, ranked: bool
) -> dict[str, dict[str, Any]]:
    """Tests of every figure, methods against the first: differences, ranks, and the best.

    Without accuracies, larger is not better, so no row is the best.
    """
    plan = outcomes.plan
    keys = dict.fromkeys(key for label in plan.methods for key in by_seed.get(label, {}))
    tests: dict[str, dict[str, Any]] = {}
    for key in keys:
        methods = {
            label: values for label in plan.methods if (values := by_seed.get(label, {}).get(key))
        }
        tests[key] = _test(methods, next(iter(plan.methods)), several=len(plan.seeds) > 1)
        if ranked and len(methods) > 1:
            tests[key] |= asdict(statistics.standing(methods))
    return tests


def _test(
    methods: Mapping[str, Mapping[int, float]], base: str, *, several: bool
) -> dict[str, Any]:
    """One figure's methods against the first of them."""
    rows: dict[str, dict[str, Any]] = {label: {} for label in methods}
    if base in methods and several:
        for label, difference in statistics.differences(methods, base).items():
            rows[label]["difference"] = asdict(difference)
    if len(methods) > 1:
        for label, rank in statistics.mean_ranks(methods).items():
            rows[label]["rank"] = rank
    return {
        "base": base,
        "test": statistics.TEST,
        "correction": f"{statistics.CORRECTION}, of the methods of this figure",
        "rows": {label: row for label, row in rows.items() if row},
    }


def _warnings(outcomes: Outcomes, label: str) -> str:
    """The warnings about a row's encoders, each once."""
    texts = [
        text
        for (row, _), figures in outcomes.figures.items()
        if row == label and row not in WITHOUT_RUN
        for text in figures.get("health", {}).get("warnings", ())
    ]
    return " ".join(dict.fromkeys(texts))


def _verdicts(
    outcomes: Outcomes, by_seed: Mapping[str, BySeed], keys: Sequence[str]
) -> dict[str, str]:
    """A sentence for each method: that of its run, or of the means over seeds, paired by seed."""
    verdicts: dict[str, str] = {}
    for label in outcomes.plan.methods:
        runs = [its for (row, _), its in outcomes.against.items() if row == label]
        if len(runs) == 1 and len(outcomes.plan.seeds) == 1:
            if text := runs[0].get("text"):
                verdicts[label] = text
        elif "knn" in keys and (apart := _against_references(runs, label, by_seed, keys)):
            verdicts[label] = sentence(apart)
    return verdicts


def _against_references(
    runs: Sequence[Mapping[str, Any]],
    label: str,
    by_seed: Mapping[str, BySeed],
    keys: Sequence[str],
) -> dict[str, dict[str, Difference]]:
    """A method's differences from the references that need no run, by probe and reference."""
    apart: dict[str, dict[str, Difference]] = {}
    for key in keys:
        mine = by_seed.get(label, {}).get(key, {})
        for reference in WITHOUT_RUN:
            theirs = by_seed.get(reference, {}).get(key, {})
            if len(set(mine) & set(theirs)) > 1:
                known = [its.get("probes", {}).get(key, {}).get(reference) for its in runs]
                margins = [one["margin"] for one in known if one]
                apart.setdefault(key, {})[reference] = _paired(mine, theirs, margins)
    return apart


def _paired(
    mine: Mapping[int, float], theirs: Mapping[int, float], margins: Sequence[float]
) -> Difference:
    """The difference of two rows over their common seeds; `margins` are those of single runs."""
    shared = sorted(set(mine) & set(theirs))
    gap = statistics.summary({seed: mine[seed] - theirs[seed] for seed in shared})
    own, other = (sum(values[seed] for seed in shared) for values in (mine, theirs))
    margin = 0.0 if gap.high is None else gap.high - gap.mean
    noise = sum(margins) / len(margins) if margins else CONFIDENCE * (gap.stderr or 0.0)
    return Difference(own / len(shared), other / len(shared), margin, len(shared), noise)


def _notes(outcomes: Outcomes, target: float | None) -> Iterator[str]:
    """Notes for readers of the figures."""
    plan = outcomes.plan
    yield from (f"unfair: {text}" for text in outcomes.unfair)
    yield from _run_notes(outcomes, "left out", outcomes.failed)
    yield from _run_notes(outcomes, "ended early", outcomes.stopped)
    yield from plan.remarks
    for label, recipe in plan.methods.items():
        if not recipe.objective.any_method:
            row = plan.name(label)
            yield f"only {row} can train its objective: it has no references of its own"
    if target is not None:
        points = [reached(course, target) for course in _method_courses(outcomes)]
        if points and all(point is not None and point.round == 0 for point in points):
            yield f"the untrained encoder reaches {100 * target:.1f} % already, so costs are 0"
    if 1 < len(plan.seeds) < FEW_SEEDS and len(plan.methods) > 1:
        yield (
            f"{len(plan.seeds)} seeds: intervals are wide and tests have little power; "
            "use five or more"
        )


def _run_notes(outcomes: Outcomes, what: str, reasons: Mapping[Cell, str]) -> Iterator[str]:
    """A note for each of these runs, with the reason."""
    for (label, seed), why in reasons.items():
        yield f"{what}: {outcomes.plan.name(label)}, seed {seed}: {why}"


def _missing_seeds(outcomes: Outcomes, by_seed: Mapping[str, BySeed], probe: str) -> Iterator[str]:
    """Notes on rows whose means are over fewer seeds, because runs failed or diverged."""
    seeds = outcomes.plan.seeds
    for label, figures in by_seed.items():
        values = figures.get(probe, {})
        lost = [seed for seed in seeds if seed not in values]
        if not lost:
            continue
        diverged = [seed for seed in lost if (label, seed) in outcomes.figures]
        row = outcomes.plan.name(label)
        if diverged:
            yield f"diverged: {row}, seed {', '.join(map(str, diverged))}: left out of its mean"
        if values:
            yield (
                f"{row}: means are over {len(values)} of {len(seeds)} seeds; other rows may have "
                "others. Differences and ranks use common seeds only"
            )


def _run_lines(
    outcomes: Outcomes, by_seed: Mapping[str, BySeed], target: float | None
) -> Iterator[dict[str, Any]]:
    """A line for each run: its figures, and the cost of a method; references have no cost."""
    for label, figures in by_seed.items():
        for seed in sorted(seed for row, seed in outcomes.figures if row == label):
            line: dict[str, Any] = {
                "encoder": label,
                "seed": seed,
                **{key: values.get(seed) for key, values in figures.items()},
            }
            if course := outcomes.courses.get((label, seed)):
                sent = outcomes.traffic[label, seed]
                line["rounds"] = course[-1].round
                line |= {f"bytes_{way}": round(sum(sent[way].values())) for way in WAYS}
                if target is not None:
                    point = reached(course, target)
                    line["target_knn"] = target
                    line["target_rounds"] = point and point.round
                    line["target_megabytes"] = point and point.bytes / MEGA
                    line["target_minutes"] = point and point.seconds / 60
            yield line


def _write(comparison: Comparison, runs: Rows) -> None:
    """JSON with everything, CSV with a line for each run and each test, and tables for papers."""
    unfair = "; ".join(comparison.details["unfair"])
    names = comparison.details["names"]
    lines = [
        {
            "encoder": run["encoder"],
            **({"name": comparison.name(run["encoder"])} if names else {}),
            **run,
            **({"unfair": unfair} if unfair else {}),
        }
        for run in runs
    ]
    named = ", ".join(f"{label} is {name}" for label, name in names.items())
    remarks = [f"(!) {comparison.name(k)}: {text}" for k, text in comparison.warnings.items()]
    remarks += [f"{comparison.name(k)}: {text}" for k, text in comparison.verdicts.items()]
    write_results(
        comparison.folder,
        "compare",
        comparison.plain(),
        tables(comparison),
        sheets={"": lines, "-tests": list(lines_of_tests(comparison))},
        preface=f"`label.ROW=NAME` named rows here: {named}." if names else "",
        notes=(*remarks, *comparison.notes),
        with_latex=True,
    )
