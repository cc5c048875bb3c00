"""The linear probe: a logistic regression, or a linear layer trained by a paper's schedule.

`fast` fits a logistic regression with all images at once and chooses its penalty on validation
images: with its defaults the figure is the one that a run reports at its end. The other protocols
train a linear layer as a paper did, and evaluate it after the last epoch, not after the best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, overload

import numpy as np
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.data.augment.pipeline import View
from harmonium.data.images import UNKNOWN, Images
from harmonium.evaluation.classifier import ORCHESTRA, PROTOCOLS, train
from harmonium.evaluation.linear import linear_probe
from harmonium.evaluation.metrics import answers
from harmonium.measures import Headline, measures
from harmonium.measures.eval_data import OWN, THEIRS, EvalData, labels_of
from harmonium.measures.probing import Frozen, counted_right
from harmonium.measures.result_cache import RandomPass
from harmonium.measures.run_reader import Run

Name = Literal[
    "fast", "lp_orch", "lp_fedsc", "lp_easyfl", "lp_fedca", "lp_fedx", "lp_000", "lp_style"
]


@measures("linear")
@dataclass(frozen=True)
class Linear(Frozen):
    """Accuracy of a linear classifier on frozen features."""

    protocol: Name = "fast"  # fast: penalty chosen on validation; others: a paper's schedule
    epochs: int | None = None  # of a paper's schedule; none: as published
    passes: int = 10  # of augmented images with lp_orch, reused in turn by its 50 epochs
    seed: int = 0  # of the order of the images and their augmentation

    def __post_init__(self) -> None:
        self.at_least(epochs=1, passes=1, seed=0)
        self.check_whiten()
        if self.epochs is not None and self.protocol == "fast":
            raise ConfigError("linear.epochs is for a paper's protocol: linear.protocol=lp_fedsc")

    def accuracy(
        self, run: Run, data: EvalData, encoder: nn.Module, test_images: Images, whose: str
    ) -> dict[str, Any]:
        """The accuracy of one encoder."""
        bank = self._bank(run, data)
        tested, wanted = run.cached_features(encoder, test_images, whose), labels_of(test_images)
        if self.protocol == "fast":
            validation_images = data.dataset.validation
            chosen = (
                run.cached_features(encoder, validation_images, whose)
                if len(validation_images)
                else tested[:0]
            )
            known = run.cached_features(encoder, bank, whose)
            probe = linear_probe(
                known, labels_of(bank), chosen, labels_of(validation_images), tested, wanted
            )
            by = {"strength": probe.strength, "validation": probe.validation_accuracy}
            return {**counted_right(probe.answers), **by}
        how = ORCHESTRA if self.protocol == "lp_orch" else PROTOCOLS[self.protocol]
        how = replace(how, epochs=self.epochs or how.epochs)
        rng = seeds.torch_rng(self.seed, "measure", "linear")
        features: Tensor | Sequence[Tensor]
        if self.protocol == "lp_orch":
            features = Passes(run, encoder, bank, whose, self.seed, min(self.passes, how.epochs))
        else:
            features = run.cached_features(encoder, bank, whose)
        model = train(features, labels_of(bank), how, rng)
        scores = (model.scores(tested).numpy(), model.classes.numpy())
        test_answers = answers([scores], wanted.numpy())
        about = {"protocol": asdict(how), "finite": model.finite, "learnt_from": len(bank)}
        return {**counted_right(test_answers), **about}

    def depends(self, run: Run) -> dict[str, Any]:
        """With lp_000, which labels clients may see."""
        return {"split": run.split.digest} if self.protocol == "lp_000" else {}

    def _bank(self, run: Run, data: EvalData) -> Images:
        """The images to learn from; with lp_000 those whose labels clients may see."""
        if self.protocol != "lp_000" or data.name not in THEIRS or run.split.labelled is None:
            return data.bank
        seen = run.split.seen(data.dataset.train)
        return seen.subset(np.flatnonzero(seen.labels != UNKNOWN))

    def remarks(self, run: Run, data: EvalData) -> list[str]:
        """Notes on the protocol."""
        remarks = []
        if self.protocol == "fast" and self.part == "validation":
            remarks.append("the penalty was chosen on the images that this accuracy is computed on")
        if self.protocol == "lp_orch" and self.passes < (self.epochs or ORCHESTRA.epochs):
            remarks.append(
                f"lp_orch: epochs reuse {self.passes} passes of augmented images in turn; "
                "linear.passes=50 makes a new one for every epoch, as published"
            )
        if self.protocol == "lp_000":
            remarks.append(
                "lp_000: the paper continues with the classifier of the previous evaluation; this "
                "is the first one, so it starts from 0"
            )
            if (few := len(self._bank(run, data))) < len(data.bank):
                remarks.append(f"lp_000: learnt from the {few} images whose labels clients may see")
        return remarks

    def headlines(self) -> dict[str, Headline]:
        """The accuracy by a paper's protocol; `fast` is the linear probe of every run."""
        if self.protocol == "fast":
            return {}
        return {f"linear_{self.protocol}": Headline(f"linear ({self.protocol})")}

    def headline_values(self, plain: Mapping[str, Any], reference: str = "") -> dict[str, float]:
        """This accuracy in percent, on the run's own images."""
        figures = plain["sets"].get(OWN, {})
        figures = figures.get("references", {}).get(reference, {}) if reference else figures
        accuracy = figures.get("accuracy")
        return {} if accuracy is None else dict.fromkeys(self.headlines(), 100 * accuracy)

    def title(self) -> str:
        """What the accuracies are of."""
        return f"Linear accuracy ({self.protocol})"


def cropped(run: Run) -> View:
    """Orchestra's augmentation for classifiers: half of an image or more, and a mirror image."""
    first = run.method.views.pipelines[0]
    bare = View(crop_min=0.5, flip=0.5, jitter=0.0, gray=0.0)
    return replace(bare, size=first.size, mean=first.mean, std=first.std)


@dataclass(frozen=True)
class Passes(Sequence[Tensor]):
    """Features of augmented images, one pass after another; only one is in memory."""

    run: Run
    encoder: nn.Module
    images: Images
    whose: str
    seed: int
    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, number: int) -> Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, number: int | slice) -> Tensor | Sequence[Tensor]:
        """The features of a pass."""
        if isinstance(number, slice):
            raise TypeError("passes are taken one by one")
        if not 0 <= number < self.total:
            raise IndexError(f"there are {self.total} passes")
        views = RandomPass(cropped(self.run), self.seed, number)
        return self.run.cached_features(self.encoder, self.images, self.whose, views)
