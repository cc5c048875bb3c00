"""The demonstration: FedAvg, Federated SimCLR and their references on drawn shapes.

Every client holds few classes (Dirichlet 0.1). Content moves, turns and changes its colours, so raw
pixels are a weak representation. `harmonium demo` compares the shipped recipes `demo-fedavg` and
`demo`, which differ in user verification and in their learning rates, and ends with a plot and a
summary. The learning rates of every row come from one grid (`benchmarks/demo.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harmonium.report.metric_names import heading
from harmonium.studies.comparison.table import Comparison

FEDAVG, SYSTEM = "demo-fedavg", "demo"  # the rows, which are the names of shipped recipes
NAMES = {
    "alone": "one client alone",
    FEDAVG: "FedAvg",
    SYSTEM: "Federated SimCLR",
    "centralised": "all in one place",
}
RATES = {"alone": ["local.lr=0.3"], "centralised": ["local.lr=0.3"]}  # of the references
LINEAR = "linear"
WHERE_FROM = (
    "Why it is better: each client holds few classes, so the client that an image comes from is "
    "informative about its content. User verification makes the encoder learn that; contrast "
    "within one client cannot. Where clients differ in style instead of content it can hurt: "
    "`harmonium diagnose` advises, without labels. The learning rates of every row were chosen "
    "from one grid, by validation images of other seeds: docs/results/demo.md."
)


def words(settings: Sequence[str]) -> list[str]:
    """The words for `harmonium compare`: both recipes, and the user's settings.

    >>> [word for word in words(["local.lr=0.1"]) if word.startswith("alone,")]
    []
    """
    named = [f"label.{row}={name}" for row, name in NAMES.items()]
    given = {word.partition("=")[0] for word in settings}
    tuned = []
    for row, rates in RATES.items():
        own = [rate for rate in rates if rate.partition("=")[0] not in given]
        tuned += [",".join([row, *own])] if own else []
    return [FEDAVG, SYSTEM, *tuned, *named, "compare.supervised=false", *settings]


def plot(comparison: Comparison) -> Path | None:
    """Draw a panel of bars for each probe; None where there are no labels to test with."""
    if not comparison.has_accuracy:
        return None
    from harmonium.report.arms import Estimate, arms_plot

    arms: dict[str, dict[str, Estimate | None]] = {}
    for row in comparison.rows:
        label = str(row["encoder"])
        figures = comparison.details["rows"].get(label, {}).get("figures", {})
        arms[comparison.name(label)] = {
            heading(key): None if mean is None else (100 * mean, _half(figures.get(key, {})))
            for key, mean in row.items()
            if key != "encoder"
        }
    seeds = len(comparison.details["seeds"])
    path = comparison.folder / "demo.png"
    arms_plot(
        path,
        arms,
        "Frozen encoders on drawn shapes; clients hold few classes",
        interval=f"95 % interval over {seeds} seeds" if seeds > 1 else "",
        muted=[name for name in arms if name not in map(comparison.name, (FEDAVG, SYSTEM))],
        strong=[comparison.name(SYSTEM)],
    )
    return path


def _half(figure: Mapping[str, float | None]) -> float | None:
    """Half the width of a figure's interval in percent; None where one seed has none."""
    low, high = figure.get("low"), figure.get("high")
    return None if low is None or high is None else 50 * (high - low)


def sentences(comparison: Comparison) -> list[str]:
    """A summary of the figures, and an explanation if the system is better than FedAvg."""
    rows = {str(row["encoder"]): row for row in comparison.rows}
    few = next((key for key in comparison.rows[0] if key.startswith("linear_")), LINEAR)
    order = (SYSTEM, FEDAVG, "alone", "whitened pixels", "raw pixels", "centralised")
    if any(rows.get(label, {}).get(key) is None for label in order for key in (LINEAR, few)):
        return []
    each = ", ".join(f"{comparison.name(label)} {100 * rows[label][few]:.1f} %" for label in order)
    lines = [f"Test accuracy ({heading(few)}): {each}."]
    system, fedavg, whole = (rows[label][LINEAR] for label in (SYSTEM, FEDAVG, "centralised"))
    gap, gain = whole - fedavg, system - fedavg
    if gap <= 0:
        return [*lines, "All images in one place are no better than FedAvg: no gap to close here."]
    if gain <= 0:
        closed = "closes none of the gap"
    elif gain < gap:
        closed = f"closes {100 * gain / gap:.0f} % of the gap"
    else:
        closed = "closes all of the gap"
    lines.append(
        f"By a linear probe with all labels FedAvg of InfoNCE has {100 * fedavg:.1f} % and the "
        f"same loss on all images in one place {100 * whole:.1f} %. {comparison.name(SYSTEM)} has "
        f"{100 * system:.1f} % and {closed}."
    )
    return [*lines, WHERE_FROM] if gain > 0 else lines
