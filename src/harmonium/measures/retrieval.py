"""Retrieval: which images lie nearest, as numbers and as a sheet to look at.

Test images ask for others of their class among all other test images, by the cosine of their
features. Nothing is trained. Chance is what a drawn ranking would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.data.images import Images
from harmonium.evaluation.evaluator import average
from harmonium.evaluation.retrieval import nearest, retrieve
from harmonium.measures import Figures, Shown, measures
from harmonium.measures.eval_data import EvalData, labels_of
from harmonium.measures.probing import ProbeMeasure, by_set, called
from harmonium.measures.run_reader import Run

NEIGHBOURS = 8  # beside each query of the sheet


@measures("retrieval")
@dataclass(frozen=True)
class Retrieving(ProbeMeasure):
    """Precision and mean average precision of nearest images, and a sheet of them."""

    legend = "chance: the precision of a ranking that is drawn at random"

    at: tuple[int, ...] = (1, 5, 10)  # neighbours among which precision is counted
    queries: int | None = 1000  # images that ask, at most; none: all
    sheet: int = 6  # queries on the sheet; 0: no sheet
    seed: int = 0  # of the choice of queries
    whiten: bool | int = False  # also whitened features: true (64) or how many directions

    def __post_init__(self) -> None:
        self.at_least(queries=1, sheet=0, seed=0)
        if self.whiten is not False and self.whiten < 1:
            raise ConfigError(f"retrieval.whiten is {self.whiten}; give true, or at least 1")
        if not self.at or min(self.at) < 1:
            raise ConfigError(f"retrieval.at is {list(self.at)}; each must be at least 1")

    def judge(self, run: Run, data: EvalData) -> Figures:
        """The means over the encoders that runs judge, and the encoder at initialisation."""
        asked = data.part(self.part)
        rng = seeds.numpy_rng(self.seed, "measure", "queries")
        queries = torch.from_numpy(rng.permutation(len(asked))[: self.queries])
        features = {
            whose: run.kept_features(encoder, asked, whose) for whose, encoder in run.judged.items()
        }
        before = run.kept_features(run.untrained, asked, "the untrained encoder")
        mean = average([self._figures(rows, asked, queries) for rows in features.values()])
        run.note(f"{run.label}: retrieval on {data.name}: mAP {100 * mean['map']:.1f} %")
        first = next(iter(features.values()))
        pixels = {
            name: self._figures(run.kept_features(encoder, asked, name), asked, queries)
            for name, encoder in run.pixels(data).items()
        }
        plain = {
            **mean,
            "untrained": self._figures(before, asked, queries),
            "references": pixels,
        }
        if self.whiten is not False:
            made = {k: run.whitened(one, data, self.whiten) for k, one in run.judged.items()}
            features = {k: run.kept_features(one, asked, k) for k, one in made.items()}
            found = [self._figures(rows, asked, queries) for rows in features.values()]
            plain["whitened"] = average(found)
        beyond = [f"P@{k}" for k in self.at if k >= mean["gallery"]]
        notes = [f"{one} is of all {mean['gallery'] - 1:.0f} other images" for one in beyond]
        return Figures(plain, notes, self._sheet(first, asked, queries[: self.sheet]))

    def _figures(self, features: Tensor, asked: Images, queries: Tensor) -> dict[str, Any]:
        found = retrieve(features, labels_of(asked), queries, self.at)
        return {
            "precision": {str(k): value for k, value in found.precision.items()},
            "precision_chance": found.precision_chance,
            "map": found.average,
            "map_chance": found.average_chance,
            "queries": found.queries,
            "gallery": found.gallery,
        }

    def _sheet(self, features: Tensor, asked: Images, queries: Tensor) -> dict[str, np.ndarray]:
        """Images (rows, 1 + neighbours, height, width, channels), and which are of a class."""
        if not len(queries):
            return {}
        unit = functional.normalize(features.double())
        near = nearest(unit, queries, min(NEIGHBOURS, len(asked) - 1))
        rows = torch.cat([queries[:, None], near], 1).numpy()
        pixels = np.stack([asked.batch(row) for row in rows])
        return {"pictures": pixels, "alike": asked.labels[rows] == asked.labels[rows[:, :1]]}

    def tables(self, found: Mapping[str, Figures]) -> list[Shown]:
        """A row a run and set."""
        rows: list[dict[str, Any]] = []
        for label, name, one in by_set(found):
            first = {f"P@{k}": 100 * value for k, value in one["precision"].items()}
            rows.append(
                {
                    "run": label,
                    "on": name,
                    **first,
                    "chance": 100 * one["precision_chance"],
                    "mAP": 100 * one["map"],
                    **_whitened(one),
                    "mAP untrained": 100 * one["untrained"]["map"],
                    **{f"mAP {name}": 100 * its["map"] for name, its in one["references"].items()},
                    "mAP chance": 100 * one["map_chance"],
                }
            )
        return [Shown(f"Nearest {self.part} images by cosine, percent", rows, 1)]

    def draw(self, path: Path, found: Mapping[str, Figures]) -> bool:
        """A sheet a run and set."""
        from harmonium.report.contact_sheets import Sheet, sheets

        made = {
            called(label, name, found): Sheet(
                found[label].arrays[f"{name}/pictures"], found[label].arrays[f"{name}/alike"]
            )
            for label, name, _ in by_set(found)
            if f"{name}/pictures" in found[label].arrays
        }
        if made:
            sheets(path, made, "Images and their nearest others, by cosine")
        return bool(made)


def _whitened(figures: Mapping[str, Any]) -> dict[str, float]:
    """The columns of whitened features, where there are any: the first precision, and mAP."""
    if not (white := figures.get("whitened")):
        return {}
    k, first = next(iter(white["precision"].items()))
    return {f"P@{k} whitened": 100 * first, "mAP whitened": 100 * white["map"]}
