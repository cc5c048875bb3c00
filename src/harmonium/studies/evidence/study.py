"""A claim tested in stages: what `harmonium study` does.

Headroom first: references alone show, on seeds that are used for nothing else, that the regime has
room for a method. Then every arm chooses from the same grid on tuning seeds, and fresh seeds
decide by the rule that the file states. Every cell is an ordinary run in the study's folder, so a
study that was killed goes on, and nothing is run twice.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import harmonium
from harmonium.core import files
from harmonium.core.callbacks import Callbacks, called
from harmonium.core.errors import CallbackError, ConfigError, HarmoniumError, counted
from harmonium.core.paths import home
from harmonium.evaluation.evaluator import probes_of
from harmonium.evaluation.geometry import tuning_score
from harmonium.evaluation.references import COMMONEST, RAW, WHITENED
from harmonium.recipe.schema import Recipe
from harmonium.report.figure import without_plots
from harmonium.runs.loop import Result
from harmonium.runs.start import run
from harmonium.storage.result_folder import FolderKind, locked_folder
from harmonium.studies.comparison.cells import UNTRAINED
from harmonium.studies.comparison.names import slug
from harmonium.studies.evidence.decision import Check, Decision, apart, decide, flat, overall
from harmonium.studies.evidence.measuring import Values, measure, measured_before
from harmonium.studies.evidence.study_file import (
    GRADIENT,
    OBJECTIVE,
    RANK,
    HeadroomRule,
    StudyFile,
    read_study,
)
from harmonium.studies.evidence.worker import Worker, cpu_seconds

STUDY = FolderKind("study", "study", "study.yaml", frozenset({".lock"}))
VERSIONS = "versions.jsonl"  # every text that the study's file had when it was run
COSTS = "costs.jsonl"  # CPU seconds of every finished cell
CODE = "code.json"  # the code that made every finished cell
FREE = (COMMONEST, UNTRAINED, RAW, WHITENED)  # rows without training
PERCENT = 100.0
NOT_FINISHED = "not finished"

Figures = dict[str, dict[int, float]]  # by figure, then by seed


@dataclass(frozen=True)
class StudyCell:
    """One run of a study."""

    stage: str
    condition: str
    row: str
    setting: tuple[str, ...]
    seed: int
    recipe: Recipe = field(compare=False)

    @property
    def path(self) -> Path:
        """Where it lies in the study's folder; another recipe lies elsewhere."""
        parts = [slug(part) for part in (self.condition, self.row) if part]
        chosen = slug("+".join(self.setting))[:60]
        name = "-".join(filter(None, [chosen, f"seed-{self.seed}", self.recipe.digest[:8]]))
        return Path("cells", *parts, name)

    @property
    def label(self) -> str:
        """What progress shows."""
        named = [self.stage, self.condition, self.row, " ".join(self.setting), f"seed {self.seed}"]
        return ", ".join(filter(None, named))


