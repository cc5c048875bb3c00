"""Several methods under one budget, over seeds: what `harmonium compare` does.

Every cell (a method or a reference, with a seed) is an ordinary run in the comparison's folder.
What is complete is not run again, what was killed goes on, and what fails is named and left out.
Figures of the table are of the test part, read once at the end of a run; rounds, bytes and time to
an accuracy are by validation images.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.callbacks import Callbacks, called
from harmonium.core.errors import (
    CallbackError,
    DataError,
    HarmoniumError,
    NoneFinished,
)
from harmonium.core.progress import work
from harmonium.methods.centralised import Centralised
from harmonium.recipe.overrides import as_words, changes_of
from harmonium.report import figure as look
from harmonium.runs.loop import Result
from harmonium.runs.open_run import read_about, read_split
from harmonium.runs.start import COMMAND, holds, reference_figures, reference_levels, run
from harmonium.storage.result_folder import FolderKind
from harmonium.storage.run_folder import RECIPE
from harmonium.studies.comparison import table
from harmonium.studies.comparison.cells import SUPERVISED, UNTRAINED, WHITENED, Plan
from harmonium.studies.comparison.cells import plan as planned
from harmonium.studies.comparison.names import slug
from harmonium.studies.comparison.published import Published, published
from harmonium.studies.comparison.traffic import Point, components, course

COMPARISON = FolderKind("comparison", "compare")

Cell = tuple[str, int]  # a row's label and a seed


@dataclass
class Found:
    """What the cells of a comparison came to."""

    plan: Plan
    figures: dict[Cell, Mapping[str, Any]] = field(default_factory=dict)
    courses: dict[Cell, list[Point]] = field(default_factory=dict)
    objectives: dict[Cell, list[Mapping[str, Any]]] = field(default_factory=dict)  # by round
    traffic: dict[Cell, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    levels: dict[Cell, float] = field(default_factory=dict)  # validation kNN of references
    against: dict[Cell, Mapping[str, Any]] = field(default_factory=dict)  # verdicts of runs
    published: dict[str, Published] = field(default_factory=dict)
    failed: dict[Cell, str] = field(default_factory=dict)
    stopped: dict[Cell, str] = field(default_factory=dict)  # why runs ended before their last round
    unfair: list[str] = field(default_factory=list)


def compare(
    *words: str,
    out: str | Path | None = None,
    allow_unfair: bool = False,
    formats: str | Sequence[str] | None = None,
    callbacks: Callbacks = (),
    **settings: Any,
) -> table.Comparison:
    """Run methods and references under one budget, and put their figures side by side.

    Args:
        words: methods and recipes by name, and settings of all of them, as on the command line.
        out: the folder of all runs; if it holds some of them already, they are continued or simply
            read.
        allow_unfair: compare although budgets differ; else that is refused, with the reason.
        formats: of the plots, e.g. `"pdf"` or `["pdf", "svg"]`; PNG, PDF and SVG if left out.
        callbacks: one or several `Callback` objects for every run, or a function that makes one
            from a run's label.
        settings: settings by name, e.g. `rounds=5, seeds=3`, and names of rows for readers,
            `label={"fedavg": "FedAvg (ours)"}`.

    Returns:
        Rows of figures over seeds, with intervals and differences in `details`.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> found = harmonium.compare("fedavg", "compare.references=none", **small)
    >>> {"untrained", "raw pixels", "fedavg"} <= {row["encoder"] for row in found.rows}
    True
    """
    formats = None if formats is None else look.known_formats(formats)
    made = planned(words, settings, allow_unfair=allow_unfair)
    if not next(iter(made.methods.values())).data.load().train.labelled:
        unlabelled = {k: v for k, v in made.references.items() if not k.startswith(SUPERVISED)}
        made = replace(made, references=unlabelled)
    folder = Path(out) if out is not None else new_folder(list(made.methods))
    cells = list(made.cells())
    COMPARISON.holds(folder)
    for label, seed, recipe in cells:
        if (cell(folder, label, seed) / RECIPE).exists():
            holds(cell(folder, label, seed), recipe)
    COMPARISON.claim(folder)
    note_command(folder, "compare", words, settings, allow_unfair=allow_unfair)
    found = Found(made, unfair=list(made.unfair))
    results: dict[Cell, Result] = {}
    for label, name in made.words.items():
        if figure := published(name, made.methods[label]):
            found.published[label] = figure
    for number, (label, seed, recipe) in enumerate(cells, 1):
        place = f", seed {seed}" if len(made.seeds) > 1 else ""
        told = f"{made.name(label)}{place} ({number} of {len(cells)})"
        with called(callbacks, told) as teller:
            try:
                result = run(recipe, out=cell(folder, label, seed), callbacks=teller)
            except CallbackError:
                raise
            except HarmoniumError as error:
                found.failed[label, seed] = str(error)
                teller.note(f"it failed and is left out: {error}")
            except Exception as error:  # a fault of ours: the others go on, and it is told later
                found.failed[label, seed] = f"{type(error).__name__}: {error}"
                files.write_atomic(folder / "failed.txt", traceback.format_exc().encode())
                teller.note(f"it broke and is left out; {folder / 'failed.txt'} says where")
            else:
                results[label, seed] = result
    if not any(label in made.methods for label, _ in results):
        why = next(why for (label, _), why in found.failed.items() if label in made.methods)
        raise NoneFinished(f"no run of any method came to its end: {why}")
    found.unfair += _same_ground(made, results, allow=allow_unfair)
    _read(found, results)
    with work("tables and plots"), look.formats(formats):
        return table.written(folder, found)


def note_command(
    folder: Path,
    kind: str,
    words: Sequence[str],
    settings: Mapping[str, Any] = {},
    *,
    allow_unfair: bool,
) -> None:
    """Write down the command that goes on with a folder: all of it but --out."""
    flags = ["--allow-unfair"] if allow_unfair else []
    keys = {word.partition("=")[0] for word in words}
    more = [one for one in changes_of([], settings) if one.key not in keys]
    text = shlex.join(["harmonium", kind, *words, *as_words(more), *flags])
    files.write_atomic(folder / COMMAND, f"{text}\n".encode())


def cell(folder: Path, label: str, seed: int) -> Path:
    """Where a cell's run lies: a name without blanks.

    >>> cell(Path("c"), "alone (fedbyol)", 0).as_posix()
    'c/alone-fedbyol/seed-0'
    """
    return folder / slug(label) / f"seed-{seed}"


def new_folder(labels: list[str]) -> Path:
    """The folder of a comparison that was started without `out`."""
    named = "-".join(labels) if len(labels) <= 4 else f"{labels[0]}-and-{len(labels) - 1}-others"
    return COMPARISON.new(named)


def _same_ground(plan: Plan, results: Mapping[Cell, Result], *, allow: bool) -> list[str]:
    """Refuse runs on other images or another split: files and folders may change in between."""
    about = {cell: read_about(result.folder) for cell, result in results.items()}
    apart: list[str] = []
    for (label, seed), its in about.items():
        is_whole = results[label, seed].recipe.method.cls is Centralised
        for (other, same), theirs in about.items():
            if other >= label or same != seed:
                continue
            both = is_whole or results[other, same].recipe.method.cls is Centralised
            for what in ("data", "split"):
                if its[what] != theirs[what] and not (what == "split" and both):
                    words = {"data": "on different images", "split": "with different splits"}
                    both_rows = f"{plan.name(other)} and {plan.name(label)}"
                    apart.append(f"{both_rows} ran {words[what]} (seed {seed})")
    if not apart and len({its["data"] for its in about.values()}) > 1:
        apart.append("some seeds ran on different images than others")
    if apart and not allow:
        raise DataError(
            f"{apart[0]}, for those changed in between: compare again with another --out, or with "
            "--allow-unfair"
        )
    return apart


def _read(found: Found, results: Mapping[Cell, Result]) -> None:
    """Figures, courses and traffic of the runs, and the references that need no run."""
    device = found.plan.settings
    for (label, seed), result in results.items():
        found.figures[label, seed] = result.figures
        if result.whitened:
            found.figures[f"{label}{WHITENED}", seed] = result.whitened["figures"]
        found.figures.setdefault((UNTRAINED, seed), result.untrained)
        if result.stopped:
            last = f"after {result.rounds[-1]['round'] - 1} of {result.recipe.rounds} rounds"
            found.stopped[label, seed] = f"{last}: {result.stopped}"
        if overall := [row for row in result.rounds if row.get("global_objective")]:
            found.objectives[label, seed] = overall
        validated = [row["knn"] for row in result.rounds if row.get("knn") is not None]
        if label not in found.plan.methods:
            found.levels |= {(label, seed): validated[-1]} if validated else {}
            continue
        if result.rounds and (first := result.rounds[0])["round"] == 0 and validated:
            found.levels.setdefault((UNTRAINED, seed), first.get("knn") or validated[0])
        split = read_split(result.folder)
        examples = [len(index) for index in split.indices]
        method = result.recipe.known_method()
        found.courses[label, seed] = course(result.folder, method, examples, device)
        found.traffic[label, seed] = components(result.folder)
        found.against[label, seed] = result.against
    for seed in found.plan.seeds:
        base = next((r for (label, s), r in results.items() if s == seed), None)
        if base is not None:
            beside = base.references or reference_figures(base.recipe, base.folder)
            found.figures |= {(label, seed): figures for label, figures in beside.items()}
            levels = base.levels or reference_levels(base.recipe, base.folder)
            found.levels |= {(label, seed): level for label, level in levels.items()}
