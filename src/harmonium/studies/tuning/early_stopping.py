"""The runs of a study, with early stopping by their scores."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.callbacks import Callback, Callbacks, called
from harmonium.core.errors import ConfigError, DataError, NotEnoughReplies, StoreError, WireError
from harmonium.evaluation.geometry import tuning_score
from harmonium.federation.driver import Reply
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import run
from harmonium.storage.result_folder import FolderKind
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.tuning.grid import Setting

STUDY = FolderKind("study", "tune", "study.json")
FIRST = 3  # round before which no setting stops: scores have hardly changed


@dataclass(frozen=True)
class Stopping:
    """After which rounds settings stop early, and which of them."""

    keep: float = 0.5  # share of the settings that continues
    margin: float = 0.1  # settings so close below continue, too; as a share of best - worst
    checks: tuple[int, ...] | None = None  # rounds; none: a quarter and half, from FIRST on

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be above 0 and at most 1")
        if not 0 <= self.margin < math.inf:
            raise ConfigError(f"margin is {self.margin}; it must be 0 or more")

    def rounds(self, recipe: Recipe) -> list[int]:
        """The rounds after which settings may stop: some of those that end with a score."""
        last = recipe.rounds
        scored = [number for number in range(1, last) if recipe.evaluate.due(number, last)]
        if self.checks is not None:
            for number in self.checks:
                if number not in scored:
                    raise ConfigError(
                        f"no score is taken after round {number}: choose from "
                        f"{', '.join(map(str, scored)) or 'nothing'}, or set evaluate.every"
                    )
            return sorted(set(self.checks))
        wanted = (max(FIRST, last / 4), max(FIRST, last / 2))
        return sorted({min(due) for want in wanted if (due := [s for s in scored if s >= want])})


class _Reached(Exception):
    """A run has reached the round where it pauses."""


class _Until(Callback):
    """Forwards to another callback, and ends the run after a round."""

    def __init__(self, last: int, inner: Callback) -> None:
        self._last, self._inner = last, inner

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        self._inner.begin(recipe, folder, done, cohort)

    def task(self, reply: Reply) -> None:
        self._inner.task(reply)

    def note(self, text: str) -> None:
        self._inner.note(text)

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        self._inner.round(row, seconds)
        if row["round"] >= self._last:
            raise _Reached


@dataclass
class StudyRuns:
    """The runs of a study: which continue, their last rounds, and which failed and why."""

    folder: Path
    points: Sequence[Setting]
    callbacks: Callbacks
    note: Callable[[str], None]
    reached: dict[int, int] = field(default_factory=dict)  # setting -> round that its row is of
    stopped: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)

    @cached_property
    def any_recipe(self) -> Recipe:
        """The recipe of any setting, for what all settings have in common."""
        return next(point.recipe for point in self.points if point.recipe is not None)

    @property
    def alive(self) -> list[int]:
        """Settings that continue, in the order of the grid."""
        out = {*self.stopped, *self.failed}
        return [n for n, point in enumerate(self.points) if point.recipe and n not in out]

    def place(self, number: int) -> Path:
        """The folder of a setting's run."""
        label = re.sub(r"[^\w.=+-]+", "_", self.points[number].label)
        return self.folder / "runs" / f"{number:03d}-{label[:80]}"

    def begin(self) -> None:
        """Create the study's folder; one that holds anything else is refused."""
        if not STUDY.claim(self.folder, self._difference):
            files.write_atomic(self.folder / STUDY.marker, self._identity)

    def check_folder(self) -> None:
        """Refuse a folder that holds anything but this very study."""
        STUDY.holds(self.folder, self._difference)

    def _difference(self) -> str:
        """How the study in the folder differs from this one; empty where it is the same."""
        same = (self.folder / STUDY.marker).read_bytes() == self._identity
        return "" if same else "its grid or recipe differs"

    @property
    def _identity(self) -> bytes:
        """Every setting with the digest of its recipe, for the file that marks the folder."""
        digests = {p.label: p.recipe and p.recipe.digest for p in self.points}
        return json.dumps({"settings": digests}, indent=1).encode()

    def advance(self, until: int) -> bool:
        """Run all remaining settings up to a round; returns whether any is left."""
        for number in self.alive:
            self._advance_one(number, until)
        return bool(self.alive)

    def _advance_one(self, number: int, until: int) -> None:
        point, path = self.points[number], self.place(number)
        if (known := self.failure(number)) and known["after"] < until:
            self.reached[number], self.failed[number] = known["after"], known["why"]
            return
        if self._committed(path) < until:
            assert point.recipe is not None
            label = f"{number + 1}/{len(self.points)} {point.label}"
            try:
                with called(self.callbacks, label) as inner:
                    run(point.recipe, out=path, callbacks=_Until(until, inner))
            except _Reached:
                pass
            except (ConfigError, NotEnoughReplies, WireError) as error:
                self._fail(number, self._committed(path), str(error))
                return
            except DataError as error:  # files may come back, so the next call tries again
                self._fail(number, self._committed(path), str(error), for_good=False)
                return
        self.reached[number] = until
        figures = self.figures(number)
        if not figures or figures[-1]["score"] is None:
            why = "no client could score it: its features are not finite, or nobody answered"
            self._fail(number, until, why)

    def _committed(self, path: Path) -> int:
        if not (path / "recipe.yaml").exists():
            return -1
        commit, _ = RunFolder(path).newest_readable()
        return commit.round if commit else -1

    def _fail(self, number: int, after: int, why: str, *, for_good: bool = True) -> None:
        self.reached[number], self.failed[number] = after, why
        self.note(f"{self.points[number].label} failed: {why}")
        path = self.folder / "failed" / f"{number:03d}.json"
        if for_good:
            files.write_atomic(path, json.dumps({"after": after, "why": why}).encode())

    def failure(self, number: int) -> dict[str, Any] | None:
        """After which round a setting failed for good, and why; none where it did not."""
        path = self.folder / "failed" / f"{number:03d}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError:
            raise StoreError(f"{path} is damaged: remove it and continue") from None

    def figures(self, number: int) -> list[dict[str, Any]]:
        """A setting's scores so far, one for each evaluated round."""
        rows = []
        for row in RunFolder(self.place(number)).read_log("metrics.jsonl"):
            reported, health = row.get("reported", {}), row.get("health", {})
            if 0 < row["round"] <= self.reached.get(number, 0) and (health or "align" in reported):
                align, unif = reported.get("align"), reported.get("unif")
                scored = align is not None and unif is not None
                rows.append(
                    {
                        "round": row["round"],
                        "score": tuning_score(align, unif) if scored else None,
                        "align": align,
                        "unif": unif,
                        "knn": row.get("knn"),
                        "warnings": health.get("warnings", []),
                    }
                )
        return rows

    def drop(self, after: int, stopping: Stopping) -> None:
        """Stop the settings whose scores are too low after a round."""
        scores = {number: self.figures(number)[-1]["score"] for number in self.alive}
        order = sorted(scores, key=lambda number: -scores[number])
        apart = scores[order[0]] - scores[order[-1]]
        least = scores[order[math.ceil(len(order) * stopping.keep) - 1]] - stopping.margin * apart
        self.stopped |= {number for number in order if scores[number] < least}
        best = self.points[order[0]].label
        self.note(
            f"after round {after} {len(self.alive)} of {len(order)} settings continue; the best "
            f"score is {scores[order[0]]:.3f}, of {best}"
        )

    def row(self, number: int) -> dict[str, Any]:
        """A setting's row of the table."""
        point, figures = self.points[number], self.figures(number)
        last = figures[-1] if figures else {"align": None, "unif": None, "score": None}
        why = point.why or self.failed.get(number, "")
        state = "refused" if point.recipe is None else "failed" if why else "complete"
        if number in self.stopped:
            state = "stopped"
        return {
            "setting": dict(point.values),
            "round": last.get("round", 0),
            **{key: last[key] for key in ("score", "align", "unif")},
            "knn": last.get("knn"),
            "state": state,
            "why": why,
            "warnings": last.get("warnings", []),
        }
