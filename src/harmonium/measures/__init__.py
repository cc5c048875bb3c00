"""Measures of finished or stopped runs, as `harmonium eval` computes them from run folders.

Each measure is one file. It is computed for one run at a time; its tables and plots show all runs
side by side.
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
    """The figures of a measure for one run."""

    plain: Mapping[str, Any]  # as JSON has it
    notes: Sequence[str] = ()  # caveats for readers of the figures
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # to draw from


class Shown(NamedTuple):
    """A table for people."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    digits: int


class Headline(NamedTuple):
    """A figure that sums a run up, as a study uses it."""

    heading: str
    percent: bool = True
    less_is_better: bool = False


@dataclass(frozen=True)
class Measure:
    """A measure of a run; its fields are its settings."""

    name: ClassVar[str] = ""
    legend: ClassVar[str] = ""  # explains the words of its tables, in a line below them

    def compute(self, run: Run) -> Figures:
        """The figures of one run."""
        raise TypeError(f"{type(self).__name__} must define `compute`")

    def needs(self, names: Sequence[str]) -> list[str]:
        """The data sets that it uses, of those that a call names; refuses if none is suitable."""
        return []

    def headlines(self) -> dict[str, Headline]:
        """The figures that a study may use, by name; none where no single number sums a run up."""
        return {}

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """The values of these figures, in percent where they are accuracies.

        Args:
            plain: the figures of one run, as `compute` gives them.
            reference: an encoder without training, such as `untrained`; empty: the run's own.
        """
        return {}

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """The figures of all runs, by label, as tables."""
        raise TypeError(f"{type(self).__name__} must define `tables`")

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Plot the figures of all runs; returns whether there was anything to plot."""
        return False


measures: Registry[Measure] = Registry("measure", "harmonium.measures", Measure)
"""Every measure, by name."""
