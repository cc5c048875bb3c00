"""A grid of settings in short runs, ranked without labels: what `harmonium tune` does.

Lubana et al., Orchestra, 2022, section 5: every setting runs for 20 rounds, then all clients score
the encoder by Align + 0.2 Unif (eq. 5), and the highest score wins. Labels, where there are any,
only say beside it how well the score ranked. Test images are not looked at: runs end with their
last round, before the verdict.

Not of the paper: hopeless settings stop early. At some rounds the better share of all settings goes
on (successive halving, Jamieson and Talwalkar, 2016), and whoever is hardly worse than the last of
them. Runs are ordinary runs in the study's folder, so a study that was stopped goes on where it was
and ends with the same table.
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

from harmonium.core import files
from harmonium.core.callbacks import Callbacks
from harmonium.core.errors import ConfigError
from harmonium.core.progress import work
from harmonium.recipe.overrides import Change, as_words, changes_of
from harmonium.report import figure
from harmonium.report.metric_names import times
from harmonium.report.tables import Tabular, csv_text, markdown
from harmonium.studies.tuning.early_stopping import STUDY, Playing, Stopping
from harmonium.studies.tuning.grid import Setting, points

UNEQUAL = {  # what makes scores hard to compare, and why
    "encoder": "features of different encoders have different geometry before they learn anything",
    "clients": "Unif grows with the number of images at a client",
    "split": "Unif depends on which and how many images a client has",
}


@dataclass(frozen=True, repr=False)
class Study(Tabular):
    """What a study found; scores are those of eq. 5, kNN a share between 0 and 1."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]  # the best first
    best: Mapping[str, str] | None  # of those without a warning, if any; none: none came through
    command: str  # that runs the best setting in full; empty without one
    rounds: int
    ranked: Mapping[str, float] | None  # rho of score and kNN, and over how many settings
    picture: Path | None  # the first of the plots
    notes: tuple[str, ...] = ()
    plots: tuple[Path, ...] = ()  # every file of the plot

    def panels(self) -> list[tuple[str, list[dict[str, Any]], int | None]]:
        """The one table of a notebook."""
        return [("Settings by their score without labels", self.shown(), None)]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "folder": str(self.folder),
            "best": dict(self.best) if self.best else None,
            "command": self.command,
            "rounds": self.rounds,
            "spearman": dict(self.ranked) if self.ranked else None,
            "picture": str(self.picture) if self.picture else None,
            "plots": [str(path) for path in self.plots],
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def shown(self) -> list[dict[str, Any]]:
        """The rows under the names that people read, accuracies in percent; (!) is a warning."""
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
        keep_all: play every setting to its end.
        keep: else the share that goes on after each round of `check`,
        margin: and whoever is less than this below the last of them, as a share of the distance
            between the best and the worst score.
        check: rounds after which settings are dropped.
        formats: of the plot, as for `compare`.
        callbacks: as for `compare`.
        note: is told what is worth a line.
        settings: settings by name.

    Returns:
        The settings with their scores, the best first, and the command that runs the best.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> grid = {"local.lr": [0.1, 0.001]}
    >>> found = harmonium.tune("fedsimclr", grid=grid, **small, **{"engine.workers": 0})
    >>> len(found.rows), found.best["local.lr"] in ("0.1", "0.001")
    (2, True)
    """
    formats = None if formats is None else figure.known_formats(formats)
    grid_points, changes = grid_of(what, words, grid, settings)
    playing = Playing(new_folder(what) if out is None else Path(out), grid_points, callbacks, note)
    stopping = Stopping(keep, margin, None if check is None else tuple(check))
    checks = [] if keep_all else stopping.rounds(playing.any_recipe)
    playing.begin()
    while playing.advance(checks[0] if checks else playing.any_recipe.rounds):
        if not checks:
            break
        playing.drop(checks.pop(0), stopping)
    with work("tables and plots"), figure.formats(formats):
        return _written(playing, what, changes)


def grid_of(
    what: str,
    words: Sequence[str],
    grid: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[Setting], list[Change]]:
    """The settings of a study and what is the same in all of them; the arguments are `tune`'s."""
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
_ASIDE = ("rounds", *_TUNING)  # what only the study's runs need


def _written(playing: Playing, what: str, changes: Sequence[Change]) -> Study:
    """The study's table, its files and its image."""
    lines = {number: playing.row(number) for number in range(len(playing.points))}
    order = sorted(lines, key=lambda number: _place(lines[number]))
    rows, rounds = [lines[number] for number in order], playing.any_recipe.rounds
    through = [number for number in order if lines[number]["state"] == "complete"]
    healthy = [number for number in through if not lines[number]["warnings"]]
    best, command = next(iter(healthy or through), None), ""
    if best is not None:
        left = [change for change in changes if change.key not in _ASIDE]
        full = ["harmonium", "run", what, *as_words(left), *playing.points[best].words]
        command = " ".join(map(shlex.quote, full))
    pairs = [(row["score"], row["knn"]) for row in rows if row["state"] == "complete"]
    pairs = [pair for pair in pairs if None not in pair]
    ranked = {"rho": rho, "settings": len(pairs)} if (rho := spearman(pairs)) is not None else None
    curves = {playing.points[number].label: playing.figures(number) for number in order}
    place = playing.folder / "tune.png"
    top = next((n for n, number in enumerate(order) if number == best), None)
    plots = _plots(place, rows, curves, ranked, top)
    chosen = None if best is None else lines[best]["setting"]
    notes = (*_notes(playing, rows), *at_the_edge([p.values for p in playing.points], chosen or {}))
    study = Study(
        playing.folder, tuple(rows), chosen, command, rounds, ranked,
        plots[0] if plots else None, notes, plots,
    )  # fmt: skip
    text = json.dumps(study.plain(), indent=1)
    files.write_atomic(playing.folder / "tune.json", f"{text}\n".encode())
    flat = [{**row["setting"], **{k: row[k] for k in row if k != "setting"}} for row in rows]
    flat = [{**row, "warnings": " ".join(row["warnings"])} for row in flat]
    files.write_atomic(playing.folder / "tune.csv", csv_text(flat).encode())
    files.write_atomic(playing.folder / "tune.md", markdown(study.shown()).encode())
    return study


def _place(row: Mapping[str, Any]) -> tuple[int, int, float]:
    score = -math.inf if row["score"] is None else row["score"]
    return _ORDER.index(row["state"]), -row["round"], -score


def _notes(playing: Playing, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a reader of the table should know."""
    for key in playing.points[0].values:
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


def _plots(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    ranked: Mapping[str, float] | None,
    best: int | None,
) -> tuple[Path, ...]:
    """Draw the study; gives the files, of which there are none without anything to draw."""
    from harmonium.report.tuning_plots import plot_study

    with figure.formats(figure.study_formats()):
        return (
            tuple(figure.plot_paths(path)) if plot_study(path, rows, curves, ranked, best) else ()
        )
