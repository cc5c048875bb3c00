"""What a comparison or a sweep would do, and how much of it is done: `--dry-run`. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harmonium.checkpoint import Folder
from harmonium.comparing.cells import SUPERVISED, Plan, plan
from harmonium.comparing.study import cell
from harmonium.comparing.sweep import read
from harmonium.errors import counted
from harmonium.hosts import missing, read_recipe
from harmonium.recipe import Recipe
from harmonium.report.progress import clock


@dataclass(frozen=True)
class Cell:
    """One run of a comparison, as its folder has it now."""

    encoder: str
    seed: int
    folder: str | None  # none: a new one
    rounds: int
    done: int = 0  # rounds that are behind it
    pace: float | None = None  # seconds a round so far; none: it has none yet
    complete: bool = False
    other: bool = False  # the folder holds a run of another recipe


@dataclass(frozen=True)
class Forecast:
    """The runs of a comparison or a sweep, and what stands in their way."""

    said: str
    cells: tuple[Cell, ...]
    unfair: tuple[str, ...]
    missing: tuple[str, ...]  # data sets that are not here, each with the command that gets it
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """How long training will take at the pace of runs that have begun; none: none has."""
        known = [one for one in self.cells if one.pace is not None]
        if not known:
            return None
        whole = 0.0
        for one in self.cells:
            same = [other for other in known if other.encoder == one.encoder] or known
            left = 0 if one.complete else one.rounds - one.done
            whole += left * fmean(other.pace or 0.0 for other in same)
        return whole

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {**asdict(self), "seconds": self.seconds}

    def lines(self) -> list[str]:
        """What a reader of the command sees."""
        going = [one for one in self.cells if not one.complete]
        left = sum(one.rounds - one.done for one in going)
        begun = sum(one.done > 0 for one in going)
        complete = len(self.cells) - len(going)
        done = f"{complete} of {counted(len(self.cells), 'run')} complete, {begun} begun"
        time = f", about {clock(self.seconds)} of training" if self.seconds else ""
        clash = next((one.folder for one in self.cells if one.other), None)
        return [
            self.said,
            *(f"unfair   {text}" for text in self.unfair),
            *([] if self.unfair else ["fair     all methods have the same budget"]),
            f"done     {done}; {counted(left, 'round')} left{time}",
            *(f"note     {text}" for text in self.notes),
            *(f"missing  {text}" for text in self.missing),
            *([f"in use   {clash} holds another run: name another --out"] if clash else []),
        ]


def forecast(
    words: Sequence[str], folder: Path | None = None, *, allow_unfair: bool = False
) -> Forecast:
    """What `compare` would do with the same words; budgets that differ are refused alike."""
    made = plan(words, allow_unfair=allow_unfair)
    return _of(made.said, [(made, folder)])


def forecast_sweep(
    words: Sequence[str], folder: Path | None = None, *, allow_unfair: bool = False
) -> Forecast:
    """The same for `sweep`: all values together."""
    asked = read(words)
    plans = [asked.plan(value, allow_unfair=allow_unfair) for value in asked.values]
    said = f"{asked.key} is {', '.join(asked.values)}; at each {plans[0].said}"
    places = [folder and folder / f"{asked.key}={value}" for value in asked.values]
    return _of(said, list(zip(plans, places, strict=True)))


def _of(said: str, plans: Sequence[tuple[Plan, Path | None]]) -> Forecast:
    recipes = [recipe for made, _ in plans for recipe in made.rows.values()]
    for recipe in recipes:
        recipe.check()
    notes = [text for made, _ in plans for text in made.remarks]
    if any(map(_maybe_unlabelled, recipes)) and any(SUPERVISED in p.references for p, _ in plans):
        notes.append(f"{SUPERVISED} is left out if the pictures turn out to have no labels")
    return Forecast(
        said,
        tuple(
            _cell(label, seed, recipe, folder and cell(folder, label, seed))
            for made, folder in plans
            for label, seed, recipe in made.cells()
        ),
        tuple(dict.fromkeys(text for made, _ in plans for text in made.unfair)),
        tuple(dict.fromkeys(text for recipe in recipes for text in missing(recipe))),
        tuple(dict.fromkeys(notes)),
    )


def _maybe_unlabelled(recipe: Recipe) -> bool:
    return recipe.data.about is None or recipe.data.about.classes is None


def _cell(label: str, seed: int, recipe: Recipe, folder: Path | None) -> Cell:
    if folder is None or not (folder / "recipe.yaml").exists():
        return Cell(label, seed, None if folder is None else str(folder), recipe.rounds)
    if read_recipe(folder).digest != recipe.digest:
        return Cell(label, seed, str(folder), recipe.rounds, other=True)
    taken = {row["round"]: row["seconds"] for row in Folder(folder).read_log("timings.jsonl")}
    return Cell(
        label,
        seed,
        str(folder),
        recipe.rounds,
        done=max(taken, default=0),
        pace=fmean(taken[number] for number in taken if number) if max(taken, default=0) else None,
        complete=(folder / "result.json").exists(),
    )
