"""kill -9 at any moment, then the same command: the same bits. benchmarks/kills.py does twenty."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harmonium.runs.start import run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kills  # noqa: E402

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")


def test_three_kills_leave_no_trace(tmp_path: Path) -> None:
    """Soon after the run has begun, and after a first and a third round; goes on in this process.

    Where it goes on does not matter: workers change no bit, and a new process has nothing else. One
    of the killed runs has a worker.
    """
    recipe = f"{kills.RECIPE} evaluate.labels_per_class=[]"
    words = recipe.split()
    run(*words, "engine.workers=0", out=tmp_path / "calm")
    calm, rng = kills.contents(tmp_path / "calm"), random.Random(1)
    for commits in (0, 1, 3):
        folder = tmp_path / f"killed-{commits}"
        process = subprocess.Popen(
            kills.command(folder, f"{recipe} engine.workers={int(commits == 1)}"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        last = folder / "commits" / f"{commits:06}.json"
        deadline = time.monotonic() + 60
        while not (last if commits else folder).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert folder.exists() and not (folder / "result.json").exists()
        run(*words, "engine.workers=0", out=folder)
        assert kills.contents(folder) == calm


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("begun", [False, True])
def test_workers_do_not_outlive_a_killed_run(tmp_path: Path, begun: bool) -> None:
    """Nor a command that is killed while it loads torch, before its run begins."""
    process = subprocess.Popen(
        [*kills.command(tmp_path / "run"), "engine.workers=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    commit = tmp_path / "run" / "commits" / "000001.json"
    while not (workers := workers_of(process.pid)) or (begun and not commit.exists()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert begun or not (tmp_path / "run").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while workers_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers and workers_of(process.pid) == []


def workers_of(parent: int) -> list[int]:
    """Workers that were started by a process, which may be gone."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"harmonium.runs.worker" in words and str(parent).encode() in words:
            found.append(int(entry.name))
    return found
