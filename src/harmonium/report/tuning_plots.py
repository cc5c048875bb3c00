"""The image of a study: scores over rounds, and against kNN where labels exist."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.core.errors import counted
from harmonium.report.figure import COLOURS, PALE, WIDTH, dress, headline, picture, whole_numbers

OTHERS = "#9db7c9"  # settings without a name
PALETTE = (COLOURS[1], COLOURS[0], *COLOURS[2:])  # the best first
MOST = len(PALETTE)  # settings up to which all are named; of more only the best
LINE = 100  # signs of a name that fit beside each other


def plot_study(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    ranked: Mapping[str, float] | None = None,
    best: int | None = 0,
) -> bool:
    """Draw the settings of a study, named below; whether there was anything to draw.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        rows: the table's, the best first: `score`, `knn` between 0 and 1 or None, `state`.
        curves: for each row, by label and in the same order, figures with `round` and `score`.
        ranked: `rho` and over how many `settings`.
        best: place of the best in `rows`.
    """
    drawn = [
        (number, label, [point for point in points if point["score"] is not None])
        for number, (label, points) in enumerate(curves.items())
    ]
    drawn = [one for one in drawn if one[2]]
    if not drawn:
        return False
    dots = [n for n, row in enumerate(rows) if None not in (row["score"], row["knn"])]
    names = {number: label for number, label, _ in drawn if number == best or len(drawn) <= MOST}
    wrapped = {number: textwrap.fill(label, LINE) for number, label in names.items()}
    colours = dict(zip(sorted(names, key=lambda n: n != best), PALETTE, strict=False))
    early = any(row["state"] != "complete" for row in rows)
    below = sum(label.count("\n") + 1 for label in wrapped.values()) + early
    with picture(path, WIDTH, 3.6 + 0.2 * below) as figure:
        panels = figure.subplots(1, 2 if dots else 1, squeeze=False)[0]
        lines = panels[0]
        for number, _, points in drawn:
            first, stopped = number == best, rows[number]["state"] != "complete"
            lines.plot(
                [point["round"] for point in points],
                [point["score"] for point in points],
                color=colours.get(number, OTHERS),
                linewidth=2.2 if first else 1.2,
                linestyle=":" if stopped else "-",
                marker="o",
                markersize=4 if first else 2.5,
                label=wrapped.get(number),
                zorder=3 if first else 2,
            )
        if early:
            words = "dotted, hollow: stopped early" if dots else "dotted: stopped early"
            lines.plot([], [], ":", color=PALE, linewidth=1.2, label=words)
        dress(lines, "round", "Align + 0.2 Unif")
        whole_numbers(lines)
        if below:
            figure.legend(loc="outside lower left", frameon=False, fontsize=8)
        if dots:
            _scatter(panels[1], rows, dots, ranked, colours)
        headline(figure, f"{counted(len(rows), 'setting')}, scored without labels")
    return True


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
