"""A run as it is watched: one live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from harmonium.callbacks import Callback
from harmonium.errors import counted
from harmonium.evaluate.geometry import tuning_score
from harmonium.telling import listening

if TYPE_CHECKING:
    from harmonium.federation.drive import Reply
    from harmonium.life import Result
    from harmonium.recipe import Recipe


def watcher_for(console: Console, label: str = "") -> Callback:
    """The watcher that suits where the output goes."""
    return LiveWatcher(console, label) if console.is_terminal else LineWatcher(console, label)


class LineWatcher(Callback):
    """One plain line a round."""

    def __init__(self, console: Console, label: str = "") -> None:
        """Print to `console`; `label` tells several runs apart."""
        self.console = console
        self.label = f"{label}: " if label else ""
        self._rounds = 0
        self._clock = _Clock()
        self._warned = ""
        self._told: set[tuple[int, str]] = set()

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Say where the run is kept and whether it continues."""
        self.folder = folder
        self._rounds = recipe.rounds
        self._clock = _Clock(done)
        clients = counted(recipe.clients, "client")
        if new := recipe.split.newcomers:
            beside = " and " if recipe.clients == 1 else ", "  # all of one place, or among them
            clients += beside + counted(new, "newcomer")
        losses = [
            recipe.objective.name or "an objective of your own",
            *(t.name for t in recipe.terms),
        ]
        what = f"{recipe.method.name} with {' and '.join(losses)}"
        self._say(f"{self.label}{what} on {recipe.data.name}, {clients}")
        self._say(f"{self.label}run folder {folder}")
        if done:
            self._say(f"{self.label}continuing after round {done}")

    def task(self, reply: Reply) -> None:
        """Say why a client did not answer, the first time."""
        if reply.why and (reply.client, reply.why) not in self._told:
            self._told.add((reply.client, reply.why))
            name = self.names.get(reply.client, f"client {reply.client}")
            self.note(f"{name} did not take part: {reply.why}")

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Print the round's figures."""
        left = self._clock.left(row["round"], self._rounds)
        place = f"{self.label}round {row['round']}/{self._rounds}"
        self._say(f"{place}  {figures_of(row)}  training left {left}")
        self._warn(row)

    def _warn(self, row: Mapping[str, Any]) -> None:
        """Say what is wrong with the representation when it begins, not at every look."""
        if "health" in row:
            found = "; ".join(row["health"]["warnings"])
            kind = found.partition(":")[0]  # the figures behind it differ each time
            if found and kind != self._warned:
                self.note(found)
            self._warned = kind

    def note(self, text: str) -> None:
        """Print a remark."""
        self._say(f"{self.label}note: {text}")

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)


class LiveWatcher(LineWatcher):
    """A bar that moves with every client, with the latest figures beside it."""

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Start the bar; one step is one client's answer."""
        super().begin(recipe, folder, done, cohort)
        self._cohort = cohort
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("training left {task.fields[left]}"),
            console=self.console,
        )
        self._task = self._bar.add_task(
            f"{self.label}round {done}/{recipe.rounds}",
            total=recipe.rounds * cohort,
            completed=done * cohort,
            figures="",
            left="?",
        )
        self._bar.start()

    def task(self, reply: Reply) -> None:
        """A client is done."""
        super().task(reply)
        self._bar.advance(self._task)

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Put the round's figures beside the bar."""
        number = row["round"]
        self._bar.update(
            self._task,
            description=f"{self.label}round {number}/{self._rounds}",
            completed=number * self._cohort,
            figures=figures_of(row),
            left=self._clock.left(number, self._rounds),
        )
        self._warn(row)

    def end(self, result: Result) -> None:
        """Leave the finished bar on the screen."""
        self.close()

    def close(self) -> None:
        """Stop drawing, also after an error."""
        if hasattr(self, "_bar"):
            self._bar.stop()


class _Clock:
    """How long the rest will take, from the rounds seen so far."""

    def __init__(self, done: int = 0) -> None:
        self._first, self._start = done, time.perf_counter()
        self._warm: float | None = None

    def left(self, number: int, rounds: int) -> str:
        now, seen = time.perf_counter(), number - self._first
        if self._warm is None:
            # the first round also starts the workers, and FedStyle's clients learn their styles:
            # later ones tell more
            self._warm = now
        if seen > 1 or number == rounds:
            return clock((now - self._warm) / max(1, seen - 1) * (rounds - number))
        return f"{clock((now - self._start) * (rounds - number))} or less"


def clock(seconds: float) -> str:
    """A time as clocks have it.

    >>> clock(75.4), clock(3600)
    ('1:15', '1:00:00')
    """
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def figures_of(row: Mapping[str, Any]) -> str:
    """Clients, loss, kNN and bytes of a round in a few words."""
    words = [counted(row["answered"], "client")]
    if row["missing"]:
        words.append(f"{row['missing']} missing")
    if row["loss"] is not None:
        words.append(f"loss {row['loss']:.3f}")
    if row.get("knn") is not None:
        words.append(f"validation kNN {100 * row['knn']:.1f} %")
    if (overall := row.get("global_objective", {}).get("value")) is not None:
        words.append(f"global objective {overall:.3f}")
    told = row.get("reported", {})
    if "align" in told and "unif" in told:
        words.append(f"score {tuning_score(told['align'], told['unif']):.3f}")
    words.append(f"{size_of(row['bytes_up'] + row['bytes_down'])}")
    return "  ".join(words)


def size_of(count: float) -> str:
    """Bytes in the unit that suits them.

    >>> size_of(2_800_000)
    '2.8 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


@contextmanager
def transfer(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A function to call with (what, bytes so far, bytes in all) while something is fetched."""
    if not console.is_terminal:
        told: dict[str, int] = {}

        def say(what: str, done: int, total: int | None) -> None:
            tenth = 10 * done // total if total else done // 10_000_000
            if told.get(what) != tenth:
                told[what] = tenth
                share = f": {size_of(done)}" + (f" of {size_of(total)}" if total else "")
                text = what + (share if done else "")
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield say
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield draw


@contextmanager
def long_work(console: Console, silent: bool = False) -> Iterator[None]:
    """Show how far decoding, features or trainings are, wherever they take more than a moment."""
    if silent:
        yield
        return
    shown = _LongWork(console)
    try:
        with listening(shown):
            yield
    finally:
        shown.stop()


class _LongWork:
    """A bar on a terminal, a line now and then elsewhere, nothing in the first two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._began, self._told = "", 0.0, 0.0
        self._bar: Progress | None = None

    def __call__(self, name: str, done: int, total: int | None, unit: str) -> None:
        now = time.perf_counter()
        if done == total:
            return self.stop()
        if name != self._name:
            self.stop()
            self._name, self._began = name, now
        if now - self._began < 2:
            return None
        if self._console.is_terminal:
            return self._draw(done, total, unit)
        if now - self._told > 10:
            self._told = now
            whole = f" of {total:,}" if total else ""
            text = f"{name}: {done:,}{whole} {unit}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        return None

    def _draw(self, done: int, total: int | None, unit: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("")
            self._bar.start()
        words = f"{self._name}: {done:,} {unit}"
        self._bar.update(self._bar.task_ids[0], description=words, completed=done, total=total)

    def stop(self) -> None:
        """Take the bar away; the next work begins anew."""
        self._name, self._told = "", 0.0
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
