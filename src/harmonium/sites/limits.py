"""Limits on what a client may use of its machine; a task that exceeds one is refused by name.

The refusal names the limit and nothing else of the site, and the client goes on. The limits of a
service manager or a container end the whole process instead, so they should be a little wider.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from harmonium.core.errors import ConfigError, PolicyRefusal
from harmonium.sites.settings import LimitSettings

GB = 1e9
AGAIN = 1.0  # seconds after which a task that went on is interrupted again
_FULL = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


def apply(limits: LimitSettings) -> None:
    """Limit the memory and the CPUs of this process and those that it starts."""
    if limits.seconds is not None and threading.current_thread() is not threading.main_thread():
        raise ConfigError("limits.seconds works in the main thread of a process only")
    if sys.platform == "linux" and limits.cpus is not None:
        here = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, here[: limits.cpus])
        torch.set_num_threads(min(torch.get_num_threads(), limits.cpus))
    if sys.platform == "linux" and limits.memory is not None:
        import resource

        most, used = int(limits.memory * GB), _data_size()
        if most <= used:
            raise ConfigError(
                f"limits.memory is {limits.memory:g} GB, but the client needs {used / GB:.2g} GB "
                "before it has read an image: allow more"
            )
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # Not RLIMIT_AS, which counts files that are only mapped, such as the cache of images.
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_size() -> int:
    """Bytes of this process that `RLIMIT_DATA` counts."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    return 0


@contextmanager
def within_memory(limits: LimitSettings) -> Iterator[None]:
    """Refuse what needs more memory than the process may have."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError) or any(word in str(error) for word in _FULL)
        if limits.memory is None or not full:
            raise
        _refuse("memory", f"{limits.memory:g} GB of memory")


@contextmanager
def within_time(limits: LimitSettings) -> Iterator[None]:
    """Interrupt a task that takes too long."""
    if limits.seconds is None:
        yield
        return

    def interrupt(*_: Any) -> NoReturn:
        _refuse("seconds", f"{limits.seconds:g} seconds for a task")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_disk(limits: LimitSettings, folder: Path) -> None:
    """Refuse a task while a site's files take more than they may.

    What a task itself writes is not known before: its state and its answer may exceed the limit
    once.
    """
    if limits.disk is not None and size_of_folder(folder) > limits.disk * GB:
        _refuse("disk", f"{limits.disk:g} GB for states, answers and encoders")


def size_of_folder(folder: Path) -> int:
    """Bytes of all files in a folder."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_size if path.is_file() else 0
    return size


def _refuse(key: str, words: str) -> NoReturn:
    raise PolicyRefusal(
        f"the site refuses this task: it needs more than {words}, and `limits.{key}` allows no more"
    )
