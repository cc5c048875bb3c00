"""Draw progress on a console: the line of a run, and the work under way.

A run's line comes from its watcher (`run_progress`), the work from the progress events of
`harmonium.core.progress`. A terminal shows both, redraws them several times a second, and clears
them when they end; before there is either, it shows the name of the command. Elsewhere, long work
prints a plain line every few seconds.

This module imports no heavy library, so that the first line appears before those are loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from harmonium.core.progress import send_events_to
from harmonium.report.terminal_table import prose

PATIENCE = 2.0  # seconds of work before it is shown
SPACING = 5.0  # seconds between plain lines about long work
REPEAT = 60.0  # seconds until the same plain line is printed again
TICK = 0.25  # seconds between two redraws


# ---- lines that fit ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of a line; `forms` are its wordings, the longest first."""

    place: int  # its position in the line, from the left
    forms: tuple[str, ...]


def fitted(pieces: Sequence[Piece], width: int, between: str = "  ") -> str:
    """As many pieces as fit into a width, the first ones preferred, ordered by their places.

    >>> pieces = [Piece(1, ("round 3/20",)), Piece(2, ("time left 1:05", "1:05")), Piece(0, ("a",))]
    >>> fitted(pieces, 40), fitted(pieces, 20), fitted(pieces, 14)
    ('a  round 3/20  time left 1:05', 'a  round 3/20  1:05', 'round 3/20')
    """
    chosen: dict[int, str] = {}

    def fits(place: int, form: str) -> bool:
        parts = {**chosen, place: form}
        return len(between.join(parts.values())) <= width

    for piece in pieces:  # first the shortest form of each, then longer ones where there is room
        if not fits(piece.place, piece.forms[-1]):
            break
        chosen[piece.place] = piece.forms[-1]
    for piece in pieces:
        longer = [form for form in piece.forms if piece.place in chosen and fits(piece.place, form)]
        chosen |= {piece.place: longer[0]} if longer else {}
    return between.join(chosen[place] for place in sorted(chosen))


def bar(share: float, length: int) -> str:
    """A bar of characters.

    >>> bar(0.5, 8)
    '━━━━────'
    """
    full = round(min(1.0, max(0.0, share)) * length)
    return "━" * full + "─" * (length - full)


