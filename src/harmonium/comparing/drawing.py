"""The pictures of a comparison: bars of accuracies, and kNN over what it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harmonium.comparing.traffic import MEGA, Point, mean_course
from harmonium.errors import counted
from harmonium.report.plots import bars, curves
from harmonium.report.tables import estimate

if TYPE_CHECKING:
    from harmonium.comparing.study import Found
    from harmonium.comparing.table import Comparison

AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "rounds": ("round", lambda point: float(point.round)),
    "bytes": ("megabytes sent and received, all clients", lambda point: point.bytes / MEGA),
    "time": ("modelled minutes", lambda point: point.seconds / 60),
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
