"""Arms of a comparison: a panel for each probe, a bar for each arm, references as lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harmonium.core.errors import ConfigError
from harmonium.report.figure import (
    COLOURS,
    INK,
    LINE,
    PALE,
    add_legend,
    brief_names,
    dress,
    headline,
    legend_rows,
    level_style,
    saved_figure,
)

Estimate = tuple[float, float | None]
"""A mean, and half the width of its interval; None where there is a single measurement."""

ACROSS = 3  # panels beside each other
PANEL = 1.75  # inches that a panel takes at least
PAGE = 7.0  # inches: the widest figure that a page of a paper has
CLOSE = 0.2  # of the largest value: arms that lie closer are drawn as dots on a part of the axis
MUTED = "#9db8c9"
MISSING = "no value"


def arms_plot(
    path: str | Path,
    arms: Mapping[str, Mapping[str, Estimate | None]],
    title: str = "",
    *,
    xlabel: str = "test accuracy (%)",
    references: Mapping[str, Mapping[str, float | None]] | None = None,
    interval: str = "",
    muted: Collection[str] = (),
    strong: Collection[str] = (),
    digits: int = 1,
) -> None:
    """Draw horizontal bars of arms, a panel for each probe, and vertical reference lines.

    Where all values of the plot are within a fifth of the largest one, arms are dots on a part of
    the axis instead: bars begin at 0, so short differences would not be seen.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        arms: name of an arm, from top to bottom, to probe (`kNN`, `linear`, ...) to `(mean, half)`,
            where half is half the width of its interval or None. None instead of a pair, or a
            probe that is left out, is a missing value and labelled so.
        title: what the plot shows.
        xlabel: what the bars measure; with `(%)` the axis ends at 100 at the latest.
        references: name of a reference (`untrained`, `raw pixels`, ...) to probe to level: a
            vertical line in the probe's panel, named in the legend.
        interval: what the intervals are, e.g. `95 % interval over 5 seeds`, for the legend.
        muted: arms in a pale colour, such as references that were trained (`centralised`).
        strong: arms in a second strong colour, such as the system that a plot is about.
        digits: decimals of the values.
    """
    probes = list(dict.fromkeys(probe for its in arms.values() for probe in its))
    values = [pair for its in arms.values() for one in its.values() if (pair := _value(one))]
    if not values:
        raise ConfigError("there is nothing to draw yet: no arm has a figure")
    levels = references or {}
    percent = "(%)" in xlabel
    known = [level for its in levels.values() for level in its.values() if level is not None]
    ends = [end for mean, half in values for end in _ends(mean, half, percent)] + known
    dots = min(ends) > 0 and max(ends) - min(ends) < CLOSE * max(ends)
    short = brief_names([*arms, *levels])
    names = [textwrap.fill(short[name], LINE) for name in arms]
    page = _page(names, len(probes), [*levels, interval])
    colours = [_colour(name, muted, strong) for name in arms]
    with saved_figure(path, page.width, page.height) as figure:
        grid = figure.subplots(page.down, page.across, squeeze=False, sharey=True).flatten()
        for axes, probe in zip(grid, probes, strict=False):
            figures = [_value(its.get(probe)) for its in arms.values()]
            _arms(axes, figures, colours, digits, dots, percent)
            _levels(axes, {short[name]: its.get(probe) for name, its in levels.items()})
            if interval and any(one is not None and one[1] for one in figures):
                axes.plot([], [], "_", color=INK, markersize=12, label=interval)
            dress(axes, xlabel, "")
            axes.set_title(textwrap.fill(probe, page.letters), loc="left", fontsize=9.5, color=INK)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.set_yticks(range(len(arms)), names)
            axes.set_ylim(len(arms) - 0.4, -0.6)  # the first arm on top
            _limit(axes, ends, percent, dots, digits)
        for axes in grid[len(probes) :]:
            axes.set_axis_off()
        headline(figure, title)
        add_legend(figure)


class _Page(NamedTuple):
    """How panels are laid out; sizes are in inches."""

    across: int
    down: int
    width: float
    height: float
    letters: int  # of a panel's title on one line


def _page(names: Sequence[str], panels: int, legend: Sequence[str]) -> _Page:
    """A layout with room for the names of arms at the left and for the legend below."""
    across = min(ACROSS, panels) if panels != 4 else 2
    down = math.ceil(panels / across)
    room = 0.2 + 0.068 * max(len(line) for name in names for line in name.split("\n"))
    width = min(PAGE, max(5.0, room + PANEL * across))
    deep = sum(1 + 0.6 * name.count("\n") for name in names)  # names of two lines are taller
    height = 0.75 + down * (0.55 + 0.25 * max(deep, 2)) + 0.17 * legend_rows(legend, width)
    return _Page(across, down, width, height, int((width - room) / across / 0.078))


def _levels(axes: Any, levels: Mapping[str, float | None]) -> None:
    """One panel's references as vertical lines."""
    for index, (name, level) in enumerate(levels.items()):
        if level is not None:
            style = level_style(index)
            axes.axvline(level, zorder=3, **style)
            axes.plot([], [], label=name, **style)


