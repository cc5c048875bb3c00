"""Sweeps: methods compared at several values of one setting, `harmonium sweep`.

Each value is a comparison in its own folder, so nothing is run twice and an interrupted sweep can
be continued. Sweeps of papers are included by name (`recipe/library/sweeps/`); any other is a
comparison with `sweep.KEY=V1,V2`. Where a paper gives methods their own views, as Orchestra does,
budgets differ, and the result notes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harmonium.core.callbacks import Callbacks, labelled
from harmonium.core.errors import ConfigError, NoneFinished, suggest
from harmonium.core.settings import plain
from harmonium.engines.workers import shared_workers
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.paper_tables import FULL, SMALL
from harmonium.recipe.presets import read_yaml, sweeps
from harmonium.report import figure as look
from harmonium.report.metric_names import PROBES, heading
from harmonium.report.plots import curves
from harmonium.report.tables import BEST, NEAR, Marks, Tabular
from harmonium.report.writer import ResultTable, write_plot, write_results
from harmonium.storage.result_folder import FolderKind
from harmonium.studies.comparison.cells import WITHOUT_RUN, ComparisonPlan, is_name, plan
from harmonium.studies.comparison.statistics import half_width, interval_words
from harmonium.studies.comparison.study import compare, note_command
from harmonium.studies.comparison.table import BESIDE, TEST_LEGEND, Comparison, marks_legend
from harmonium.studies.tuning.grid import split_values

SWEEP = FolderKind("sweep", "sweeps")
PREFIX = "sweep."
REFERENCES = "compare.references"
NONE = f"{REFERENCES}=none"  # a reference at every value would be most of the work
LINES = "lines"  # the folder of rows that are run once


@dataclass(frozen=True)
class SweepPlan:
    """The runs of a sweep."""

    names: tuple[str, ...]  # methods or recipes
    key: str
    values: tuple[str, ...]
    words: tuple[str, ...]  # for every run
    own_views: bool  # a paper's methods may differ in their budget
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # settings that go with key
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every run, by name
    lines: tuple[str, ...] = ()  # recipes that are run once, beside all values of the key
    probe: str = ""  # the figure to show; empty: kNN where there is one

    def at_value(self, value: str, *, allow_unfair: bool = False) -> ComparisonPlan:
        """The comparison at one value."""
        return plan(
            self.words_at(value), self.settings, allow_unfair=allow_unfair or self.own_views
        )

    def at_every_value(self, *, allow_unfair: bool = False) -> ComparisonPlan:
        """The comparison of the rows that are run once."""
        unfair = allow_unfair or self.own_views
        return plan(self.words_once(), self.settings, allow_unfair=unfair)

    def words_once(self) -> list[str]:
        """The words of the comparison that is run once, without references."""
        words = [word for word in self.words if not word.startswith(f"{REFERENCES}=")]
        return [*self.lines, *words, *([] if REFERENCES in _keys([], self.settings) else [NONE])]

    def words_at(self, value: str) -> list[str]:
        """The words of the comparison at one value."""
        given = _keys(self.words, self.settings)
        references = [] if REFERENCES in given else [NONE]
        place = self.values.index(value)
        beside = [f"{key}={values[place]}" for key, values in self.beside.items()]
        return [*self.names, f"{self.key}={value}", *beside, *references, *self.words]


@dataclass(frozen=True, repr=False)
class Sweep(Tabular):
    """The result of a sweep."""

    folder: Path
    key: str
    values: tuple[str, ...]
    comparisons: Mapping[str, Comparison]  # by value
    main_plot: Path | None  # the first of the plots
    lost: tuple[Mapping[str, Any], ...] = ()  # runs at values where none finished
    plots: tuple[Path, ...] = ()  # all files of the plots
    lines: Comparison | None = None  # rows that are the same at every value
    wanted: str = ""  # the figure to show first, if runs have it

    def panels(self) -> list[tuple[str, list[dict[str, Any]], int | None]]:
        """A table for every figure, that of `probe` first."""
        digits = 1 if self.has_accuracy else 2
        return [(self.title_of(probe), self.shown(probe), digits) for probe in self.probes]

    @property
    def probes(self) -> list[str]:
        """The figures that tables have, one a table: that of `probe` first."""
        known = [
            key for one in self.comparisons.values() for key in one.rows[0] if key != "encoder"
        ]
        return list(dict.fromkeys([self.probe, *known]))

    @property
    def tabled(self) -> list[str]:
        """The figures with a table: those of `probes`, each followed by its balanced accuracy."""
        rows = [its for one in self.comparisons.values() for its in one.details["rows"].values()]
        known = {key for its in rows for key in its["figures"]}
        kinds = ("", *(f"{kind}_" for kind in BESIDE))
        each = [f"{kind}{probe}" for probe in self.probes for kind in kinds]
        return [key for key in each if key in known or key in self.probes]

    def name(self, label: str) -> str:
        """The display name of a row: set by `label.ROW`, or its own label."""
        run_once = self.lines is not None and label in self._once
        one = self.lines if run_once else next(iter(self.comparisons.values()))
        assert one is not None
        return one.name(label)

    @property
    def _once(self) -> dict[str, Mapping[str, Any]]:
        """Rows that were run once, by label, without references that every value has."""
        swept = {label for one in self.comparisons.values() for label in one.details["rows"]}
        rows = self.lines.details["rows"] if self.lines else {}
        return {label: its for label, its in rows.items() if label not in swept}

    @property
    def probe(self) -> str:
        """The figure that the first table shows."""
        rows = [its for one in self.comparisons.values() for its in one.details["rows"].values()]
        if any(self.wanted in its["figures"] for its in rows):
            return self.wanted
        return str(next(iter(self.comparisons.values())).details["probe"])

    @property
    def title(self) -> str:
        """The title of the first table."""
        return self.title_of(self.probe)

    def title_of(self, probe: str) -> str:
        """The title of a figure's table."""
        unit = " in percent" if self.has_accuracy else ""
        return f"{heading(probe)}{unit} over {self.key}; encoders frozen"

    @property
    def has_accuracy(self) -> bool:
        """Whether there are labels to compute accuracies with."""
        return self.probe in PROBES

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the figures, each once."""
        lost = dict.fromkeys((one[self.key], one["why"]) for one in self.lost)
        left_out = [f"left out: {self.key}={value}: {why}" for value, why in lost]
        warned = [
            f"(!) {one.name(label)} at {self.key}={value}: {text}"
            for value, one in self.comparisons.items()
            for label, text in one.warnings.items()
        ]
        compared = [*self.comparisons.values(), *([self.lines] if self.lines else [])]
        notes = [note for one in compared for note in one.notes]
        return list(dict.fromkeys([*warned, *notes, *left_out]))

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Runs that did not finish."""
        return [
            *(
                {self.key: value, **one}
                for value, comparison in self.comparisons.items()
                for one in comparison.details["failed"]
            ),
            *self.lost,
            *(self.lines.details["failed"] if self.lines else ()),
        ]

    def shown(self, probe: str | None = None) -> list[dict[str, Any]]:
        """One figure: a row for each method, a column for each value."""
        probe = probe or self.probe
        scale = 100 if self.has_accuracy else 1
        rows: dict[str, dict[str, Any]] = {}
        for value, comparison in self.comparisons.items():
            for label, its in comparison.details["rows"].items():
                if figure := its["figures"].get(probe):
                    stderr = figure["stderr"]
                    cell = scale * figure["mean"]
                    shown = cell if stderr is None else (cell, scale * stderr)
                    rows.setdefault(label, {"encoder": self.name(label)})[value] = shown
        for label, one in self.levels(probe).items():
            mean, error = scale * one["mean"], one["stderr"]
            same = mean if error is None else (mean, scale * error)
            rows[label] = {"encoder": self.name(label), **dict.fromkeys(self.comparisons, same)}
        return list(rows.values())

    def levels(self, probe: str) -> dict[str, Mapping[str, Any]]:
        """A figure of the rows that were run once, by label."""
        return {
            k: its["figures"][probe] for k, its in self._once.items() if probe in its["figures"]
        }

    def labels(self, probe: str) -> list[str]:
        """The rows of `shown` by their own labels."""
        by_value = (one.details["rows"].items() for one in self.comparisons.values())
        swept = [k for rows in by_value for k, its in rows if probe in its["figures"]]
        return list(dict.fromkeys([*swept, *self.levels(probe)]))

    def marks(self, probe: str) -> Marks:
        """The best method at every value, and those not significantly worse."""
        labels = self.labels(probe)
        return {
            (labels.index(label), value): mark
            for value, comparison in self.comparisons.items()
            for mark in (BEST, NEAR)
            for label in comparison.details["tests"].get(probe, {}).get(mark, ())
        }

    def tested(self) -> list[dict[str, Any]]:
        """Methods against the first at every value, by every figure; empty for a single seed."""
        return [
            {self.key: value, **row}
            for value, comparison in self.comparisons.items()
            for row in comparison.tested()
        ]

    def plain(self) -> dict[str, Any]:
        """The sweep as plain values, for JSON."""
        return {
            "folder": str(self.folder),
            "key": self.key,
            "values": list(self.values),
            "found": {value: comparison.plain() for value, comparison in self.comparisons.items()},
            **({"lines": self.lines.plain()} if self.lines else {}),
            "notes": self.notes,
            "failed": self.failed,
            "plots": [str(path) for path in self.plots],
        }


