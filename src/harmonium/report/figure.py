"""The writer of every plot, and what plots have in common: colours, sizes, titles, legends, names.

The ending of the path sets the format, PNG, PDF or SVG; inside a `formats` block, plots are written
in all of its formats. The same input gives the same bytes (no dates inside). Text stays text in PDF
and SVG. A PDF is for papers, whose captions carry the title, so it has none. Each plot has its own
Figure, so nothing leaks between plots or into a notebook. Colours are Okabe and Ito's, which
colour-blind readers can tell apart; lines differ by marker and dashes as well.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from harmonium.core.errors import ConfigError

FORMATS = ("png", "pdf", "svg")
BY_DEFAULT = FORMATS  # of studies: comparisons, sweeps, tuning, evaluations
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#8C564B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one fewer than colours: 56 lines differ
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (2, 1)))
HATCHES = ("", "////", "....", "xxxx")  # of bars, for prints without colours
LEVEL_DASHES: tuple[Any, ...] = (  # of reference lines, which have no markers
    (0, (6, 3)),
    (0, (1.2, 1.8)),
    (0, (6, 2, 1.2, 2)),
    (0, (3, 2)),
    (0, (10, 3)),
    (0, (6, 2, 1.2, 2, 1.2, 2)),
)
LEVEL_COLOURS = ("#222222", "#6b6b6b", "#8C564B")
INK, PALE, GRID = "#222222", "#6b6b6b", "#e3e3e3"
WIDTH = 7.2  # inches: the width of a page
COLUMN = 5.0  # inches: nine-point text is still six points when set in a column of 3.3 inches
HEADLINE = "headline"  # the mark of a title among a figure's texts
PIXELS = 1008  # of a PNG's width at least, whatever its inches
LONG = 44  # letters of a name; of a longer one both ends are shown
LINE = 24  # letters of a name in a legend that stay on one line
UNDATED = {  # what would differ from day to day, or from one version of matplotlib to the next
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
    "svg": ("Date", "Creator"),
}

_chosen: ContextVar[tuple[str, ...] | None] = ContextVar("formats", default=None)
_plots: ContextVar[bool] = ContextVar("plots", default=True)


@contextmanager
def saved_figure(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """A figure that is written to `path` when the block ends well, in the chosen formats."""
    paths = plot_paths(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from harmonium.core.files import write_atomic

    # The salt fixes the ids inside an SVG. Text stays text, so that it can be searched and edited;
    # names are no formulas, whatever dollars are in them.
    settings: Any = {
        "svg.hashsalt": "harmonium",
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "font.family": "DejaVu Sans",
        "text.parse_math": False,
    }
    contents: dict[Path, bytes] = {}
    with matplotlib.rc_context(settings):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        dpi = max(140.0, PIXELS / width)
        figure = Figure(figsize=(width, height), dpi=dpi, layout=layout, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        for one in paths:
            kind = one.suffix.lstrip(".")
            for text in figure.texts:
                if text.get_gid() == HEADLINE:
                    text.set_visible(kind != "pdf")
                    text.set_in_layout(kind != "pdf")
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=dict.fromkeys(UNDATED[kind]))
            contents[one] = buffer.getvalue()
    for one, content in contents.items():
        write_atomic(one, content)


@contextmanager
def formats(chosen: str | Sequence[str] | None) -> Iterator[None]:
    """Inside the block every plot is written in these formats, whatever its path ends in.

    `with formats("pdf,svg"):` or `with formats(["pdf", "svg"]):`; None changes nothing.
    """
    if chosen is None:
        yield
        return
    token = _chosen.set(known_formats(chosen))
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def without_plots() -> Iterator[None]:
    """Inside the block runs draw no plot of their own: for work made of many runs."""
    token = _plots.set(False)
    try:
        yield
    finally:
        _plots.reset(token)


def plots_wanted() -> bool:
    """Whether a run is to draw its plot."""
    return _plots.get()


def study_formats(named: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The formats of a study's plots: those named, those of a `formats` block around it, or all."""
    return known_formats(named) if named is not None else _chosen.get() or BY_DEFAULT


def known_formats(chosen: str | Sequence[str]) -> tuple[str, ...]:
    """The formats in the order of `FORMATS`; a name that is none of them is refused.

    >>> known_formats("svg, png"), known_formats(["pdf"])
    (('png', 'svg'), ('pdf',))
    """
    listed = chosen.split(",") if isinstance(chosen, str) else list(chosen)
    names = [str(one).strip().lower().lstrip(".") for one in listed]
    for name in names or [""]:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"unknown format '{name}' of plots: choose from {known}")
    return tuple(one for one in FORMATS if one in names)


