"""kill -9 at any moment, then the same command: the same bits. benchmarks/kills.py does twenty."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kills  # noqa: E402


def test_three_kills_at_random_moments_leave_no_trace(tmp_path: Path) -> None:
    assert kills.trial(3, seed=1, base=tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_workers_do_not_outlive_a_killed_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*kills.command(tmp_path / "run"), "engine.workers=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (workers := workers_of(tmp_path / "run")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while workers_of(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(tmp_path / "run") == []


def workers_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"harmonium.engines.worker" in words and str(folder).encode() in words:
            found.append(int(entry.name))
    return found