def coloured(line: str) -> Text:
    """A line of the live display, with coloured bars."""
    text = Text(line, no_wrap=True, overflow="crop")
    text.highlight_regex("━+", "bar.complete")
    text.highlight_regex("─+", "bar.back")
    return text


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds.

    >>> clock(75.4), clock(3600)
    ('1:15', '1:00:00')
    """
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


# ---- the display ---------------------------------------------------------------------------------


@dataclass
class _Work:
    """Work that is under way."""

    began: float
    done: int
    total: int | None
    unit: str
    first: int = 0  # what was done already when it began

    def pace(self, now: float) -> tuple[float, float] | None:
        """How much is done a second and the seconds that are left; None where nobody can tell.

        >>> _Work(0.0, 300, 1200, "images", first=100).pace(now=10.0)
        (20.0, 45.0)
        """
        if not self.total or self.done <= self.first or now <= self.began:
            return None
        rate = (self.done - self.first) / (now - self.began)
        return rate, (self.total - self.done) / rate

    def words(self, name: str) -> str:
        """Its name and progress.

        >>> _Work(0.0, 300, 1200, "images").words("features")
        'features: 300 of 1,200 images'
        """
        if self.total is not None:
            return f"{name}: {self.done:,} of {self.total:,} {self.unit}"
        return f"{name}: {self.done:,} {self.unit}" if self.done else name


class RunLine(Protocol):
    """A run that a display can show."""

    def line(self, width: int) -> str:
        """The run on one line of a terminal."""

    def place_under_way(self) -> str:
        """Which run and round the work under way belongs to."""


class Display:
    """The progress shown while a command works: the line of a run and the work under way."""

    def __init__(self, console: Console) -> None:
        """Draw on `console` if it is a terminal; print plain lines to it otherwise."""
        self.console = console
        self.run: RunLine | None = None
        self._command: tuple[str, _Work] | None = None  # what is shown without a run or work
        self._works: dict[str, _Work] = {}  # the outermost first
        self._live: Live | None = None
        self._shows_work = False
        self._drawn = self._said = float("-inf")
        self._plain = ""  # the last plain line
        self._lock = threading.RLock()  # events come from several threads

    def event(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Take a progress event; `done == total` ends a piece of work."""
        with self._lock:
            if done == total:
                self._works.pop(what, None)
            elif what in self._works:
                known = self._works[what]
                known.done, known.total, known.unit = done, total, unit
            else:
                self._works[what] = _Work(time.perf_counter(), done, total, unit, done)
            self.tick(at_once=self._shows_work and not self._works)

    def tick(self, *, at_once: bool = False) -> None:
        """Redraw, or print a plain line, if it is time to."""
        with self._lock:
            now = time.perf_counter()
            if not self.console.is_terminal:
                if self._lasting(now) and now - self._said >= SPACING:
                    line = self._plain_line()
                    if line != self._plain or now - self._said >= REPEAT:
                        self._plain = line
                        self.say(line)
            elif at_once or now - self._drawn >= TICK:
                self._drawn = now
                self._draw(now)

    def say(self, text: str, *, is_prose: bool = False) -> None:
        """Print a permanent line above the live display; prose is wrapped between words."""
        self._said = time.perf_counter()
        if is_prose and self.console.is_terminal:
            text = prose(text, self.console.width)
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def under_way(self, what: str) -> bool:
        """Whether this work has begun and not ended."""
        return what in self._works

    def share(self, unit: str) -> float:
        """The fraction done of the work that is counted in this unit."""
        for one in self._works.values():
            if one.unit == unit and one.total:
                return one.done / one.total
        return 0.0

    def close(self) -> None:
        """Clear the display; no work is under way any more."""
        with self._lock:
            self._works.clear()
            self.run = self._command = None
            self.tick(at_once=True)

    @contextmanager
    def ticking(self, command: str = "") -> Iterator[None]:
        """Keep redrawing between progress events; a terminal shows `command` at once."""
        over = threading.Event()
        if command and self.console.is_terminal:
            self._command = command, _Work(time.perf_counter(), 0, None, "")
            self.tick(at_once=True)

        def tick() -> None:
            while not over.wait(TICK):
                self.tick()

        thread = threading.Thread(target=tick, name="harmonium-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.close()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines of the live display, as wide as the terminal is now."""
        with self._lock:
            yield from map(coloured, self.lines(options.max_width))

    def lines(self, width: int) -> list[str]:
        """The line of the run, and one of the work under way if that takes long."""
        lines = [self.run.line(width)] if self.run else []
        oldest = self._lasting(time.perf_counter())
        self._shows_work = oldest is not None
        if oldest:
            parts = self._parts()
            known = [one for one in self._works.values() if one.total]
            shares = [bar(known[-1].done / (known[-1].total or 1), 12)] if known else []
            pace = self._pace()
            pieces = [
                Piece(1, (parts[-1],)),
                Piece(2, (clock(time.perf_counter() - oldest.began),)),
                *(Piece(4 + n, (words,)) for n, words in reversed([*enumerate(pace)])),
                *(Piece(place - 9, (part,)) for place, part in enumerate(parts[:-1])),
                *(Piece(3, (share,)) for share in shares),
            ]
            lines.append(fitted(pieces, width) or parts[-1][:width])
        return lines

    def _lasting(self, now: float) -> _Work | None:
        """The oldest work under way if it is long enough to show; a named command always is."""
        if self._command and self.run is None:
            return self._command[1]
        oldest = next(iter(self._works.values()), None)
        return oldest if oldest and now - oldest.began >= PATIENCE else None

    def _parts(self) -> list[str]:
        """The work under way: the outermost, and the latest countable work within it."""
        works = [*self._works.items()]
        if not works and self._command:
            works = [self._command]
        first, last = works[0], works[-1]
        within = [one for one in works[1:] if one[1].total or one == last]
        return [one.words(name) for name, one in (first, *within[-2:])]

    def _pace(self) -> list[str]:
        """Rate and time left of work on images that stands alone, for which a user waits."""
        works = list(self._works.values())
        alone = self.run is None and len(works) == 1 and works[0].unit == "images"
        pace = works[0].pace(time.perf_counter()) if alone else None
        if pace is None:
            return []
        rate, left = pace
        return [f"{rate:,.{0 if rate >= 10 else 1}f} a second", f"time left {clock(left)}"]

    def _plain_line(self) -> str:
        place = [self.run.place_under_way()] if self.run else []
        parts = "; ".join(self._parts())
        return ": ".join(filter(None, [*place, ", ".join([parts, *self._pace()])]))

    def _draw(self, now: float) -> None:
        if self.run is None and not self._lasting(now):
            if self._live is not None:
                self._live.stop()
                self._live = None
            return
        if self._live is None:
            self._live = Live(
                self,
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # results go there, and need not go to this console
            )
            self._live.start()
        self._live.refresh()


_displays: dict[Console, Display] = {}


def display_of(console: Console) -> Display:
    """The display of a console; each console has only one."""
    return _displays.setdefault(console, Display(console))


@contextmanager
def long_work(console: Console, silent: bool = False, command: str = "") -> Iterator[None]:
    """Show the progress of long work: training, decoding, features, probes.

    `command` says what a command does, e.g. `evaluating`. A terminal shows it at once, until there
    is a run or work to show, so slow imports can be done inside. Print results afterwards.
    """
    if silent:
        yield
        return
    display = display_of(console)
    with send_events_to(display.event), display.ticking(command):
        yield
