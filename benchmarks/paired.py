"""Rows of tables that benchmarks share: means over seeds, and differences paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harmonium.report.tables import estimate

PROBES = {"knn": "kNN", "linear": "linear"}
SHOWN = ["row", "seeds", "kNN", "kNN, difference", "linear", "linear, difference", "effective rank"]


def untrained(bases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of encoders at initialisation, from the runs that others are compared with."""
    figures = {
        title: estimate([one[f"{probe}_untrained"] for one in bases])
        for probe, title in PROBES.items()
    }
    return {"row": "untrained", "seeds": len(bases), **figures}


def paired(
    label: str, its: Sequence[dict[str, Any]], bases: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A row: means of the runs whose seed a base run has, too; empty if there are none."""
    base = {one["seed"]: one for one in bases}
    pairs = [(one, base[one["seed"]]) for one in its if one["seed"] in base]
    if not pairs:
        return {}
    row: dict[str, Any] = {"row": label, "seeds": len(pairs)}
    for probe, title in PROBES.items():
        row[title] = estimate([one[probe] for one, _ in pairs])
        apart = estimate([one[probe] - other[probe] for one, other in pairs])
        row[f"{title}, difference"] = "" if pairs[0][0] is pairs[0][1] else apart
    return {**row, "effective rank": estimate([one["rank"] for one, _ in pairs])[0]}
