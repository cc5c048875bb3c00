"""Progress events: how far long work is, told to whoever listens, and to nobody else.

Work of any kind (a local training, an exchange with clients, an evaluation) tells what it is and
how far it has come. It does not know who listens: a terminal (`report/progress.py`), a worker
process that passes events on to the process that started it, or nobody, which costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Listener = Callable[[str, int, int | None, str], None]
"""Told what is done, how much of it so far, of how much where known (equal at the end), in what."""

T = TypeVar("T")

SETUP = "setup"  # what a run does before its first round

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener told of whatever is long meanwhile."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Listener | None:
    """Who listens now, for handing events of other threads and processes on; None: nobody."""
    return _listener.get()


def seldom(listener: Listener, spacing: float = 1.0) -> Listener:
    """A listener that passes on an event each `spacing` seconds, and the ends of what it told of.

    Work that is over before the first of them stays untold.
    """
    told: set[str] = set()
    last = time.monotonic()

    def pass_on(what: str, done: int, total: int | None, unit: str) -> None:
        nonlocal last
        if done == total:
            if what in told:
                told.discard(what)
                listener(what, done, total, unit)
        elif time.monotonic() - last >= spacing:
            last = time.monotonic()
            told.add(what)
            listener(what, done, total, unit)

    return pass_on


def tell(what: str, done: int, total: int | None, unit: str = "images") -> None:
    """Say how far something is."""
    if listener := _listener.get():
        listener(what, done, total, unit)


@contextmanager
def work(what: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Tell of work from its beginning to its end, also where it fails.

    Yields a function to call with how much is done so far. `total` is none where nobody knows how
    much there is to do; such work only shows for how long it has gone on.

    >>> def printed(what, done, total, unit):
    ...     print(f"{what}: {done} of {total} {unit}")
    >>> with listening(printed), work("clustering", 2, "steps") as at:
    ...     at(1)
    clustering: 0 of 2 steps
    clustering: 1 of 2 steps
    clustering: 2 of 2 steps
    """
    tell(what, 0, total, unit)
    try:
        yield lambda done: tell(what, done, total, unit) if done != total else None
    finally:
        end = total or 0
        tell(what, end, end, unit)


def each(what: str, items: Sequence[T], unit: str) -> Iterator[T]:
    """Items one after another; tells how many of them are done.

    >>> def printed(what, done, total, unit):
    ...     print(f"{what}: {done} of {total} {unit}")
    >>> with listening(printed):
    ...     order = list(each("measuring", [3, 1], "clients"))
    measuring: 0 of 2 clients
    measuring: 1 of 2 clients
    measuring: 2 of 2 clients
    """
    with work(what, len(items), unit) as at:
        for done, item in enumerate(items, 1):
            yield item
            at(done)
