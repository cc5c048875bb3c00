"""Progress of a run: one live line on a terminal, plain lines anywhere else.

Figures that do not fit into the terminal's width are left out in a fixed order: round, loss, kNN
and time left go last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from harmonium.core.callbacks import Callback
from harmonium.core.errors import counted
from harmonium.core.progress import SETUP
from harmonium.evaluation.geometry import tuning_score
from harmonium.report.display import Piece, bar, coloured, display_of, fitted
from harmonium.report.display import clock as clock
from harmonium.report.display import long_work as long_work

if TYPE_CHECKING:
    from harmonium.federation.driver import Reply
    from harmonium.recipe.schema import Recipe
    from harmonium.runs.loop import Result

MOST_NAMES = 5  # missing clients that a round's line names
LATER = (
    "objective",
    "sites",
    "clients",
    "score",
    "shortened",
    "left_out",
    "bytes",
)  # figures of a round that are shown last


def watcher_for(console: Console, label: str = "") -> Callback:
    """The watcher for a console: a live line on a terminal, plain lines elsewhere."""
    return LiveWatcher(console, label) if console.is_terminal else LineWatcher(console, label)


def progress(label: str = "") -> Callback:
    """A callback that shows a run on standard error as the commands do.

    Args:
        label: distinguishes several runs; `compare`, `sweep` and `tune` give it.

    Returns:
        A live line on a terminal, a plain line a round anywhere else.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("demo", callbacks=harmonium.progress, **small)
    """
    return watcher_for(Console(stderr=True), label)


class LineWatcher(Callback):
    """One plain line a round."""

    def __init__(self, console: Console, label: str = "") -> None:
        """Print to `console`; `label` distinguishes several runs."""
        self.display = display_of(console)
        self.label = f"{label}: " if label else ""
        self._rounds = self._done = 0
        self._clock = _Clock()
        self._warned = ""
        self._explained: set[tuple[int, str]] = set()
        self._silent: set[int] = set()  # clients that did not answer an ask of this round
        self._answered: set[int] = set()  # clients that answered one

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Print what is run, its folder and whether it continues."""
        self.folder = folder
        self._rounds, self._done = recipe.rounds, done
        self._clock = _Clock(
            recipe.rounds, lambda number: recipe.evaluate.due(number, recipe.rounds)
        )
        self.display.say(f"{self.label}{what_runs(recipe, len(self.names))}")
        self.display.say(f"{self.label}run folder {folder}")
        if done:
            self.display.say(f"{self.label}continuing after round {done}")
        self.display.run = self

    def place_under_way(self) -> str:
        """The run and round that work belongs to; setup and final evaluation have no round."""
        number = self._done + 1
        is_round = number <= self._rounds and not self.display.under_way(SETUP)
        return self.label.rstrip(": ") + (
            (", " if self.label else "") + f"round {number}/{self._rounds}" if is_round else ""
        )

    def line(self, width: int) -> str:
        """The run on one line of a terminal."""
        return fitted([Piece(0, (f"{self.label}round {self._done}/{self._rounds}",))], width)

    def task(self, reply: Reply) -> None:
        """Print why a client did not answer, once for each reason."""
        if not reply.measuring:
            (self._silent if reply.up is None else self._answered).add(reply.client)
        if reply.why and (reply.client, reply.why) not in self._explained:
            self._explained.add((reply.client, reply.why))
            name = self.names.get(reply.client, f"client {reply.client}")
            self.note(f"{name} {reply.absence}")

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Print the round's figures."""
        self._done = row["round"]
        left = self._clock.left(self._done)
        place = f"{self.label}round {self._done}/{self._rounds}"
        words = {"round": place, "loss": "", "knn": ""}
        words |= {"left": f"training left {left}"} if left else {}
        self.display.say("  ".join(filter(None, (words | self._figures_of(row)).values())))
        self._warn(row)

    def _figures_of(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The round's figures; missing clients are named if they have names."""
        words, missing = figures_of(row), sorted(self._silent - self._answered)
        if len(missing) == row["missing"] and all(client in self.names for client in missing):
            names = [self.names[client] for client in missing[:MOST_NAMES]]
            more = ["..."] if len(missing) > MOST_NAMES else []
            words["clients"] += f" ({', '.join(names + more)})" if names else ""
        self._silent.clear()
        self._answered.clear()
        return words

    def _warn(self, row: Mapping[str, Any]) -> None:
        """Warn of a problem with the representation when it begins, not at every evaluation."""
        if "health" in row:
            warning = "; ".join(row["health"]["warnings"])
            kind = warning.partition(":")[0]  # the figures after it differ each time
            if warning and kind != self._warned:
                self.note(warning)
            self._warned = kind

    def note(self, text: str) -> None:
        """Print a note."""
        self.display.say(f"{self.label}note: {text}", is_prose=True)

    def close(self) -> None:
        """Stop showing this run."""
        if self.display.run is self:
            self.display.run = None
            self.display.tick(at_once=True)


def what_runs(recipe: Recipe, joined: int) -> str:
    """A run in a few words; `joined` is how many sites take part so far, 0 where it has none."""
    clients = counted(recipe.clients, "client")
    if 0 < joined < recipe.clients:  # not all sites have joined
        clients = f"{joined} of {clients}"
    if new := recipe.split.newcomers:
        separator = " and " if recipe.clients == 1 else ", "  # newcomers are extra, or among them
        clients += separator + counted(new, "newcomer")
    losses = [
        recipe.objective.name or "an objective of your own",
        *(t.name for t in recipe.terms),
    ]
    what = f"{recipe.method.name} with {' and '.join(losses)}"
    return f"{what} on {recipe.data.name}, {clients}"


class LiveWatcher(LineWatcher):
    """One live line: a bar that moves with every client, and the latest figures."""

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Draw the line for the first time."""
        super().begin(recipe, folder, done, cohort)
        self._began = time.perf_counter()
        self._figures: dict[str, str] = {}
        self._left = ""
        self.display.tick(at_once=True)

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Show the round's figures in the line."""
        self._done = row["round"]
        passing = ("clients", "score", "shortened", "left_out")
        self._figures = self._figures | dict.fromkeys(passing, "")
        self._figures |= self._figures_of(row)
        self._left = self._clock.left(self._done)
        self._warn(row)
        self.display.tick(at_once=True)

    def line(self, width: int) -> str:
        """Round, loss, kNN and time left first; then the run's label and the other figures.

        A kNN accuracy stays until the next one; every other figure is that of the last round.
        """
        is_setup = self.display.under_way(SETUP)
        done = self._done + (0.0 if is_setup else self.display.share("clients"))
        share = min(done, self._rounds) / max(1, self._rounds)
        label = self.label.removesuffix(": ")
        number = label[label.rfind("(") :] if label.endswith(")") else label  # "(3 of 12)"
        figures = dict.fromkeys(("loss", "knn", *LATER), "") | self._figures
        left = f"left {self._left}" if self._left else ""
        pieces = [
            Piece(1, ("setup" if is_setup else f"round {self._done}/{self._rounds}",)),
            Piece(3, (figures["loss"],)),
            Piece(4, (figures["knn"].removeprefix("validation "),)),
            Piece(5, (left, left.removesuffix(" or more"))),
            Piece(0, (label, number)),
            Piece(2, tuple(bar(share, length) for length in (24, 16, 8))),
            *(Piece(6 + place, (figures[key],)) for place, key in enumerate(LATER)),
            Piece(6 + len(LATER), (f"elapsed {clock(time.perf_counter() - self._began)}",)),
        ]
        return fitted([piece for piece in pieces if piece.forms[-1]], width)

    def end(self, result: Result) -> None:
        """Leave the finished line on the screen."""
        if self.display.run is self:
            line = self.line(self.display.console.width)
            self.close()
            self.display.console.print(coloured(line))


class _Clock:
    """Estimates the remaining time from the rounds so far.

    The first round is not counted, because it also starts the workers, decodes images, and lets
    FedStyle's clients learn their styles. Rounds with an evaluation are averaged separately.
    """

    def __init__(self, rounds: int = 0, due: Callable[[int], bool] = lambda number: False) -> None:
        """Estimate a run of `rounds` rounds; `due` says which end with an evaluation."""
        self._rounds, self._due = rounds, due
        self._last: float | None = None  # when a round ended
        self._took: dict[bool, list[float]] = {}  # seconds, by whether it was evaluated

    def left(self, number: int) -> str:
        """The time left after a round that has just ended; empty while too little is known."""
        now = time.perf_counter()
        if self._last is not None:
            self._took.setdefault(self._due(number), []).append(now - self._last)
        self._last = now
        rest = Counter(self._due(one) for one in range(number + 1, self._rounds + 1))
        mean = {evaluated: sum(took) / len(took) for evaluated, took in self._took.items()}
        if False in rest and False not in mean:
            return ""
        if not rest.keys() <= mean.keys():  # no evaluation was seen yet
            return f"{clock(rest.total() * mean[False])} or more" if mean else ""
        return clock(sum(mean[evaluated] * count for evaluated, count in rest.items()))


def figures_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The available figures of a round in a few words each: loss, kNN, clients, score, bytes."""
    words: dict[str, str] = {}
    if row["loss"] is not None:
        words["loss"] = f"loss {row['loss']:.3f}"
    if row.get("knn") is not None:
        words["knn"] = f"validation kNN {100 * row['knn']:.1f} %"
    if (overall := row.get("global_objective", {}).get("value")) is not None:
        words["objective"] = f"global objective {overall:.3f}"
    if (counts := row.get("sites", {}).get("all")) is not None:
        words["sites"] = f"balanced at the sites {100 * counts['balanced']:.1f} %"
    words["clients"] = counted(row["answered"], "client")
    if row["missing"]:
        words["clients"] += f", {row['missing']} missing"
    values = row.get("reported", {})
    if "align" in values and "unif" in values:
        words["score"] = f"score {tuning_score(values['align'], values['unif']):.3f}"
    if "shortened" in values:
        words["shortened"] = f"{values['shortened']:.0f} shortened, to {values['shortened_to']:.2g}"
    if "left_out" in values:
        words["left_out"] = f"{values['left_out']:.0f} left out"
    words["bytes"] = size_of(row["bytes_up"] + row["bytes_down"])
    return words


def size_of(count: float) -> str:
    """A number of bytes in a readable unit.

    >>> size_of(2_800_000)
    '2.8 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


@contextmanager
def transfer(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A function to call with (name, bytes so far, bytes in total) during a download."""
    if not console.is_terminal:
        shown: dict[str, int] = {}

        def say(what: str, done: int, total: int | None) -> None:
            tenth = 10 * done // total if total else done // 10_000_000
            if shown.get(what) != tenth:
                shown[what] = tenth
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
