"""Curves over rounds, grouped bars, and one run at a glance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core.errors import ConfigError
from harmonium.report.figure import (
    COLOURS,
    COLUMN,
    DASHES,
    HATCHES,
    INK,
    MARKERS,
    PALE,
    WIDTH,
    add_legend,
    brief_names,
    dress,
    headline,
    legend_rows,
    level_style,
    saved_figure,
    short,
    whole_numbers,
    wrapped,
)

BANDS = 5  # lines up to which each has its band; of more, only the last intervals are drawn
FAR = (10.0, 25.0)  # percentage points: references that far from all lines are named, not drawn

KNN = "validation kNN (%)"  # the panel of a run that has reference lines
BYTES = "bytes sent so far"

Point = tuple[float, ...]


def curves(
    path: str | Path,
    series: Mapping[str, Sequence[Point]],
    xlabel: str,
    ylabel: str,
    title: str,
    references: Mapping[str, float] | None = None,
    ticks: Sequence[str] | None = None,
    interval: str = "",
) -> None:
    """Lines over rounds with their intervals and horizontal reference lines, named in a legend.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        series: name to points `(x, y)`, or `(x, y, half)` for an interval from `y - half` to
            `y + half`. A y that is not finite interrupts its line.
        xlabel: name of the x axis.
        ylabel: name of the y axis; with `(%)` it stays between 0 and 100.
        title: what the plot shows.
        references: name to level, such as an untrained encoder or centralised training. Levels far
            from every line are named with their value in the legend, so that lines keep the room.
        ticks: names of the places 0, 1, ... on the x axis, where those are no numbers.
        interval: what the intervals are, e.g. `mean and 95 % interval over 5 seeds`.
    """
    shown = {name: points for name, points in series.items() if any(map(_finite, points))}
    levels = {k: level for k, level in (references or {}).items() if math.isfinite(level)}
    names = brief_names([*shown, *levels])
    percent = "(%)" in ylabel
    below = [names[k] for k in shown] + [f"{names[k]} (00.0 %), below" for k in levels]
    rows = legend_rows([*below, interval], COLUMN)
    has_bars = any(len(point) > 2 and point[2] > 0 for points in shown.values() for point in points)
    few = len(shown) <= BANDS
    beside = has_bars and not few  # so many bands would hide each other
    with saved_figure(path, COLUMN, 2.9 + 0.17 * rows) as figure:
        axes, *side = figure.subplots(
            1, 1 + beside, squeeze=False, sharey=True, width_ratios=[1, 0.2][: 1 + beside]
        )[0]
        for index, (name, points) in enumerate(shown.items()):
            _line(axes, index, wrapped(names[name]), points, band=few, percent=percent)
            for panel in side:
                _end(panel, index, points)
        named = {names[name]: level for name, level in levels.items()}
        _levels((axes, *side), named, percent, alone=not shown)
        headline(figure, title)
        dress(axes, xlabel, ylabel)
        whole_numbers(axes)
        axes.ticklabel_format(axis="y", useOffset=False)
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), list(ticks))
        for panel in side:
            _dress_end(panel)
        if has_bars and interval:
            _name_interval(axes, wrapped(interval), as_band=few)
        add_legend(figure)


def _dress_end(panel: Any) -> None:
    """The panel of last values, which has no ticks of its own."""
    dress(panel, "at the end", "")
    panel.set_xticks([])
    panel.tick_params(axis="y", length=0, labelleft=False)
    panel.margins(x=0.08)


def _name_interval(axes: Any, name: str, *, as_band: bool) -> None:
    """An entry of the legend that says what the intervals are."""
    if as_band:
        axes.fill_between([], [], color=PALE, alpha=0.3, linewidth=0, label=name)
    else:
        axes.plot([], [], color=PALE, label=name, marker="|", linestyle="none", markersize=10)


def _levels(
    panels: Sequence[Any], levels: Mapping[str, float], percent: bool, *, alone: bool = False
) -> None:
    """Reference lines across panels with one y axis, which the first one names with their values.

    Those that are far from all other lines are named only, unless there are none (`alone`).
    """
    axes = panels[0]
    low, high = bottom, top = axes.get_ylim()
    beyond = min(max(high - low, FAR[0]), FAR[1]) if percent else high - low
    digits = 1 if percent or any(abs(level) >= 1 for level in levels.values()) else 3
    for index, (name, level) in enumerate(levels.items()):
        style = level_style(index)
        near = alone or low - beyond <= level <= high + beyond
        where = "" if near else ", below" if level < low else ", above"
        value = f"{level:.{digits}f}{' %' if percent else ''}"
        axes.plot([], [], label=wrapped(f"{name} ({value}){where}"), **style)
        for panel in panels if near else ():
            panel.axhline(level, zorder=2, **style)
            margin = 0.04 * (high - low)
            bottom, top = min(bottom, level - margin), max(top, level + margin)
    axes.set_ylim(*(_shares(bottom, top) if percent else (bottom, top)))


def _end(axes: Any, index: int, points: Sequence[Point]) -> None:
    """The last value of a line with its interval, in a column of its own."""
    point = [one for one in points if _finite(one)][-1]
    axes.errorbar(
        index, point[1], yerr=point[2] if len(point) > 2 else None, linewidth=1.2,
        color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], markersize=4,
    )  # fmt: skip


def _finite(point: Point) -> bool:
    return all(map(math.isfinite, point[:2]))


def _shares(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis of percentages: hardly beyond 0 and 100, and no closer than noise is.

    >>> _shares(-40.0, 50.0), _shares(90.0, 90.2)
    ((-2.0, 50.0), (89.6, 90.6))
    """
    if high - low < NARROW:
        low, high = (low + high - NARROW) / 2, (low + high + NARROW) / 2
    return max(low, -2.0), min(high, 102.0)


