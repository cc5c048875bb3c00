"""Pictures of runs: curves over rounds, bars of methods, and one run at a glance.

PNG or SVG by the ending of the path; the same input gives the same bytes (no dates inside). Each
function makes its own Figure, so nothing leaks between pictures or into a notebook.
Colours are Okabe and Ito's, told apart with colour-blind eyes; lines differ by marker as well.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.errors import ConfigError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C564B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one fewer than colours: 56 lines differ
INK, PALE, GRID = "#222222", "#6b6b6b", "#e3e3e3"
DPI = 140  # 7.2 inches wide make a picture of about 1000 pixels
WIDTH = 7.2
LONG = 44  # letters of a name; of a longer one both ends are shown

Point = tuple[float, ...]


Label = tuple[float | None, float, str, str]
"""Where a line ends (nowhere: at the edge), how high, its name and its colour."""


def curves(
    path: str | Path,
    series: Mapping[str, Sequence[Point]],
    xlabel: str,
    ylabel: str,
    title: str,
    references: Mapping[str, float] | None = None,
    ticks: Sequence[str] | None = None,
) -> None:
    """Lines over rounds, each named at its right end, with dashed reference levels.

    Args:
        path: where to, `.png` or `.svg`.
        series: name to points `(x, y)`, or `(x, y, standard error)` for a shaded band. Points that
            are not finite are left out.
        xlabel: name of the x axis.
        ylabel: name of the y axis.
        title: what the picture shows.
        references: name to level, such as an untrained encoder or centralised training.
        ticks: names of the places 0, 1, ... on the x axis, where those are no numbers.
    """
    with picture(path, WIDTH, 4.1) as figure:
        axes = figure.add_subplot()
        labels = [_line(axes, i, name, points) for i, (name, points) in enumerate(series.items())]
        for name, level in (references or {}).items():
            axes.axhline(level, color=PALE, linewidth=1.1, dashes=(5, 3), zorder=1)
            labels.append((None, level, name, PALE))
        headline(figure, title)
        dress(axes, xlabel, ylabel)
        whole_numbers(axes)
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), list(ticks))
        places = [point[0] for points in series.values() for point in points]
        if places and min(places) < max(places):
            axes.set_xlim(right=max(places))  # lines end at the edge, beside their names
        _end_labels(figure, axes, [label for label in labels if label is not None])


def bars(
    path: str | Path,
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]],
    ylabel: str,
    title: str,
) -> None:
    """Grouped bars with their values: one group a method, one colour a probe.

    The bars lie, so that method names and values stay readable however many there are.

    Args:
        path: where to, `.png` or `.svg`.
        groups: group to bar to `(mean, standard error)`; the error may be None. Groups may lack
            bars.
        ylabel: what the bars measure.
        title: what the picture shows.
    """
    kinds = list(dict.fromkeys(kind for group in groups.values() for kind in group))
    thick = 0.8 / max(1, len(kinds))
    height = 1.25 + 0.21 * len(groups) * max(len(kinds), 1.6)
    with picture(path, WIDTH, height) as figure:
        axes = figure.add_subplot()
        for i, kind in enumerate(kinds):
            rows = [(y, group[kind]) for y, group in enumerate(groups.values()) if kind in group]
            places = [y + (i - (len(kinds) - 1) / 2) * thick for y, _ in rows]
            means = [mean for _, (mean, _) in rows]
            errors = [error or 0.0 for _, (_, error) in rows]
            colour = COLOURS[i % len(COLOURS)]
            axes.barh(places, means, thick * 0.88, color=colour, label=kind, zorder=2)
            for place, mean, error in zip(places, means, errors, strict=True):
                if error:
                    axes.errorbar(mean, place, xerr=error, color=INK, linewidth=1, capsize=2.5)
                axes.annotate(
                    _short(mean), (max(mean, 0) + error, place), (4, 0), va="center",
                    textcoords="offset points", fontsize=8, color=INK,
                )  # fmt: skip
        axes.set_yticks(range(len(groups)), [_brief(name) for name in groups])
        axes.set_ylim(len(groups) - 0.45, -0.55)  # the first group on top
        axes.margins(x=0.09)
        headline(figure, title)
        dress(axes, ylabel, "")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if len(kinds) > 1:
            figure.legend(
                loc="outside lower center", ncols=min(5, len(kinds)), frameon=False, fontsize=9
            )


def run_picture(
    path: str | Path,
    metrics: Sequence[Mapping[str, Any]],
    title: str = "",
) -> None:
    """One run at a glance: kNN, loss, geometry and traffic over rounds.

    Args:
        path: where to, `.png` or `.svg`.
        metrics: one mapping a round with `round` and any of `knn`, `loss`, `bytes` (or `bytes_up`
            and `bytes_down`), `uniformity`, `alignment`, `effective_rank`, `spread`; the last four
            may also stand inside `health`; bounds of information inside `bounds`. Rounds without a
            figure are skipped in its panel, and panels without figures are left out.
        title: name of the run.
    """
    rows = [{**row, **(row.get("health") or {}), **(row.get("bounds") or {})} for row in metrics]
    bounds = {"all clients": "total", "within a client": "local", "client": "client"}
    panels: list[tuple[str, dict[str, list[Point]]]] = [
        ("validation kNN (%)", _columns(rows, {"kNN": "knn"}, 100)),
        ("training loss", _columns(rows, {"loss": "loss"})),
        ("uniformity (lower is wider)", _columns(rows, {"uniformity": "uniformity"})),
        ("alignment (lower is closer)", _columns(rows, {"alignment": "alignment"})),
        ("effective rank", _columns(rows, {"effective rank": "effective_rank"})),
        ("bounds of information (nats)", _columns(rows, bounds)),
        ("bytes sent so far", _traffic(rows)),
    ]
    panels = [(name, lines) for name, lines in panels if lines]
    if not panels:
        raise ConfigError("there is nothing to draw yet: the run has no figures for any round")
    across = min(3, len(panels)) if len(panels) != 4 else 2
    down = math.ceil(len(panels) / across)
    with picture(path, max(3.6, 2.4 * across), 0.4 + 2.15 * down) as figure:
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for place, axes in enumerate(grid):
            if place >= len(panels):
                axes.set_axis_off()
                continue
            name, lines = panels[place]
            for i, (line, points) in enumerate(lines.items()):
                _line(axes, i, line, points, size=3.5 if len(points) <= 15 else 0.0)
            dress(axes, "round" if place >= len(panels) - across else "", "")
            axes.set_title(name, loc="left", fontsize=9.5, color=INK)
            axes.tick_params(labelsize=8)
            whole_numbers(axes)
            if name.startswith("bytes"):
                axes.yaxis.set_major_formatter(_size_text)
                axes.set_ylim(bottom=0)
            if len(lines) > 1:
                where = "upper left" if name.startswith("bytes") else "best"
                axes.legend(frameon=False, fontsize=8, loc=where)
        headline(figure, title)


def picture_kind(path: str | Path) -> str:
    """`png` or `svg`, by the ending of the path."""
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"a picture is written as .png or .svg, not '{Path(path).name}'")
    return kind


@contextmanager
def picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """A figure that is written to `path` when the block ends well."""
    path, kind = Path(path), picture_kind(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from harmonium.store import write_atomic

    # The salt fixes the ids inside an SVG; text stays text, so that it can be searched.
    settings: Any = {
        "svg.hashsalt": "harmonium",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(settings):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        figure = Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        drawn = io.BytesIO()
        undated = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(drawn, format=kind, metadata=undated)
    write_atomic(path, drawn.getvalue())


def _line(
    axes: Any, index: int, name: str, points: Sequence[Point], size: float = 5.0
) -> Label | None:
    """Draw one series; gives what its name needs, None if nothing was drawn."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    kept = [point for point in points if all(map(math.isfinite, point[:2]))]
    if not kept:
        return None
    x, y = [point[0] for point in kept], [point[1] for point in kept]
    every = max(1, len(kept) // 12)  # markers tell lines apart; too many hide them
    size = size or (4.0 if len(kept) == 1 else 0.0)
    axes.plot(
        x, y, color=colour, marker=marker, markersize=size, markevery=every, linewidth=1.7,
        label=name, zorder=3, markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    errors = [point[2] if len(point) > 2 else 0.0 for point in kept]
    if any(errors):
        low, high = np.subtract(y, errors), np.add(y, errors)
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    return x[-1], y[-1], name, colour


def _brief(name: str) -> str:
    """A name that leaves room for the picture.

    >>> _brief("fedavg objective.norm=none privacy.epsilon=2.5 privacy.noise=simulated")
    'fedavg objective.norm=n … cy.noise=simulated'
    """
    return name if len(name) <= LONG else f"{name[:23]} … {name[-18:]}"


def _end_labels(figure: Any, axes: Any, labels: Sequence[Label]) -> None:
    """Names in the right margin, led to by the lines' ends, pushed apart where they meet."""
    if not labels:
        return
    low, high = axes.get_ylim()
    figure.draw_without_rendering()  # the axes' height in points is known only after the layout
    points_high = axes.get_window_extent().height * 72 / figure.dpi
    order = sorted(labels, key=lambda label: label[1])
    wanted = [(level - low) / (high - low) for _, level, _, _ in order]
    edge = axes.get_xlim()[1]
    for place, (end, level, name, colour) in zip(
        _apart(wanted, 12.5 / points_high), order, strict=True
    ):
        axes.annotate(
            _brief(name), (edge if end is None else end, level), (1.028, place), xycoords="data",
            textcoords="axes fraction", va="center", fontsize=9, color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "alpha": 0.6,
                        "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places near the sorted `wanted` in [0, 1], neighbours at least `gap` apart.

    Labels that would meet form a block around their mean; blocks that then meet are joined.
    """
    blocks: list[tuple[list[float], float]] = []  # members' wishes, and the block's centre
    for wish in wanted:
        members, centre = [wish], wish
        while blocks and centre - blocks[-1][1] < gap * (len(blocks[-1][0]) + len(members)) / 2:
            members = blocks.pop()[0] + members
            half = min(0.5, gap * (len(members) - 1) / 2)
            centre = max(half, min(sum(members) / len(members), 1 - half))
        blocks.append((members, centre))
    return [
        centre + gap * (i - (len(members) - 1) / 2)
        for members, centre in blocks
        for i in range(len(members))
    ]


def headline(figure: Any, title: str) -> None:
    """The title at the left edge, on as many lines as it needs."""
    if title:
        lines = textwrap.fill(title, int(10 * figure.get_figwidth()))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK)


def dress(axes: Any, xlabel: str, ylabel: str) -> None:
    """The common look: no box, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9a9a9a")
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=PALE, labelcolor=INK, labelsize=9)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)


def whole_numbers(axes: Any) -> None:
    """Rounds and clients are counted, so no ticks between whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))


def _columns(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], scale: float = 1.0
) -> dict[str, list[Point]]:
    """Points `(round, scaled figure)` of each named key that any row holds."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, key in names.items():
            if row.get(key) is not None:
                found.setdefault(name, []).append((float(row["round"]), scale * row[key]))
    return found


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


def _short(value: float) -> str:
    """A bar's value in about three figures."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"
