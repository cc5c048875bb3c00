"""One setting over several values, every method at each: what `harmonium sweep` does.

Each value is a comparison in a folder of its own, so that nothing is run twice and a sweep that was
killed goes on. Sweeps of the papers come along by name (`recipes/sweeps/`); any other is a
comparison with one word more, `sweep.KEY=V1,V2`. Where a paper gives methods views of their own, as
Orchestra does, budgets differ, and the result says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.callbacks import Callbacks, labelled
from harmonium.core.errors import ConfigError, NoneFinished, suggest
from harmonium.core.settings import plain
from harmonium.recipe.overrides import changes_of
from harmonium.recipe.paper_tables import FULL, SMALL
from harmonium.recipe.presets import read_yaml, sweeps
from harmonium.report import figure as look
from harmonium.report.metric_names import PROBES, heading
from harmonium.report.tables import BEST, NEAR, Marks, Tabular, csv_text, latex, markdown
from harmonium.storage.result_folder import FolderKind
from harmonium.studies.comparison.cells import WITHOUT_RUN, Plan, is_name, plan
from harmonium.studies.comparison.statistics import half_width, interval_words
from harmonium.studies.comparison.study import compare, note_command
from harmonium.studies.comparison.table import (
    BESIDE,
    TEST_WORDS,
    TEX,
    Comparison,
    as_markdown,
    marks_words,
)
from harmonium.studies.tuning.grid import split_values

SWEEP = FolderKind("sweep", "sweeps")
PREFIX = "sweep."


@dataclass(frozen=True)
class Asked:
    """What a sweep goes over."""

    names: tuple[str, ...]  # methods or recipes
    key: str
    values: tuple[str, ...]
    words: tuple[str, ...]  # for every run
    own_views: bool  # a paper's methods may differ in their budget
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # that change with the key
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every run, by name
    lines: tuple[str, ...] = ()  # recipes that are run once, beside all values of the key
    probe: str = ""  # the figure to show; empty: kNN where there is one

    def plan(self, value: str, *, allow_unfair: bool = False) -> Plan:
        """The comparison at one value."""
        return plan(self.at(value), self.settings, allow_unfair=allow_unfair or self.own_views)

    def plan_lines(self, *, allow_unfair: bool = False) -> Plan:
        """The comparison of what is run once."""
        return plan(self.once(), self.settings, allow_unfair=allow_unfair or self.own_views)

    def once(self) -> list[str]:
        """The words of what is run once; it has no references of its own."""
        words = [word for word in self.words if not word.startswith(f"{REFERENCES}=")]
        return [*self.lines, *words, *([] if REFERENCES in _keys([], self.settings) else [NONE])]

    def at(self, value: str) -> list[str]:
        """The words of the comparison at one value."""
        given = _keys(self.words, self.settings)
        references = [] if REFERENCES in given else [NONE]
        place = self.values.index(value)
        beside = [f"{key}={its[place]}" for key, its in self.beside.items()]
        return [*self.names, f"{self.key}={value}", *beside, *references, *self.words]


REFERENCES = "compare.references"
LINES = "lines"  # the folder of what is run once
NONE = f"{REFERENCES}=none"  # a reference at every value would be most of the work


@dataclass(frozen=True, repr=False)
class Sweep(Tabular):
    """What a sweep found."""

    folder: Path
    key: str
    values: tuple[str, ...]
    found: Mapping[str, Comparison]  # by value
    picture: Path | None  # the first of the plots
    lost: tuple[Mapping[str, Any], ...] = ()  # runs at values where none came to its end
    plots: tuple[Path, ...] = ()  # every file of them
    lines: Comparison | None = None  # what is the same at every value
    wanted: str = ""  # the figure to show first, where runs have it

    def panels(self) -> list[tuple[str, list[dict[str, Any]], int | None]]:
        """A table for every figure, that of `probe` first."""
        digits = 1 if self.has_accuracy else 2
        return [(self.title_of(probe), self.shown(probe), digits) for probe in self.probes]

    @property
    def probes(self) -> list[str]:
        """The figures that tables have, one a table: that of `probe` first."""
        known = [key for made in self.found.values() for key in made.rows[0] if key != "encoder"]
        return list(dict.fromkeys([self.probe, *known]))

    @property
    def tabled(self) -> list[str]:
        """The figures with a table: those of `probes`, each followed by its balanced accuracy."""
        rows = [its for made in self.found.values() for its in made.details["rows"].values()]
        known = {key for its in rows for key in its["figures"]}
        kinds = ("", *(f"{kind}_" for kind in BESIDE))
        each = [f"{kind}{probe}" for probe in self.probes for kind in kinds]
        return [key for key in each if key in known or key in self.probes]

    def name(self, label: str) -> str:
        """What readers see of a row: its name by `label.ROW`, or its own label."""
        run_once = self.lines is not None and label in self._once
        one = self.lines if run_once else next(iter(self.found.values()))
        assert one is not None
        return one.name(label)

    @property
    def _once(self) -> dict[str, Mapping[str, Any]]:
        """Rows that were run once, by label; references that every value has are none of them."""
        swept = {label for made in self.found.values() for label in made.details["rows"]}
        rows = self.lines.details["rows"] if self.lines else {}
        return {label: its for label, its in rows.items() if label not in swept}

    @property
    def probe(self) -> str:
        """The figure that the table has."""
        rows = [its for made in self.found.values() for its in made.details["rows"].values()]
        if any(self.wanted in its["figures"] for its in rows):
            return self.wanted
        return str(next(iter(self.found.values())).details["probe"])

    @property
    def title(self) -> str:
        """What the first table shows."""
        return self.title_of(self.probe)

    def title_of(self, probe: str) -> str:
        """What the table of a figure shows."""
        unit = " in percent" if self.has_accuracy else ""
        return f"{heading(probe)}{unit} over {self.key}; encoders frozen"

    @property
    def has_accuracy(self) -> bool:
        """Whether anything could be judged by labels."""
        return self.probe in PROBES

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures should know, each once."""
        lost = dict.fromkeys((one[self.key], one["why"]) for one in self.lost)
        told = [f"left out: {self.key}={value}: {why}" for value, why in lost]
        warned = [
            f"(!) {made.name(label)} at {self.key}={value}: {text}"
            for value, made in self.found.items()
            for label, text in made.warnings.items()
        ]
        compared = [*self.found.values(), *([self.lines] if self.lines else [])]
        notes = [note for made in compared for note in made.notes]
        return list(dict.fromkeys([*warned, *notes, *told]))

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Runs that did not come to their end."""
        return [
            *(
                {self.key: value, **one}
                for value, made in self.found.items()
                for one in made.details["failed"]
            ),
            *self.lost,
            *(self.lines.details["failed"] if self.lines else ()),
        ]

    def shown(self, probe: str | None = None) -> list[dict[str, Any]]:
        """One figure: a row for each method, a column for each value."""
        probe = probe or self.probe
        scale = 100 if self.has_accuracy else 1
        rows: dict[str, dict[str, Any]] = {}
        for value, made in self.found.items():
            for label, its in made.details["rows"].items():
                if figure := its["figures"].get(probe):
                    stderr = figure["stderr"]
                    cell = scale * figure["mean"]
                    shown = cell if stderr is None else (cell, scale * stderr)
                    rows.setdefault(label, {"encoder": self.name(label)})[value] = shown
        for label, one in self.levels(probe).items():
            mean, error = scale * one["mean"], one["stderr"]
            same = mean if error is None else (mean, scale * error)
            rows[label] = {"encoder": self.name(label), **dict.fromkeys(self.found, same)}
        return list(rows.values())

    def levels(self, probe: str) -> dict[str, Mapping[str, Any]]:
        """A figure of what was run once, by label."""
        return {
            k: its["figures"][probe] for k, its in self._once.items() if probe in its["figures"]
        }

    def labels(self, probe: str) -> list[str]:
        """The rows of `shown` by their own labels."""
        found = (made.details["rows"].items() for made in self.found.values())
        swept = [k for rows in found for k, its in rows if probe in its["figures"]]
        return list(dict.fromkeys([*swept, *self.levels(probe)]))

    def marks(self, probe: str) -> Marks:
        """The best method at every value, and those that a test does not tell from it."""
        labels = self.labels(probe)
        return {
            (labels.index(label), value): mark
            for value, made in self.found.items()
            for mark in (BEST, NEAR)
            for label in made.details["tests"].get(probe, {}).get(mark, ())
        }

    def tested(self) -> list[dict[str, Any]]:
        """Methods against the first at every value, by every figure; empty for a single seed."""
        return [
            {self.key: value, **row} for value, made in self.found.items() for row in made.tested()
        ]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "folder": str(self.folder),
            "key": self.key,
            "values": list(self.values),
            "found": {value: made.plain() for value, made in self.found.items()},
            **({"lines": self.lines.plain()} if self.lines else {}),
            "notes": self.notes,
            "failed": self.failed,
            "plots": [str(path) for path in self.plots],
        }


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
        out: the folder of all comparisons; what it holds already is continued or simply read.
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
    >>> found.key, list(found.found)
    ('local.lr', ['0.1'])
    """
    formats = None if formats is None else look.known_formats(formats)
    words, settings = _swept(words, settings)
    asked = read(words, settings)
    allow = allow_unfair or asked.own_views
    for value in asked.values:  # slips are refused before anything runs
        asked.plan(value, allow_unfair=allow)
    if asked.lines:
        asked.plan_lines(allow_unfair=allow)
    folder = Path(out) if out is not None else new_folder(words)
    SWEEP.claim(folder)
    note_command(folder, "sweep", words, settings, allow_unfair=allow_unfair)
    found: dict[str, Comparison] = {}
    lost: list[dict[str, Any]] = []
    for value in asked.values:
        teller = labelled(callbacks, f"{asked.key}={value}, ")

        place = folder / f"{asked.key}={value}"
        try:
            found[value] = compare(
                *asked.at(value),
                out=place,
                allow_unfair=allow,
                formats=look.study_formats(formats),
                callbacks=teller,
                **asked.settings,
            )
        except NoneFinished as error:  # at other values some may
            made = asked.plan(value, allow_unfair=allow)
            cells = [(label, seed) for label in made.methods for seed in made.seeds]
            lost += [
                {asked.key: value, "encoder": label, "seed": seed, "why": str(error)}
                for label, seed in cells
            ]
    if not found:
        raise NoneFinished(lost[0]["why"])
    lines = None
    if asked.lines:
        try:
            lines = compare(
                *asked.once(),
                out=folder / LINES,
                allow_unfair=allow,
                formats=look.study_formats(formats),
                callbacks=labelled(callbacks, f"at every {asked.key}, "),
                **asked.settings,
            )
        except NoneFinished as error:
            every = f"every {asked.key}"
            lost += [{asked.key: every, "encoder": one, "why": str(error)} for one in asked.lines]
    whole = Sweep(folder, asked.key, asked.values, found, None, tuple(lost))
    with look.formats(look.study_formats(formats)):
        return _written(replace(whole, lines=lines, wanted=asked.probe))


