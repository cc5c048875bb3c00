"""The log of a running server or client: one line an event, as plain text or JSON.

A line has the time in UTC, a level and a text. The levels:

    error    the command ends, or an answer could not be given because of a fault of the site itself
    warning  somebody should look: a refusal, a lost connection, images that cannot be read
    info     what happens: starts, connections, rounds, bytes sent
    debug    also answers one by one, progress of long work, details of errors with names of files

Names of images and paths to them are in lines of the level debug only. What messages contain is in
none. This log is for operators; the record of what left a site is `harmonium.sites.log`.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, counted
from harmonium.core.notes import Level, Note
from harmonium.core.progress import Listener, throttled
from harmonium.report.run_progress import figures_of, what_runs
from harmonium.sites.settings import LogSettings

if TYPE_CHECKING:
    from harmonium.federation.driver import Reply
    from harmonium.recipe.schema import Recipe
    from harmonium.runs.loop import Result

LEVELS: Mapping[Level, int] = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_COUNTED = re.compile(r"((?:left out: )?[\d,]+ of [\d,]+ images[a-z ]*)[:,]")
_UNREADABLE = re.compile(r"(?:left out: )?([\d,]+) of [\d,]+ images cannot be read")
_BRIEF = "a remark on the images, which may name some: --log-level debug shows it"
SPACING = 10.0  # seconds between two lines about the progress of long work


class EventLog:
    """Writes events to standard error, or to a file that is renamed when it is large."""

    def __init__(self, settings: LogSettings, folder: Path, who: str) -> None:
        """Log as `settings` say.

        Args:
            settings: level, form and file.
            folder: that the name of the file is relative to.
            who: the server or site that every line is of.
        """
        self.settings, self.who = settings, who
        self._logger = logging.Logger(f"harmonium {who}", LEVELS[settings.level])
        self._handler = _handler(settings, folder)
        self._handler.setFormatter(_Lines(as_json=settings.json))
        self._logger.addHandler(self._handler)

    def write(self, level: Level, event: str, text: str, **facts: Any) -> None:
        """Write an event, if its level is logged; `facts` are keys of their own in JSON."""
        about = {"who": self.who, "event": event, "facts": facts}
        self._logger.log(LEVELS[level], "%s", text, extra=about)

    def note(self, text: str) -> None:
        """Write a note at its level; one that may name images is shortened above debug."""
        one = text if isinstance(text, Note) else Note(text)
        hidden = one.brief is not None and self.settings.level != "debug"
        self.write(one.level, "note", str(one.brief) if hidden else one)

    def listener(self) -> Listener:
        """A listener that logs the progress of long work, at the level debug."""

        def listen(what: str, done: int, total: int | None, unit: str) -> None:
            of = f" of {total:,}" if total is not None else ""
            self.write("debug", "work", f"{what}: {done:,}{of} {unit}".rstrip())

        return throttled(listen, SPACING)

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def _handler(settings: LogSettings, folder: Path) -> logging.Handler:
    if settings.file is None:
        return logging.StreamHandler(sys.stderr)
    path = folder / Path(settings.file).expanduser()
    size = int(1e6 * settings.megabytes)
    try:
        return logging.handlers.RotatingFileHandler(
            path, maxBytes=size, backupCount=settings.files, encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"log.file is {path}: {error.strerror}") from None


class _Lines(logging.Formatter):
    """One line an event."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The event as text, or as JSON with its facts."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about: dict[str, Any] = {"time": time.replace("+00:00", "Z")}
        about |= {"level": record.levelname.lower(), "who": vars(record)["who"]}
        text = printable_line(record.getMessage())
        if self._as_json:
            about |= {"event": vars(record)["event"], "text": text, **vars(record)["facts"]}
            return json.dumps(about)
        return f"{about['time']} {about['level']} {about['who']}: {text}"


def printable_line(text: str) -> str:
    r"""A text on one line, however long, without control characters.

    >>> printable_line("one\n  two\x1b[2J")
    'one two?[2J'
    """
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


class LogWatcher(Callback):
    """Logs a run at the server."""

    def __init__(self, log: EventLog) -> None:
        """Write to a log."""
        self._log = log
        self._rounds = 0
        self._explained: set[tuple[int, str]] = set()
        self.folder: Path | None = None

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """Log what is run, and whether it continues."""
        self.folder, self._rounds = folder, recipe.rounds
        more = f", continuing after round {done}" if done else ""
        text = f"{what_runs(recipe, len(self.names))}, {counted(recipe.rounds, 'round')}{more}"
        about = {"folder": str(folder), "plan": recipe.digest, "after": done}
        self._log.write("info", "run", f"{text}; run folder {folder}", **about)

    def task(self, reply: Reply) -> None:
        """Log an answer; a missing one as a warning, once for each reason."""
        name = self.names.get(reply.client, f"client {reply.client}")
        if reply.up is not None:
            self._log.write("debug", "answer", f"{name} answered", site=name)
            return
        new = (reply.client, reply.why) not in self._explained
        self._explained.add((reply.client, reply.why))
        text = f"{name} {reply.absence}"
        self._log.write("warning" if new else "debug", "missing", text, site=name)

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """Log the figures of a round."""
        words = "  ".join(filter(None, figures_of(row).values()))
        keys = ("round", "loss", "knn", "answered", "missing", "bytes_down", "bytes_up")
        facts = {key: row[key] for key in keys if key in row} | {"seconds": round(seconds, 3)}
        self._log.write("info", "round", f"round {row['round']}/{self._rounds}  {words}", **facts)

    def note(self, text: str) -> None:
        """Log a remark on the run."""
        self._log.note(text)

    def end(self, result: Result) -> None:
        """Log that the run is complete."""
        self._log.write("info", "complete", f"the run {result.folder} is complete")


def unreadable(text: str) -> int:
    """How many images cannot be read, according to a remark on them.

    >>> unreadable("left out: 2 of 9 images cannot be read: a.png (broken) and b.png")
    2
    """
    found = _UNREADABLE.match(text)
    return int(found[1].replace(",", "")) if found else 0


def about_images(text: str) -> Note:
    """A remark on images, which may name some, as a note whose brief form names none.

    >>> about_images("left out: 2 of 9 images cannot be read: a.png (broken) and b.png").brief
    'left out: 2 of 9 images cannot be read (their names: --log-level debug)'
    >>> about_images("b.png is odd").brief
    'a remark on the images, which may name some: --log-level debug shows it'
    """
    found = _COUNTED.match(text)
    brief = f"{found[1]} (their names: --log-level debug)" if found else _BRIEF
    return Note(text, "warning", brief)
