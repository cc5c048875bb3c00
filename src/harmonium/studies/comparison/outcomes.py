"""Outcomes of a comparison's runs, before they are summarised in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harmonium.studies.comparison.cells import ComparisonPlan
from harmonium.studies.comparison.published import PublishedFigure
from harmonium.studies.comparison.traffic import Point, mean_course

Cell = tuple[str, int]  # a row's label and a seed


@dataclass
class Outcomes:
    """Figures, courses and traffic of a comparison's runs, by cell, and of its references."""

    plan: ComparisonPlan
    figures: dict[Cell, Mapping[str, Any]] = field(default_factory=dict)
    courses: dict[Cell, list[Point]] = field(default_factory=dict)
    objectives: dict[Cell, list[Mapping[str, Any]]] = field(default_factory=dict)  # by round
    traffic: dict[Cell, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    levels: dict[Cell, float] = field(default_factory=dict)  # validation kNN of references
    against: dict[Cell, Mapping[str, Any]] = field(default_factory=dict)  # verdicts of runs
    published: dict[str, PublishedFigure] = field(default_factory=dict)
    failed: dict[Cell, str] = field(default_factory=dict)  # why
    stopped: dict[Cell, str] = field(default_factory=dict)  # why runs ended before their last round
    unfair: list[str] = field(default_factory=list)

    def courses_of(self, label: str) -> list[list[Point]]:
        """The courses of a row's runs, one a seed."""
        return [course for (row, _), course in self.courses.items() if row == label]

    def mean_course_of(self, label: str) -> list[Point]:
        """The mean of a row's courses over seeds; empty for a row without any."""
        courses = self.courses_of(label)
        return mean_course(courses) if courses else []
