"""Figures of `harmonium eval` for the runs of a study, each computed once and kept in its folder.

As a program, `python -m harmonium.studies.evidence.measuring RUN WORD...` prints the figures of one
run as JSON, so that several runs can be measured at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harmonium.core import files
from harmonium.core.errors import HarmoniumError
from harmonium.measures.evaluation import headline_values

FOLDER = "measures"  # in the study's folder, with a file for every measured run
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Values = dict[str, dict[str, float]]
"""Figures by reference without training, or `""` for the run itself, then by name."""


def measured_before(folder: Path, cell: Path, words: Sequence[str]) -> Values | None:
    """What an earlier call computed of a cell with the same words; none: nothing."""
    return _read(_file(folder, cell)).get(" ".join(words))


def measure(folder: Path, cell: Path, words: Sequence[str], *, apart: bool = False) -> Values:
    """Measure the finished run of a cell, and keep the figures beside those of other words.

    Args:
        folder: the study's.
        cell: the run's folder inside it.
        words: as for `harmonium eval`: measures and their settings.
        apart: whether to do it in a process of its own.
    """
    run = folder / cell
    values = _measure_apart(run, words) if apart else headline_values(run, words)
    path = _file(folder, cell)
    body = json.dumps({**_read(path), " ".join(words): values}, indent=1)
    files.write_atomic(path, f"{body}\n".encode())
    return values


def _file(folder: Path, cell: Path) -> Path:
    return folder / FOLDER / cell.parent.relative_to("cells") / f"{cell.name}.json"


def _read(path: Path) -> dict[str, Values]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _measure_apart(run: Path, words: Sequence[str]) -> Values:
    command = [sys.executable, "-m", __name__, str(run), *words]
    done = subprocess.run(
        command, env={**os.environ, **ONE_THREAD}, stdin=subprocess.DEVNULL, capture_output=True
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise HarmoniumError((lines or [f"exit code {done.returncode}"])[-1])
    values: Values = json.loads(done.stdout)
    return values


if __name__ == "__main__":
    try:
        print(json.dumps(headline_values(Path(sys.argv[1]), sys.argv[2:])))
    except HarmoniumError as failure:
        sys.exit(str(failure))
