"""Registries: the classes that a recipe can choose by name.

Registering is a decorator on a frozen dataclass whose fields are the settings of that choice. A
user's own class needs no registration: a recipe names it `package.module:Class`, which every worker
process can import.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from harmonium.core.errors import ConfigError, HarmoniumError, UnknownSetting, suggest

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """The classes of one kind by name; `package` is scanned, so that a new file is enough."""

    def __init__(
        self,
        kind: str,
        package: str,
        base: type[T],
        adapt: Callable[[Any, str], type[T] | None] = lambda object, name: None,
        also: str = "",
    ) -> None:
        """Make an empty table of `kind`; the modules of `package` fill it when first asked.

        `adapt` makes a class of another object that `module:name` refers to, if it can; `also`
        says in messages which objects those are.
        """
        self.kind = kind
        self._adapt, self._also = adapt, also
        self.base = base
        self._package = package
        self._table: dict[str, type[T]] = {}
        self._scanned = False

    def __call__(self, name: str) -> Callable[[C], C]:
        """Decorator that files a class under `name`; the class learns its own `name`."""

        def file(cls: C) -> C:
            existing = self._table.get(name)
            if existing is not None and existing.__qualname__ != cls.__qualname__:
                raise ConfigError(
                    f"two {self.kind} classes are called '{name}': {existing} and {cls}"
                )
            self._table[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return file

    def __getitem__(self, name: str) -> type[T]:
        """The class called `name` or `module:Class`, or an error that names the nearest."""
        if ":" in name:
            return self._import(name)
        table = self.table()
        if name not in table:
            raise UnknownSetting(f"unknown {self.kind} '{name}': {suggest(name, table)}")
        return table[name]

    def _import(self, path: str) -> type[T]:
        module, _, attribute = path.partition(":")
        try:
            named = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # noqa: BLE001  (someone else's module may raise anything)
            plain = isinstance(error, ImportError | AttributeError | HarmoniumError)
            why = str(error) if plain else f"{type(error).__name__}: {error}"
            if module == "__main__":
                why = (
                    "other processes cannot import what a script or a notebook defines. Move it to "
                    "a module, or set engine.workers=0"
                )
            raise ConfigError(f"cannot import {self.kind} '{path}': {why}") from None
        if isinstance(named, type) and issubclass(named, self.base):
            return named
        if (adapted := self._adapt(named, path)) is not None:
            return adapted
        raise ConfigError(
            f"'{path}' is not a valid {self.kind}: it must be a class that extends "
            f"{self.base.__name__}"
            f"{self._also}"
        )

    def table(self) -> dict[str, type[T]]:
        """All names and their classes."""
        if not self._scanned:
            self._scanned = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        return dict(sorted(self._table.items()))


def recipe_name(cls: type) -> str | None:
    """The name of a class in a recipe: its registered name, or how to import a user's own.

    None for classes that are not chosen by name.
    """
    if not isinstance(getattr(cls, "name", None), str):
        return None
    ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return (
        str(vars(cls)["name"])
        if ours and "name" in vars(cls)
        else f"{cls.__module__}:{cls.__qualname__}"
    )
