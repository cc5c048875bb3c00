"""Plots of a study: figures over two settings as maps, and figures over what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from harmonium.report.figure import (
    COLOURS,
    COLUMN,
    INK,
    MARKERS,
    PALE,
    WIDTH,
    add_legend,
    dress,
    headline,
    legend_rows,
    level_style,
    saved_figure,
    wrapped,
)

Place = tuple[str, str, str]  # values of the first, the second and the third setting


def value_maps(
    path: str | Path,
    cells: Mapping[Place, float | str],
    names: Sequence[str],
    meaning: str,
    title: str,
) -> None:
    """Draw values over two settings, with a panel for each value of a third.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        cells: a value for every place, or a word such as `failed` where there is none.
        names: of the first setting (rows), the second (columns), and the third (panels), if any.
        meaning: what the values are.
        title: what the plot shows.
    """
    rows, columns, panels = (list(dict.fromkeys(place[n] for place in cells)) for n in range(3))
    known = [one for one in cells.values() if not isinstance(one, str)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    with saved_figure(path, WIDTH, 0.7 + down * (0.9 + 0.32 * len(rows))) as figure:
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid, panels, strict=False):
            values = [[cells.get((row, one, panel), "") for one in columns] for row in rows]
            numbers = [[math.nan if isinstance(v, str) else v for v in line] for line in values]
            drawn = axes.imshow(numbers, cmap="viridis", vmin=low, vmax=high, aspect="auto")
            axes.set_facecolor("#f0f0f0")  # behind cells without a value
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    text = value if isinstance(value, str) else f"{value:.1f}"
                    dark = not isinstance(value, str) and value < (low + high) / 2
                    colour = "white" if dark else PALE if isinstance(value, str) else INK
                    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=colour)
            axes.set_xticks(range(len(columns)), columns, fontsize=8)
            axes.set_yticks(range(len(rows)), rows, fontsize=8)
            axes.set_xlabel(names[1], fontsize=9, color=INK)
            axes.set_ylabel(names[0], fontsize=9, color=INK)
            if len(names) > 2:
                axes.set_title(f"{names[2]}={panel}", loc="left", fontsize=9.5, color=INK)
        if known:
            figure.colorbar(drawn, ax=list(grid[: len(panels)]), label=meaning)
        headline(figure, title)


def cost_points(
    path: str | Path,
    points: Mapping[str, tuple[float, float, float]],
    xlabel: str,
    ylabel: str,
    title: str,
    levels: Mapping[str, float],
) -> None:
    """Draw a point `(cost, figure, half of its interval)` for each row, over a logarithmic axis.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        points: by row; costs are above 0.
        xlabel: what the cost is.
        ylabel: what the figure is.
        title: what the plot shows.
        levels: figures of rows that have no such cost, as lines.
    """
    rows = legend_rows([*points, *levels], COLUMN)
    with saved_figure(path, COLUMN, 2.9 + 0.17 * rows) as figure:
        axes = figure.subplots()
        for index, (name, (cost, value, half)) in enumerate(points.items()):
            axes.errorbar(
                cost, value, yerr=half or None, color=COLOURS[index % len(COLOURS)], capsize=2.5,
                marker=MARKERS[index % len(MARKERS)], linestyle="none", label=wrapped(name),
            )  # fmt: skip
        for index, (name, level) in enumerate(levels.items()):
            axes.axhline(level, label=wrapped(name), **level_style(index))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda cost, _: f"{cost:g}")
        axes.xaxis.set_minor_formatter(lambda cost, _: _minor_tick(cost))
        dress(axes, xlabel, ylabel)
        axes.tick_params(axis="x", which="minor", labelsize=7, labelcolor=PALE)
        headline(figure, title)
        add_legend(figure)


def _minor_tick(cost: float) -> str:
    """The text of a tick between powers of ten; only some have one, so that none overlap.

    >>> _minor_tick(20.0), _minor_tick(30.0), _minor_tick(0.5)
    ('20', '', '0.5')
    """
    first = f"{cost:e}"[0]
    return f"{cost:g}" if first in "25" else ""
