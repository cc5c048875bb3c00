"""Several methods under one recipe, with the references that give their figures a meaning.

Every comparison holds an untrained encoder, each client training alone, and all pictures in one
place (centralised), so a figure can be read as a distance from nothing and from everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium import store
from harmonium.errors import ConfigError, DataError
from harmonium.hosts import read_about
from harmonium.life import Result, Watcher
from harmonium.recipe import Recipe
from harmonium.report.tables import csv_text, markdown
from harmonium.runs import run

PROBES = {"knn": "kNN", "linear": "linear", "linear_labelled": "linear, known labels"}


@dataclass(frozen=True)
class Comparison:
    """One row a way of training; accuracies are shares between 0 and 1."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    picture: Path | None
    warnings: Mapping[str, str]  # label -> what is wrong with the encoder; healthy ones have none

    @property
    def title(self) -> str:
        """What the figures are."""
        if "knn" in self.rows[0]:
            return "Test accuracy in percent; encoders frozen"
        return "Label-free figures; encoders frozen"

    def shown(self) -> list[dict[str, Any]]:
        """The rows under the names that people read, accuracies in percent; (!) is a warning."""
        scale = 100 if "knn" in self.rows[0] else 1
        shown = []
        for row in self.rows:
            label = f"{row['encoder']} (!)" if row["encoder"] in self.warnings else row["encoder"]
            figures = {heading(k): times(scale, v) for k, v in row.items() if k != "encoder"}
            shown.append({"encoder": label, **figures})
        return shown


def references(recipe: Recipe) -> dict[str, Recipe]:
    """Recipes for each client alone and for all pictures in one place, under the same budget.

    Nothing leaves a client in either, so there is nothing to protect.
    """
    changes = {"server": "average", "privacy": {}}
    return {name: recipe.changed(method=name, **changes) for name in ("alone", "centralised")}


def compare(
    names: Sequence[str],
    changes: Sequence[str],
    out: Path,
    watcher: Callable[[str], Watcher] = lambda label: Watcher(),
) -> Comparison:
    """Run every method and the references; what is complete in `out` already is not run again."""
    if given := {"alone", "centralised"} & set(names):
        raise ConfigError(f"{min(given)} is in every comparison already: leave it out")
    recipes = {name: Recipe.of(name, *changes) for name in names}
    cells = {
        recipes[name].method.name if list(names) == ["demo"] else _label(name): recipes[name]
        for name in names
    }
    if len(cells) < len(names):
        raise ConfigError(f"two of these have the same name: {', '.join(names)}")
    cells = _with_references(cells)
    results = {}
    for label, recipe in cells.items():
        teller = watcher(label)
        if not recipe.objective.any_method:
            teller.note("only its own method can train its objective: it has no references")
        results[label] = run(recipe, out=out / label, watcher=teller)
    _check_same_data(results)
    untrained = next(iter(results.values())).untrained
    rows = [{"encoder": "untrained", **_figures(untrained)}]
    rows += [{"encoder": label, **_figures(result.figures)} for label, result in results.items()]
    warnings = {
        label: " ".join(result.figures["health"]["warnings"])
        for label, result in results.items()
        if result.figures["health"]["warnings"]
    }
    picture = _picture(out / "compare.png", rows, results)
    found = Comparison(out, tuple(rows), picture, warnings)
    held = {"rows": rows, "warnings": warnings}
    store.write_atomic(out / "compare.json", json.dumps(held, indent=1).encode())
    store.write_atomic(out / "compare.csv", csv_text(rows).encode())
    store.write_atomic(out / "compare.md", markdown(found.shown(), digits=1).encode())
    return found


def _with_references(cells: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The cells between their references; every objective has its own, from who names it first.

    An objective that only its own method can train has none.
    """
    first: dict[str, str] = {}
    for label, recipe in cells.items():
        if recipe.objective.any_method:
            first.setdefault(repr(recipe.objective), label)
    ways = {
        name if len(first) == 1 else f"{name} ({label})": made
        for label in first.values()
        for name, made in references(cells[label]).items()
    }
    alone = {label: recipe for label, recipe in ways.items() if label.startswith("alone")}
    return {**alone, **cells, **{k: v for k, v in ways.items() if k not in alone}}


def _check_same_data(results: Mapping[str, Result]) -> None:
    """Refuse to put runs on different pictures side by side: files may change in between."""
    first, *others = results
    for label in others:
        for what in ("data", "public"):
            mine, theirs = (read_about(results[name].folder)[what] for name in (first, label))
            if mine != theirs:
                raise DataError(
                    f"{label} and {first} ran on different pictures, for those changed in between: "
                    f"compare again with another --out"
                )


def _label(name: str) -> str:
    """A method's name, or a file's or class's without the way to it."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name.rpartition(":")[2]


def heading(key: str) -> str:
    """What people call a figure.

    >>> heading("linear_10"), heading("knn")
    ('linear, 10 labels a class', 'kNN')
    """
    name, _, count = key.partition("_")
    if count.isdigit():
        return f"{PROBES[name]}, {count} {'label' if count == '1' else 'labels'} a class"
    return PROBES.get(key, key.replace("_", " "))


def times(scale: float, figure: float | None) -> float | None:
    """A figure in other units; None, where an encoder has diverged, stays None."""
    return None if figure is None else scale * figure


def _figures(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The probes of a verdict; data without labels have label-free figures instead."""
    probes = {key: value for key, value in figures.items() if key != "health"}
    if probes:
        return probes
    return {key: figures["health"][key] for key in ("spread", "uniformity", "effective_rank")}


def _picture(
    path: Path, rows: Sequence[Mapping[str, Any]], results: Mapping[str, Result]
) -> Path | None:
    if "knn" not in rows[0]:
        return None
    from harmonium.report.plots import bars

    groups = {
        str(row["encoder"]): {
            heading(key): (100 * value, None)
            for key, value in row.items()
            if key != "encoder" and value is not None
        }
        for row in rows
    }
    any_run = next(iter(results.values())).recipe
    bars(path, groups, "test accuracy (%)", f"{any_run.data.name}, frozen encoders")
    return path