NARROW = 1.0  # percentage points that an axis has at least


def bars(
    path: str | Path,
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]],
    ylabel: str,
    title: str,
    interval: str = "",
) -> None:
    """Grouped bars with their values: one group a method, one colour a probe.

    The bars lie, so that method names and values stay readable however many there are.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        groups: group to bar to `(mean, half)`, an interval of the mean or None. Groups may lack
            bars.
        ylabel: what the bars measure.
        title: what the plot shows.
        interval: what the intervals are, for the legend.
    """
    kinds = list(dict.fromkeys(kind for group in groups.values() for kind in group))
    names = brief_names(list(groups))
    thick = 0.8 / max(1, len(kinds))
    height = 1.25 + 0.21 * len(groups) * max(len(kinds), 1.6)
    with saved_figure(path, WIDTH, height) as figure:
        axes = figure.add_subplot()
        for i, kind in enumerate(kinds):
            offset = (i - (len(kinds) - 1) / 2) * thick
            values = {
                y + offset: group[kind] for y, group in enumerate(groups.values()) if kind in group
            }
            _bars_of_kind(axes, i, kind, values, thick)
        axes.set_yticks(range(len(groups)), list(names.values()))
        axes.set_ylim(len(groups) - 0.45, -0.55)  # the first group on top
        axes.margins(x=0.09)
        headline(figure, title)
        dress(axes, ylabel, "")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if interval and any(error for bars in groups.values() for _, error in bars.values()):
            axes.plot([], [], "_", color=INK, markersize=12, label=interval)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            add_legend(figure)


def _bars_of_kind(
    axes: Any,
    index: int,
    kind: str,
    values: Mapping[float, tuple[float, float | None]],
    thick: float,
) -> None:
    """The bars of one colour at their places, with intervals and values."""
    means = [mean for mean, _ in values.values()]
    axes.barh(
        list(values), means, thick * 0.88, color=COLOURS[index % len(COLOURS)], label=kind,
        zorder=2, hatch=HATCHES[index % len(HATCHES)], edgecolor="white", linewidth=0,
    )  # fmt: skip
    for place, (mean, half) in values.items():
        error = half or 0.0
        if error:
            axes.errorbar(mean, place, xerr=error, color=INK, linewidth=1, capsize=2.5)
        axes.annotate(
            short(mean), (max(mean, 0) + error, place), (4, 0), va="center",
            textcoords="offset points", fontsize=8, color=INK,
        )  # fmt: skip


def plot_run(
    path: str | Path,
    metrics: Sequence[Mapping[str, Any]],
    title: str = "",
    levels: Mapping[str, float] | None = None,
) -> None:
    """One run at a glance: kNN, loss, geometry and traffic over rounds.

    Args:
        path: where to, `.png`, `.pdf` or `.svg`.
        metrics: one mapping a round with `round` and any of `knn`, `loss`, `bytes` (or `bytes_up`
            and `bytes_down`), `uniformity`, `alignment`, `effective_rank`, `spread`; the last four
            may also stand inside `health`; bounds of information inside `bounds`, the global
            objective inside `global_objective`. Rounds without a figure are skipped in its panel,
            and panels without figures are left out.
        title: name of the run.
        levels: name of a reference to its validation kNN, a share: a line in the panel of kNN.
    """
    panels = _run_panels(metrics)
    if not panels:
        raise ConfigError("there is nothing to draw yet: the run has no figures for any round")
    across = min(3, len(panels)) if len(panels) != 4 else 2
    down = math.ceil(len(panels) / across)
    width = max(3.6, 2.4 * across)
    beside = {name: 100 * level for name, level in (levels or {}).items()} if KNN in panels else {}
    below = legend_rows(["encoder", *(f"{name} (00.0 %), below" for name in beside)], width)
    height = 0.4 + 2.15 * down + (0.17 * below if beside else 0.0)
    with saved_figure(path, width, height) as figure:
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for place, (axes, (name, lines)) in enumerate(
            zip(grid[: len(panels)], panels.items(), strict=True)
        ):
            _run_panel(axes, name, lines, "round" if place >= len(panels) - across else "")
            if name == KNN and beside:
                _levels([axes], beside, percent=True)
                add_legend(figure, [axes])
        headline(figure, title)