@dataclass
class StudyResult:
    """What a study found: figures of every stage, and the verdict on its claim."""

    folder: Path
    study: StudyFile
    results: dict[StudyCell, Result] = field(default_factory=dict)
    failed: dict[StudyCell, str] = field(default_factory=dict)
    checks: dict[str, list[Check]] = field(default_factory=dict)  # of headroom, by condition
    scores: dict[tuple[str, str], dict[tuple[str, ...], float]] = field(default_factory=dict)
    chosen: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    by_measures: dict[StudyCell, Values] = field(default_factory=dict)  # figures of `measures`
    unmeasured: dict[StudyCell, str] = field(default_factory=dict)  # why a measure failed
    costs: dict[str, float] = field(default_factory=dict)  # CPU seconds by a cell's path
    code: dict[str, str] = field(default_factory=dict)  # commit or version by a cell's path
    changed: list[str] = field(default_factory=list)  # notes on earlier texts of the file
    finished: bool = False  # every stage is complete
    plots: tuple[Path, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict on the whole claim."""
        return overall(self.decisions) if self.finished else NOT_FINISHED

    @property
    def commits(self) -> list[str]:
        """The commits or versions that made the runs; of runs from before this was noted, today's.

        Several, in the order of the runs, if the code changed in between.
        """
        made_by = [self.code.get(cell.path.as_posix()) for cell in self.results]
        return list(dict.fromkeys(one or code_version() for one in made_by)) or [code_version()]

    def has_headroom(self, condition: str) -> bool:
        """Whether every requirement is met in a condition."""
        checks = self.checks.get(condition, [])
        return bool(checks) and all(check.met for check in checks)

    def cells_of(self, stage: str, condition: str, row: str) -> list[StudyCell]:
        """The finished cells of a row."""
        key = (stage, condition, row)
        return [cell for cell in self.results if (cell.stage, cell.condition, cell.row) == key]

    def failures(self, stage: str, condition: str, row: str) -> int:
        """How many runs of a row failed."""
        key = (stage, condition, row)
        return sum((cell.stage, cell.condition, cell.row) == key for cell in self.failed)

    def state(self, condition: str, row: str) -> str:
        """Why a row has no full figures in a condition, in a word or two; empty: it has them."""
        if count := self.failures("deciding", condition, row):
            left = len(self.study.seeds["deciding"]) - count
            return "failed" if not left else f"{count} failed"
        cells = self.cells_of("deciding", condition, row)
        if any(not _finite_loss(self.results[cell]) for cell in cells):
            return "diverged"
        return "" if cells else "no headroom" if self.study.decided_in(condition) else "not run"

    def figures(self, stage: str, condition: str, row: str) -> Figures:
        """The test figures of a row, percent for accuracies; rows without training included."""
        if row in FREE:
            cells = [c for c in self.results if (c.stage, c.condition) == (stage, condition)]
        else:
            cells = self.cells_of(stage, condition, row)
        found: Figures = {}
        for cell in cells:
            for key, value in self.measured(cell, row).items():
                found.setdefault(key, {}).setdefault(cell.seed, value)
        return found

    def measured(self, cell: StudyCell, row: str = "") -> dict[str, float]:
        """The test figures of one run, or of a row without training beside it."""
        result = self.results[cell]
        free: dict[str, Mapping[str, Any]] = {**result.references, UNTRAINED: result.untrained}
        measured = free.get(row, {}) if row in FREE else result.figures
        found = {k: PERCENT * v for k, v in probes_of(measured).items() if v is not None}
        rank = (measured.get("health") or {}).get("effective_rank")
        found |= {} if rank is None else {RANK: rank}
        part = "validation_" if cell.stage == "tuning" else ""
        by_measures = self.by_measures.get(cell, {}).get(row if row in FREE else "", {})
        found |= {f"{part}{key}": value for key, value in by_measures.items()}
        if row not in FREE and (objective := result.global_objective):
            found[OBJECTIVE] = objective["value"]
            if objective.get("gradient_norm") is not None:
                found[GRADIENT] = objective["gradient_norm"]
        return found

    def plain_cells(self, cells: Sequence[StudyCell]) -> list[dict[str, Any]]:
        """Finished cells as JSON has them, with what each of them cost."""
        return [
            {
                "stage": cell.stage,
                "condition": cell.condition,
                "row": cell.row,
                "setting": list(cell.setting),
                "seed": cell.seed,
                "recipe": cell.recipe.digest,
                "path": cell.path.as_posix(),
                "bytes": _bytes(self.results[cell]),
                "cpu_seconds": self.costs.get(cell.path.as_posix()),
                "figures": self.measured(cell),
            }
            for cell in cells
        ]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        study = self.study
        return {
            "study": study.name,
            "title": study.title,
            "system": study.system,
            "commits": self.commits,
            "regime": study.in_short,
            "claim": study.claim,
            "paper": study.paper,
            "digest": study.digest,
            "verdict": self.verdict,
            "decisions": [{**asdict(one), "text": one.line.text} for one in self.decisions],
            "headroom": {k: [asdict(one) for one in checks] for k, checks in self.checks.items()},
            "tuning": [
                {
                    "condition": condition,
                    "row": row,
                    "chosen": list(self.chosen.get((condition, row), ())),
                    "scores": [{"setting": list(k), "score": v} for k, v in scores.items()],
                }
                for (condition, row), scores in self.scores.items()
            ],
            "figures": [
                {"stage": stage, "condition": condition, "row": row, "figures": figures}
                for stage in study.seeds
                for condition in study.conditions
                for row in (*FREE, *study.rows)
                if (figures := self.figures(stage, condition, row))
            ],
            "cells": self.plain_cells(list(self.results)),
            "failed": [
                {"path": cell.path.as_posix(), "why": why} for cell, why in self.failed.items()
            ],
            "unmeasured": [
                {"path": cell.path.as_posix(), "why": why} for cell, why in self.unmeasured.items()
            ],
            "changed": self.changed,
            "folder": str(self.folder),
            "plots": [str(path) for path in self.plots],
        }


def study(
    what: str,
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    callbacks: Callbacks = (),
    note: Callable[[str], None] = lambda text: None,
) -> StudyResult:
    """Test a claim: headroom, tuning, decision.

    Args:
        what: a study that comes with Harmonium, e.g. `"smoke"`, or a YAML file.
        out: the study's folder; if left out, `study/NAME` under `HARMONIUM_HOME`, where an earlier
            call has left its runs.
        jobs: how many runs go on at once, each in a process of its own if there are several.
        callbacks: as for `compare`; not called where runs have processes of their own.
        note: called with a line after every stage, and after every cell if `jobs` is above 1.

    Returns:
        Figures of all stages, and the verdict.
    """
    from harmonium.studies.evidence.page import write_study

    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1")
    file = read_study(what)
    folder = Path(out) if out is not None else home() / STUDY.parent / file.name
    STUDY.holds(folder)
    with locked_folder(folder):
        found = StudyResult(folder, file)
        found.changed = _record_version(folder, file)
        stages = _Stages(found, jobs, callbacks, note)
        stages.run_all()
        found.costs, found.code = _read_notes(folder, COSTS), _read_notes(folder, CODE)
        return write_study(found)


@dataclass(frozen=True)
class StageProgress:
    """How far one stage of a study is."""

    stage: str
    runs: int
    finished: int
    cpu_seconds: float | None  # expected for the rest; none before a first run has finished


def forecast(what: str, *, out: str | Path | None = None) -> list[StageProgress]:
    """How many runs each stage of a study has, and how many are finished. Nothing is run.

    All conditions count, also those that may turn out to have no headroom.
    """
    file = read_study(what)
    folder = Path(out) if out is not None else home() / STUDY.parent / file.name
    costs = _read_notes(folder, COSTS)
    stages = _Stages(StudyResult(folder, file), 1, (), lambda text: None)
    progress = []
    for stage, groups in stages.planned().items():
        finished = sum(any(stages.is_complete(cell) for cell in group) for group in groups)
        rest, known = len(groups) - finished, list(costs.values())
        seconds = rest * sum(known) / len(known) if known else None
        progress.append(StageProgress(stage, len(groups), finished, seconds))
    return progress


class _Stages:
    """Runs the cells of a study, stage after stage."""

    def __init__(
        self, found: StudyResult, jobs: int, callbacks: Callbacks, note: Callable[[str], None]
    ) -> None:
        self.found, self.file = found, found.study
        self.jobs, self.callbacks, self.note = jobs, callbacks, note
        self.lock = threading.Lock()  # of the file with costs

    def run_all(self) -> None:
        """Every stage; a condition that lacks the headroom for its rule has only the first."""
        if self.file.headroom is not None and "headroom" in self.file.seeds:
            self._headroom(self.file.headroom)
        conditions = [
            condition
            for condition in self.file.conditions
            if not self.file.decided_in(condition) or self.found.has_headroom(condition)
        ]
        if conditions:
            self._tune(conditions)
            self._run(self._deciding(conditions))
        self._decide()
        self.found.finished = True
        self.note(f"verdict: {self.found.verdict}")

    def planned(self) -> dict[str, list[list[StudyCell]]]:
        """Every run of every stage, as the cells of which it will be one: those of its settings."""
        file, every = self.file, list(self.file.conditions)
        plan: dict[str, list[list[StudyCell]]] = {}
        if file.headroom is not None and "headroom" in file.seeds:
            decided = [one for one in every if file.decided_in(one)]
            plan["headroom"] = [[cell] for cell in self._headroom_cells(file.headroom, decided)]
        if len(file.settings) > 1:
            tuned = [file.tuned_in] if file.tuned_in else every
            plan["tuning"] = [[cell] for cell in self._tuning_cells(tuned)]
        plan["deciding"] = [
            [
                StudyCell("deciding", condition, row, setting, seed, recipe)
                for setting in file.settings
                for recipe in [file.recipe(condition, row, setting, seed)]
            ]
            for condition in every
            for seed in file.seeds["deciding"]
            for row in file.rows
        ]
        return plan

    def _headroom_cells(self, rule: HeadroomRule, conditions: Sequence[str]) -> Iterator[StudyCell]:
        default = self._default()
        for condition in conditions:
            for seed in self.file.seeds["headroom"]:
                for row in (rule.below, rule.above):
                    recipe = self.file.recipe(condition, row, default, seed)
                    yield StudyCell("headroom", condition, row, default, seed, recipe)

    def _headroom(self, rule: HeadroomRule) -> None:
        """Run the two references on seeds of their own, and check what they show."""
        conditions = [c for c in self.file.conditions if self.file.decided_in(c)]
        self._run(self._headroom_cells(rule, conditions))
        for condition in conditions:
            self.found.checks[condition] = list(self._checks(rule, condition))
            named = f"{condition}: " if condition else ""
            missing = [one.what for one in self.found.checks[condition] if not one.met]
            said = f"not met: {'; '.join(missing)}" if missing else "yes"
            self.note(f"{named}headroom: {said}")

    def _default(self) -> tuple[str, ...]:
        """The middle of the grid, with which references show headroom before anything is tuned."""
        return tuple(
            f"{key}={values[(len(values) - 1) // 2]}" for key, values in self.file.grid.items()
        )

    def _checks(self, rule: HeadroomRule, condition: str) -> Iterator[Check]:
        rows = {
            row: self.found.figures("headroom", condition, row).get(rule.by, {})
            for row in (*FREE, rule.below, rule.above)
        }
        lower_is_better = self.file.less_is_better(rule.by)
        if not lower_is_better:
            for row in (COMMONEST, UNTRAINED, RAW):
                if not rows[row] and (rule.by == RANK or rule.by in self.file.headlines):
                    continue  # this figure is not defined without training
                yield apart(rows[rule.above], rows[row], f"{rule.above} above {row} by {rule.by}")
        pair = (rows[rule.above], rows[rule.below])
        upper, lower = reversed(pair) if lower_is_better else pair
        yield apart(upper, lower, f"{rule.above} better than {rule.below} by {rule.by}")
        for row in (rule.below, rule.above):
            cells = self.found.cells_of("headroom", condition, row)
            results = {cell.seed: self.found.results[cell] for cell in cells}
            if not results:
                yield Check(f"{row} has runs", "all of them failed", False)
                continue
            changes = {s: c for s, one in results.items() if (c := _last_change(one)) is not None}
            yield flat(changes, rule.flat, f"{row} has converged")
            warned = [s for s, one in results.items() if one.figures["health"]["warnings"]]
            said = f"warnings for seed {', '.join(map(str, warned))}" if warned else "no warning"
            yield Check(f"{row} has not collapsed", said, not warned)

    def _tune(self, conditions: Sequence[str]) -> None:
        """Choose a setting of the grid for every row, on seeds that decide nothing."""
        file, found = self.file, self.found
        tuned = [file.tuned_in] if file.tuned_in else conditions
        if len(file.settings) > 1:
            self._run(self._tuning_cells(tuned))
        for condition in conditions:
            source = file.tuned_in or condition
            for row in file.rows:
                scores = self._scores(source, row)
                if scores:
                    found.scores[condition, row] = scores
                pick = min if file.tuned_by == OBJECTIVE else max
                best = pick(scores, key=lambda one: scores[one]) if scores else file.settings[0]
                found.chosen[condition, row] = best

    def _tuning_cells(self, conditions: Sequence[str]) -> Iterator[StudyCell]:
        file = self.file
        for condition in conditions:
            for seed in file.seeds["tuning"]:
                for row in file.rows:
                    for setting in file.settings:
                        recipe = file.recipe(condition, row, setting, seed)
                        yield StudyCell("tuning", condition, row, setting, seed, recipe)

    def _scores(self, condition: str, row: str) -> dict[tuple[str, ...], float]:
        """Mean score of every setting over the tuning seeds; those with a failed run have none."""
        by_setting: dict[tuple[str, ...], list[float]] = {}
        for cell in self.found.cells_of("tuning", condition, row):
            by = self.file.tuned_by
            score = _tuning_figure(self.found.results[cell], by)
            if by in self.file.headlines:
                score = self.found.by_measures.get(cell, {}).get("", {}).get(by)
            if score is not None:
                by_setting.setdefault(cell.setting, []).append(score)
        count = len(self.file.seeds.get("tuning", ()))
        return {k: sum(v) / len(v) for k, v in by_setting.items() if len(v) == count}

    def _deciding(self, conditions: Sequence[str]) -> Iterator[StudyCell]:
        for condition in conditions:
            for seed in self.file.seeds["deciding"]:
                for row in self.file.rows:
                    setting = self.found.chosen[condition, row]
                    recipe = self.file.recipe(condition, row, setting, seed)
                    yield StudyCell("deciding", condition, row, setting, seed, recipe)

    def _decide(self) -> None:
        """Apply the rule to the figures of the deciding seeds."""
        file, found = self.file, self.found
        lines = [(line, condition) for line in file.rule for condition in line.conditions]
        figures = {
            (condition, row): found.figures("deciding", condition, row)
            for condition in file.conditions
            for row in file.rows
        }
        without = {
            condition: self._why_not(condition)
            for condition in file.conditions
            if file.decided_in(condition) and not found.has_headroom(condition)
        }
        found.decisions = decide(lines, figures, without, file.seeds["deciding"])

    def _why_not(self, condition: str) -> str:
        """Why nothing is decided in a condition."""
        stages = [(cell.stage, cell.condition) for cell in self.found.failed]
        if failed := stages.count(("headroom", condition)):
            return f"headroom is not known: {counted(failed, 'run')} failed"
        return "the regime has no headroom"

    def _run(self, cells: Iterable[StudyCell]) -> None:
        """Run cells, or read those that are complete; a failed one is noted, and others go on."""
        todo = list(cells)
        if self.jobs > 1:
            self._run_apart([cell for cell in todo if not self.is_complete(cell)])
        for number, cell in enumerate(todo, 1):
            if cell in self.found.failed:
                continue
            folder = self.found.folder / cell.path
            before, complete = cpu_seconds(), self.is_complete(cell)
            with called(self.callbacks, f"{cell.label} ({number} of {len(todo)})") as callback:
                try:
                    with without_plots():
                        self.found.results[cell] = run(cell.recipe, out=folder, callbacks=callback)
                except CallbackError:
                    raise
                except HarmoniumError as error:
                    self._fail(cell, str(error))
            if not complete and self.is_complete(cell):
                _note_run(self.found.folder, cell, cpu_seconds() - before)
        self._measure([cell for cell in todo if cell in self.found.results])

    def _measure(self, cells: Sequence[StudyCell]) -> None:
        """Compute the study's measures of finished runs, or read what an earlier call computed."""
        wanted = {cell: self.file.measured_by(cell.row, cell.stage) for cell in cells}
        wanted = {cell: words for cell, words in wanted.items() if words}
        if self.jobs > 1:
            pool = ThreadPoolExecutor(self.jobs)
            try:
                list(pool.map(self._measure_one, wanted, wanted.values()))
            finally:
                pool.shutdown(cancel_futures=True)
            return
        for cell, words in wanted.items():
            self._measure_one(cell, words)

    def _measure_one(self, cell: StudyCell, words: Sequence[str]) -> None:
        """Measure one run, in a process of its own where several are at work."""
        found, apart = self.found, self.jobs > 1
        values = measured_before(found.folder, cell.path, words)
        if values is None:
            try:
                values = measure(found.folder, cell.path, words, apart=apart)
            except HarmoniumError as error:
                found.unmeasured[cell] = str(error)
                self.note(f"{cell.label}: not measured: {error}")
                return
        found.by_measures[cell] = values

    def is_complete(self, cell: StudyCell) -> bool:
        """Whether the run of a cell has finished."""
        return (self.found.folder / cell.path / "result.json").exists()

    def _fail(self, cell: StudyCell, why: str) -> None:
        self.found.failed[cell] = why
        self.note(f"{cell.label}: failed: {why}")

    def _run_apart(self, cells: Sequence[StudyCell]) -> None:
        """Run cells in processes of their own, which stay for the next; results are read later."""
        queue, finished = iter(cells), itertools.count(1)
        workers = [Worker() for _ in range(min(self.jobs, len(cells)))]
        stopped = threading.Event()  # by Ctrl-C or an error: what ends now has not failed

        def work_off(worker: Worker) -> None:
            try:
                while not stopped.is_set() and (cell := self._next(queue)) is not None:
                    seconds, why = worker.run(cell.recipe, self.found.folder / cell.path)
                    with self.lock:
                        if stopped.is_set():
                            return
                        if why:
                            self._fail(cell, why)
                            continue
                        _note_run(self.found.folder, cell, seconds)
                        self.note(f"{cell.label}: done ({next(finished)} of {len(cells)})")
            finally:
                worker.stop()

        with ThreadPoolExecutor(self.jobs) as threads:
            try:
                at_work = [threads.submit(work_off, worker) for worker in workers]
                for one in wait(at_work, return_when=FIRST_EXCEPTION).done:
                    one.result()
            except BaseException:
                stopped.set()
                for worker in workers:
                    worker.close()
                raise

    def _next(self, queue: Iterator[StudyCell]) -> StudyCell | None:
        with self.lock:
            return next(queue, None)


@cache
def code_version() -> str:
    """Which code is at work: its commit in a git clone, else its version."""
    source = Path(harmonium.__file__).parent
    done = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else harmonium.__version__


def _finite_loss(result: Result) -> bool:
    """Whether the last training loss of a run is a number."""
    losses = [row["loss"] for row in result.rounds if "loss" in row]
    return not losses or (losses[-1] is not None and math.isfinite(losses[-1]))


def _last_change(result: Result) -> float | None:
    """By how many points validation kNN changed in the last quarter of a run."""
    curve = [(row["round"], row["knn"]) for row in result.rounds if row.get("knn") is not None]
    begin = 0.75 * result.recipe.rounds
    earlier = [knn for number, knn in curve if number <= begin]
    if not curve or not earlier or curve[-1][0] <= begin:
        return None
    return PERCENT * float(curve[-1][1] - earlier[-1])


def _tuning_figure(result: Result, by: str) -> float | None:
    """The figure by which settings are chosen, of the last round that has it."""
    if by == OBJECTIVE:
        return result.global_objective["value"] if result.global_objective else None
    for row in reversed(result.rounds):
        if by == "knn" and row.get("knn") is not None:
            return PERCENT * float(row["knn"])
        reported = row.get("reported", {})
        if by == "score" and {"align", "unif"} <= set(reported):
            return tuning_score(reported["align"], reported["unif"])
    return None


def _bytes(result: Result) -> int:
    """What all clients sent and received in all rounds, without evaluation."""
    return sum(row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in result.rounds)


def _note_run(folder: Path, cell: StudyCell, seconds: float) -> None:
    """Keep what a cell cost, and which code made it, when it has been run."""
    path = cell.path.as_posix()
    for name, value in ((COSTS, round(seconds, 1)), (CODE, code_version())):
        known = {**_read_notes(folder, name), path: value}
        files.write_atomic(folder / name, json.dumps(known).encode())


def _read_notes(folder: Path, name: str) -> dict[str, Any]:
    """What was kept about cells, by their paths."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _record_version(folder: Path, file: StudyFile) -> list[str]:
    """Keep the text with which the study is run; returns what readers must know of earlier ones."""
    path = folder / VERSIONS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    versions = [json.loads(line) for line in lines]
    cells = sum(1 for _ in folder.glob("cells/**/result.json"))
    if not versions or versions[-1]["digest"] != file.digest:
        versions.append({"digest": file.digest, "cells": cells, "text": file.text})
        body = "".join(json.dumps(one) + "\n" for one in versions)
        files.write_atomic(path, body.encode())
    files.write_atomic(folder / STUDY.marker, file.text.encode())
    return [
        f"the study's file was changed when {counted(one['cells'], 'run')} had finished; "
        f"{VERSIONS} in its folder has every text"
        for one in versions[1:]
        if one["cells"]
    ]
