"""Retrieval: which images lie nearest, as numbers and as a contact sheet.

Each query, a test image, ranks all other test images by the cosine of their features; images of its
class are relevant. Nothing is trained. Chance is what a random ranking would give.
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
from harmonium.measures import Figures, Headline, Shown, measures
from harmonium.measures.eval_data import OWN, EvalData, labels_of
from harmonium.measures.probing import ProbeMeasure, by_set, called
from harmonium.measures.run_reader import Run

NEIGHBOURS = 8  # beside each query of the sheet


@measures("retrieval")
@dataclass(frozen=True)
class Retrieving(ProbeMeasure):
    """Precision and mean average precision of nearest images, and a sheet of them."""

    legend = "chance: the precision of a random ranking"

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

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """The means over the final encoders, and the encoder at initialisation."""
        test_images = data.part(self.part)
        rng = seeds.numpy_rng(self.seed, "measure", "queries")
        queries = torch.from_numpy(rng.permutation(len(test_images))[: self.queries])
        features = {
            whose: run.cached_features(encoder, test_images, whose)
            for whose, encoder in run.final_encoders.items()
        }
        untrained = run.cached_features(run.untrained, test_images, "the untrained encoder")
        mean = average([self._figures(rows, test_images, queries) for rows in features.values()])
        run.note(f"{run.label}: retrieval on {data.name}: mAP {100 * mean['map']:.1f} %")
        first = next(iter(features.values()))
        pixels = {
            name: self._figures(
                run.cached_features(encoder, test_images, name), test_images, queries
            )
            for name, encoder in run.pixels(data).items()
        }
        plain = {
            **mean,
            "untrained": self._figures(untrained, test_images, queries),
            "references": pixels,
        }
        if self.whiten is not False:
            encoders = {
                k: run.whitened(one, data, self.whiten) for k, one in run.final_encoders.items()
            }
            features = {k: run.cached_features(one, test_images, k) for k, one in encoders.items()}
            whitened = [self._figures(rows, test_images, queries) for rows in features.values()]
            plain["whitened"] = average(whitened)
        beyond = [f"P@{k}" for k in self.at if k >= mean["gallery"]]
        notes = [f"{one} is of all {mean['gallery'] - 1:.0f} other images" for one in beyond]
        return Figures(plain, notes, self._sheet(first, test_images, queries[: self.sheet]))

    def _figures(self, features: Tensor, test_images: Images, queries: Tensor) -> dict[str, Any]:
        retrieved = retrieve(features, labels_of(test_images), queries, self.at)
        return {
            "precision": {str(k): value for k, value in retrieved.precision.items()},
            "precision_chance": retrieved.precision_chance,
            "map": retrieved.average,
            "map_chance": retrieved.average_chance,
            "queries": retrieved.queries,
            "gallery": retrieved.gallery,
        }

    def _sheet(
        self, features: Tensor, test_images: Images, queries: Tensor
    ) -> dict[str, np.ndarray]:
        """Images (rows, 1 + neighbours, height, width, channels), and which are of a class."""
        if not len(queries):
            return {}
        unit = functional.normalize(features.double())
        near = nearest(unit, queries, min(NEIGHBOURS, len(test_images) - 1))
        rows = torch.cat([queries[:, None], near], 1).numpy()
        pixels = np.stack([test_images.batch(row) for row in rows])
        return {
            "pictures": pixels,
            "alike": test_images.labels[rows] == test_images.labels[rows[:, :1]],
        }

    def headlines(self) -> dict[str, Headline]:
        """The mean average precision."""
        return {"retrieval": Headline("retrieval mAP")}

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """It in percent, on the run's own images."""
        figures = plain["sets"].get(OWN, {})
        if reference:
            beside = {**figures.get("references", {}), "untrained": figures.get("untrained", {})}
            figures = beside.get(reference, {})
        return {"retrieval": 100 * figures["map"]} if "map" in figures else {}

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run and set."""
        rows: list[dict[str, Any]] = []
        for label, name, one in by_set(results):
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

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """One sheet per run and set."""
        from harmonium.report.contact_sheets import ContactSheet, plot_contact_sheets

        by_title = {
            called(label, name, results): ContactSheet(
                results[label].arrays[f"{name}/pictures"], results[label].arrays[f"{name}/alike"]
            )
            for label, name, _ in by_set(results)
            if f"{name}/pictures" in results[label].arrays
        }
        if by_title:
            plot_contact_sheets(path, by_title, "Images and their nearest others, by cosine")
        return bool(by_title)


def _whitened(figures: Mapping[str, Any]) -> dict[str, float]:
    """The columns of whitened features, where there are any: the first precision, and mAP."""
    if not (white := figures.get("whitened")):
        return {}
    k, first = next(iter(white["precision"].items()))
    return {f"P@{k} whitened": 100 * first, "mAP whitened": 100 * white["map"]}
