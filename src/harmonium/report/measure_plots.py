"""Images of measures: boxes and strips of runs side by side, and maps of images by class."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harmonium.data.images import UNKNOWN
from harmonium.report.figure import COLOURS, INK, PALE, WIDTH, dress, headline, saved_figure

LISTED = 20  # classes up to which a legend names all of them
ACROSS = 3  # maps beside each other


class Strip(NamedTuple):
    """A dot a client."""

    values: Sequence[float]
    groups: Sequence[str]  # of each; empty where it has none
    mean: float
    hollow: Sequence[bool] = ()  # dots to set apart; none: all are filled


class Panel(NamedTuple):
    """One map."""

    places: np.ndarray  # (n, 2)
    labels: np.ndarray  # (n,), -1 where unknown
    names: Sequence[str]  # of the classes
    own: Collection[int]  # classes to emphasise


def boxes(
    path: str | Path,
    groups: Mapping[str, np.ndarray],
    ylabel: str,
    title: str,
    references: Mapping[str, float] | None = None,
    reference: str = "reference",
) -> None:
    """Quartiles of each group as a box, with whiskers from 5 to 95 percent and the mean as a dot.

    The boxes lie, so that names stay readable however many there are.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        groups: name to values `(n,)`.
        ylabel: what the values are.
        title: what the plot shows.
        references: name of a group to a level that gives its values a meaning, a grey cross.
        reference: what that level is.
    """
    with saved_figure(path, WIDTH, 1.3 + 0.45 * len(groups) + (0.2 if references else 0)) as figure:
        axes = figure.add_subplot()
        headline(figure, title)
        dress(axes, f"{ylabel}; whiskers from 5 to 95 percent, a dot at the mean", "")
        for place, values in enumerate(groups.values()):
            _box(axes, place, values, COLOURS[place % len(COLOURS)])
        if references:
            levels, places = zip(*((references[k], n) for n, k in enumerate(groups)), strict=True)
            axes.plot(levels, places, "X", color=PALE, markersize=7, zorder=7, label=reference)
            figure.legend(loc="outside lower left", frameon=False, fontsize=9)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.set_ylim(len(groups) - 0.5, -0.5)  # the first group on top
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)


def _box(axes: Any, place: int, values: np.ndarray, colour: str) -> None:
    low, first, middle, third, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
    axes.plot([low, high], [place, place], color=colour, linewidth=1.4, zorder=2)
    for end in (low, high):
        axes.plot([end, end], [place - 0.12, place + 0.12], color=colour, linewidth=1.4, zorder=2)
    axes.barh(place, third - first, 0.5, first, color=colour, alpha=0.35, zorder=3)
    axes.barh(place, third - first, 0.5, first, color="none", edgecolor=colour, zorder=4)
    axes.plot([middle, middle], [place - 0.25, place + 0.25], color=INK, linewidth=1.6, zorder=5)
    axes.plot(values.mean(), place, "o", color="white", markeredgecolor=INK, markersize=5, zorder=6)


def strips(
    path: str | Path, rows: Mapping[str, Strip], xlabel: str, title: str, apart: str = ""
) -> None:
    """Dots of every row on a line of its own, coloured by group, with a bar at their mean.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        rows: name to dots, the first on top.
        xlabel: what the values are.
        title: what the plot shows.
        apart: what hollow dots are.
    """
    groups = sorted({group for row in rows.values() for group in row.groups if group})
    hollow = any(any(row.hollow) for row in rows.values())
    legend = bool(groups or hollow)
    with saved_figure(path, WIDTH, 1.3 + 0.5 * len(rows) + (0.3 if legend else 0)) as figure:
        axes = figure.add_subplot()
        headline(figure, title)
        dress(axes, xlabel, "")
        for place, row in enumerate(rows.values()):
            _dots(axes, place, row, groups)
        handles = [_dot(axes, name, _colour(number), False) for number, name in enumerate(groups)]
        handles += [_dot(axes, apart, INK, True)] if hollow else []
        if legend:
            figure.legend(
                handles=handles, loc="outside lower left", ncols=min(5, len(handles)),
                frameon=False, fontsize=8.5,
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)


def _dots(axes: Any, place: int, row: Strip, groups: Sequence[str]) -> None:
    """One strip; dots go up and down in turn, so that equal ones stay apart."""
    lifts = place + 0.22 * (np.arange(len(row.values)) % 5 - 2) / 2
    for number, (value, lift) in enumerate(zip(row.values, lifts, strict=True)):
        group = row.groups[number]
        colour = _colour(groups.index(group)) if group else COLOURS[0]
        hollow = bool(row.hollow) and row.hollow[number]
        axes.plot(
            value, lift, "o", markersize=5, markeredgecolor=colour, alpha=0.8,
            color="white" if hollow else colour, zorder=4 if hollow else 3,
        )  # fmt: skip
    axes.plot([row.mean] * 2, [place - 0.34, place + 0.34], color=INK, linewidth=1.8, zorder=5)


def _dot(axes: Any, name: str, colour: Any, hollow: bool) -> Any:
    """A dot for the legend, nowhere in the image."""
    inner = "white" if hollow else colour
    return axes.plot([], [], "o", markersize=5, color=inner, markeredgecolor=colour, label=name)[0]


def maps(path: str | Path, panels: Mapping[str, Panel], title: str) -> None:
    """Points coloured by class, side by side; classes to emphasise are larger and ringed.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        panels: name to map.
        title: what the plot shows.
    """
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    side = 4.6 if across == 1 else 3.6
    with saved_figure(path, max(5.6, side * across), 1.0 + side * down) as figure:
        headline(figure, title)
        grid = figure.subplots(down, across, squeeze=False).flatten()
        named: dict[str, Any] = {}
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (name, panel) in zip(grid, panels.items(), strict=False):
            named |= _points(axes, panel)
            axes.set_title(name, loc="left", fontsize=9.5, color=INK)
            axes.set_xticks([])
            axes.set_yticks([])
            low, high = panel.places.min(0), panel.places.max(0)
            half = 0.53 * max(*(high - low), 1e-9)  # a square, so that both ways measure alike
            right, up = (low + high) / 2
            axes.set_xlim(right - half, right + half)
            axes.set_ylim(up - half, up + half)
            axes.set_box_aspect(1)
            axes.spines[:].set_color("#c9c9c9")
        if named:
            wide = 0.45 + 0.066 * max(map(len, named))  # inches that an entry takes, about
            most = max(1, int(figure.get_figwidth() / wide))
            figure.legend(
                named.values(), named, loc="outside lower center", ncols=min(6, most, len(named)),
                frameon=False, fontsize=8.5,
            )  # fmt: skip


def _points(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw one map, the others first; gives what the legend names."""
    classes = [int(value) for value in np.unique(panel.labels)]
    named: dict[str, Any] = {}
    for value in sorted(classes, key=lambda value: (value in panel.own, value)):
        own, known = value in panel.own, value != UNKNOWN
        rows = panel.labels == value
        drawn = axes.scatter(
            *panel.places[rows].T,
            s=20 if own else 9,
            color=_colour(value) if known else PALE,
            alpha=0.95 if own else 0.35 if panel.own else 0.75,
            linewidths=0.6 if own else 0,
            edgecolors=INK if own else "none",
            zorder=3 if own else 2,
        )
        if known and (own or len(classes) <= LISTED):
            named[f"{panel.names[value]} (own)" if own else panel.names[value]] = drawn
    return dict(sorted(named.items(), key=lambda item: not item[0].endswith("(own)")))


def _colour(value: int) -> Any:
    """The colour of a class: first Okabe and Ito's, then a colour map for many classes."""
    if value < len(COLOURS):
        return COLOURS[value]
    from matplotlib import colormaps

    return colormaps["tab20"](value * 7 % 20)
