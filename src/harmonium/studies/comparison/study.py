"""Comparisons of several methods under one budget, over seeds: `harmonium compare`.

Every cell (a method or a reference, with a seed) is an ordinary run in the comparison's folder.
Complete runs are not repeated, interrupted ones are resumed, and failed ones are reported and left
out. The figures in the table are on the test part, which is used once at the end of a run; rounds,
bytes and time to an accuracy are measured on validation images.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from harmonium.engines.workers import shared_workers
from harmonium.methods.centralised import Centralised
from harmonium.recipe.overrides import as_words, changes_of
from harmonium.report import figure as look
from harmonium.runs.loop import Result
from harmonium.runs.open_run import read_about, read_split
from harmonium.runs.start import COMMAND, holds, reference_figures, reference_levels, run
from harmonium.storage.result_folder import FolderKind
from harmonium.storage.run_folder import RECIPE
from harmonium.studies.comparison.cells import SUPERVISED, UNTRAINED, WHITENED, ComparisonPlan
from harmonium.studies.comparison.cells import plan as plan_cells
from harmonium.studies.comparison.names import slug
from harmonium.studies.comparison.outcomes import Cell, Outcomes
from harmonium.studies.comparison.published import published
from harmonium.studies.comparison.summary import write_comparison
from harmonium.studies.comparison.table import Comparison
from harmonium.studies.comparison.traffic import components, course

COMPARISON = FolderKind("comparison", "compare")


@shared_workers()
def compare(
    *words: str,
    out: str | Path | None = None,
    allow_unfair: bool = False,
    formats: str | Sequence[str] | None = None,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Comparison:
    """Run methods and references under one budget, and put their figures side by side.

    Args:
        words: methods and recipes by name, and settings of all of them, as on the command line.
        out: the folder of all runs; if it holds some of them already, they are continued or simply
            read.
        allow_unfair: compare although budgets differ; otherwise that is refused, with the reason.
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
    plan = _without_supervised(plan_cells(words, settings, allow_unfair=allow_unfair))
    folder = Path(out) if out is not None else new_folder(list(plan.methods))
    _claim(folder, plan)
    note_command(folder, "compare", words, settings, allow_unfair=allow_unfair)
    outcomes = Outcomes(plan, unfair=list(plan.unfair))
    for label, name in plan.words.items():
        if figure := published(name, plan.methods[label]):
            outcomes.published[label] = figure
    results = _run_cells(folder, outcomes, callbacks)
    if not any(label in plan.methods for label, _ in results):
        why = next(why for (label, _), why in outcomes.failed.items() if label in plan.methods)
        raise NoneFinished(f"no run of any method finished: {why}")
    outcomes.unfair += _differing_data(plan, results, allow=allow_unfair)
    for (label, seed), result in results.items():
        _read_result(outcomes, label, seed, result)
    _read_references(outcomes, results)
    with work("tables and plots"), look.formats(formats):
        return write_comparison(folder, outcomes)


def _without_supervised(plan: ComparisonPlan) -> ComparisonPlan:
    """The plan, without the references that need labels if the images have none."""
    if next(iter(plan.methods.values())).data.load().train.labelled:
        return plan
    unlabelled = {k: v for k, v in plan.references.items() if not k.startswith(SUPERVISED)}
    return replace(plan, references=unlabelled)


def _claim(folder: Path, plan: ComparisonPlan) -> None:
    """Create the folder; that of a run, or of a comparison with other settings, is refused."""
    COMPARISON.holds(folder)
    for label, seed, recipe in plan.cells():
        _ = recipe.engine.devices  # one that is not here is refused before anything is written
        if (cell(folder, label, seed) / RECIPE).exists():
            holds(cell(folder, label, seed), recipe)
    COMPARISON.claim(folder)


def _run_cells(folder: Path, outcomes: Outcomes, callbacks: Callbacks) -> dict[Cell, Result]:
    """Run every cell; the results of those that finish, while the others are noted as failed."""
    plan, results = outcomes.plan, dict[Cell, Result]()
    cells = list(plan.cells())
    for number, (label, seed, recipe) in enumerate(cells, 1):
        of_seed = f", seed {seed}" if len(plan.seeds) > 1 else ""
        title = f"{plan.name(label)}{of_seed} ({number} of {len(cells)})"
        with called(callbacks, title) as callback:
            try:
                result = run(recipe, out=cell(folder, label, seed), callbacks=callback)
            except CallbackError:
                raise
            except HarmoniumError as error:
                outcomes.failed[label, seed] = str(error)
                callback.note(f"it failed and is left out: {error}")
            except Exception as error:  # a bug: the other runs continue, and it is reported last
                outcomes.failed[label, seed] = f"{type(error).__name__}: {error}"
                files.write_atomic(folder / "failed.txt", traceback.format_exc().encode())
                callback.note(f"it crashed and is left out; see {folder / 'failed.txt'}")
            else:
                results[label, seed] = result
    return results


