"""Limits of a client: a task that exceeds one is refused by name, and the next is answered."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.sites.test_site import Bench

from harmonium.core.errors import ConfigError
from harmonium.engines.runtime import ClientRuntime
from harmonium.sites import limits
from harmonium.sites.settings import LimitSettings


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def limited(bench: Bench, **most: Any) -> None:
    bench.site.limits = LimitSettings(**most)


def spoiled(bench: Bench, monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
    """Have the next task do something else."""
    before = ClientRuntime.perform

    def perform(*args: Any) -> Any:
        monkeypatch.setattr(ClientRuntime, "perform", before)
        return task()

    monkeypatch.setattr(ClientRuntime, "perform", perform)


def test_a_task_that_takes_too_long_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(bench, seconds=0.2)
    spoiled(bench, monkeypatch, lambda: time.sleep(60))
    began = time.monotonic()
    assert "limits.seconds" in bench.refusal()
    assert time.monotonic() - began < 20
    assert bench.say(about={"round": 2})["up"]
    time.sleep(0.3)  # nothing interrupts what comes after a task


def test_a_task_that_ignores_the_interruption_is_interrupted_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AGAIN", 0.1)
    limited(bench, seconds=0.1)

    def stubborn() -> None:
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)

    spoiled(bench, monkeypatch, stubborn)
    assert "limits.seconds" in bench.refusal()


def test_seconds_need_the_main_thread() -> None:
    caught: list[Exception] = []

    def apply() -> None:
        try:
            limits.apply(LimitSettings(seconds=1.0))
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=apply)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "limits.seconds" in str(caught[0])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_is_refused_by_name(
    error: Exception, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    limited(bench, memory=2.5)
    spoiled(bench, monkeypatch, fail)
    why = bench.refusal()
    assert "limits.memory" in why and "2.5 GB" in why
    assert bench.say(about={"round": 2})["up"]
    limited(bench)  # without a limit it is a fault like any other
    spoiled(bench, monkeypatch, fail)
    assert "limits" not in bench.refusal(about={"round": 3})


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("shapes differ")

    limited(bench, memory=2.5)
    spoiled(bench, monkeypatch, fail)
    assert "limits" not in bench.refusal()


def test_a_full_kit_is_refused_until_there_is_room(bench: Bench) -> None:
    assert bench.say()["up"]
    size = limits.size_of_folder(bench.folder)
    assert size > 1000
    limited(bench, disk=size / 2e9)
    why = bench.refusal(about={"round": 2})
    assert "limits.disk" in why and str(bench.folder) not in why
    limited(bench, disk=2 * size / 1e9)
    assert bench.say(about={"round": 3})["up"]


def test_a_limit_does_not_change_an_answer(tmp_path: Path) -> None:
    bodies = []
    for name, most in (("a", LimitSettings()), ("b", LimitSettings(seconds=100.0, disk=50.0))):
        bench = Bench(tmp_path / name)
        bench.site.limits = most
        model = bench.say()["up"]["model"]
        bodies.append({key: value.tolist() for key, value in model.items()})
    assert bodies[0] == bodies[1]


SCRIPT = """
import os, torch
from harmonium.core.errors import PolicyRefusal
from harmonium.engines.runtime import ClientRuntime
from harmonium.sites import limits
from harmonium.sites.settings import LimitSettings
most = LimitSettings(memory=1.5, cpus=1)
limits.apply(most)
assert len(os.sched_getaffinity(0)) == 1 and torch.get_num_threads() == 1
for fill in (lambda: torch.ones(500_000_000), lambda: bytearray(2_000_000_000)):
    try:
        with limits.within_memory(most):
            fill()
    except PolicyRefusal as error:
        print(error)
torch.ones(1_000_000)
try:
    limits.apply(LimitSettings(memory=0.001))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and CPUs need Linux")
def test_the_system_keeps_to_the_limits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    one, two, three = done.stdout.splitlines()
    assert "limits.memory" in one and one == two
    assert three.startswith("ConfigError limits.memory is 0.001")
