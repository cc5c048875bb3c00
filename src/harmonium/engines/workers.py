"""Worker processes that wait for work: started early, and kept from one run to the next.

Nothing here needs torch, so that a command can start its workers before it loads torch itself; they
load it at the same time. A worker builds a runtime from the folder that a task names, and drops the
one before. Inside `shared_workers` all runs use the same processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from harmonium.core.allocator import allocator_environment
from harmonium.core.processes import child_environment, end_process, start_module

EARLY = 2  # workers that a command starts before it has read its recipe, at most


def task_environment() -> dict[str, str]:
    """The environment of a process that performs tasks: one thread, and memory is kept."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return child_environment(**one_thread, **allocator_environment())


class Worker:
    """One worker process."""

    def __init__(self) -> None:
        self.answered = False  # it has sent its first frame
        self.process = start_module(
            "harmonium.runs.worker", str(os.getpid()), environment=task_environment()
        )

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def end(self) -> None:
        """End the process now."""
        end_process(self.process)


class Spares:
    """Worker processes without work, for whichever run needs one next."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self, count: int) -> None:
        """Start workers until there are so many without work."""
        with self._lock:
            while len(self._idle) < count and not self._closed:
                self._idle.append(Worker())

    def take(self) -> Worker:
        """A worker: one that waits, or else a new one."""
        with self._lock:
            while self._idle:
                if (worker := self._idle.pop(0)).alive:
                    return worker
                worker.end()
        return Worker()

    def put_back(self, worker: Worker) -> None:
        """Keep a worker that has nothing to do; it ends if nobody can need it any more."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.end()

    def dismiss(self) -> None:
        """End the workers that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def close(self) -> None:
        """End the workers that wait, and those that are put back later."""
        with self._lock:
            self._closed = True
        self.dismiss()


_shared: ContextVar[Spares | None] = ContextVar("shared workers", default=None)


def waiting_workers() -> Spares | None:
    """The workers that runs share here; None outside of `shared_workers`."""
    return _shared.get()


@contextmanager
def shared_workers(count: int = 0) -> Iterator[Spares]:
    """Share worker processes between all runs inside the block; `count` of them start at once."""
    outer = _shared.get()
    if outer is not None:
        outer.start(count)
        yield outer
        return
    spares = Spares()
    token = _shared.set(spares)
    try:
        spares.start(count)
        yield spares
    finally:
        _shared.reset(token)
        spares.close()


def early_workers(words: Sequence[str]) -> int:
    """How many workers to start for a command with these settings, before they are understood.

    One core is left to the command itself, which loads torch at the same time.

    >>> early_workers(["rounds=3", "engine.workers=1"]), early_workers(["engine=flower"])
    (1, 0)
    """
    cores = os.cpu_count() or 1
    count = cores
    for word in words:
        key, _, value = word.partition("=")
        if key == "engine.workers" and value.isdecimal():
            count = int(value)
        elif key in ("engine", "engine.kind", "engine.device"):
            return 0
    return min(count, EARLY, max(1, cores - 1))
