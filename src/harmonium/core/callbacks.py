"""Callbacks: the class to extend to follow a run, and how several of them are called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmonium.core.errors import CallbackError, ConfigError, HarmoniumError

if TYPE_CHECKING:
    from harmonium.core.types import ClientId
    from harmonium.federation.driver import Reply
    from harmonium.recipe.schema import Recipe
    from harmonium.runs.loop import Result


class Callback:
    """Follows a run while it goes; every method does nothing unless overridden.

    Pass one or a list of them as `callbacks` to `run`, `resume`, `compare`, `sweep` or `tune`. They
    see a run and cannot change its result. An exception ends the run with a `CallbackError`; every
    round that was committed stays, and `resume` goes on from there.

    >>> import harmonium
    >>> class Losses(harmonium.Callback):
    ...     def __init__(self):
    ...         self.seen = []
    ...     def round(self, row, seconds):
    ...         self.seen.append(row["loss"])
    >>> losses = Losses()
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 2, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", callbacks=losses, **small)
    >>> len(losses.seen)
    2
    """

    names: Mapping[ClientId, str] = {}  # of clients that have one

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        """The run starts, or continues after `done` rounds; `cohort` clients are asked a round."""

    def task(self, reply: Reply) -> None:
        """A client answered, or did not: `reply.client`, and `reply.why` if it did not."""

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        """A round was committed; `row` is its line in metrics.jsonl."""

    def note(self, text: str) -> None:
        """A remark about the run."""

    def end(self, result: Result) -> None:
        """The run is complete."""

    def close(self) -> None:
        """No more calls follow; this one comes after an error, too."""


Callbacks = Callback | Sequence[Callback] | Callable[[str], Callback] | None
"""What `callbacks` may be: one, several, or for several runs a function from a run's label."""


@contextmanager
def called(callbacks: Callbacks, label: str = "") -> Iterator[Callback]:
    """One callback that calls all that were given, and is closed at the end whatever happens."""
    if isinstance(callbacks, _Every):  # closed by its creator
        yield callbacks
        return
    every = _Every(_listed(callbacks, label))
    try:
        yield every
    finally:
        every.close()


def labelled(callbacks: Callbacks, before: str) -> Callbacks:
    """The same callbacks; functions of a run's label get it with `before` in front."""
    if callable(callbacks) and not isinstance(callbacks, Callback | type):
        return lambda label: callbacks(f"{before}{label}")
    return callbacks


def _listed(callbacks: Any, label: str) -> list[Callback]:
    if callable(callbacks) and not isinstance(callbacks, Callback | type):
        callbacks = callbacks(label)
        if callbacks is None:
            raise ConfigError(
                "callbacks is a function that returns nothing; give objects of classes that extend "
                "Callback, or a function that returns one for a run's label"
            )
    some = [] if callbacks is None else callbacks
    some = list(some) if isinstance(some, Sequence) else [some]
    for one in some:
        if not isinstance(one, Callback):
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise ConfigError(f"callbacks has {what}; give objects of classes that extend Callback")
        _check_hooks(type(one))
    return some


def _check_hooks(cls: type[Callback]) -> None:
    """Refuse a method that was probably meant to override a hook, for nothing would call it.

    That is `on_` before a hook, or nearly the name of one that the class does not override.
    """
    hooks = [name for name, one in vars(Callback).items() if inspect.isfunction(one)]
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in hooks:
            continue
        bare = name.removeprefix("on_")
        near = [word for word in bare.split("_") if word in hooks] if bare != name else []
        near += difflib.get_close_matches(bare, hooks, n=1, cutoff=0.8)
        if near and near[0][0] == bare[0] and getattr(cls, near[0]) is getattr(Callback, near[0]):
            takes = ", ".join(inspect.signature(getattr(Callback, near[0])).parameters)
            raise ConfigError(
                f"{cls.__name__}.{name} is never called: if it is meant for the hook, write "
                f"`def {near[0]}({takes})`; if it is a helper, call it _{name}"
            )


class _Every(Callback):
    """Calls several callbacks; an exception in a user's becomes a `CallbackError` that names it."""

    def __init__(self, every: Sequence[Callback]) -> None:
        self._every = every
        self._folder: Path | None = None
        self._done = 0

    @property
    def names(self) -> Mapping[ClientId, str]:
        return next((one.names for one in self._every), {})

    @names.setter
    def names(self, names: Mapping[ClientId, str]) -> None:
        for one in self._every:
            one.names = names

    def begin(self, recipe: Recipe, folder: Path, done: int, cohort: int) -> None:
        self._folder, self._done = folder, done
        self._call("begin", recipe, folder, done, cohort)

    def task(self, reply: Reply) -> None:
        self._call("task", reply)

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        self._done = row["round"]
        self._call("round", row, seconds)

    def note(self, text: str) -> None:
        self._call("note", text)

    def end(self, result: Result) -> None:
        self._call("end", result)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *args: Any) -> None:
        for one in self._every:
            try:
                getattr(one, name)(*args)
            except HarmoniumError:
                raise
            except Exception as error:
                kind = type(one)
                if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
                    raise  # a bug of Harmonium keeps its traceback
                raise CallbackError(
                    f"{kind.__name__}.{name} raised {type(error).__name__}: {error}{self._left()}"
                ) from error

    def _left(self) -> str:
        """How to continue the run."""
        if self._folder is None:
            return ""
        rounds = f"{self._done} rounds are" if self._done != 1 else "1 round is"
        return f". {rounds} committed: continue with harmonium.resume('{self._folder}')"
