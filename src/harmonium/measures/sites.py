"""Evaluation at the clients: each tests the encoder on its own labelled images and sends counts.

This is what `evaluate.sites` does during a run, for a run that has ended or stopped: the same
exchanges with the clients' own images, in a temporary folder. See `federation/site_evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harmonium.core.errors import DataError, counted
from harmonium.core.settings import plain as plain_settings
from harmonium.evaluation.evaluator import Evaluation
from harmonium.federation import site_evaluation
from harmonium.measures import Figures, Headline, Measure, Shown, measures
from harmonium.measures.extra_round import at_clients, settled
from harmonium.measures.run_reader import Federated, Run
from harmonium.report import sites as report
from harmonium.runs.open_run import client_names

DEFAULTS = Evaluation()


@measures("sites")
@dataclass(frozen=True)
class Sites(Measure):
    """Accuracy, balanced accuracy and AUROC at each client, from counts alone."""

    legend = report.LEGEND

    protocol: Literal["probe", "ridge"] = "ridge"  # a probe of each client's own, or a common one
    held_out: float = DEFAULTS.sites_held_out  # share of a client's labelled images to test on
    least: int = DEFAULTS.sites_least  # fewest images of a class that a client counts
    bins: int = DEFAULTS.sites_bins  # of scores, for AUROC; 0: none

    def __post_init__(self) -> None:
        Evaluation(**self._settings())  # refuses wrong values

    def _settings(self) -> dict[str, Any]:
        """The settings of a recipe's section `evaluate` that mean the same."""
        asked = {f"sites_{key}": value for key, value in asdict(self).items()}
        return {"sites": asked.pop("sites_protocol"), **asked}

    def compute(self, run: Run) -> Figures:
        """The figures of one run."""
        if isinstance(run, Federated):
            raise DataError(
                f"{run.path} is a run of a federation, whose images stay at the sites: ask them "
                f"with harmonium server eval {run.path}"
            )
        server, clients = settled(run), sorted(run.examples)
        evaluate = {**plain_settings(run.recipe.evaluate), **self._settings()}
        run.note(f"{run.label}: evaluation at {counted(len(clients), 'client')}")
        after = at_clients(
            run,
            clients,
            lambda method: site_evaluation.evaluated(method, server),
            evaluate=evaluate,
        )
        figures = site_evaluation.report(after.memory)
        if "all" not in figures:
            why = figures.get("why") or "no client has enough labelled images"
            raise DataError(f"{run.path}: no counts: {why}")
        named = site_evaluation.named(figures, client_names(run.path), run.dataset.classes)
        return Figures({"round": run.commit.round, **named}, report.remarks(named))

    def headlines(self) -> dict[str, Headline]:
        """The mean over clients, and the worst of them."""
        return {
            "sites": Headline("balanced accuracy, mean of clients"),
            "sites_worst": Headline("balanced accuracy, worst client"),
        }

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """These figures of the run's own encoder, in percent."""
        if reference:
            return {}
        worst = plain["by_site"][0]["balanced"]
        return {"sites": 100 * plain["mean"]["balanced"], "sites_worst": 100 * worst}

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """The clients of each run, the worst of them first; then the figures of all of them."""
        first = next(iter(results.values()))
        shown, title = [], report.title(first.plain)
        for make, column in ((report.site_rows, "client"), (report.overall_rows, "over")):
            rows = [
                {"run": label, **row}
                for label, one in results.items()
                for row in make(one.plain, column)
            ]
            shown.append(Shown(title, rows, 1))
        return shown

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Two bars per run: all images, and the worst client."""
        from harmonium.report.plots import bars

        groups = {
            label: {
                "all images": (100 * one.plain["all"]["balanced"], None),
                "worst client": (100 * one.plain["by_site"][0]["balanced"], None),
            }
            for label, one in results.items()
        }
        bars(path, groups, "balanced accuracy (%)", "held-out images of the clients")
        return True