def note_command(
    folder: Path,
    kind: str,
    words: Sequence[str],
    settings: Mapping[str, Any] = {},
    *,
    allow_unfair: bool,
) -> None:
    """Write the command that continues the runs of a folder, without --out."""
    flags = ["--allow-unfair"] if allow_unfair else []
    keys = {word.partition("=")[0] for word in words}
    more = [one for one in changes_of([], settings) if one.key not in keys]
    text = shlex.join(["harmonium", kind, *words, *as_words(more), *flags])
    files.write_atomic(folder / COMMAND, f"{text}\n".encode())


def cell(folder: Path, label: str, seed: int) -> Path:
    """The folder of a cell's run; its name has no blanks.

    >>> cell(Path("c"), "alone (fedbyol)", 0).as_posix()
    'c/alone-fedbyol/seed-0'
    """
    return folder / slug(label) / f"seed-{seed}"


def new_folder(labels: list[str]) -> Path:
    """The folder of a comparison that was started without `out`."""
    named = "-".join(labels) if len(labels) <= 4 else f"{labels[0]}-and-{len(labels) - 1}-others"
    return COMPARISON.new(named)


def _differing_data(
    plan: ComparisonPlan, results: Mapping[Cell, Result], *, allow: bool
) -> list[str]:
    """Refuse runs on different images or splits: files may have changed between runs."""
    about = {cell: read_about(result.folder) for cell, result in results.items()}
    centralised = {
        cell for cell, result in results.items() if result.recipe.method.cls is Centralised
    }
    apart: list[str] = []
    for (label, seed), mine in about.items():
        for (other, same), theirs in about.items():
            if other >= label or same != seed:
                continue
            both = f"{plan.name(other)} and {plan.name(label)}"
            if mine["data"] != theirs["data"]:
                apart.append(f"{both} ran on different images (seed {seed})")
            # All images in one place are another split by design.
            whole = centralised & {(label, seed), (other, same)}
            if mine["split"] != theirs["split"] and not whole:
                apart.append(f"{both} ran with different splits (seed {seed})")
    if not apart and len({its["data"] for its in about.values()}) > 1:
        apart.append("some seeds ran on different images than others")
    if apart and not allow:
        raise DataError(
            f"{apart[0]}: they changed in between. Compare again with another --out, or with "
            "--allow-unfair"
        )
    return apart


def _read_result(outcomes: Outcomes, label: str, seed: int, result: Result) -> None:
    """Add the figures of a run to the outcomes; for a method, also its course and traffic."""
    outcomes.figures[label, seed] = result.figures
    if result.whitened:
        outcomes.figures[f"{label}{WHITENED}", seed] = result.whitened["figures"]
    outcomes.figures.setdefault((UNTRAINED, seed), result.untrained)
    if result.stopped:
        last = f"after {result.rounds[-1]['round'] - 1} of {result.recipe.rounds} rounds"
        outcomes.stopped[label, seed] = f"{last}: {result.stopped}"
    if objectives := [row for row in result.rounds if row.get("global_objective")]:
        outcomes.objectives[label, seed] = objectives
    validated = [row["knn"] for row in result.rounds if row.get("knn") is not None]
    if label not in outcomes.plan.methods:
        outcomes.levels |= {(label, seed): validated[-1]} if validated else {}
        return
    if result.rounds and (first := result.rounds[0])["round"] == 0 and validated:
        outcomes.levels.setdefault((UNTRAINED, seed), first.get("knn") or validated[0])
    examples = [len(index) for index in read_split(result.folder).indices]
    method, device = result.recipe.known_method(), outcomes.plan.settings
    outcomes.courses[label, seed] = course(result.folder, method, examples, device)
    outcomes.traffic[label, seed] = components(result.folder)
    outcomes.against[label, seed] = result.against


def _read_references(outcomes: Outcomes, results: Mapping[Cell, Result]) -> None:
    """Add the figures of references that need no run, from any run with the same seed."""
    for seed in outcomes.plan.seeds:
        base = next((result for (_, same), result in results.items() if same == seed), None)
        if base is None:
            continue
        figures = base.references or reference_figures(base.recipe, base.folder)
        outcomes.figures |= {(label, seed): one for label, one in figures.items()}
        levels = base.levels or reference_levels(base.recipe, base.folder)
        outcomes.levels |= {(label, seed): level for label, level in levels.items()}
