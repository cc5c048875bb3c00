"""Rows that a command has computed so far, on disk beside its output, so that a kill loses little.

    NAME.unfinished/rows       float32 rows, appended part by part
    NAME.unfinished/journal    a line for what is computed, then one for every part, each sealed

A part counts once its line in the journal is whole, and its line is written after its rows. What a
kill leaves behind it is cut off when the command is started again. Parts are verified by their
SHA-256 before they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core import files

SUFFIX = ".unfinished"
ROWS, JOURNAL = "rows", "journal"

Rows = npt.NDArray[np.float32]


@dataclass
class Unfinished:
    """The parts of an output that exist.

    Attributes:
        folder: beside the output.
        width: numbers in a row.
        stop: images that are dealt with, kept or left out.
        kept: rows on disk.
        left_out: the row in the source of each image that cannot be read, and why.
    """

    folder: Path
    width: int
    stop: int = 0
    kept: int = 0
    left_out: list[tuple[int, str]] = field(default_factory=list)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start anew; whatever was there is discarded."""
        self.stop, self.kept, self.left_out = 0, 0, []
        files.remove(self.folder / JOURNAL)
        files.remove(self.folder / ROWS)
        self._append(JOURNAL, _line({"about": about}))

    def earlier(self) -> dict[str, Any] | None:
        """What the parts on disk are of, which can then be continued; None where there are none.

        Whatever follows the last whole part is cut off.
        """
        journal, rows = self.folder / JOURNAL, self.folder / ROWS
        if not journal.is_file():
            return None
        with files.reading(journal), files.writing(journal):
            lines = [_content(line) for line in journal.read_bytes().splitlines(keepends=True)]
            if not lines or lines[0] is None or "about" not in lines[0]:
                return None
            rows.touch()
            whole = len(_line(lines[0]))
            with open(rows, "rb") as file:
                for part in lines[1:]:
                    if part is None or not self._read(part, file):
                        break
                    whole += len(_line(part))
            os.truncate(journal, whole)
            os.truncate(rows, self.kept * self.width * 4)
        return dict(lines[0]["about"])

    def _read(self, part: dict[str, Any], file: Any) -> bool:
        """Take over a part, if its rows are on disk as they were written."""
        count = part["kept"] - self.kept
        if _digest(file.read(count * self.width * 4)) != part["rows"]:
            return False
        self.stop, self.kept = part["stop"], part["kept"]
        self.left_out += [(row, why) for row, why in part["left_out"]]
        return True

    def add(self, stop: int, rows: Rows, left_out: list[tuple[int, str]]) -> None:
        """Append a part: images up to `stop`, of which some are left out."""
        data = np.ascontiguousarray(rows, "<f4").tobytes()
        self._append(ROWS, data)
        self.stop, self.kept = stop, self.kept + len(rows)
        self.left_out += left_out
        part = {"stop": stop, "kept": self.kept, "left_out": left_out, "rows": _digest(data)}
        self._append(JOURNAL, _line(part))

    def blocks(self, count: int) -> Iterator[Rows]:
        """All rows, `count` at a time."""
        path = self.folder / ROWS
        with files.reading(path), open(path, "rb") as file:
            while data := file.read(4 * self.width * count):
                yield np.frombuffer(data, "<f4").reshape(-1, self.width)

    def remove(self) -> None:
        """Delete the folder; the output has its rows."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _append(self, name: str, data: bytes) -> None:
        path = self.folder / name
        with files.writing(path), open(path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def folder_of(output: Path) -> Path:
    """The folder of an output's parts."""
    return output.with_name(output.name + SUFFIX)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _line(content: Mapping[str, Any]) -> bytes:
    """A line of the journal with a digest of itself."""
    sealed = {**content, files.SEAL: _digest(json.dumps(content).encode())}
    return json.dumps(sealed).encode() + b"\n"


def _content(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it was not written to its end, or was changed."""
    try:
        content = dict(json.loads(line))
        seal = content.pop(files.SEAL)
    except (ValueError, TypeError, KeyError):
        return None
    whole = line.endswith(b"\n") and seal == _digest(json.dumps(content).encode())
    return content if whole else None
