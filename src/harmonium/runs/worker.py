"""A worker process: `python -m harmonium.runs.worker PARENT`.

A task names the folder of its run, from which the worker builds its own runtime. It answers one
task after another, of one run after another, until its input ends, which happens at the latest when
the process that started it is gone.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harmonium.core.errors import HarmoniumError
from harmonium.core.progress import send_events_to, throttled

if TYPE_CHECKING:
    from harmonium.engines.runtime import ClientRuntime


class TaskServer:
    """Answers tasks of one run after another."""

    def __init__(self) -> None:
        self._of: list[str] = []  # folder, engine and device of the runtime
        self._runtime: ClientRuntime | None = None

    def serve(self, tasks: IO[bytes], results: IO[bytes]) -> None:
        """Answer tasks until there are no more; an error is also sent as an answer.

        Progress events of a long task are sent before its answer.
        """
        from harmonium.core import codec
        from harmonium.engines.local import read_frame, write_frame

        def pass_on(*event: Any) -> None:
            write_frame(results, codec.encode({"progress": list(event)}))

        importlib.import_module("harmonium.runs.open_run")  # while the run is being prepared
        while (frame := read_frame(tasks)) is not None:
            try:
                with send_events_to(throttled(pass_on)):
                    message = codec.decode(frame)
                    answer = _perform(self._runtime_of(message.pop("runtime")), message)
            except HarmoniumError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            except Exception:  # a bug in a method: its traceback is sent, and the worker continues
                answer = {"error": "", "message": traceback.format_exc()}
            write_frame(results, codec.encode(answer))

    def _runtime_of(self, of: list[str]) -> ClientRuntime:
        """The runtime, built at a run's first task, so that its errors are reported like others."""
        import torch

        from harmonium.core.devices import select
        from harmonium.runs.open_run import open_runtime

        if self._runtime is None or of != self._of:
            if self._runtime is not None:  # two of them may be too large
                self._runtime = None
                gc.collect()
            folder, _, device = of
            select(place := torch.device(device))
            self._runtime, self._of = open_runtime(Path(folder)).on(place), of
        return self._runtime


def _perform(runtime: ClientRuntime, message: Any) -> Any:
    from harmonium.engines.runtime import StateRef, Task

    state = message.pop("state")
    broadcast = message.pop("broadcast")
    task = Task(**message, state=StateRef(**state) if state else None)
    with Path(broadcast).open("rb") as file:
        shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with shared:
        return runtime.perform(task, shared[:])


def leave_with(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a long task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Use the standard streams for frames; anything a method prints goes to standard error.

    Torch is imported later, so that a process whose parent is gone can end before that.
    """
    threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    TaskServer().serve(sys.stdin.buffer, results)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the process that asked is gone
        os._exit(1)
