"""A worker process: `python -m harmonium.runs.worker RUN_FOLDER PARENT DEVICE`.

It builds its own runtime from the run's folder, then answers one task after another until its input
ends, which happens at the latest when the process that started it is gone.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harmonium.core.errors import HarmoniumError
from harmonium.core.progress import send_events_to, throttled

if TYPE_CHECKING:
    from harmonium.engines.runtime import ClientRuntime


def serve(folder: Path, device: str, tasks: IO[bytes], results: IO[bytes]) -> None:
    """Answer tasks until there are no more; an error is also sent as an answer.

    Progress events of a long task are sent before its answer.
    """
    from harmonium.core import codec
    from harmonium.engines.local import read_frame, write_frame

    def pass_on(*event: Any) -> None:
        write_frame(results, codec.encode({"progress": list(event)}))

    while (frame := read_frame(tasks)) is not None:
        try:
            with send_events_to(throttled(pass_on)):
                answer = _perform(_runtime(folder, device), codec.decode(frame))
        except HarmoniumError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception:  # a bug in a method: its traceback is sent, and the worker continues
            answer = {"error": "", "message": traceback.format_exc()}
        write_frame(results, codec.encode(answer))


@cache
def _runtime(folder: Path, device: str) -> ClientRuntime:
    """The runtime, built at the first task, so that its errors are reported like others."""
    import torch

    from harmonium.core.devices import select
    from harmonium.runs.open_run import open_runtime

    select(place := torch.device(device))
    return open_runtime(folder).on(place)


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

    Torch is imported later, so that a process whose parent is gone ends before that.
    """
    threading.Thread(target=leave_with, args=(int(sys.argv[2]),), daemon=True).start()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), sys.argv[3], sys.stdin.buffer, results)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the process that asked is gone
        os._exit(1)
