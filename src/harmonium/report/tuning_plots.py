"""The picture of a study: scores over rounds, and against kNN where labels exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.report.plots import COLOURS, PALE, WIDTH, dress, headline, picture, whole_numbers

OTHERS = "#9db7c9"  # settings that are not the best


def study_picture(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    ranked: Mapping[str, float] | None = None,
    best: int | None = 0,
) -> bool:
    """Draw the settings of a study, the best in colour; whether there was anything to draw.

    Args:
        path: where to, `.png` or `.svg`.
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
    with picture(path, WIDTH, 3.6) as figure:
        panels = figure.subplots(1, 2 if dots else 1, squeeze=False)[0]
        lines = panels[0]
        for number, label, points in drawn:
            first, stopped = number == best, rows[number]["state"] == "stopped"
            lines.plot(
                [point["round"] for point in points],
                [point["score"] for point in points],
                color=COLOURS[1] if first else OTHERS,
                linewidth=2.2 if first else 1.2,
                linestyle=":" if stopped else "-",
                marker="o",
                markersize=4 if first else 2.5,
                label=label if first else None,
                zorder=3 if first else 2,
            )
        dress(lines, "round", "Align + 0.2 Unif")
        whole_numbers(lines)
        if best is not None:
            lines.legend(frameon=False, fontsize=8)
        if dots:
            _scatter(panels[1], rows, dots, ranked, best)
        headline(figure, f"{len(rows)} settings, scored without labels")
    return True


def _scatter(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    dots: Sequence[int],
    ranked: Mapping[str, float] | None,
    best: int | None,
) -> None:
    """Score against kNN; settings that were stopped early are hollow."""
    for number in dots:
        row = rows[number]
        colour = COLOURS[1] if number == best else COLOURS[0]
        hollow = row["state"] != "complete"
        axes.plot(
            row["score"], 100 * row["knn"], "o", color=colour, markersize=6,
            markerfacecolor="none" if hollow else colour, zorder=3,
        )  # fmt: skip
    dress(axes, "Align + 0.2 Unif", "validation kNN (%)")
    if ranked:
        text = f"rank correlation {ranked['rho']:.2f} ({ranked['settings']:.0f} settings)"
        axes.set_title(text, loc="left", fontsize=9.5)
    if any(rows[number]["state"] != "complete" for number in dots):
        axes.annotate(
            "hollow: stopped early", (0.98, 0.03), xycoords="axes fraction", ha="right",
            fontsize=8, color=PALE,
        )  # fmt: skip
