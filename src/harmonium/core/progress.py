"""Progress events: long work reports how far it is to a listener, if there is one.

An event says what is being done, how much of it is done, of how much, and in which unit. Work of
any kind emits events: local training, an exchange with clients, an evaluation. It does not know who
receives them: a terminal (`report/display.py`), a worker process that forwards them to the process
that started it, or nobody, which costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Listener = Callable[[str, int, int | None, str], None]
"""Called with what is done, how much of it so far, the total (none: not known) and the unit.

The last event of any work has `done` equal to the total."""

T = TypeVar("T")

SETUP = "setup"  # what a run does before its first round

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def send_events_to(listener: Listener) -> Iterator[None]:
    """Send all progress events inside the block to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener | None:
    """The listener in effect, so that events of other threads and processes can be forwarded."""
    return _listener.get()


def throttled(listener: Listener, spacing: float = 1.0) -> Listener:
    """A listener that forwards at most one event in `spacing` seconds.

    The last event of work is forwarded if an earlier one was, so that work which ends within the
    first `spacing` seconds causes no events at all.
    """
    forwarded: set[str] = set()
    last = time.monotonic()

    def forward(what: str, done: int, total: int | None, unit: str) -> None:
        nonlocal last
        if done == total:
            if what in forwarded:
                forwarded.discard(what)
                listener(what, done, total, unit)
        elif time.monotonic() - last >= spacing:
            last = time.monotonic()
            forwarded.add(what)
            listener(what, done, total, unit)

    return forward


def emit(what: str, done: int, total: int | None, unit: str = "images") -> None:
    """Send one progress event."""
    if listener := _listener.get():
        listener(what, done, total, unit)


@contextmanager
def work(what: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Emit an event at the beginning and at the end of the block, also if it fails.

    Yields a function to call with how much is done so far. Without `total`, only the time that the
    work has taken can be shown.

    >>> def printed(what, done, total, unit):
    ...     print(f"{what}: {done} of {total} {unit}")
    >>> with send_events_to(printed), work("clustering", 2, "steps") as at:
    ...     at(1)
    clustering: 0 of 2 steps
    clustering: 1 of 2 steps
    clustering: 2 of 2 steps
    """
    emit(what, 0, total, unit)
    try:
        yield lambda done: emit(what, done, total, unit) if done != total else None
    finally:
        end = total or 0
        emit(what, end, end, unit)


def each(what: str, items: Sequence[T], unit: str) -> Iterator[T]:
    """Iterate over items, with an event after each of them.

    >>> def printed(what, done, total, unit):
    ...     print(f"{what}: {done} of {total} {unit}")
    >>> with send_events_to(printed):
    ...     order = list(each("measuring", [3, 1], "clients"))
    measuring: 0 of 2 clients
    measuring: 1 of 2 clients
    measuring: 2 of 2 clients
    """
    with work(what, len(items), unit) as at:
        for done, item in enumerate(items, 1):
            yield item
            at(done)
