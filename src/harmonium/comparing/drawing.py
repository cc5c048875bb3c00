"""Plots of a comparison: bars of accuracies, kNN over what it took, global objectives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harmonium.comparing.traffic import MEGA, Point, mean_course
from harmonium.errors import counted
from harmonium.report.plots import bars, curves
from harmonium.report.tables import estimate
from harmonium.settings import plain

if TYPE_CHECKING:
    from harmonium.comparing.study import Found
    from harmonium.comparing.table import Comparison

AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "rounds": ("round", lambda point: float(point.round)),
    "bytes": ("megabytes sent and received, all clients", lambda point: point.bytes / MEGA),
    "time": ("modelled minutes", lambda point: point.seconds / 60),
}

OBJECTIVES = {  # of a global objective: the name of its plot, and the axis
    "value": ("objective", "global objective"),
    "gradient_norm": ("gradient", "gradient norm of the global objective"),
}


def draw(made: Comparison, found: Found) -> None:
    """Bars of accuracies; kNN over rounds, bytes and modelled time."""
    assert made.picture is not None
    recipe = next(iter(found.plan.methods.values()))
    name = f"{recipe.data.name}, {counted(len(found.plan.seeds), 'seed')}"
    name += ", unfair: budgets differ" if found.unfair else ""
    groups: dict[str, dict[str, tuple[float, float | None]]] = {}
    for row in made.shown():
        cells = {key: value for key, value in row.items() if key != "encoder" and value is not None}
        groups[str(row["encoder"])] = {
            key: value if isinstance(value, tuple) else (value, None)
            for key, value in cells.items()
        }
    bars(made.picture, groups, "test accuracy (%)", f"{name}, frozen encoders")
    for kind, (words, place) in AXES.items():
        series = {label: line(found, label, place) for label in found.plan.methods}
        if any(len(points) > 1 for points in series.values()):
            path = made.folder / f"knn-over-{kind}.png"
            curves(path, series, words, "validation kNN (%)", f"{name}, kNN over {kind}")


def draw_objectives(folder: Path, found: Found) -> None:
    """The global objective and its gradient norm over rounds, of rows with the same objective."""
    groups: dict[str, list[str]] = {}
    for label, recipe in found.plan.rows.items():
        if any(label == row for row, _ in found.objectives):
            groups.setdefault(json.dumps(plain(recipe.objective)), []).append(label)
    for number, labels in enumerate(groups.values(), 1):
        recipe = found.plan.rows[labels[0]]
        of = f"{recipe.objective.name} on {recipe.data.name}"
        of += f", {counted(len(found.plan.seeds), 'seed')}"
        more = f"-{number}" if number > 1 else ""
        for key, (name, words) in OBJECTIVES.items():
            series = {label: _over_rounds(found, label, key) for label in labels}
            if any(len(points) > 1 for points in series.values()):
                path = folder / f"{name}-over-rounds{more}.png"
                curves(path, series, "round", words, f"{of}, {words} over rounds")


def _over_rounds(found: Found, label: str, key: str) -> list[tuple[float, float, float]]:
    """Means over seeds of a figure of the global objective, and their standard errors."""
    by_round: dict[int, list[float]] = {}
    runs = [rows for (row, _), rows in found.objectives.items() if row == label]
    for row in (row for rows in runs for row in rows):
        value = row["global_objective"].get(key)
        if value is not None:
            by_round.setdefault(row["round"], []).append(value)
    drawn = []
    for number, values in sorted(by_round.items()):
        mean, error = estimate(values)
        if len(values) == len(runs) and mean is not None:  # else means would be of other seeds
            drawn.append((float(number), mean, error or 0.0))
    return drawn


def line(
    found: Found, label: str, place: Callable[[Point], float]
) -> list[tuple[float, float, float]]:
    """Means over seeds, and their standard errors; 0 for a single seed."""
    courses = [some for (row, _), some in found.courses.items() if row == label]
    if not courses:
        return []
    drawn = []
    for point in mean_course(courses):
        if point.knn is not None:
            each = [one.knn for some in courses for one in some if one.round == point.round]
            _, error = estimate([knn for knn in each if knn is not None])
            drawn.append((place(point), 100 * point.knn, 100 * (error or 0.0)))
    return drawn
