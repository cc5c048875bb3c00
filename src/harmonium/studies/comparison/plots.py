"""Plots of a comparison: arms beside references, kNN over what it took, global objectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonium.core.errors import counted
from harmonium.report.arms import Estimate, arms_plot
from harmonium.report.figure import formats, plot_paths, study_formats
from harmonium.report.metric_names import heading, times
from harmonium.report.plots import curves
from harmonium.report.tables import estimate
from harmonium.studies.comparison.cells import UNTRAINED, WITHOUT_RUN
from harmonium.studies.comparison.losses import measured_losses
from harmonium.studies.comparison.statistics import half_width, interval_words
from harmonium.studies.comparison.traffic import MEGA, Point, mean_course

if TYPE_CHECKING:
    from harmonium.studies.comparison.study import Found
    from harmonium.studies.comparison.table import Comparison

AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "rounds": ("round", lambda point: float(point.round)),
    "bytes": ("megabytes sent and received, all clients", lambda point: point.bytes / MEGA),
    "time": ("modelled minutes", lambda point: point.seconds / 60),
}

OBJECTIVES = {  # of a global objective: the name of its plot, and the axis
    "value": ("objective", "global objective"),
    "gradient_norm": ("gradient", "gradient norm of the global objective"),
}


def draw(made: Comparison, found: Found) -> Iterator[Path]:
    """Accuracies of arms; kNN over rounds, bytes and modelled time. Gives the files."""
    recipe = next(iter(found.plan.methods.values()))
    title = f"{recipe.data.name}, {counted(len(found.plan.seeds), 'seed')}"
    title += ", unfair: budgets differ" if found.unfair else ""
    with formats(study_formats()):
        path = made.folder / "compare.png"
        _arms(path, made, f"{title}, frozen encoders")
        yield from plot_paths(path)
        for kind, (words, place) in AXES.items():
            series = {made.name(k): line(found, k, place) for k in found.plan.methods}
            if any(len(points) > 1 for points in series.values()):
                path = made.folder / f"knn-over-{kind}.png"
                seeds = {_seeds(found, label) for label in found.plan.methods}
                curves(
                    path, series, words, "validation kNN (%)", f"{title}, kNN over {kind}",
                    levels(made, found), interval=_interval(seeds),
                )  # fmt: skip
                yield from plot_paths(path)


def _arms(path: Path, made: Comparison, title: str) -> None:
    """A panel for each probe: methods and trained references as bars, the others as lines."""
    arms: dict[str, dict[str, Estimate | None]] = {}
    lines: dict[str, dict[str, float | None]] = {}
    seeds: set[int] = set()
    for row in made.rows:
        label = str(row["encoder"])
        keys = [key for key in row if key != "encoder"]
        if label in WITHOUT_RUN:
            lines[made.name(label)] = {heading(key): times(100, row[key]) for key in keys}
            continue
        held = made.details["rows"][label]["figures"]
        arms[made.name(label)] = {heading(key): _estimate(held.get(key)) for key in keys}
        seeds |= {held[key]["seeds"] for key in keys if key in held}
    tested = {made.name(label) for label in made.details["methods"]}
    muted = [name for name in arms if name not in tested]
    interval = interval_words(seeds)
    arms_plot(path, arms, title, references=lines, interval=interval, muted=muted)


def _estimate(figure: dict[str, Any] | None) -> Estimate | None:
    if figure is None:
        return None
    return 100 * figure["mean"], times(100, half_width(figure["stderr"], figure["seeds"]))


def levels(made: Comparison, found: Found) -> dict[str, float]:
    """Validation kNN of all references in percent, for horizontal lines."""
    order = [UNTRAINED, *(k for k in WITHOUT_RUN if k != UNTRAINED), *found.plan.references]
    known: dict[str, float] = {}
    for label in order:
        values = [value for (row, _), value in found.levels.items() if row == label]
        if values:
            known[made.name(label)] = 100 * sum(values) / len(values)
    return known


def draw_objectives(made: Comparison, found: Found) -> Iterator[Path]:
    """The global objective and its gradient norm over rounds, a plot for each loss."""
    groups: dict[str, list[str]] = {}
    for label, loss in measured_losses(found).items():
        groups.setdefault(loss, []).append(label)
    with formats(study_formats()):
        for number, (loss, labels) in enumerate(groups.items(), 1):
            of = f"{found.plan.rows[labels[0]].data.name}"
            of += f", {counted(len(found.plan.seeds), 'seed')}; loss: {loss}"
            more = f"-{number}" if number > 1 else ""
            runs = {sum(label == row for row, _ in found.objectives) for label in labels}
            for key, (name, words) in OBJECTIVES.items():
                series = {made.name(label): _over_rounds(found, label, key) for label in labels}
                if any(len(points) > 1 for points in series.values()):
                    path = made.folder / f"{name}-over-rounds{more}.png"
                    title = f"{words[0].upper()}{words[1:]} over rounds, {of}"
                    curves(path, series, "round", words, title, interval=_interval(runs))
                    yield from plot_paths(path)


def _over_rounds(found: Found, label: str, key: str) -> list[tuple[float, float, float]]:
    """Means over seeds of a figure of the global objective, with half their intervals."""
    by_round: dict[int, list[float]] = {}
    runs = [rows for (row, _), rows in found.objectives.items() if row == label]
    for row in (row for rows in runs for row in rows):
        value = row["global_objective"].get(key)
        if value is not None:
            by_round.setdefault(row["round"], []).append(value)
    drawn = []
    for number, values in sorted(by_round.items()):
        mean, error = estimate(values)
        if len(values) == len(runs):  # else means would be of other seeds
            drawn.append((float(number), mean, half_width(error, len(values)) or 0.0))
    return drawn


def _interval(seeds: Collection[int]) -> str:
    said = interval_words(seeds)
    return f"mean and {said}" if said else ""


def _seeds(found: Found, label: str) -> int:
    return sum(row == label for row, _ in found.courses)


def line(
    found: Found, label: str, place: Callable[[Point], float]
) -> list[tuple[float, float, float]]:
    """Means over seeds with half their intervals; 0 for a single seed."""
    courses = [some for (row, _), some in found.courses.items() if row == label]
    if not courses:
        return []
    drawn = []
    for point in mean_course(courses):
        if point.knn is not None:
            each = [one.knn for some in courses for one in some if one.round == point.round]
            known = [knn for knn in each if knn is not None]
            half = half_width(estimate(known)[1], len(known))
            drawn.append((place(point), 100 * point.knn, 100 * (half or 0.0)))
    return drawn
