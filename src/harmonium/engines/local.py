"""The local engine: clients run in this process, or in a few single-threaded worker processes.

The number of workers changes only the time: tasks are pure functions of their inputs, and replies
are yielded in the order of asking. A worker that dies is replaced and its task is run again.
Nothing is pickled: workers exchange length-prefixed frames over their standard streams, and the
broadcast of an ask is written once to a file that every worker maps.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from harmonium.core import codec, files
from harmonium.core.devices import CPU
from harmonium.core.errors import EngineError, HarmoniumError
from harmonium.core.progress import Listener, current_listener
from harmonium.core.types import ClientId, Weights
from harmonium.engines.runtime import ClientRuntime, StateRef, Task
from harmonium.engines.state_versions import StateVersions
from harmonium.engines.workers import Spares, Worker, waiting_workers
from harmonium.federation.driver import Reply, Turn
from harmonium.federation.wire import Ask
from harmonium.storage import state_store

TRIES = 3  # how often a task may lose its worker before the run stops


class LocalEngine(StateVersions):
    """Clients on this machine. Use as a context manager: leaving it ends the workers."""

    is_remote = False
    shows_states = True

    def __init__(
        self,
        runtime: ClientRuntime,
        folder: Path,
        workers: int,
        devices: Sequence[torch.device] = (CPU,),
    ) -> None:
        """Run tasks of `runtime`; workers build their own from the run's `folder`.

        Workers are spread over the devices; without workers, tasks run on the first.
        """
        super().__init__()
        self.runtime = runtime if runtime.device == devices[0] else runtime.on(devices[0])
        self._folder = folder
        self._pool = _Pool(folder, workers, devices) if workers else None

    def __enter__(self) -> LocalEngine:
        """Nothing to prepare: workers that were not started before start with the first ask."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers, or leave them to the next run of `shared_workers`."""
        if self._pool:
            self._pool.close()

    def deliver(self, ask: Ask, turn: Turn) -> Iterator[Reply]:
        """One reply per client, in the order of asking."""
        broadcast = codec.encode(dict(ask.down))
        tasks = (
            Task(
                ask.step,
                client,
                turn.round,
                turn.ask,
                dict(ask.each.get(client, {})),
                self._states.get(client),
            )
            for client in ask.to
        )
        results: Iterator[codec.Tree] = (
            (self._in_process(task, broadcast) for task in tasks)
            if self._pool is None
            else self._pool.run(tasks, broadcast, current_listener() or _ignore)
        )
        for result in results:
            state = result.get("state")
            yield Reply(
                result["client"],
                result["up"],
                result["why"],
                tuple(result.get("releases", ())),
                StateRef(**state) if state else None,
            )

    def _in_process(self, task: Task, broadcast: bytes) -> codec.Tree:
        """Perform a task as a worker would: inputs and outputs pass through the same encoding."""
        down = codec.decode(codec.encode(task.down)) if task.down else {}
        fresh = Task(task.step, task.client, task.round, task.ask, down, task.state)
        return codec.decode(codec.encode(self.runtime.perform(fresh, broadcast)))

    def state_of(self, client: ClientId) -> dict[str, Any]:
        """The state that a client keeps, for personal evaluation."""
        return self.runtime.read_state(self._states.get(client))

    def prune(self, *snapshots: codec.Tree) -> None:
        """Delete every state version that none of these snapshots refers to."""
        needed = {version["file"] for snapshot in snapshots for version in snapshot.values()}
        for folder in self.runtime.folder.glob("[0-9]*"):
            for path in folder.glob("[0-9]*"):  # versions only, neither large tensors nor secrets
                if f"{folder.name}/{path.name}" not in needed:
                    files.remove(path)
            state_store.remove_unused_tensors(folder)

    def joined(self, round: int) -> dict[ClientId, int]:
        """No client joins later: all are here from the start."""
        return {}

    def finish(
        self, model: Weights, statistics: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Delete the secrets of secure aggregation; the clients need no copy of the model."""
        for folder in self.runtime.folder.glob("[0-9]*"):
            self.runtime.forget_masks(int(folder.name))


class _Pool:
    """Worker processes, each served by one thread of this process."""

    def __init__(self, folder: Path, count: int, devices: Sequence[torch.device]) -> None:
        self._folder = folder
        self._run = secrets.token_hex(8)  # a worker builds a runtime for every engine
        self._devices = [devices[number % len(devices)] for number in range(count)]  # free ones
        self._count = count
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._all: dict[Worker, torch.device] = {}  # and where its tasks run
        self._shared = waiting_workers()
        self._spares = self._shared or Spares()
        self._closing = False
        self._lock = threading.Lock()  # no worker starts once closing has begun
        for _ in range(count):
            self._idle.put(None)  # started when first needed
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="harmonium-worker")

    def run(
        self, tasks: Iterator[Task], broadcast: bytes, listener: Listener
    ) -> Iterator[codec.Tree]:
        """Results in the order of the tasks; at most two tasks per worker are under way.

        `listener` is called, from other threads, with the progress of long tasks.
        """
        scratch = self._folder / "scratch"
        scratch.mkdir(exist_ok=True)
        shared = scratch / f"broadcast-{os.getpid()}"
        with files.writing(shared):
            shared.write_bytes(broadcast)
        under_way: deque[Future[codec.Tree]] = deque()
        try:
            for task in tasks:
                under_way.append(self._threads.submit(self._perform, task, shared, listener))
                if len(under_way) > 2 * self._count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
            shared.unlink(missing_ok=True)

    def _perform(self, task: Task, shared: Path, listener: Listener) -> codec.Tree:
        state = asdict(task.state) if task.state else None
        message = {**vars(task), "state": state, "broadcast": str(shared)}
        for _ in range(TRIES):
            worker = self._take()
            runtime = [str(self._folder), self._run, str(self._all[worker])]
            try:
                result = _ask(worker, codec.encode({**message, "runtime": runtime}), listener)
            except (OSError, EOFError, ValueError):  # ValueError: its streams are closed
                self._replace(worker)
                continue
            self._idle.put(worker)
            if "error" in result:
                raise _error(result)
            return result
        raise EngineError(
            f"the worker running client {task.client} died {TRIES} times in round {task.round}: "
            "out of memory? Use fewer engine.workers or a smaller local.batch"
        )

    def _take(self) -> Worker:
        """An idle worker, started if needed; the caller must put it, or None, back."""
        idle = self._idle.get()
        if idle is not None:
            return idle
        try:
            with self._lock:
                if self._closing:
                    raise EngineError("the run is being stopped")
                worker = self._spares.take()
                self._all[worker] = self._devices.pop()
                return worker
        except BaseException:
            self._idle.put(None)
            raise

    def _replace(self, worker: Worker) -> None:
        """End a worker; another one starts on its device when it is needed."""
        self._devices.append(self._all.pop(worker))
        worker.end()
        self._idle.put(None)

    def close(self) -> None:
        """Put back the workers that wait, and end the others now, in the middle of a task."""
        with self._lock:
            self._closing = True
        waiting = set[Worker]()
        with suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker is not None and self._all[worker].type == "cpu":
                    waiting.add(worker)  # one on an accelerator would go on holding memory there
        for _ in range(self._count):
            self._idle.put(None)  # for tasks that have not begun: they see that this is closing
        for worker in set(self._all) - waiting:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._all.clear()
        for worker in waiting:
            self._spares.put_back(worker)
        if self._shared is None:
            self._spares.close()


def _ask(worker: Worker, message: bytes, listener: Listener) -> codec.Tree:
    """Send a task and wait for its result; OSError or EOFError if the process is gone."""
    write_frame(worker.process.stdin, message)  # type: ignore[arg-type]
    if starts := not worker.answered:
        listener("starting workers", 0, None, "")
    while (frame := read_frame(worker.process.stdout)) is not None:  # type: ignore[arg-type]
        worker.answered = True
        if starts:
            listener("starting workers", 0, 0, "")
            starts = False
        result: codec.Tree = codec.decode(frame)
        if "progress" not in result:
            return result
        listener(*result["progress"])
    raise EOFError


def _ignore(what: str, done: int, total: int | None, unit: str) -> None:
    """Ignore the progress of tasks."""


def _subclasses(kind: type[HarmoniumError]) -> Iterator[type[HarmoniumError]]:
    for child in kind.__subclasses__():
        yield from (child, *_subclasses(child))


def _error(result: codec.Tree) -> Exception:
    """A worker's error to raise here: of the same class where it is a HarmoniumError."""
    kinds = {kind.__name__: kind for kind in _subclasses(HarmoniumError)}
    kind = kinds.get(result["error"])
    return kind(result["message"]) if kind else RuntimeError(f"in a worker:\n{result['message']}")


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """A frame with its length before it."""
    stream.write(len(frame).to_bytes(8, "little"))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame, or None when the stream ends."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    frame = stream.read(int.from_bytes(head, "little"))
    return frame if len(frame) == int.from_bytes(head, "little") else None
