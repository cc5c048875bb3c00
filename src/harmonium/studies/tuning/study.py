"""A grid of settings in short runs, ranked without labels: what `harmonium tune` does.

Lubana et al., Orchestra, 2022, section 5: every setting runs for 20 rounds, then all clients score
the encoder by Align + 0.2 Unif (eq. 5), and the highest score wins. Labels, where there are any,
only show how well the score ranked. Test images are not used: runs end with their last round,
before the verdict.

Not in the paper: settings with low scores stop early. At some rounds only the better share of all
settings continues (successive halving, Jamieson and Talwalkar, 2016), with those that score hardly
worse. Runs are ordinary runs in the study's folder, so a stopped study continues where it was and
ends with the same table.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core.callbacks import Callbacks
from harmonium.core.errors import ConfigError
from harmonium.core.progress import work
from harmonium.engines.workers import shared_workers
from harmonium.recipe.overrides import Change, as_words, changes_of
from harmonium.report import figure
from harmonium.report.metric_names import times
from harmonium.report.tables import Tabular
from harmonium.report.tuning_plots import plot_study
from harmonium.report.writer import ResultTable, write_plot, write_results
from harmonium.studies.tuning.early_stopping import STUDY, Stopping, StudyRuns
from harmonium.studies.tuning.grid import Setting, points

UNEQUAL = {  # what makes scores hard to compare, and why
    "encoder": "features of different encoders have different geometry before they learn anything",
    "clients": "Unif grows with the number of images at a client",
    "split": "Unif depends on which and how many images a client has",
}


@dataclass(frozen=True, repr=False)
class Study(Tabular):
    """The result of a study; scores are those of eq. 5, kNN a share between 0 and 1."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]  # the best first
    best: Mapping[str, str] | None  # of those without a warning, if any; none: none is complete
    command: str  # that runs the best setting in full; empty without one
    rounds: int
    ranked: Mapping[str, float] | None  # rho of score and kNN, and over how many settings
    main_plot: Path | None  # the first of the plots
    notes: tuple[str, ...] = ()
    plots: tuple[Path, ...] = ()  # every file of the plot

    def panels(self) -> list[tuple[str, list[dict[str, Any]], int | None]]:
        """The one table of a notebook."""
        return [("Settings by their score without labels", self.shown(), None)]

    def plain(self) -> dict[str, Any]:
        """The study as plain values, for JSON."""
        return {
            "folder": str(self.folder),
            "best": dict(self.best) if self.best else None,
            "command": self.command,
            "rounds": self.rounds,
            "spearman": dict(self.ranked) if self.ranked else None,
            "picture": str(self.main_plot) if self.main_plot else None,
            "plots": [str(path) for path in self.plots],
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def shown(self) -> list[dict[str, Any]]:
        """The rows with display names, accuracies in percent; (!) marks a warning."""
        labelled = any(row["knn"] is not None for row in self.rows)
        keys = list(self.rows[0]["setting"])
        ends = [key.rpartition(".")[2] for key in keys]
        names = ends if len({*ends, "round", "score"}) == len(ends) + 2 else keys
        shown = []
        for row in self.rows:
            one = dict(zip(names, row["setting"].values(), strict=True))
            one |= {"round": row["round"], "score": row["score"]}
            one |= {"Align": row["align"], "Unif": row["unif"]}
            one |= {"validation kNN": times(100, row["knn"])} if labelled else {}
            one["state"] = row["state"] + (" (!)" if row["warnings"] else "")
            shown.append(one)
        return shown


@shared_workers()
def tune(
    what: str,
    *words: str,
    grid: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path | None = None,
    keep_all: bool = False,
    keep: float = 0.5,
    margin: float = 0.1,
    check: Sequence[int] | None = None,
    formats: str | Sequence[str] | None = None,
    callbacks: Callbacks = (),
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Study:
    """Try a grid of settings in short runs and rank them without labels.

    Args:
        what: a method or a recipe by name.
        words: settings, and the grid as `"grid.local.lr=0.03,0.01"`, as on the command line.
        grid: the same as `{"local.lr": [0.03, 0.01]}`.
        out: the study's folder; if it holds this very study already, that is continued.
        keep_all: run every setting to its end.
        keep: the share of the settings that continues after each round of `check`.
        margin: settings that score less than this below the last of them continue, too; as a share
            of the distance between the best and the worst score.
        check: rounds after which settings may be stopped.
        formats: of the plot, as for `compare`.
        callbacks: as for `compare`.
        note: called with each message on progress.
        settings: settings by name.

    Returns:
        The settings with their scores, the best first, and the command that runs the best.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> grid = {"local.lr": [0.1, 0.001]}
    >>> study = harmonium.tune("fedsimclr", grid=grid, **small, **{"engine.workers": 0})
    >>> len(study.rows), study.best["local.lr"] in ("0.1", "0.001")
    (2, True)
    """
    formats = None if formats is None else figure.known_formats(formats)
    grid_points, changes = grid_of(what, words, grid, settings)
    runs = StudyRuns(new_folder(what) if out is None else Path(out), grid_points, callbacks, note)
    stopping = Stopping(keep, margin, None if check is None else tuple(check))
    checks = [] if keep_all else stopping.rounds(runs.any_recipe)
    runs.begin()
    while runs.advance(checks[0] if checks else runs.any_recipe.rounds):
        if not checks:
            break
        runs.drop(checks.pop(0), stopping)
    with work("tables and plots"), figure.formats(formats):
        return _write(runs, what, changes)


def grid_of(
    what: str,
    words: Sequence[str],
    grid: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[Setting], list[Change]]:
    """The settings of a study, and the changes that all of them share; arguments as for `tune`."""
    settings = settings or {}
    grid_words = [word for word in words if word.startswith("grid.")]
    dotted = {key: some for key, some in settings.items() if key.startswith("grid.")}
    settings = {key: value for key, value in settings.items() if key not in dotted}
    tried = [*(grid or {}).items(), *((k.removeprefix("grid."), v) for k, v in dotted.items())]
    for key, some in tried:
        if isinstance(some, str) or not isinstance(some, Sequence):
            raise ConfigError(f"grid {key!r} is {some!r}; it must be a list, e.g. [0.03, 0.01]")
        grid_words.append(f"grid.{key}={','.join(map(_text, some))}")
    changes = changes_of([word for word in words if not word.startswith("grid.")], settings)
    return points(what, changes, grid_words), changes


def new_folder(what: str) -> Path:
    """The folder of a study that was started without `out`."""
    return STUDY.new(Path(what).stem)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_ORDER = ("complete", "stopped", "failed", "refused")
_TUNING = ("evaluate.tuning", "evaluate.tuning_centre", "evaluate.tuning_over")
_STUDY_ONLY = ("rounds", *_TUNING)  # settings that a run of the best in full does not take over


def _write(runs: StudyRuns, what: str, changes: Sequence[Change]) -> Study:
    """Rank the settings, draw them, and write the study in every form."""
    lines = {number: runs.row(number) for number in range(len(runs.points))}
    order = sorted(lines, key=lambda number: _place(lines[number]))
    rows = [lines[number] for number in order]
    best = _best(rows)
    setting = None if best is None else rows[best]["setting"]
    command = "" if best is None else _command(what, changes, runs.points[order[best]])
    ranked = _rank_correlation(rows)
    curves = {runs.points[number].label: runs.figures(number) for number in order}
    with figure.formats(figure.study_formats()):
        path = runs.folder / "tune.png"
        plots = tuple(write_plot(path, plot_study, rows, curves, ranked, best))
    tried = [point.values for point in runs.points]
    study = Study(
        runs.folder,
        tuple(rows),
        setting,
        command,
        runs.any_recipe.rounds,
        ranked,
        plots[0] if plots else None,
        (*_notes(runs, rows), *at_the_edge(tried, setting or {})),
        plots,
    )
    write_results(
        study.folder,
        "tune",
        study.plain(),
        [ResultTable("", study.shown())],
        sheets={"": [_csv_row(row) for row in rows]},
    )
    return study


def _best(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The place of the best complete setting, without a warning if there is such a one."""
    complete = [place for place, row in enumerate(rows) if row["state"] == "complete"]
    healthy = [place for place in complete if not rows[place]["warnings"]]
    return next(iter(healthy or complete), None)


def _command(what: str, changes: Sequence[Change], best: Setting) -> str:
    """The command that runs the best setting in full."""
    shared = [change for change in changes if change.key not in _STUDY_ONLY]
    return shlex.join(["harmonium", "run", what, *as_words(shared), *best.words])


def _rank_correlation(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The rank correlation of score and kNN over complete settings, and their number."""
    pairs = [(row["score"], row["knn"]) for row in rows if row["state"] == "complete"]
    pairs = [pair for pair in pairs if None not in pair]
    rho = spearman(pairs)
    return None if rho is None else {"rho": rho, "settings": len(pairs)}


def _csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with a column for each key of the grid."""
    rest = {key: value for key, value in row.items() if key != "setting"}
    return {**row["setting"], **rest, "warnings": " ".join(row["warnings"])}


def _place(row: Mapping[str, Any]) -> tuple[int, int, float]:
    score = -math.inf if row["score"] is None else row["score"]
    return _ORDER.index(row["state"]), -row["round"], -score


def _notes(runs: StudyRuns, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Notes for readers of the table."""
    for key in runs.points[0].values:
        if why := UNEQUAL.get(key.partition(".")[0]):
            yield f"{key}: scores are hard to compare: {why}"
    if rows[0]["state"] == "complete" and rows[0]["warnings"]:
        yield (
            "the highest score is of an encoder with a warning, so it is not to be trusted: "
            f"{' '.join(rows[0]['warnings'])}"
        )
    for row in rows:
        if row["why"]:
            label = " ".join(f"{key}={value}" for key, value in row["setting"].items())
            yield f"{label} {row['state']}: {row['why']}"


def at_the_edge(tried: Sequence[Mapping[str, str]], best: Mapping[str, str]) -> Iterator[str]:
    """Say where the best of three or more numbers is the least or the greatest of them.

    >>> list(at_the_edge([{"local.lr": lr} for lr in ("1e-3", "0.1", "0.01")], {"local.lr": "0.1"}))
    ['local.lr=0.1 is the largest that was tried: larger ones may be better still']
    """
    for key, value in best.items():
        try:
            numbers = sorted({float(setting[key]) for setting in tried})
        except ValueError:  # names, lists
            continue
        for place, most in ((0, "smallest"), (-1, "largest")):
            if len(numbers) > 2 and float(value) == numbers[place]:
                more = most.replace("est", "er")
                yield f"{key}={value} is the {most} that was tried: {more} ones may be better still"


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of pairs, ties sharing their mean rank; none of fewer than 3 or all equal.

    >>> spearman([(0.1, 5.0), (0.2, 7.0), (0.3, 6.0)])
    0.5
    """
    if len(pairs) < 3:
        return None
    ranks = [_ranks(np.array(column, dtype=np.float64)) for column in zip(*pairs, strict=True)]
    first, second = (rank - rank.mean() for rank in ranks)
    size = math.sqrt(float((first @ first) * (second @ second)))
    return float(first @ second) / size if size else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values have the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean: np.ndarray = np.cumsum(count) - (count + 1) / 2
    return mean[place]
