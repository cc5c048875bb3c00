"""Measures of runs: what `harmonium eval` can say of folders that runs have left behind.

One file a measure. A measure looks at one run at a time, and shows all that it found together, so
that runs stand side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from harmonium.core.registry import Registry

if TYPE_CHECKING:
    import numpy as np

    from harmonium.measures.run_reader import Run


@dataclass(frozen=True)
class Figures:
    """What a measure found of one run."""

    plain: Mapping[str, Any]  # as JSON has it
    notes: Sequence[str] = ()  # what a reader of the figures should know
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # to draw from


class Shown(NamedTuple):
    """A table for people."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    digits: int


@dataclass(frozen=True)
class Measure:
    """A question to a run; its fields are its settings."""

    name: ClassVar[str] = ""
    legend: ClassVar[str] = ""  # what words of its tables mean, in a line below them

    def compute(self, run: Run) -> Figures:
        """The figures of one run."""
        raise TypeError(f"{type(self).__name__} must define `compute`")

    def needs(self, names: Sequence[str]) -> list[str]:
        """The data sets that it looks at, of those that a call names; refuses if none will do."""
        return []

    def tables(self, found: Mapping[str, Figures]) -> list[Shown]:
        """The figures of all runs, by label, as tables."""
        raise TypeError(f"{type(self).__name__} must define `tables`")

    def draw(self, path: Path, found: Mapping[str, Figures]) -> bool:
        """Draw them; whether there was anything to draw."""
        return False


measures: Registry[Measure] = Registry("measure", "harmonium.measures", Measure)
"""Every measure, by name."""
