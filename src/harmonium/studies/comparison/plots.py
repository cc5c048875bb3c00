"""Plots of a comparison: accuracies with references, kNN over cost, global objectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from harmonium.core.errors import counted
from harmonium.report.arms import Estimate, arms_plot
from harmonium.report.figure import formats, study_formats
from harmonium.report.metric_names import heading, times
from harmonium.report.plots import curves
from harmonium.report.tables import estimate
from harmonium.report.writer import write_plot
from harmonium.studies.comparison.cells import UNTRAINED, WITHOUT_RUN
from harmonium.studies.comparison.losses import measured_losses
from harmonium.studies.comparison.outcomes import Outcomes
from harmonium.studies.comparison.statistics import half_width, interval_words
from harmonium.studies.comparison.table import Comparison
from harmonium.studies.comparison.traffic import MEGA, Point

AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "rounds": ("round", lambda point: float(point.round)),
    "bytes": ("megabytes sent and received, all clients", lambda point: point.bytes / MEGA),
    "time": ("modelled minutes", lambda point: point.seconds / 60),
}

OBJECTIVES = {  # of a global objective: the name of its plot, and the axis
    "value": ("objective", "global objective"),
    "gradient_norm": ("gradient", "gradient norm of the global objective"),
}


def draw(comparison: Comparison, outcomes: Outcomes) -> Iterator[Path]:
    """Draw accuracies of arms, and kNN over rounds, bytes and modelled time; yields the files."""
    recipe = next(iter(outcomes.plan.methods.values()))
    title = f"{recipe.data.name}, {counted(len(outcomes.plan.seeds), 'seed')}"
    title += ", unfair: budgets differ" if outcomes.unfair else ""
    with formats(study_formats()):
        path = comparison.folder / "compare.png"
        yield from write_plot(path, _arms, comparison, f"{title}, frozen encoders")
        for kind, (words, place) in AXES.items():
            series = {comparison.name(k): line(outcomes, k, place) for k in outcomes.plan.methods}
            if any(len(points) > 1 for points in series.values()):
                path = comparison.folder / f"knn-over-{kind}.png"
                seeds = {_seeds(outcomes, label) for label in outcomes.plan.methods}
                yield from write_plot(
                    path, curves, series, words, "validation kNN (%)", f"{title}, kNN over {kind}",
                    levels(comparison, outcomes), interval=_interval(seeds),
                )  # fmt: skip


def _arms(path: Path, comparison: Comparison, title: str) -> None:
    """A panel for each probe: methods and trained references as bars, the others as lines."""
    arms: dict[str, dict[str, Estimate | None]] = {}
    lines: dict[str, dict[str, float | None]] = {}
    seeds: set[int] = set()
    for row in comparison.rows:
        label = str(row["encoder"])
        keys = [key for key in row if key != "encoder"]
        if label in WITHOUT_RUN:
            lines[comparison.name(label)] = {heading(key): times(100, row[key]) for key in keys}
            continue
        figures = comparison.details["rows"][label]["figures"]
        arms[comparison.name(label)] = {heading(key): _estimate(figures.get(key)) for key in keys}
        seeds |= {figures[key]["seeds"] for key in keys if key in figures}
    tested = {comparison.name(label) for label in comparison.details["methods"]}
    muted = [name for name in arms if name not in tested]
    interval = interval_words(seeds)
    arms_plot(path, arms, title, references=lines, interval=interval, muted=muted)


def _estimate(figure: dict[str, Any] | None) -> Estimate | None:
    if figure is None:
        return None
    return 100 * figure["mean"], times(100, half_width(figure["stderr"], figure["seeds"]))


def levels(comparison: Comparison, outcomes: Outcomes) -> dict[str, float]:
    """Validation kNN of all references in percent, for horizontal lines."""
    order = [UNTRAINED, *(k for k in WITHOUT_RUN if k != UNTRAINED), *outcomes.plan.references]
    known: dict[str, float] = {}
    for label in order:
        values = [value for (row, _), value in outcomes.levels.items() if row == label]
        if values:
            known[comparison.name(label)] = 100 * sum(values) / len(values)
    return known


def draw_objectives(comparison: Comparison, outcomes: Outcomes) -> Iterator[Path]:
    """Draw global objectives and their gradient norms over rounds, for each loss; yields files."""
    groups: dict[str, list[str]] = {}
    for label, loss in measured_losses(outcomes).items():
        groups.setdefault(loss, []).append(label)
    with formats(study_formats()):
        for number, (loss, labels) in enumerate(groups.items(), 1):
            data = f"{outcomes.plan.rows[labels[0]].data.name}"
            data += f", {counted(len(outcomes.plan.seeds), 'seed')}; loss: {loss}"
            more = f"-{number}" if number > 1 else ""
            runs = {sum(label == row for row, _ in outcomes.objectives) for label in labels}
            for key, (name, words) in OBJECTIVES.items():
                series = {
                    comparison.name(label): _over_rounds(outcomes, label, key) for label in labels
                }
                if any(len(points) > 1 for points in series.values()):
                    path = comparison.folder / f"{name}-over-rounds{more}.png"
                    title = f"{words[0].upper()}{words[1:]} over rounds, {data}"
                    yield from write_plot(
                        path, curves, series, "round", words, title, interval=_interval(runs)
                    )


def _over_rounds(outcomes: Outcomes, label: str, key: str) -> list[tuple[float, float, float]]:
    """Means over seeds of a figure of the global objective, with half their intervals."""
    by_round: dict[int, list[float]] = {}
    runs = [rows for (row, _), rows in outcomes.objectives.items() if row == label]
    for row in (row for rows in runs for row in rows):
        value = row["global_objective"].get(key)
        if value is not None:
            by_round.setdefault(row["round"], []).append(value)
    points = []
    for number, values in sorted(by_round.items()):
        mean, error = estimate(values)
        if len(values) == len(runs):  # otherwise means would be over different seeds
            points.append((float(number), mean, half_width(error, len(values)) or 0.0))
    return points


def _interval(seeds: Collection[int]) -> str:
    interval = interval_words(seeds)
    return f"mean and {interval}" if interval else ""


def _seeds(outcomes: Outcomes, label: str) -> int:
    return sum(row == label for row, _ in outcomes.courses)


def line(
    outcomes: Outcomes, label: str, place: Callable[[Point], float]
) -> list[tuple[float, float, float]]:
    """Means over seeds with half their intervals; 0 for a single seed."""
    courses = outcomes.courses_of(label)
    points = []
    for mean in outcomes.mean_course_of(label):
        if mean.knn is not None:
            here = [point for course in courses for point in course if point.round == mean.round]
            known = [point.knn for point in here if point.knn is not None]
            half = half_width(estimate(known)[1], len(known))
            points.append((place(mean), 100 * mean.knn, 100 * (half or 0.0)))
    return points