def plot_paths(path: str | Path) -> list[Path]:
    """The files that a plot of this path is written to: one a format.

    >>> [one.name for one in plot_paths("run.png")]
    ['run.png']
    """
    path, kind = Path(path), plot_format(path)
    return [path.with_suffix(f".{one}") for one in _chosen.get() or (kind,)]


def plot_format(path: str | Path) -> str:
    """`png`, `pdf` or `svg`, by the ending of the path."""
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise ConfigError(f"a plot is written as .png, .pdf or .svg, not '{Path(path).name}'")
    return kind


def level_style(index: int) -> dict[str, Any]:
    """How the reference line of this number is drawn; no two of 36 are alike.

    >>> len({str(level_style(index)) for index in range(36)})
    36
    """
    lap, place = divmod(index, len(LEVEL_DASHES))
    colours = len(LEVEL_COLOURS)
    return {
        "linestyle": LEVEL_DASHES[place],
        "color": LEVEL_COLOURS[(place // 2 + lap) % colours],
        "linewidth": 1.2 if lap < colours else 2.0,
    }


def headline(figure: Any, title: str) -> None:
    """The title at the left edge, on as many lines as it needs."""
    if title:
        lines = textwrap.fill(title, int(10 * figure.get_figwidth()))
        figure.suptitle(
            lines, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK, gid=HEADLINE
        )


def dress(axes: Any, xlabel: str, ylabel: str) -> None:
    """Apply the common style: no box, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9a9a9a")
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=PALE, labelcolor=INK, labelsize=9)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)


def displayed(pixels: Any) -> Any:
    """Images (..., channels) as they are drawn: of 4 channels the first three, of 2 the first."""
    return pixels[..., : {2: 1, 4: 3}.get(pixels.shape[-1])]


def whole_numbers(axes: Any) -> None:
    """Rounds and clients are counted, so no ticks between whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))


def add_legend(figure: Any, panels: Sequence[Any] | None = None) -> None:
    """One legend below all panels, each name once, in as many columns as there is room for.

    It names what is in the given panels, or in all of them.
    """
    handles: dict[str, Any] = {}
    for axes in figure.axes if panels is None else panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        figure.legend(
            handles.values(), handles, loc="outside lower center", frameon=False, fontsize=8.5,
            ncols=_legend_columns(handles, figure.get_figwidth()), handlelength=2.8,
            columnspacing=1.4,
        )  # fmt: skip


def _legend_columns(names: Iterable[str], width: float) -> int:
    """Entries that fit beside each other in so many inches."""
    lengths = [len(line) for name in names for line in name.split("\n")]
    wide = 0.62 + 0.066 * max(lengths, default=0)
    return max(1, min(len(list(names)), int(width / wide)))


def legend_rows(names: Sequence[str], width: float) -> int:
    """Lines that a legend of these names takes, about."""
    folded = [wrapped(name) for name in names if name]
    tall = sum(name.count("\n") + 1 for name in folded)
    return math.ceil(tall / _legend_columns(folded, width)) if folded else 0


def wrapped(name: str) -> str:
    """A name for the legend, on two lines where it is long; no line ends before a percent sign.

    >>> print(wrapped("alone (fedsimclr) (87.2 %)"))
    alone (fedsimclr)
    (87.2 %)
    """
    glue = "\0"
    return textwrap.fill(name.replace(" %", f"{glue}%"), LINE).replace(glue, " ")


def brief_names(names: Sequence[str]) -> dict[str, str]:
    """Short names for a plot, all different; long ones lose the words that they have in common.

    >>> brief_names(["fedavg", "fedavg local.lr=0.1 objective.momentum=0.99 rounds=9 views=digits",
    ...     "fedavg local.lr=0.2 objective.momentum=0.99 rounds=9 views=digits"]).values()
    dict_values(['fedavg', 'fedavg local.lr=0.1 …', 'fedavg local.lr=0.2 …'])
    """
    long = [name.split() for name in names if len(name) > LONG]
    shared = set.intersection(*map(set, long)) if len(long) > 1 else set[str]()
    shortened: dict[str, str] = {}
    for name in names:
        first, *rest = name.split() or [""]
        own = [word for word in rest if word not in shared]
        cut = len(name) > LONG and len(own) < len(rest)
        shortened[name] = brief(" ".join([first, *own, "…"]) if cut else name)
    distinct = len(set(shortened.values())) == len(names)
    return shortened if distinct else {name: name for name in names}


def brief(name: str) -> str:
    """A name that leaves room for the plot.

    >>> brief("fedavg objective.norm=none privacy.epsilon=2.5 privacy.noise=simulated")
    'fedavg objective.norm=n … cy.noise=simulated'
    """
    return name if len(name) <= LONG else f"{name[:23]} … {name[-18:]}"


def short(value: float) -> str:
    """A bar's value in about three figures."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"