def _run_panels(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Point]]]:
    """The panels of a run that have figures, by title: the points of each line by its name."""
    rows = [{**row, **(row.get("health") or {}), **(row.get("bounds") or {})} for row in metrics]
    overall = [{"round": row["round"], **(row.get("global_objective") or {})} for row in metrics]
    bounds = {"all clients": "total", "within a client": "local", "client": "client"}
    objectives = {"all clients": "value", "mean of clients": "local"}
    panels = {
        KNN: _columns(rows, {"encoder": "knn"}, 100),
        "training loss": _columns(rows, {"loss": "loss"}),
        "uniformity (lower is wider)": _columns(rows, {"uniformity": "uniformity"}),
        "alignment (lower is closer)": _columns(rows, {"alignment": "alignment"}),
        "effective rank": _columns(rows, {"effective rank": "effective_rank"}),
        "bounds of information (nats)": _columns(rows, bounds),
        "global objective": _columns(overall, objectives),
        "its gradient norm": _columns(overall, {"gradient norm": "gradient_norm"}),
        BYTES: _traffic(rows),
    }
    return {name: lines for name, lines in panels.items() if lines}


def _run_panel(axes: Any, name: str, lines: Mapping[str, Sequence[Point]], xlabel: str) -> None:
    """One panel of a run: its lines, title and axes."""
    for index, (line, points) in enumerate(lines.items()):
        _line(axes, index, line, points, size=3.5 if len(points) <= 15 else 0.0)
    dress(axes, xlabel, "")
    axes.set_title(name, loc="left", fontsize=9.5, color=INK)
    axes.tick_params(labelsize=8)
    whole_numbers(axes)
    if name == BYTES:
        axes.yaxis.set_major_formatter(_size_text)
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        where = "upper left" if name == BYTES else "best"
        axes.legend(frameon=False, fontsize=8, loc=where)


def _line(
    axes: Any,
    index: int,
    name: str,
    points: Sequence[Point],
    size: float = 5.0,
    *,
    band: bool = True,
    percent: bool = False,
) -> None:
    """Draw one series, with its intervals as a band."""
    placed = [point for point in points if math.isfinite(point[0])]
    if not any(map(_finite, placed)):
        return
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    x = [point[0] for point in placed]
    y = [point[1] if math.isfinite(point[1]) else math.nan for point in placed]
    whole = len(list(filter(_finite, placed))) == len(placed)
    step = max(1, len(placed) // 12) if whole else 1  # too many markers hide the line
    marked = sorted({*range(0, len(placed), step), len(placed) - 1})
    size = size or (4.0 if len(placed) == 1 else 0.0)
    axes.plot(
        x, y, color=colour, marker=marker, markersize=size, markevery=marked, linewidth=1.6,
        linestyle=DASHES[index // 4 % len(DASHES)], label=name, zorder=3 + 0.01 * index,
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    halves = [point[2] if len(point) > 2 else 0.0 for point in placed]
    if band and any(half > 0 for half in halves):
        _band(axes, x, y, halves, colour, percent=percent)


def _band(
    axes: Any,
    x: Sequence[float],
    y: Sequence[float],
    halves: Sequence[float],
    colour: str,
    *,
    percent: bool,
) -> None:
    """The intervals of a line as a band; of a point without neighbours, as a bar."""
    low, high = np.subtract(y, halves), np.add(y, halves)
    if percent:  # no accuracy is beyond these
        low, high = np.maximum(low, 0.0), np.minimum(high, 100.0)
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    for place, level, half, alone in zip(x, y, halves, _alone(y), strict=True):
        if alone and half > 0:  # a band has no width here
            axes.errorbar(place, level, yerr=half, color=colour, linewidth=1, capsize=2.5)


def _alone(y: Sequence[float]) -> list[bool]:
    """Which values have neither a value before nor one after them.

    >>> _alone([1.0, 2.0, math.nan, 3.0])
    [False, False, False, True]
    """
    known = [False, *map(math.isfinite, y), False]
    return [known[n] and not known[n - 1] and not known[n + 1] for n in range(1, len(known) - 1)]


def _columns(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], scale: float = 1.0
) -> dict[str, list[Point]]:
    """Points `(round, scaled figure)` of each named key that any row holds."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        for name, key in names.items():
            if row.get(key) is not None:
                points.setdefault(name, []).append((float(row["round"]), scale * row[key]))
    return points


def _traffic(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Bytes summed over rounds, up and down apart where they are known apart and differ."""
    lines = _columns(rows, {"up": "bytes_up", "down": "bytes_down"})
    lines = lines or _columns(rows, {"both ways": "bytes"})
    for points in lines.values():
        totals = np.cumsum([size for _, size in points])
        points[:] = [
            (place, float(total)) for (place, _), total in zip(points, totals, strict=True)
        ]
    ends = [points[-1][1] for points in lines.values()]
    if len(ends) == 2 and math.isclose(*ends, rel_tol=0.01):  # one line would hide the other
        return {"up, and as much down": lines["up"]}
    return lines


def _size_text(size: float, _: object = None) -> str:
    """Bytes in words: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