def _swept(
    words: Sequence[str], settings: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """`sweep.*` that is given by name as words; the other settings stay what they are.

    >>> _swept(["fedavg"], {"sweep.local.lr": [0.05, 0.1], "seeds": 3})
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


def read(words: Sequence[str], settings: Mapping[str, Any] | None = None) -> Asked:
    """From the words of a command, and settings by name, to what it goes over."""
    settings = settings or {}
    names = [word for word in words if is_name(word)]
    over = [word for word in words if word.startswith(PREFIX)]
    rest = [word for word in words if word not in [*names, *over]]
    if over and names:
        if ours := [one for one in names if one.partition("@")[0] in sweeps()]:
            raise ConfigError(f"{ours[0]} has a setting of its own to sweep: leave {over[0]} out")
        if len(over) > 1:
            raise ConfigError("a sweep goes over one setting: leave all but one sweep.* out")
        key, equals, text = over[0].removeprefix(PREFIX).partition("=")
        if not key or not equals:
            raise ConfigError(f"'{over[0]}' is no sweep: write sweep.key=value,value")
        values = tuple(split_values(key, text, PREFIX))
        _check(key, _keys(rest, settings))
        return Asked(tuple(names), key, values, tuple(rest), own_views=False, settings=settings)
    if len(names) != 1 or over:
        raise ConfigError(
            "name a sweep, e.g. `harmonium sweep heterogeneity@cpu`, or methods and a setting, "
            "e.g. `harmonium sweep fedavg fedprox sweep.local.epochs=1,5 data=digits`"
        )
    name, at, size = names[0].partition("@")
    if name not in sweeps() or size not in ("", SMALL):
        known = [*sweeps(), *(f"{one}@{SMALL}" for one in sweeps())]
        near = suggest(names[0], known)
        raise ConfigError(
            f"there is no sweep called '{names[0]}': {near}; to sweep a setting of methods, add it "
            "with its values, e.g. sweep.local.epochs=1,5"
        )
    file = sweeps()[name]
    tree = read_yaml(file.read_text(encoding="utf-8"), file.name)

    def sized(listed: Any) -> Any:
        return listed[size or FULL] if isinstance(listed, Mapping) else listed

    beside = {key: sized(listed) for key, listed in tree.get("with", {}).items()}
    for key in (tree["key"], *beside):
        _check(key, _keys(rest, settings))
    return Asked(
        tuple(f"{one}{at}{size}" for one in sized(tree["methods"])),
        tree["key"],
        tuple(str(value) for value in sized(tree["values"])),
        (*tree.get("words", ()), *rest),
        own_views=True,
        beside=beside,
        settings=settings,
        lines=tuple(f"{one}{at}{size}" for one in tree.get("lines", ())),
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


def _written(made: Sweep) -> Sweep:
    """Draw it, and write it down in every form."""
    plots = [path for probe in made.probes for path in _drawn(made, probe)]
    made = replace(made, plots=tuple(plots), picture=plots[0] if plots else None)
    apart = dict.fromkeys(x for one in made.found.values() for x in one.details["unfair"])
    unfair = {"unfair": "; ".join(apart)} if apart else {}
    said = [f"Unfair: {'; '.join(apart)}"] if apart else []
    more = marks_words(next(iter(made.found.values())).details)
    parts, tex, lines = list[str](), [TEX], list[dict[str, Any]]()
    digits = 1 if made.has_accuracy else 3
    for probe in made.tabled:
        rows, marks, title = made.shown(probe), made.marks(probe), made.title_of(probe)
        for label, row in zip(made.labels(probe), rows, strict=True):
            called = {"name": row["encoder"]} if row["encoder"] != label else {}
            lines.append({"figure": probe, **row, "encoder": label, **called, **unfair})
        parts += [f"## {title}\n", markdown(rows, digits=digits, marks=marks), as_markdown(more)]
        parts.append("")
        label = f"tab:sweep{'' if probe == made.probe else f'-{probe}'}"
        caption = ". ".join([title, more.rstrip("."), *said])
        tex.append(latex(rows, caption, digits=digits, label=label, marks=marks))
    if tested := made.tested():
        base = made.name(next(iter(made.found.values())).details["base"])
        title = f"Against {base}, paired by seed, at every value"
        parts += [f"## {title}\n", markdown(tested, digits=digits), f"{TEST_WORDS}.\n"]
        caption = f"{title}. {TEST_WORDS}"
        tex.append(latex(tested, caption, digits=digits, label="tab:sweep-tests"))
    notes = "".join(f"- {note}\n" for note in made.notes)
    texts = {
        "sweep.json": json.dumps(made.plain(), indent=1) + "\n",
        "sweep.csv": csv_text(lines),
        "sweep.md": "\n".join([*parts, notes]).rstrip() + "\n",
        "sweep.tex": "\n".join([*(f"% {note}" for note in made.notes), *tex]),
    }
    for name, text in texts.items():
        files.write_atomic(made.folder / name, text.encode())
    return made


def _drawn(made: Sweep, probe: str) -> list[Path]:
    """Draw one figure over the values; gives the files."""
    from harmonium.report.plots import curves

    scale = 100 if made.has_accuracy else 1
    labels = made.labels(probe)
    held = {
        label: {
            value: one.details["rows"][label]["figures"][probe]
            for value, one in made.found.items()
            if probe in one.details["rows"].get(label, {}).get("figures", {})
        }
        for label in labels
        if label not in made.levels(probe)
    }
    known = [value for value in made.values if any(value in its for its in held.values())]
    levels = {made.name(k): scale * one["mean"] for k, one in made.levels(probe).items()}
    series: dict[str, list[tuple[float, ...]]] = {}
    seeds: set[int] = set()
    for label, its in held.items():
        means = {figure["mean"] for figure in its.values()}
        if label in WITHOUT_RUN and len(means) == 1:  # if images and encoder are the same at each
            levels[made.name(label)] = scale * means.pop()
            continue
        seeds |= {figure["seeds"] for figure in its.values()}
        series[made.name(label)] = [
            (place, *_point(its.get(value), scale)) for place, value in enumerate(known)
        ]
    ylabel = f"{heading(probe)}{' (%)' if made.has_accuracy else ''}"
    said = interval_words(seeds)
    interval = f"mean and {said}" if said else ""
    path = made.folder / f"sweep{'' if probe == made.probe else f'-{probe}'}.png"
    title = made.title_of(probe)
    curves(path, series, made.key, ylabel, title, levels, ticks=known, interval=interval)
    return look.plot_paths(path)


def _point(figure: Mapping[str, Any] | None, scale: float) -> tuple[float, float]:
    """A mean and half its interval; not a number where a run is missing."""
    if figure is None:
        return math.nan, 0.0
    half = half_width(figure["stderr"], figure["seeds"])
    return scale * figure["mean"], scale * (half or 0.0)
