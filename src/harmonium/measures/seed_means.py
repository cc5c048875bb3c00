"""Means over runs that differ in their seed only: rows of tables, averaged over seeds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

from harmonium.measures import Shown
from harmonium.recipe.schema import Recipe
from harmonium.report.tables import estimate

Groups = Mapping[str, Sequence[str]]
"""Labels of runs, by the common name that tables show."""


def repeats(runs: Mapping[str, tuple[Recipe, int]]) -> dict[str, list[str]]:
    """The runs, by label, in groups that differ in the seed only; none where nothing is repeated.

    A run is its recipe and how many rounds it has had.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for label, (recipe, done) in runs.items():
        groups.setdefault((recipe.changed(seed=0).digest, done), []).append(label)
    if len(groups) == len(runs):
        return {}
    names = [_shared(labels) for labels in groups.values()]
    return {
        name if name and names.count(name) == 1 else ", ".join(labels): labels
        for name, labels in zip(names, groups.values(), strict=True)
    }


def _shared(labels: Sequence[str]) -> str:
    """What the labels of a group begin with.

    >>> _shared(["fedavg/seed-0", "fedavg/seed-1"]), _shared(["byol-s3", "byol-s10"])
    ('fedavg', 'byol')
    """
    if len(labels) == 1:
        return re.sub(r"/seed-\d+$", "", labels[0])
    return re.sub(r"([/_.-]?(seed|s)?[/_.=-]*)$", "", os.path.commonprefix(list(labels)))


def over_seeds(shown: Shown, groups: Groups) -> Shown | None:
    """A table's rows as means and standard errors over the runs of each group.

    Rows of single clients are left out: with another seed they are other clients. So are groups
    whose runs have different numbers of rows.
    """
    if any("client" in row or isinstance(row.get("clients"), str) for row in shown.rows):
        return None
    rows = list[dict[str, Any]]()
    for name, labels in groups.items():
        by_run = [[row for row in shown.rows if row["run"] == label] for label in labels]
        by_run = [its for its in by_run if its]  # runs that could be measured
        if len(set(map(len, by_run))) == 1:
            rows += [_merged(name, some) for some in zip(*by_run, strict=True)]
    return Shown(f"{shown.title}; means over seeds", rows, shown.digits) if rows else None


def _merged(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for several: shared values as they are, else means; none where one is missing."""
    keys = dict.fromkeys(chain.from_iterable(rows))
    columns = {key: [row.get(key) for row in rows] for key in keys if key != "run"}
    return {"run": name, "seeds": len(rows), **{key: _mean(some) for key, some in columns.items()}}


def _mean(values: Sequence[Any]) -> Any:
    """Mean and standard error over runs, of numbers or of pairs `(mean, standard error)`.

    >>> _mean([1.0, 3.0]), _mean([(1.0, 0.5), (3.0, None)]), _mean([7, 7]), _mean(["a", "b"])
    ((2.0, 1.0), (2.0, 1.0), 7, None)
    """
    numbers = [value[0] if isinstance(value, tuple) else value for value in values]
    if all(isinstance(value, Real) for value in numbers):
        same = len(set(numbers)) == 1 and len(numbers) > 1
        return numbers[0] if same else estimate([float(value) for value in numbers])
    return values[0] if all(value == values[0] for value in values) else None
