"""The result of a comparison, and the tables that show it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmonium.report.metric_names import heading, times
from harmonium.report.tables import BEST, NEAR, Marks, Tabular
from harmonium.report.writer import ResultTable
from harmonium.studies.comparison import statistics
from harmonium.studies.comparison.traffic import MEGA, WAYS, by_component

BESIDE = {"balanced": "Balanced test accuracy in percent", "auroc": "AUROC in percent"}
OBJECTIVE = {  # figures of a global objective, as a table has them
    "value": "over all clients",
    "local": "mean of clients",
    "gradient_norm": "gradient norm",
}

Rows = list[dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Rows of figures over seeds; accuracies are shares between 0 and 1."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]  # `encoder`, and the mean of each figure
    details: Mapping[str, Any]  # of every row: each seed, intervals, differences, cost
    main_plot: Path | None  # the first of the plots
    warnings: Mapping[str, str]  # on collapsed or diverged encoders, by label
    notes: tuple[str, ...] = ()  # on fairness, failed runs, public images
    plots: tuple[Path, ...] = ()  # all files of the plots

    def panels(self) -> list[tuple[str, Rows, int | None]]:
        """The one table of a notebook."""
        return [(self.title, self.shown(), 1 if self.has_accuracy else 2)]

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Runs that did not finish."""
        return list(self.details["failed"])

    def name(self, label: str) -> str:
        """The display name of a row: set by `label.ROW`, or its own label."""
        return str(self.details.get("names", {}).get(label, label))

    @property
    def has_accuracy(self) -> bool:
        """Whether there are labels to compute accuracies with."""
        return any("knn" in row for row in self.rows)

    @property
    def title(self) -> str:
        """The title of the table."""
        if self.has_accuracy:
            return "Test accuracy in percent; encoders frozen"
        return "Label-free figures; encoders frozen"

    @property
    def headline(self) -> str:
        """The title of a table without a caption: it also explains the number after a mean."""
        seeds = len(self.details["seeds"])
        return (
            f"{self.title}; mean ± standard error over {seeds} seeds" if seeds > 1 else self.title
        )

    def plain(self) -> dict[str, Any]:
        """The comparison as plain values, for JSON."""
        return {
            "folder": str(self.folder),
            "rows": [dict(row) for row in self.rows],
            "details": dict(self.details),
            "warnings": dict(self.warnings),
            "notes": list(self.notes),
            "plots": [str(path) for path in self.plots],
        }

    def shown(self) -> Rows:
        """The rows with display names, accuracies in percent; (!) marks a warning."""
        scale = 100 if self.has_accuracy else 1
        shown = []
        for row in self.rows:
            label = str(row["encoder"])
            name = f"{self.name(label)} (!)" if label in self.warnings else self.name(label)
            figures = {
                heading(key): self._estimate(label, key, value, scale)
                for key, value in row.items()
                if key != "encoder"
            }
            shown.append({"encoder": name, **figures})
        return shown

    def _estimate(self, label: str, key: str, mean: float | None, scale: float) -> Any:
        stderr = self.details["rows"].get(label, {}).get("figures", {}).get(key, {}).get("stderr")
        value = times(scale, mean)
        return value if value is None or stderr is None else (value, scale * stderr)

    @property
    def verdicts(self) -> dict[str, str]:
        """Whether each method beats the references that need no run, in a sentence."""
        rows = self.details["rows"].items()
        return {label: its["verdict"] for label, its in rows if "verdict" in its}

    def shown_beside(self, kind: str) -> Rows:
        """Balanced accuracies, or AUROC, of the same probes; empty where there are none."""
        rows: Rows = []
        for row in self.rows:
            label = str(row["encoder"])
            figures = self.details["rows"].get(label, {}).get("figures", {})
            keys = [key for key in row if f"{kind}_{key}" in figures]
            values = {
                heading(key): self._estimate(label, f"{kind}_{key}", its["mean"], 100)
                for key in keys
                for its in [figures[f"{kind}_{key}"]]
            }
            rows += [{"encoder": self.name(label), **values}] if values else []
        return rows

    def marks(self, kind: str = "") -> Marks:
        """The best methods of every column of `shown`, or of `shown_beside(kind)`.

        Empty if there is one method only, or if larger figures are not better.
        """
        marks: dict[tuple[int, str], str] = {}
        before = f"{kind}_" if kind else ""
        details = self.details["rows"]
        labels = [str(row["encoder"]) for row in self.rows]
        if kind:  # rows without such figures are left out of that table
            labels = [k for k in labels if any(f.startswith(before) for f in details[k]["figures"])]
        for key in (key for key in self.rows[0] if key != "encoder"):
            stands = self.details.get("tests", {}).get(f"{before}{key}", {})
            for mark in (BEST, NEAR):
                for label in stands.get(mark, ()):
                    marks[labels.index(label), heading(key)] = mark
        return marks

    def rules(self) -> tuple[int, ...]:
        """Where methods begin among the rows, and where they end."""
        tested = self.details.get("methods", ())
        places = [n for n, row in enumerate(self.rows) if row["encoder"] in tested]
        return (places[0], places[-1] + 1) if places else ()

    def tested(self) -> Rows:
        """Methods against the first, by every probe; empty for a single seed."""
        probes = [key for key in self.rows[0] if key != "encoder"]
        return [{"figure": heading(key), **row} for key in probes for row in self.beside(key)]

    def beside(self, probe: str | None = None) -> Rows:
        """Methods against the first, by kNN or another probe; empty for a single seed."""
        tests = self.details["tests"].get(probe or self.details["probe"], {}).get("rows", {})
        scale = 100 if self.has_accuracy else 1
        each = [its.get("difference", {}) for its in tests.values()]
        fewer = any(one.get("seeds", math.inf) < len(self.details["seeds"]) for one in each)
        shown: Rows = []
        for label, its in tests.items():
            row: dict[str, Any] = {"method": self.name(label), "mean rank": its.get("rank")}
            apart = its.get("difference", {})
            if apart.get("seeds", 0) > 1:
                row |= {"difference": scale * apart["mean"], "95 % interval": "the same each time"}
                if apart["p"] is not None:
                    low, high = scale * apart["low"], scale * apart["high"]
                    digits = 1 if self.has_accuracy else 3
                    row["95 % interval"] = f"{low:.{digits}f} to {high:.{digits}f}"
                    row["p (Holm)"] = f"{apart['p']:.3f}" if apart["p"] >= 0.001 else "< 0.001"
                row |= {"seeds": apart["seeds"]} if fewer else {}
            shown.append(row)
        return shown if any("difference" in row for row in shown) else []

    def costs(self) -> Rows:
        """Traffic of methods, and their cost until the target accuracy."""
        shown: Rows = []
        for label, its in self.details["rows"].items():
            if "traffic" not in its:
                continue
            row: dict[str, Any] = {"method": self.name(label)}
            for way in WAYS:
                row[f"MB {way}"] = sum(its["traffic"][way].values()) / MEGA
            if self.details["target"] is not None:
                point = its["reached"]
                row["rounds"] = point and point["round"]
                row["MB, all"] = point and point["bytes"] / MEGA
                row["minutes"] = point and point["seconds"] / 60
            shown.append(row)
        return shown

    def sent(self) -> Rows:
        """Megabytes per client and round by component, down / up."""
        rows = self.details["rows"].items()
        return by_component(
            {self.name(label): its["traffic"] for label, its in rows if "traffic" in its}
        )

    def objectives(self) -> Rows:
        """Global objectives at the end; only rows with the same loss can be compared."""
        shown: Rows = []
        for label, its in self.details["rows"].items():
            if objective := its.get("global_objective"):
                row: dict[str, Any] = {"method": self.name(label), "loss": objective["loss"]}
                for key, name in OBJECTIVE.items():
                    if key in objective:
                        one = objective[key]
                        error = one["stderr"]
                        row[name] = one["mean"] if error is None else (one["mean"], error)
                shown.append(row)
        return shown

    def papers(self) -> Rows:
        """Published figures with those of this comparison, and why they differ."""
        published = {k: its for k, its in self.details["rows"].items() if "published" in its}
        return [
            {
                "method": self.name(label),
                "published": _with_deviation(its["published"]),
                "here": times(100, its["figures"].get(its["published"]["probe"], {}).get("mean")),
                "by": heading(its["published"]["probe"]),
                "because": "; ".join(its["published"]["gap"]),
            }
            for label, its in published.items()
        ]


