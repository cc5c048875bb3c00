"""Decoding many image files in several processes, with the same result for any number of them.

Each process has a thread of its own. If a process dies, a new one continues with the same image;
an image that ends two processes in a row counts as unreadable.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from harmonium.core.errors import EngineError
from harmonium.core.processes import child_environment, end_process, start_module
from harmonium.data.decoding.dicom import check_installed, is_dicom
from harmonium.data.decoding.worker import SECONDS, Answer, Frames, Order, Source, perform

HEADS = 256  # files whose headers are read at once
TRIES = 2  # processes that an image may end before it counts as unreadable


class Decoders:
    """A pool of decoding processes, started when first needed. Leaving the context ends them.

    With `count=0` everything is decoded in this process.
    """

    def __init__(self, count: int | None = None) -> None:
        """Use `count` processes; None uses one per core."""
        self.count = _cores() if count is None else count
        self._threads = ThreadPoolExecutor(max(1, self.count), "harmonium-decoder")
        self._own = threading.local()  # the process of each thread
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closing = False
        self._lock = threading.Lock()  # no process starts once closing has begun

    def __enter__(self) -> Decoders:
        """The pool itself; processes start later."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes at once, even in the middle of an image."""
        with self._lock:
            self._closing = True
        for process in list(self._all):
            self._end(process)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def sources(self, paths: Sequence[str], frames: Frames = "all") -> list[list[Source]]:
        """The images of each file: one, except of DICOM files with several frames."""
        check_installed(paths)
        found: list[list[Source]] = [[path] for path in paths]
        if frames != "all":
            return found
        several = [row for row, path in enumerate(paths) if is_dicom(Path(path))]
        heads = self.run([paths[row] for row in several], Order(head=True), HEADS)
        answers = (head for some in heads for head in some)
        for row, head in zip(several, answers, strict=True):
            if head.frames > 1:
                found[row] = [(paths[row], number) for number in range(head.frames)]
        return found

    def run(self, paths: Sequence[Source], order: Order, chunk: int) -> Iterator[list[Answer]]:
        """Answers in the order of the paths, `chunk` at a time, with few chunks in memory.

        A path may come with the number of a frame; see `sources`.
        """
        chunks = (paths[start : start + chunk] for start in range(0, len(paths), chunk))
        if self.count == 0:
            yield from ([perform(path, order) for path in some] for some in chunks)
            return
        under_way: deque[Future[list[Answer]]] = deque()
        try:
            for some in chunks:
                under_way.append(self._threads.submit(self._perform, some, order))
                if len(under_way) > 2 * self.count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()

    def _perform(self, paths: Sequence[Source], order: Order) -> list[Answer]:
        """Decode one chunk in this thread's process, replacing the process if it dies."""
        answers: list[Answer] = []
        deaths = 0  # in a row, of the same image
        while len(answers) < len(paths):
            process, before = self._process(), len(answers)
            try:
                for answer in _ask(process, paths[before:], order):
                    answers.append(answer)
            except (OSError, EOFError, ValueError):  # ValueError: streams closed, half an answer
                code = self._end(process, seconds=1)
                deaths = deaths + 1 if len(answers) == before else 1
                if deaths == TRIES:
                    answers.append(Answer(error=_exit_reason(code)))
                    deaths = 0
        return answers

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is not None and process.poll() is None:
            return process
        with self._lock:
            if self._closing:
                raise EngineError("decoding was stopped")
            process = self._own.process = _start()
            self._all.add(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n" and not self._closing:
            code = self._end(process, seconds=1)
            raise EngineError(f"a decoding process cannot be started: {_exit_reason(code)}")
        return process

    def _end(self, process: subprocess.Popen[bytes], seconds: float = 0) -> int:
        """Wait some seconds for a process to end, then kill it; returns its exit code."""
        self._all.discard(process)
        return end_process(process, seconds)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start() -> subprocess.Popen[bytes]:
    # With more threads NumPy would reserve memory for every core.
    one_thread = child_environment(OPENBLAS_NUM_THREADS="1")
    return start_module("harmonium.data.decoding.worker", environment=one_thread)


def _ask(
    process: subprocess.Popen[bytes], paths: Sequence[Source], order: Order
) -> Iterator[Answer]:
    """Each answer as it arrives; raises OSError, EOFError or ValueError if the process died."""
    assert process.stdin is not None and process.stdout is not None
    # JSON in ASCII carries any file name, also one that is not valid text.
    process.stdin.write(json.dumps({"paths": list(paths), "order": order}).encode() + b"\n")
    process.stdin.flush()
    for _ in paths:
        yield _receive(process.stdout)


def _receive(stream: IO[bytes]) -> Answer:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    about = json.loads(line)
    about["size"] = tuple(about["size"])
    shape = about.pop("pixels")
    if shape is None:
        return Answer(**about)
    content = np.frombuffer(stream.read(math.prod(shape)), np.uint8)
    return Answer(**about, pixels=content.reshape(shape))  # ValueError if incomplete


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"its decoder ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"not done in {SECONDS:.0f} s" if name == "SIGPROF" else f"{name} ended its decoder"
