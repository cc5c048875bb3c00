"""The plot of a study: scores over rounds, and against kNN where labels exist."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.core.errors import counted
from harmonium.report.figure import (
    COLOURS,
    PALE,
    WIDTH,
    dress,
    headline,
    saved_figure,
    whole_numbers,
)

OTHERS = "#9db7c9"  # settings without a name
PALETTE = (COLOURS[1], COLOURS[0], *COLOURS[2:])  # the best first
MOST = len(PALETTE)  # settings up to which all are named; of more only the best
LINE = 100  # characters of a name on one line


def plot_study(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    ranked: Mapping[str, float] | None = None,
    best: int | None = 0,
) -> bool:
    """Draw the settings of a study, named below; whether there was anything to draw.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        rows: the table's, the best first: `score`, `knn` between 0 and 1 or None, `state`.
        curves: for each row, by label and in the same order, figures with `round` and `score`.
        ranked: `rho` and over how many `settings`.
        best: place of the best in `rows`.
    """
    scored = {
        place: [point for point in points if point["score"] is not None]
        for place, points in enumerate(curves.values())
    }
    scored = {place: points for place, points in scored.items() if points}
    if not scored:
        return False
    dots = [n for n, row in enumerate(rows) if None not in (row["score"], row["knn"])]
    names = {
        place: textwrap.fill(label, LINE)
        for place, label in enumerate(curves)
        if place in scored and (place == best or len(scored) <= MOST)
    }
    colours = dict(zip(sorted(names, key=lambda place: place != best), PALETTE, strict=False))
    early = any(row["state"] != "complete" for row in rows)
    below = sum(name.count("\n") + 1 for name in names.values()) + early
    with saved_figure(path, WIDTH, 3.6 + 0.2 * below) as figure:
        panels = figure.subplots(1, 2 if dots else 1, squeeze=False)[0]
        for place, points in scored.items():
            stopped = rows[place]["state"] != "complete"
            colour = colours.get(place, OTHERS)
            _curve(panels[0], points, colour, names.get(place), place == best, stopped)
        if early:
            words = "dotted, hollow: stopped early" if dots else "dotted: stopped early"
            panels[0].plot([], [], ":", color=PALE, linewidth=1.2, label=words)
        dress(panels[0], "round", "Align + 0.2 Unif")
        whole_numbers(panels[0])
        if below:
            figure.legend(loc="outside lower left", frameon=False, fontsize=8)
        if dots:
            _scatter(panels[1], rows, dots, ranked, colours)
        headline(figure, f"{counted(len(rows), 'setting')}, scored without labels")
    return True


def _curve(
    axes: Any,
    points: Sequence[Mapping[str, Any]],
    colour: str,
    name: str | None,
    best: bool,
    stopped: bool,
) -> None:
    """One setting's scores over rounds; dotted where it was stopped early."""
    axes.plot(
        [point["round"] for point in points],
        [point["score"] for point in points],
        color=colour,
        linewidth=2.2 if best else 1.2,
        linestyle=":" if stopped else "-",
        marker="o",
        markersize=4 if best else 2.5,
        label=name,
        zorder=3 if best else 2,
    )


def _scatter(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    dots: Sequence[int],
    ranked: Mapping[str, float] | None,
    colours: Mapping[int, str],
) -> None:
    """Score against kNN; settings that were stopped early are hollow."""
    for number in dots:
        row = rows[number]
        colour = colours.get(number, OTHERS)
        hollow = row["state"] != "complete"
        axes.plot(
            row["score"], 100 * row["knn"], "o", color=colour, markersize=6,
            markerfacecolor="none" if hollow else colour, zorder=3,
        )  # fmt: skip
    dress(axes, "Align + 0.2 Unif", "validation kNN (%)")
    if ranked:
        axes.set_title(f"rank correlation {ranked['rho']:.2f}", loc="left", fontsize=9.5)