def _value(one: Estimate | None) -> Estimate | None:
    return one if one is not None and math.isfinite(one[0]) else None


def _ends(mean: float, half: float | None, percent: bool) -> tuple[float, float]:
    """Where an interval ends; no accuracy is below 0 or above 100."""
    low, high = mean - (half or 0.0), mean + (half or 0.0)
    return (max(low, 0.0), min(high, 100.0)) if percent else (low, high)


def _colour(name: str, muted: Collection[str], strong: Collection[str]) -> str:
    return COLOURS[1] if name in strong else MUTED if name in muted else COLOURS[0]


def _arms(
    axes: Any,
    figures: Sequence[Estimate | None],
    colours: Sequence[str],
    digits: int,
    dots: bool,
    percent: bool,
) -> None:
    """One panel's bars or dots, each with its interval and its value."""
    for place, (one, colour) in enumerate(zip(figures, colours, strict=True)):
        if one is None:
            axes.annotate(
                MISSING, (0.02, place), xycoords=("axes fraction", "data"), va="center",
                fontsize=7.5, color=PALE, style="italic", zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
            continue
        mean, half = one
        if dots:
            axes.plot(mean, place, "o", color=colour, markersize=5.5, zorder=5)
        else:
            axes.barh(place, mean, 0.68, color=colour, zorder=2)
        left, right = _ends(mean, half, percent)
        if half:
            sides = [[mean - left], [right - mean]]
            axes.errorbar(mean, place, xerr=sides, color=INK, linewidth=1, capsize=2.5, zorder=4)
        axes.annotate(
            f"{mean:.{digits}f}", (max(right, 0.0), place), (4, 0), va="center",
            textcoords="offset points", fontsize=8, color=INK, zorder=6, annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip


def _limit(axes: Any, ends: Sequence[float], percent: bool, dots: bool, digits: int) -> None:
    """The same axis in every panel, with room for the values; accuracies end at 100."""
    from matplotlib.ticker import MaxNLocator

    low, high = (min(ends), max(ends)) if dots else (min(0.0, *ends), max(0.0, *ends))
    size = (high - low) or abs(high) or 1.0
    room = 0.22 + 0.05 * digits  # of the axis, for the value beside the longest bar
    axes.set_xlim(low - (0.08 * size if dots or low < 0 else 0.0), high + room * size)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.ticklabel_format(axis="x", useOffset=False)
    if percent:  # the room for values beyond 100 is no accuracy
        left, right = axes.get_xlim()
        axes.set_xticks([tick for tick in axes.get_xticks() if left <= tick <= min(right, 100)])
        axes.set_xlim(left, right)
