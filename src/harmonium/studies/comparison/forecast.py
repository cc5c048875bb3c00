"""Forecasts of comparisons and sweeps for `--dry-run`: their runs, and how much is done.

Nothing is run. Time is estimated from the pace of runs that have begun, else from a few measured
steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harmonium.core.errors import HarmoniumError, counted
from harmonium.core.progress import work
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock, size_of
from harmonium.runs.estimate import Estimate, estimated
from harmonium.runs.open_run import missing
from harmonium.runs.start import holds
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.comparison.cells import SUPERVISED, ComparisonPlan, plan
from harmonium.studies.comparison.study import COMPARISON, cell
from harmonium.studies.comparison.sweep import LINES, read

PATIENCE = 15.0  # seconds after which no further recipe is measured


@dataclass(frozen=True)
class Cell:
    """One run of a comparison, and its progress."""

    encoder: str
    seed: int
    folder: str | None  # none: a new one
    rounds: int
    done: int = 0  # completed rounds
    pace: float | None = None  # seconds a round so far; none: no round is complete
    expected: float | None = None  # seconds a round by a few measured steps; none: not measured
    down: float | None = None  # bytes a round to clients by the same steps
    up: float | None = None  # and from them
    unknown: str = ""  # why nothing could be measured
    complete: bool = False
    refused: str = ""  # why the command refuses what the folder holds


@dataclass(frozen=True)
class Forecast:
    """The runs of a comparison or a sweep, their cost, and missing data."""

    said: str  # the first line: how many runs, and of what
    cells: tuple[Cell, ...]
    unfair: tuple[str, ...]
    missing: tuple[str, ...]  # data sets that are not here, each with the command that gets it
    notes: tuple[str, ...]
    measured: str = ""  # how steps were measured, or why none was

    @property
    def seconds(self) -> float | None:
        """Seconds for the remaining rounds; none if no run has begun and no step was measured.

        The pace of a run is that of its encoder so far, else the one from measured steps, else the
        mean of the others.
        """
        paces = {one: one.pace for one in self.cells if one.pace is not None}
        known = [*paces.values(), *(e for one in self.cells if (e := one.expected) is not None)]
        if not known:
            return None
        whole = 0.0
        for one in self.cells:
            same = [pace for other, pace in paces.items() if other.encoder == one.encoder]
            if not same:
                same = known if one.expected is None else [one.expected]
            whole += (0 if one.complete else one.rounds - one.done) * fmean(same)
        return whole

    @property
    def sent(self) -> dict[str, float] | None:
        """Bytes of the remaining rounds, down and up; none if no step was measured.

        A run that was not measured is taken to send the mean of the others.
        """
        each = [(one.down, one.up) for one in self.cells]
        known = [(down, up) for down, up in each if down is not None and up is not None]
        if not known:
            return None
        mean = {"down": fmean(down for down, _ in known), "up": fmean(up for _, up in known)}
        total = dict.fromkeys(mean, 0.0)
        for one in self.cells:
            left = 0 if one.complete else one.rounds - one.done
            for way, usual in mean.items():
                its = getattr(one, way)
                total[way] += left * (usual if its is None else its)
        return total

    def plain(self) -> dict[str, Any]:
        """The forecast as plain values, for JSON."""
        return {**asdict(self), "seconds": self.seconds, "sent": self.sent}

    def lines(self) -> list[str]:
        """The lines that the command prints."""
        going = [one for one in self.cells if not one.complete]
        left = sum(one.rounds - one.done for one in going)
        begun = sum(one.done > 0 for one in going)
        complete = len(self.cells) - len(going)
        done = f"{complete} of {counted(len(self.cells), 'run')} complete, {begun} begun"
        what = "" if self.measured else " of training"
        time_left = f", about {clock(self.seconds)}{what}" if self.seconds else ""
        clash = next((one.refused for one in self.cells if one.refused), "")
        return [
            self.said,
            *(f"unfair   {text}" for text in self.unfair),
            *([] if self.unfair else ["fair     all methods have the same budget"]),
            f"done     {done}; {counted(left, 'round')} left{time_left}",
            *([f"time     {self.measured}"] if self.measured else []),
            *([f"bytes    {in_bytes(sent)}"] if (sent := self.sent) else []),
            *(f"note     {text}" for text in self.notes),
            *(f"missing  {text}" for text in self.missing),
            *([f"in use   {clash}"] if clash else []),
        ]


def in_bytes(sent: Mapping[str, float]) -> str:
    """Bytes in both directions, in words.

    >>> in_bytes({"down": 2e6, "up": 1e6})
    'about 2.0 MB down and 1.0 MB up'
    """
    return f"about {size_of(sent['down'])} down and {size_of(sent['up'])} up"


def forecast(
    words: Sequence[str],
    folder: Path | None = None,
    *,
    allow_unfair: bool = False,
    measure: bool = False,
) -> Forecast:
    """The runs of `compare` with the same words; different budgets are refused as there.

    With `measure`, a few steps of runs that have not begun are timed.
    """
    comparison = plan(words, allow_unfair=allow_unfair)
    return _forecast(comparison.headline, [(comparison, folder)], measure)


def forecast_sweep(
    words: Sequence[str],
    folder: Path | None = None,
    *,
    allow_unfair: bool = False,
    measure: bool = False,
) -> Forecast:
    """The same for `sweep`: all values together."""
    sweep = read(words)
    plans = [sweep.at_value(value, allow_unfair=allow_unfair) for value in sweep.values]
    headline = f"{sweep.key} is {', '.join(sweep.values)}; at each {plans[0].headline}"
    places = [folder and folder / f"{sweep.key}={value}" for value in sweep.values]
    if sweep.lines:
        once = sweep.at_every_value(allow_unfair=allow_unfair)
        plans, places = [*plans, once], [*places, folder and folder / LINES]
        headline += f"; and once {once.headline}"
    return _forecast(headline, list(zip(plans, places, strict=True)), measure)


def _forecast(
    headline: str, plans: Sequence[tuple[ComparisonPlan, Path | None]], measure: bool
) -> Forecast:
    """The runs of several comparisons, each with its folder; `headline` is the first line."""
    for _, folder in plans:
        if folder is not None:
            COMPARISON.holds(folder)
    recipes = [recipe for plan, _ in plans for recipe in plan.rows.values()]
    for recipe in recipes:
        recipe.check()
    runs = [
        (cell_of(label, seed, recipe, folder and cell(folder, label, seed)), recipe)
        for plan, folder in plans
        for label, seed, recipe in plan.cells()
    ]
    cells, measured = expected(runs) if measure else ([run for run, _ in runs], "")
    return Forecast(
        headline,
        tuple(cells),
        _each_once(text for plan, _ in plans for text in plan.unfair),
        _each_once(text for recipe in recipes for text in missing(recipe)),
        _each_once([*(text for plan, _ in plans for text in plan.remarks), *_label_note(plans)]),
        measured,
    )


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _label_note(plans: Sequence[tuple[ComparisonPlan, Path | None]]) -> Iterator[str]:
    """A note that supervised training may be left out, if labels may be missing."""
    unsure = any(_maybe_unlabelled(recipe) for plan, _ in plans for recipe in plan.rows.values())
    if unsure and any(SUPERVISED in plan.references for plan, _ in plans):
        yield f"{SUPERVISED} is left out if the images turn out to have no labels"


def expected(
    runs: Sequence[tuple[Cell, Recipe]],
    estimate: Callable[[Recipe], Estimate | str] | None = None,
) -> tuple[list[Cell], str]:
    """The cells with estimates from a few measured steps, and the assumptions behind them.

    Measuring stops after `PATIENCE` seconds. Runs that differ only in their seed are measured once,
    and those of an encoder that has a pace already are not. `estimate` replaces `estimated`.
    """
    begun = {one.encoder for one, _ in runs if one.pace is not None}
    asked = {_apart_from_seed(r): r for one, r in runs if one.encoder not in begun}
    estimates: dict[str, Estimate | str] = {}
    started = time.perf_counter()
    with work("measuring a few steps of each", len(asked), "recipes") as at:
        for key, recipe in asked.items():
            if estimates and time.perf_counter() - started > PATIENCE:
                break
            estimates[key] = (estimate or estimated)(recipe)
            at(len(estimates))
    known = {key: one for key, one in estimates.items() if isinstance(one, Estimate)}
    cells = [
        one if one.encoder in begun else _filled(one, estimates.get(_apart_from_seed(recipe)))
        for one, recipe in runs
    ]
    if not asked:
        return cells, ""
    if not known:
        return cells, f"not known: {next(iter(estimates.values()))}"
    assumed = "; ".join(next(iter(known.values())).assumed)
    return cells, f"by a few steps of {len(known)} of {counted(len(asked), 'recipe')}: {assumed}"


def _filled(one: Cell, its: Estimate | str | None) -> Cell:
    """A cell with the estimate of its recipe."""
    if its is None or isinstance(its, str):
        return replace(one, unknown=its or "")
    return replace(
        one,
        expected=its.seconds / its.rounds,
        down=its.bytes_down / its.rounds,
        up=its.bytes_up / its.rounds,
    )


def _apart_from_seed(recipe: Recipe) -> str:
    return json.dumps({**recipe.tree(), "seed": None}, sort_keys=True)


def _maybe_unlabelled(recipe: Recipe) -> bool:
    return recipe.data.about is None or recipe.data.about.classes is None


def cell_of(label: str, seed: int, recipe: Recipe, folder: Path | None) -> Cell:
    """A run and its progress, from its folder; without a folder it is new."""
    if folder is None:
        return Cell(label, seed, None, recipe.rounds)
    try:
        begun = folder.exists() and holds(folder, recipe)
    except HarmoniumError as error:
        return Cell(label, seed, str(folder), recipe.rounds, refused=str(error))
    if not begun:
        return Cell(label, seed, str(folder), recipe.rounds)
    taken = {row["round"]: row["seconds"] for row in RunFolder(folder).read_log("timings.jsonl")}
    return Cell(
        label,
        seed,
        str(folder),
        recipe.rounds,
        done=max(taken, default=0),
        pace=fmean(taken[number] for number in taken if number) if max(taken, default=0) else None,
        complete=(folder / "result.json").exists(),
    )
