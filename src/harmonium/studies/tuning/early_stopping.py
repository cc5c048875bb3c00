"""The runs of a study: each goes as far as its score is worth, and stops or fails by itself."""

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
from harmonium.core.paths import make_folder
from harmonium.evaluation.geometry import tuning_score
from harmonium.federation.driver import Reply
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import run
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.tuning.grid import Setting

FIRST = 3  # round before which nothing stops by itself: scores have hardly moved


@dataclass(frozen=True)
class Stopping:
    """When settings stop early, and which."""

    keep: float = 0.5  # share of the settings that goes on
    margin: float = 0.1  # as well as whoever is so near below, as a share of best less worst
    checks: tuple[int, ...] | None = None  # rounds; none: a quarter and half, from FIRST on

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be above 0 and at most 1")
        if not 0 <= self.margin < math.inf:
            raise ConfigError(f"margin is {self.margin}; it must be 0 or more")

    def rounds(self, recipe: Recipe) -> list[int]:
        """The rounds after which settings may stop: some of those that end with a score."""
        last = recipe.rounds
        scored = [one for one in range(1, last) if recipe.evaluate.due(one, last)]
        if self.checks is not None:
            for one in self.checks:
                if one not in scored:
                    raise ConfigError(
                        f"no score is taken after round {one}: choose from "
                        f"{', '.join(map(str, scored)) or 'nothing'}, or set evaluate.every"
                    )
            return sorted(set(self.checks))
        wanted = (max(FIRST, last / 4), max(FIRST, last / 2))
        return sorted({min(due) for want in wanted if (due := [s for s in scored if s >= want])})


class _Reached(Exception):
    """A run has come as far as it shall for now."""


class _Until(Callback):
    """Hands on to another callback, and ends the run after a round."""

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
class Playing:
    """A study under way: who still runs, how far each has come, and who failed of what."""

    folder: Path
    points: Sequence[Setting]
    callbacks: Callbacks
    note: Callable[[str], None]
    reached: dict[int, int] = field(default_factory=dict)  # setting -> round that its row is of
    stopped: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)

    @cached_property
    def any_recipe(self) -> Recipe:
        """What all settings have in common can be read from any."""
        return next(point.recipe for point in self.points if point.recipe is not None)

    @property
    def alive(self) -> list[int]:
        """Settings that go on, in the order of the grid."""
        out = {*self.stopped, *self.failed}
        return [n for n, point in enumerate(self.points) if point.recipe and n not in out]

    def place(self, number: int) -> Path:
        """The folder of a setting's run."""
        label = re.sub(r"[^\w.=+-]+", "_", self.points[number].label)
        return self.folder / "runs" / f"{number:03d}-{label[:80]}"

    def begin(self) -> None:
        """Write down what is studied; a folder that holds anything else is refused."""
        self.check_folder()
        if not self._about.exists():
            make_folder(self.folder)
            files.write_atomic(self._about, self._studied)

    def check_folder(self) -> None:
        """Refuse a folder that holds anything but this very study."""
        if self._about.exists():
            if self._about.read_bytes() != self._studied:
                raise ConfigError(f"{self.folder} holds another study: name another --out")
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} is not empty and holds no study: name a new --out")

    @property
    def _studied(self) -> bytes:
        held = {p.label: p.recipe and p.recipe.digest for p in self.points}
        return json.dumps({"settings": held}, indent=1).encode()

    @property
    def _about(self) -> Path:
        return self.folder / "study.json"

    def advance(self, until: int) -> bool:
        """Play all that go on up to a round; whether any is left."""
        for number in self.alive:
            self._play(number, until)
        return bool(self.alive)

    def _play(self, number: int, until: int) -> None:
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
            except DataError as error:  # files may come back, so it is not for ever
                self._fail(number, self._committed(path), str(error), for_ever=False)
                return
        self.reached[number] = until
        figures = self.figures(number)
        if not figures or figures[-1]["score"] is None:
            why = "no client could score it: its features are not finite, or nobody answered"
            self._fail(number, until, why)

    def _committed(self, path: Path) -> int:
        if not (path / "recipe.yaml").exists():
            return -1
        commit, _ = RunFolder(path).last()
        return commit.round if commit else -1

    def _fail(self, number: int, after: int, why: str, *, for_ever: bool = True) -> None:
        self.reached[number], self.failed[number] = after, why
        self.note(f"{self.points[number].label} failed: {why}")
        path = self.folder / "failed" / f"{number:03d}.json"
        if for_ever:
            files.write_atomic(path, json.dumps({"after": after, "why": why}).encode())

    def failure(self, number: int) -> dict[str, Any] | None:
        """After which round a setting failed for ever, and why; none where it did not."""
        path = self.folder / "failed" / f"{number:03d}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        except ValueError:
            raise StoreError(f"{path} is damaged: remove it and go on") from None

    def figures(self, number: int) -> list[dict[str, Any]]:
        """A setting's scores so far, one a look."""
        rows = []
        for row in RunFolder(self.place(number)).read_log("metrics.jsonl"):
            told, health = row.get("reported", {}), row.get("health", {})
            if 0 < row["round"] <= self.reached.get(number, 0) and (health or "align" in told):
                align, unif = told.get("align"), told.get("unif")
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
        """Stop the settings whose score is hopeless after a round."""
        scores = {number: self.figures(number)[-1]["score"] for number in self.alive}
        order = sorted(scores, key=lambda number: -scores[number])
        apart = scores[order[0]] - scores[order[-1]]
        least = scores[order[math.ceil(len(order) * stopping.keep) - 1]] - stopping.margin * apart
        self.stopped |= {number for number in order if scores[number] < least}
        best = self.points[order[0]].label
        self.note(
            f"after round {after} {len(self.alive)} of {len(order)} settings go on; the best "
            f"score is {scores[order[0]]:.3f}, of {best}"
        )

    def row(self, number: int) -> dict[str, Any]:
        """A line of the table."""
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
