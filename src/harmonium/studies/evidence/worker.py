"""A process that runs cells of a study one after another.

`python -m harmonium.studies.evidence.worker` starts it. Orders and answers are lines of JSON on its
standard streams: the recipe of a cell and its folder come in, its CPU seconds and, if it failed,
the reason go out. What a run prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from harmonium.core.allocator import allocator_environment
from harmonium.core.errors import HarmoniumError
from harmonium.core.threads import single_thread
from harmonium.recipe.schema import Recipe
from harmonium.report.figure import without_plots
from harmonium.runs.start import run
from harmonium.runs.worker import leave_with

DIED = "its process ended without a word"  # killed, or out of memory


class Worker:
    """A worker process, started with the first cell and anew if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def run(self, recipe: Recipe, folder: Path) -> tuple[float, str]:
        """Run a recipe in a folder; returns CPU seconds, and the reason if it failed."""
        if self._process is None:
            one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())],
                env={**os.environ, **one_thread, **allocator_environment()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0 if os.name == "posix" else None,  # Ctrl-C is for the study
            )
        if self._closed:  # since this call began
            self.stop()
            return 0.0, DIED
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None
        try:
            orders.write(json.dumps({"recipe": recipe.tree(), "folder": str(folder)}) + "\n")
            orders.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.stop()
            return 0.0, DIED
        report = json.loads(answer)
        return report["seconds"], report["error"]

    def stop(self) -> None:
        """End the process once it has nothing to do; it is killed with a cell in its hands."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop for good: a cell that is being run, or is about to be, is given up."""
        self._closed = True
        self.stop()


def cpu_seconds() -> float:
    """What this process and its children have used so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def serve(orders: IO[str], answers: IO[str]) -> None:
    """Run cells until there are no more orders."""
    for order in orders:
        before, error = cpu_seconds(), ""
        asked = json.loads(order)
        try:
            with without_plots(), single_thread():
                run(Recipe.from_tree(asked["recipe"]), out=asked["folder"])
        except HarmoniumError as refused:
            error = str(refused)
        answers.write(json.dumps({"seconds": cpu_seconds() - before, "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    lines, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, lines)
