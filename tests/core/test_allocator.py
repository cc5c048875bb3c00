"""Freed memory is kept by processes that train, unless the user says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from harmonium.core.allocator import allocator_environment
from harmonium.engines.workers import task_environment

FAULTS = """
import resource, sys
if "keep" in sys.argv:
    from harmonium.core.allocator import keep_freed_memory
    keep_freed_memory()
import torch
for _ in range(2):  # the first takes the memory from the system
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def faults(environment: dict[str, str], *words: str) -> int:
    """Pages that the system cleared for twenty tensors of 40 MB, one after the other."""
    command = [sys.executable, "-c", FAULTS, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@glibc
def test_memory_is_kept() -> None:
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    plain.pop("GLIBC_TUNABLES", None)
    assert faults(plain) > 2000
    assert faults(task_environment()) < 200
    assert faults(plain, "keep") < 200


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_settings_of_the_user_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "own")
    assert allocator_environment() == {}
    assert task_environment()[name] == "own"