@shared_workers()
def sweep(
    *words: str,
    out: str | Path | None = None,
    allow_unfair: bool = False,
    formats: str | Sequence[str] | None = None,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Sweep:
    """Compare methods at every value of one setting.

    Args:
        words: a paper's sweep by name, such as `"heterogeneity@cpu"`, or methods and
            `"sweep.KEY=1,5"`; and settings of all, as on the command line.
        out: the folder of all comparisons; those that exist are continued, or read if complete.
        allow_unfair: as for `compare`.
        formats: as for `compare`, also for the plots of every value.
        callbacks: as for `compare`.
        settings: settings by name, e.g. `seeds=3, data="digits"`; names of rows are as for
            `compare`.

    Returns:
        A comparison for every value.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> found = harmonium.sweep("fedavg", "sweep.local.lr=0.1", "compare.references=none", **small)
    >>> found.key, list(found.comparisons)
    ('local.lr', ['0.1'])
    """
    formats = None if formats is None else look.known_formats(formats)
    words, settings = _sweep_words(words, settings)
    plan = read(words, settings)
    allow = allow_unfair or plan.own_views
    for value in plan.values:  # invalid settings are refused before anything runs
        plan.at_value(value, allow_unfair=allow)
    if plan.lines:
        plan.at_every_value(allow_unfair=allow)
    folder = Path(out) if out is not None else new_folder(words)
    SWEEP.claim(folder)
    note_command(folder, "sweep", words, settings, allow_unfair=allow_unfair)
    formats = look.study_formats(formats)
    shared: dict[str, Any] = {"allow_unfair": allow, "formats": formats, **plan.settings}
    comparisons: dict[str, Comparison] = {}
    lost: list[dict[str, Any]] = []
    for value in plan.values:
        out = folder / f"{plan.key}={value}"
        label = labelled(callbacks, f"{plan.key}={value}, ")
        try:
            comparisons[value] = compare(*plan.words_at(value), out=out, callbacks=label, **shared)
        except NoneFinished as error:  # at other values some may
            lost += _lost(plan, value, error, allow_unfair=allow)
    if not comparisons:
        raise NoneFinished(lost[0]["why"])
    lines = None
    if plan.lines:
        label = labelled(callbacks, f"at every {plan.key}, ")
        try:
            lines = compare(*plan.words_once(), out=folder / LINES, callbacks=label, **shared)
        except NoneFinished as error:
            every = f"every {plan.key}"
            lost += [{plan.key: every, "encoder": one, "why": str(error)} for one in plan.lines]
    whole = Sweep(folder, plan.key, plan.values, comparisons, None, tuple(lost))
    with look.formats(formats):
        return write_sweep(replace(whole, lines=lines, wanted=plan.probe))


def _lost(
    plan: SweepPlan, value: str, error: NoneFinished, *, allow_unfair: bool
) -> list[dict[str, Any]]:
    """The runs of methods at a value where none finished."""
    comparison = plan.at_value(value, allow_unfair=allow_unfair)
    return [
        {plan.key: value, "encoder": label, "seed": seed, "why": str(error)}
        for label in comparison.methods
        for seed in comparison.seeds
    ]


def _sweep_words(
    words: Sequence[str], settings: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Keywords `sweep.*` as words; the other settings are unchanged.

    >>> _sweep_words(["fedavg"], {"sweep.local.lr": [0.05, 0.1], "seeds": 3})
    (('fedavg', 'sweep.local.lr=0.05,0.1'), {'seeds': 3})
    """
    mine = {k: v for k, v in settings.items() if k.partition(".")[0] == "sweep"}
    more = []
    for change in changes_of([], mine):
        values = change.value if isinstance(change.value, list | tuple) else [change.value]
        texts = [v if isinstance(v, str) else json.dumps(plain(v)) for v in values]
        more.append(f"{change.key}={','.join(texts)}")
    return (*words, *more), {k: v for k, v in settings.items() if k not in mine}


def _keys(words: Sequence[str], settings: Mapping[str, Any]) -> set[str]:
    return {word.partition("=")[0] for word in words} | {c.key for c in changes_of([], settings)}


def read(words: Sequence[str], settings: Mapping[str, Any] | None = None) -> SweepPlan:
    """The sweep that the words of a command, and settings by name, ask for."""
    settings = settings or {}
    names = [word for word in words if is_name(word)]
    over = [word for word in words if word.startswith(PREFIX)]
    rest = [word for word in words if word not in [*names, *over]]
    if over and names:
        return _over_setting(names, over, rest, settings)
    if len(names) != 1 or over:
        raise ConfigError(
            "name a sweep, e.g. `harmonium sweep heterogeneity@cpu`, or methods and a setting, "
            "e.g. `harmonium sweep fedavg fedprox sweep.local.epochs=1,5 data=digits`"
        )
    return _of_paper(names[0], rest, settings)


def _over_setting(
    names: Sequence[str], over: Sequence[str], rest: Sequence[str], settings: Mapping[str, Any]
) -> SweepPlan:
    """Methods over the values of one `sweep.KEY=V1,V2`."""
    if ours := [name for name in names if name.partition("@")[0] in sweeps()]:
        raise ConfigError(f"{ours[0]} has a setting of its own to sweep: leave {over[0]} out")
    if len(over) > 1:
        raise ConfigError("a sweep goes over one setting: leave all but one sweep.* out")
    key, equals, text = over[0].removeprefix(PREFIX).partition("=")
    if not key or not equals:
        raise ConfigError(f"'{over[0]}' is not a sweep: write sweep.key=value,value")
    values = tuple(split_values(key, text, PREFIX))
    _check(key, _keys(rest, settings))
    return SweepPlan(tuple(names), key, values, tuple(rest), own_views=False, settings=settings)


def _of_paper(word: str, rest: Sequence[str], settings: Mapping[str, Any]) -> SweepPlan:
    """A paper's sweep by its name, at its full or its small size."""
    name, at, size = word.partition("@")
    if name not in sweeps() or size not in ("", SMALL):
        known = [*sweeps(), *(f"{one}@{SMALL}" for one in sweeps())]
        raise ConfigError(
            f"there is no sweep called '{word}': {suggest(word, known)}; to sweep a setting of "
            "methods, add it with its values, e.g. sweep.local.epochs=1,5"
        )
    file = sweeps()[name]
    tree = read_yaml(file.read_text(encoding="utf-8"), file.name)

    def sized(listed: Any) -> Any:
        return listed[size or FULL] if isinstance(listed, Mapping) else listed

    beside = {key: sized(listed) for key, listed in tree.get("with", {}).items()}
    for key in (tree["key"], *beside):
        _check(key, _keys(rest, settings))
    return SweepPlan(
        tuple(f"{method}{at}{size}" for method in sized(tree["methods"])),
        tree["key"],
        tuple(str(value) for value in sized(tree["values"])),
        (*tree.get("words", ()), *rest),
        own_views=True,
        beside=beside,
        settings=settings,
        lines=tuple(f"{method}{at}{size}" for method in tree.get("lines", ())),
        probe=tree.get("probe", ""),
    )


def _check(key: str, given: Collection[str]) -> None:
    if key in given:
        raise ConfigError(f"{key} is both swept and set to one value: leave one out")
    if key in ("seeds", "seed") or key.startswith("compare."):
        raise ConfigError(f"{key} cannot be swept: it is the same for all methods, e.g. seeds=3")


def new_folder(words: Sequence[str]) -> Path:
    """The folder of a sweep that was started without `out`."""
    name = "-".join(Path(word).stem for word in words if is_name(word))[:80]
    return SWEEP.new(name)


def write_sweep(sweep: Sweep) -> Sweep:
    """Draw a sweep and write it in every form; returns it with the files of its plots."""
    plots = [path for probe in sweep.probes for path in _draw(sweep, probe)]
    sweep = replace(sweep, plots=tuple(plots), main_plot=plots[0] if plots else None)
    write_results(
        sweep.folder,
        "sweep",
        sweep.plain(),
        _tables(sweep),
        sheets={"": _lines(sweep)},
        notes=sweep.notes,
        with_latex=True,
    )
    return sweep


def _unfair(sweep: Sweep) -> str:
    """The differences between budgets at any value."""
    texts = (text for one in sweep.comparisons.values() for text in one.details["unfair"])
    return "; ".join(dict.fromkeys(texts))


def _tables(sweep: Sweep) -> list[ResultTable]:
    """A table for every figure, and one of the tests."""
    first = next(iter(sweep.comparisons.values()))
    digits, unfair = 1 if sweep.has_accuracy else 3, _unfair(sweep)
    tables = [
        ResultTable(
            sweep.title_of(probe),
            sweep.shown(probe),
            digits,
            sweep.marks(probe),
            legend=marks_legend(first.details),
            warning=f"Unfair: {unfair}" if unfair else "",
            label=f"tab:{_stem(sweep, probe)}",
        )
        for probe in sweep.tabled
    ]
    if tested := sweep.tested():
        title = f"Against {sweep.name(first.details['base'])}, paired by seed, at every value"
        legend = f"{TEST_LEGEND}."
        tables.append(ResultTable(title, tested, digits, legend=legend, label="tab:sweep-tests"))
    return tables


def _lines(sweep: Sweep) -> list[dict[str, Any]]:
    """The rows of all tables of figures for CSV, by their own labels."""
    unfair = {"unfair": text} if (text := _unfair(sweep)) else {}
    lines = []
    for probe in sweep.tabled:
        for label, row in zip(sweep.labels(probe), sweep.shown(probe), strict=True):
            name = {"name": row["encoder"]} if row["encoder"] != label else {}
            lines.append({"figure": probe, **row, "encoder": label, **name, **unfair})
    return lines


def _stem(sweep: Sweep, probe: str) -> str:
    """The name of a figure's plot, and of its label in LaTeX."""
    return "sweep" if probe == sweep.probe else f"sweep-{probe}"


def _draw(sweep: Sweep, probe: str) -> list[Path]:
    """Draw one figure over the values; returns the files."""
    scale = 100 if sweep.has_accuracy else 1
    swept = _swept_figures(sweep, probe)
    values = [value for value in sweep.values if any(value in its for its in swept.values())]
    levels = {sweep.name(k): scale * one["mean"] for k, one in sweep.levels(probe).items()}
    series: dict[str, list[tuple[float, ...]]] = {}
    seeds: set[int] = set()
    for label, figures in swept.items():
        means = {figure["mean"] for figure in figures.values()}
        if label in WITHOUT_RUN and len(means) == 1:  # images and encoder are the same at each
            levels[sweep.name(label)] = scale * means.pop()
            continue
        seeds |= {figure["seeds"] for figure in figures.values()}
        series[sweep.name(label)] = [
            (place, *_point(figures.get(value), scale)) for place, value in enumerate(values)
        ]
    interval = interval_words(seeds)
    return write_plot(
        sweep.folder / f"{_stem(sweep, probe)}.png",
        curves,
        series,
        sweep.key,
        f"{heading(probe)}{' (%)' if sweep.has_accuracy else ''}",
        sweep.title_of(probe),
        levels,
        ticks=values,
        interval=f"mean and {interval}" if interval else "",
    )


def _swept_figures(sweep: Sweep, probe: str) -> dict[str, dict[str, Any]]:
    """A figure of the rows that were run at every value: label to value to its summary."""
    once = sweep.levels(probe)
    return {
        label: {
            value: comparison.details["rows"][label]["figures"][probe]
            for value, comparison in sweep.comparisons.items()
            if probe in comparison.details["rows"].get(label, {}).get("figures", {})
        }
        for label in sweep.labels(probe)
        if label not in once
    }


def _point(figure: Mapping[str, Any] | None, scale: float) -> tuple[float, float]:
    """A mean and half its interval; not a number where a run is missing."""
    if figure is None:
        return math.nan, 0.0
    half = half_width(figure["stderr"], figure["seeds"])
    return scale * figure["mean"], scale * (half or 0.0)
