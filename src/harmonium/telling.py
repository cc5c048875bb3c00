"""How far long work is: told to whoever listens, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int | None, str], None]
"""Told what is done, how much of it so far, of how much where known (equal at the end), in what."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener told of whatever is long meanwhile."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(what: str, done: int, total: int | None, unit: str = "pictures") -> None:
    """Say how far something is."""
    if listener := _listener.get():
        listener(what, done, total, unit)
