"""Forecast of a study, and how much of it is done: `harmonium tune --dry-run`.

Nothing is run. How many settings stop early is not known in advance: a study takes least if only
the share `keep` continues at every check, and most if none stops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from harmonium.core.errors import ConfigError, counted
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock
from harmonium.runs.estimate import estimated
from harmonium.runs.open_run import missing
from harmonium.studies.comparison.forecast import Cell, Forecast, cell_of, expected, in_bytes
from harmonium.studies.tuning.early_stopping import Stopping, StudyRuns
from harmonium.studies.tuning.grid import Setting
from harmonium.studies.tuning.study import grid_of


@dataclass(frozen=True)
class PlannedSetting:
    """A setting of a grid, and the progress of its run."""

    setting: Mapping[str, str]
    run: Cell | None = None  # none: it does not run
    state: Literal["setting", "refused", "failed"] = "setting"
    why: str = ""  # why it does not run

    def line(self) -> str:
        """What the command prints."""
        words = " ".join(f"{key}={value}" for key, value in self.setting.items())
        if self.run is None:
            return f"{words}: {self.why}"
        if self.run.refused or self.run.unknown:
            return f"{words}: {self.run.refused or f'time not known: {self.run.unknown}'}"
        done, rounds = self.run.done, counted(self.run.rounds, "round")
        return f"{words}: {done} of {rounds} done" if done else words


@dataclass(frozen=True)
class StudyForecast:
    """The settings of a study, and what its runs would take."""

    settings: tuple[PlannedSetting, ...]
    data: str
    rounds: int
    checks: tuple[int, ...]  # rounds after which settings may stop
    keep: float
    missing: tuple[str, ...]  # data sets to fetch first, each with the command that does it
    measured: str  # how steps were measured, or why none was

    @property
    def most(self) -> Forecast:
        """The runs if no setting stops early."""
        runs = tuple(one.run for one in self.settings if one.run is not None)
        return Forecast("", runs, (), self.missing, (), self.measured)

    @property
    def share(self) -> float:
        """The share of the rounds left that is run if as many settings as possible stop early."""
        done = sorted((one.done for one in self.most.cells), reverse=True)
        goals = fewest_rounds(len(done), self.rounds, self.checks, self.keep)
        left = sum(self.rounds - one for one in done)
        least = sum(max(0, goal - one) for goal, one in zip(goals, done, strict=True))
        return least / left if left else 0.0

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON; `seconds` and `sent` are at most, `least` their least share."""
        runs = self.most
        more = {"runs": len(runs.cells), "seconds": runs.seconds, "sent": runs.sent}
        return {**asdict(self), **more, "least": self.share}

    def lines(self) -> list[str]:
        """What the command prints."""
        runs, share = self.most, self.share
        rounds = counted(self.rounds, "round")
        summary = f"{counted(len(runs.cells), 'run')} of {rounds} on {self.data}"
        states = Counter(one.state for one in self.settings if one.run is None)
        summary = "; ".join([summary, *(f"{count} {state}" for state, count in states.items())])
        lines = [f"{counted(len(self.settings), 'setting')}: {summary}"]
        lines += [f"{one.state:<8} {one.line()}" for one in self.settings]
        if self.checks:
            after = ", ".join(map(str, self.checks))
            share_kept = f"at least {100 * self.keep:g} % of the settings go on"
            rounds = "round" if len(self.checks) == 1 else "rounds"
            lines.append(f"checks   after {rounds} {after}, {share_kept}")
        if runs.seconds is not None:
            least, most = (f"about {clock(part * runs.seconds)}" for part in (share, 1.0))
            lines.append(f"time     {_either(least, most, share)}; {self.measured}".rstrip("; "))
        elif self.measured:
            lines.append(f"time     {self.measured}")
        if sent := runs.sent:
            least = in_bytes({way: share * much for way, much in sent.items()})
            amount = _either(least, in_bytes(sent), share)
            lines.append(f"bytes    {amount}; without those of scores")
        return [*lines, *(f"missing  {text}" for text in self.missing)]


def _either(least: str, most: str, share: float) -> str:
    """Both ends of an estimate, or one where nothing can stop."""
    return f"{least} if settings stop, {most} if none does" if share < 1 else most


def fewest_rounds(count: int, rounds: int, checks: Sequence[int], keep: float) -> list[int]:
    """How far settings go if no more than a share of them goes on at each check.

    >>> fewest_rounds(5, 20, [5, 10], 0.5)
    [20, 20, 10, 5, 5]
    """
    goals, alive = [rounds] * count, count
    for check in checks:
        on = math.ceil(alive * keep)
        goals[on:alive] = [check] * (alive - on)
        alive = on
    return goals


def forecast_study(
    what: str,
    words: Sequence[str],
    folder: Path | None = None,
    *,
    keep_all: bool = False,
    keep: float = 0.5,
    margin: float = 0.1,
    check: Sequence[int] | None = None,
) -> StudyForecast:
    """What `tune` would do with the same words; what it refuses is refused alike.

    A few steps of settings that have not begun are measured, while there is time.
    """
    points, _ = grid_of(what, words)
    study = StudyRuns(folder or Path(), points, (), lambda text: None)
    stopping = Stopping(keep, margin, None if check is None else tuple(check))
    checks = [] if keep_all else stopping.rounds(study.any_recipe)
    if folder is not None:
        study.check_folder()
    planned: list[PlannedSetting] = []
    runs: dict[int, tuple[Cell, Recipe]] = {}
    for number, point in enumerate(points):
        failed = study.failure(number) if folder is not None else None
        if why := _refused(point):
            planned.append(PlannedSetting(point.values, state="refused", why=why))
        elif failed:
            why = f"after round {failed['after']}: {failed['why']}"
            planned.append(PlannedSetting(point.values, state="failed", why=why))
        else:
            assert point.recipe is not None
            planned.append(PlannedSetting(point.values))
            place = folder and study.place(number)
            one = cell_of(point.label, point.recipe.seed, point.recipe, place)
            runs[number] = replace(one, complete=one.done >= one.rounds), point.recipe
    cells, measured = expected([*runs.values()], partial(estimated, verdict=False))
    for number, one in zip(runs, cells, strict=True):
        planned[number] = replace(planned[number], run=one)
    recipes = [recipe for _, recipe in runs.values()]
    return StudyForecast(
        tuple(planned),
        study.any_recipe.data.name,
        study.any_recipe.rounds,
        tuple(checks),
        keep,
        tuple(dict.fromkeys(text for recipe in recipes for text in missing(recipe))),
        measured,
    )


def _refused(point: Setting) -> str:
    """Why a setting cannot run; empty where it can."""
    if point.recipe is None:
        return point.why
    try:
        point.recipe.check()
    except ConfigError as error:
        return str(error)
    return ""
