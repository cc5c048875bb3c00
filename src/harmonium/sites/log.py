"""A site's log of asks and of the values that left: JSON lines in a chain of SHA-256 sums.

Every line has its number, the sum of the line before and its own sum. A line that was
changed, removed, added or moved breaks the chain, and nothing is read from a broken log.

The sums have no secret. Anyone who can write the file can cut off its last lines, or rewrite all of
it, and the chain is intact again. Only a head that was stored elsewhere reveals that: give it to
`verify`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from harmonium.core import files
from harmonium.core.errors import StoreError
from harmonium.federation.wire import is_measuring
from harmonium.privacy.budget import epsilon
from harmonium.report.run_progress import size_of

RESENT = "stored answer sent again"
LEFT = ("sent", RESENT)  # outcomes with which values left the site
PATIENCE = 60.0  # seconds to wait for another process that appends
_SUM = b', "sha256": "'  # between a line's content and its sum
_CHAIN_KEYS = ("number", "before", "sha256")  # keys of the chain


class Head(NamedTuple):
    """The last line of a log at some time."""

    number: int  # of lines until then
    sha256: str  # the sum of that line


START = Head(0, "0" * 64)


class SiteLog:
    """The log in one file. Each thread has an object of its own; processes may share the file."""

    def __init__(self, path: Path) -> None:
        """Refer to a file, which need not exist yet; nothing is read."""
        self.path = path
        self._head = START
        self._size = 0  # bytes of whole lines that were read or written so far
        self._releases: list[dict[str, Any]] = []

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line; when this returns, it is on the disk.

        The unfinished line of a killed process is cut off first, and a new line records that. Its
        answer never left the site, because lines are written before answers are sent.
        """
        with self._writing():
            if torn := self._read_new_lines():
                os.truncate(self.path, self._size)
                why = f"{torn} bytes of an unfinished line were cut off"
                now = datetime.now(UTC).isoformat(timespec="seconds")
                self._write({"time": now, "outcome": "noted", "why": why})
            self._write(entry)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, without the keys of the chain."""
        return [entry for _, entry in self._lines(self._bytes(0), START)]

    def verify(self, remembered: Head = START) -> None:
        """Refuse a log whose chain is broken, or that does not continue from a remembered head."""
        last = START
        for last, _ in self._lines(self._bytes(0), START):
            if last.number == remembered.number and last != remembered:
                raise StoreError(
                    f"{self.path} was replaced or rewritten: line {last.number} differs"
                )
        if last.number < remembered.number:
            raise StoreError(
                f"{self.path} was cut off: it had {remembered.number} lines and has {last.number}"
            )

    def head(self) -> Head:
        """The current end of the log; stored elsewhere, it protects the lines up to here."""
        self._read_new_lines()
        return self._head

    def releases(self) -> list[dict[str, Any]]:
        """All guarded releases ever recorded as sent.

        Each counts from its line on, whether or not the answer arrived. An answer that is stored
        and sent again has the same noise and counts once.
        """
        self._read_new_lines()
        return list(self._releases)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let one process append at a time; report disk errors in one line."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.path.with_name(self.path.name + ".lock"), PATIENCE):
                yield
        except filelock.Timeout:
            raise StoreError(f"another process keeps {self.path} busy: stop it") from None
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror}. Make room and try again."
            ) from None

    def _write(self, entry: Mapping[str, Any]) -> None:
        if taken := [key for key in _CHAIN_KEYS if key in entry]:
            raise StoreError(f"an entry of {self.path} cannot have a key '{taken[0]}'")
        number, before = self._head
        try:
            text = json.dumps({"number": number + 1, "before": before, **entry}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StoreError(f"an entry of {self.path} is not plain data: {error}") from None
        content = text.encode()[:-1]  # without its closing brace
        head = Head(number + 1, files.digest_of(content))
        line = content + _SUM + head.sha256.encode() + b'"}\n'
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if number == 0:
            files.sync_folder(self.path.parent)
        self._head, self._size = head, self._size + len(line)
        self._releases += _sent_releases(json.loads(text))

    def _read_new_lines(self) -> int:
        """Read the new lines; return the number of bytes of an unfinished line after them."""
        data = self._bytes(self._size)
        whole = data.rfind(b"\n") + 1
        lines = list(self._lines(data, self._head))  # all of them, or an error and nothing
        for self._head, entry in lines:
            self._releases += _sent_releases(entry)
        self._size += whole
        return len(data) - whole

    def _bytes(self, start: int) -> bytes:
        """The file from byte `start` on; empty if there is no file yet."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            size, data = 0, b""
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from None
        if size < self._size:
            raise StoreError(f"{self.path} became shorter while it was in use: lines were removed")
        return data

    def _lines(self, data: bytes, head: Head) -> Iterator[tuple[Head, dict[str, Any]]]:
        """Each whole line as its head and its entry; `head` is that of the line before."""
        for line in data.split(b"\n")[:-1]:
            content, _, ending = line.rpartition(_SUM)
            number, sha256 = head.number + 1, files.digest_of(content)
            if ending != sha256.encode() + b'"}':
                raise self._broken(number, "its content was changed")
            try:
                entry = json.loads(content + b"}")
                chain = Head(entry.pop("number"), entry.pop("before"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self._broken(number, "it is not a line of a log") from None
            if chain != Head(number, head.sha256):
                raise self._broken(number, "lines before it were removed, added or moved")
            head = Head(number, sha256)
            yield head, entry

    def _broken(self, number: int, why: str) -> StoreError:
        return StoreError(f"{self.path} was tampered with: line {number} breaks the chain, {why}")


def table(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for `report.tables`: one per entry, with the values that left the site."""
    rows = []
    for entry in entries:
        fields = [
            f"{name} ({about['kind']}, {size_of(about['bytes'])})"
            for name, about in _sent_fields(entry)
        ]
        if reported := entry.get("told"):
            fields.append(f"the number of images ({reported.get('examples')})")
        outcome, why = entry.get("outcome", ""), entry.get("why", "")
        rows.append(
            {
                **{key: entry.get(key) for key in ("time", "run", "round", "step")},
                "what left": ", ".join(fields) or "nothing",
                "outcome": f"{outcome}: {why}" if why else outcome,
            }
        )
    return rows


def totals(entries: Iterable[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """Totals of a log: answers, bytes by kind, and epsilon of the guarded releases.

    Epsilon is for replacing one image by another, as the policy counts it. A server counts an
    answer once and reports bytes for measuring separately, so the bytes that left `again` and
    those for `measuring` are also given by themselves.
    """
    answers, sizes, releases = 0, Counter[str](), []
    separate = {"again": 0, "measuring": 0}
    for entry in entries:
        answers += entry.get("outcome") == "sent"
        releases += _sent_releases(entry)
        for _, about in _sent_fields(entry):
            sizes[about["kind"]] += about["bytes"]
            if entry["outcome"] == RESENT:
                separate["again"] += about["bytes"]
            elif is_measuring(str(entry.get("step")), entry.get("round", 1)):
                separate["measuring"] += about["bytes"]
    return {
        "answers": answers,
        "bytes": dict(sizes),
        **separate,
        "releases": len(releases),
        "epsilon": epsilon(releases, delta, neighbours="replace"),
        "delta": delta,
    }


def last_image_count(entries: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of images that the site last reported to a server; none: it never did."""
    counts = [entry["told"].get("examples") for entry in entries if entry.get("told")]
    return counts[-1] if counts else None


def bytes_by_step(entries: Iterable[Mapping[str, Any]], run: str) -> dict[str, dict[str, int]]:
    """Bytes that left the site in a run, by exchange and by kind of value."""
    sizes: dict[str, Counter[str]] = {}
    for entry in entries:
        for _, about in _sent_fields(entry) if entry.get("run") == run else ():
            sizes.setdefault(str(entry.get("step")), Counter())[about["kind"]] += about["bytes"]
    return {step: dict(by_kind) for step, by_kind in sizes.items()}


def _sent_fields(entry: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return list(entry.get("up", {}).items()) if entry.get("outcome") in LEFT else []


def _sent_releases(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(entry.get("releases", [])) if entry.get("outcome") == "sent" else []
