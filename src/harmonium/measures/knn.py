"""The nearest-neighbour probe: the labelled training images that are nearest vote for a class.

With its defaults the figure is the one that a run reports at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from harmonium.data.images import Images
from harmonium.evaluation.knn import knn_answers
from harmonium.measures import measures
from harmonium.measures.eval_data import EvalData, labels_of
from harmonium.measures.probing import Frozen, counted_right
from harmonium.measures.run_reader import Run


@measures("knn")
@dataclass(frozen=True)
class NearestNeighbours(Frozen):
    """Accuracy of weighted nearest neighbours on frozen features."""

    k: int | None = None  # neighbours that vote; none: the recipe's evaluate.k
    temperature: float | None = None  # of the votes' weights; none: the recipe's

    def __post_init__(self) -> None:
        self.at_least(k=1)
        self.above_zero("temperature")
        self.check_whiten()

    def accuracy(
        self, run: Run, data: EvalData, encoder: nn.Module, test_images: Images, whose: str
    ) -> dict[str, Any]:
        """The accuracy of one encoder."""
        known = run.cached_features(encoder, data.bank, whose)
        answers = knn_answers(
            known,
            labels_of(data.bank),
            run.cached_features(encoder, test_images, whose),
            labels_of(test_images),
            k=self._k(run),
            temperature=self.temperature or run.recipe.evaluate.temperature,
        )
        return {**counted_right(answers), "k": self._k(run)}

    def depends(self, run: Run) -> dict[str, Any]:
        """The recipe's settings, where the measure has none of its own."""
        return {
            "k": self._k(run),
            "temperature": self.temperature or run.recipe.evaluate.temperature,
        }

    def _k(self, run: Run) -> int:
        return self.k or run.recipe.evaluate.k

    def remarks(self, run: Run, data: EvalData) -> list[str]:
        """A warning where every image of the bank votes."""
        if (k := self._k(run)) < len(data.bank):
            return []
        return [f"knn.k is {k}, but only {len(data.bank)} images can vote: set a smaller knn.k"]

    def title(self) -> str:
        """What the accuracies are of."""
        return "kNN accuracy"
