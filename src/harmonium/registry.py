"""The one name table: what a recipe may call by name, in every room of the house.

Registering is a decorator on a frozen dataclass whose fields are the settings of that choice.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from harmonium.errors import ConfigError, suggest

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Names of one kind of thing; `package` is scanned once, so a new file needs no other edit."""

    def __init__(self, kind: str, package: str) -> None:
        """Make an empty table of `kind`; the modules of `package` fill it when first asked."""
        self.kind = kind
        self._package = package
        self._table: dict[str, type[T]] = {}
        self._scanned = False

    def __call__(self, name: str) -> Callable[[C], C]:
        """Decorator that files a class under `name`; the class learns its own `name`."""

        def file(cls: C) -> C:
            held = self._table.get(name)
            if held is not None and held.__qualname__ != cls.__qualname__:
                raise ConfigError(f"two {self.kind} classes are called '{name}': {held} and {cls}")
            self._table[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return file

    def __getitem__(self, name: str) -> type[T]:
        """The class called `name`, or an error that names the nearest."""
        table = self.table()
        if name not in table:
            raise ConfigError(f"unknown {self.kind} '{name}': {suggest(name, table)}")
        return table[name]

    def table(self) -> dict[str, type[T]]:
        """All names and their classes."""
        if not self._scanned:
            self._scanned = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
        return dict(sorted(self._table.items()))
