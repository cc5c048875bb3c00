"""Semi-supervised fine-tuning of the whole network with a few percent of the labels.

FedCA (Zhang et al., 2020, Table 2) with `semi.head=mlp`, Orchestra (Lubana et al., 2022, Table 1)
with `semi.head=linear`. Which labels are known is drawn from the training part, the same share of
every class and at least one of each, several times. An untrained encoder of the same kind is
trained on the same labels for comparison: the difference is the gain from the federation.

Orchestra keeps the images with known labels out of the federation's training; here, as in FedCA,
clients have trained on them, without labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, counted
from harmonium.core.settings import plain
from harmonium.data.images import Images
from harmonium.data.labels import stratified
from harmonium.measures import Figures, Headline, Shown, measures
from harmonium.measures.eval_data import OWN, EvalData
from harmonium.measures.probing import barred, by_set, called, columns
from harmonium.measures.run_reader import Run
from harmonium.measures.training import Tunes


@measures("semi")
@dataclass(frozen=True)
class Semi(Tunes):
    """Accuracy after fine-tuning with a few percent of the labels."""

    fractions: tuple[float, ...] = (0.01, 0.1)  # of the labels; at least one a class
    draws: int = 3  # choices of those labels

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(draws=1)
        if not self.fractions or not all(0 < share <= 1 for share in self.fractions):
            raise ConfigError(
                f"semi.fractions is {list(self.fractions)}; each must be above 0 and at most 1"
            )
        if len(set(self.fractions)) < len(self.fractions):
            raise ConfigError(f"semi.fractions names one twice: {list(self.fractions)}")

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """The figures of every fraction on one set."""
        by_fraction, notes = [], []
        for share in self.fractions:
            labelled = [self.known(data, share, draw) for draw in range(self.draws)]
            one = self.both(run, data, labelled, f"{100 * share:g} % of labels")
            by_fraction.append({"fraction": share, "labels": len(labelled[0]), **one})
            for whose, values in (("its", one), ("an untrained", one["untrained"])):
                if count := sum(value is None for value in values["draws"]):
                    notes.append(
                        f"{100 * share:g} %: {whose} network diverged in {counted(count, 'draw')}"
                    )
        about = plain(self.how(run))
        chance = data.chance(data.part(self.part))
        return Figures({"how": about, "fractions": by_fraction, "chance": chance}, notes)

    def known(self, data: EvalData, share: float, draw: int) -> Images:
        """The images whose labels are known in a draw."""
        rng = seeds.numpy_rng(self.seed, "measure", "semi", f"{share:g}", draw)
        images = data.bank
        return images.subset(stratified(np.asarray(images.labels), share, rng))

    def headlines(self) -> dict[str, Headline]:
        """The accuracy with each fraction of the labels, such as `semi_10` with 10 %."""
        return {
            f"semi_{100 * share:g}": Headline(f"fine-tuned, {100 * share:g} % of labels")
            for share in self.fractions
        }

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """These accuracies in percent, on the run's own images."""
        values = {}
        for one in plain["sets"].get(OWN, {}).get("fractions", ()):
            beside = {**one["references"], "untrained": one["untrained"]}
            figures = beside.get(reference, {}) if reference else one
            if figures.get("accuracy") is not None:
                values[f"semi_{100 * one['fraction']:g}"] = 100 * figures["accuracy"]
        return values

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run, set and fraction, then the same for every reference."""
        each = []
        for label, name, figures in by_set(results):
            for one in figures["fractions"]:
                which, share = columns(label, name, results), f"{100 * one['fraction']:g} %"
                first = {**which, "labels": f"{share} ({one['labels']})"}
                each.append((first, {**which, "labels": share}, one))
        title = f"Fine-tuned with few labels, {self.head} head, {self.part} images, percent"
        return self.side_by_side(title, each, "untrained")

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Two bars per run, set and fraction."""
        groups = {
            f"{called(label, name, results)}, {100 * one['fraction']:g} %": {
                kind: (100 * some["accuracy"], 100 * (some["stderr"] or 0) or None)
                for kind, some in (("fine-tuned", one), ("untrained", one["untrained"]))
                if some["accuracy"] is not None
            }
            for label, name, figures in by_set(results)
            for one in figures["fractions"]
        }
        return barred(path, groups, f"Fine-tuned with few labels: {self.part} images")