def _with_deviation(published: Mapping[str, Any]) -> Any:
    """A paper's figure, with its deviation over seeds if published."""
    figure, deviation = published["figure"], published.get("deviation")
    return figure if deviation is None else (figure, deviation)


def lines_of_tests(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """A line for each figure and method, with every digit."""
    for figure, test in comparison.details["tests"].items():
        for label in comparison.details["methods"]:
            tested = test["rows"].get(label, {})
            apart = tested.get("difference", {})
            name = {"name": comparison.name(label)} if comparison.details["names"] else {}
            yield {
                "figure": figure,
                "encoder": label,
                **name,
                "against": test["base"],
                "mean_rank": tested.get("rank"),
                **{key: apart.get(key) for key in ("mean", "low", "high", "p", "seeds")},
                "best": label in test.get("best", ()),
                "near": label in test.get("near", ()),
                "test": test["test"],
                "correction": test["correction"],
            }


def tables(comparison: Comparison) -> list[ResultTable]:
    """All non-empty tables, the one of the probes first."""
    details = comparison.details
    accuracy, rules = comparison.has_accuracy, comparison.rules()
    unfair = "; ".join(details["unfair"])
    first = ResultTable(
        comparison.title,
        comparison.shown(),
        1 if accuracy else 2,
        comparison.marks(),
        rules,
        marks_legend(details),
        f"Unfair: {unfair}" if unfair else "",
        "tab:compare",
    )
    against = (
        f"Against {comparison.name(details['base'])}: paired t-tests over seeds, p by Holm's rule "
        "for the methods of each figure"
    )
    sent = "Megabytes per client and round by component, down / up"
    published = "Published figures, and why those here differ"
    others: dict[str, ResultTable] = {
        kind: ResultTable(title, comparison.shown_beside(kind), 1, comparison.marks(kind), rules)
        for kind, title in BESIDE.items()
    } | {
        "tests": ResultTable(
            against, comparison.tested(), 1 if accuracy else 3, legend=TEST_LEGEND
        ),
        "objectives": ResultTable(objectives_title(comparison), comparison.objectives(), 3),
        "cost": ResultTable(_cost_title(details["target"]), comparison.costs(), 2),
        "sent": ResultTable(sent, comparison.sent(), 2),
        "published": ResultTable(published, comparison.papers(), 1),
    }
    shown = {key: table for key, table in others.items() if table.rows}
    return [first, *(table._replace(label=f"tab:compare-{key}") for key, table in shown.items())]


def _cost_title(target: float | None) -> str:
    title = "Megabytes per client and round"
    if target is None:
        return title
    reached = f"{100 * target:.1f} % validation kNN"
    return f"{title}; rounds, megabytes of all clients and modelled minutes to {reached}"


def objectives_title(comparison: Comparison) -> str:
    """The title of the table of global objectives, with a caution where losses differ."""
    several = len({row["loss"] for row in comparison.objectives()}) > 1
    return "Global objective of the final model" + (
        "; only values of the same loss can be compared" if several else ""
    )


TEST_LEGEND = (
    "Differences with their 95 % intervals, p values of two-sided paired t-tests over seeds, "
    "corrected by Holm's rule for the methods of each figure, and mean ranks (1 is the best)"
)


def marks_legend(details: Mapping[str, Any]) -> str:
    """The part of a caption that explains marks and standard errors."""
    count = len(details["seeds"])
    legend = f"Mean and standard error over {count} seeds" if count > 1 else "A single seed"
    tests = details["tests"].values()
    if any(one.get("best") for one in tests):
        legend += "; bold: the best mean of the methods in each column"
        if count > 1:
            legend += (
                "; underlined: methods that a paired t-test over seeds with Holm's correction "
                f"does not distinguish from it (p > {statistics.ALPHA:g})"
            )
    return f"{legend}."
