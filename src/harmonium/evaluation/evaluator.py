"""Judging an encoder: what is measured during a run, and what is reported at its end.

During training only validation images are used, so that choosing a round or a setting never
looks at the test part; the test part is read once, at the end. Data without labels get the
label-free figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, UnknownSetting, suggest
from harmonium.core.progress import tell
from harmonium.core.threads import single_thread
from harmonium.data.augment.views import PRESETS, Views
from harmonium.data.images import UNKNOWN, Dataset, Images
from harmonium.evaluation.features import embed, evaluating
from harmonium.evaluation.geometry import Health, health
from harmonium.evaluation.knn import knn_answers
from harmonium.evaluation.linear import FEW_STRENGTH, few_label_probe, linear_probe
from harmonium.evaluation.metrics import Answers
from harmonium.evaluation.whitening import DIRECTIONS

VALIDATION = "validation kNN"  # the probe of a look during training
NOT_PROBES = ("health", "balanced", "auroc")  # among the figures of a verdict
FEWEST = 64  # held-out images for label-free figures; labels are not in play, so any will do


@dataclass(frozen=True)
class Evaluation:
    """How and when encoders are judged."""

    every: int | None = None  # rounds between evaluations; none: about ten in a run
    k: int = 200  # neighbours that vote
    temperature: float = 0.1  # of the votes' weights
    bank: int = 5000  # training images that vote during training; at the end all do
    queries: int = 2000  # validation images judged during training
    health: int = 512  # images for the label-free figures
    labels_per_class: tuple[int, ...] = (10,)  # sizes of the few-label probe; []: none
    draws: int = 5  # choices of those few labels
    clients: int = 10  # clients whose own encoders are judged, where each has one
    tuning: str | None = None  # views by which clients score the encoder without labels; none: no
    tuning_centre: bool = False  # take a client's mean feature away before; not of the paper
    tuning_over: Literal["clients", "images"] = "clients"  # what the tuning score averages
    whiten: bool | int = False  # also evaluate whitened features: true (64) or how many directions
    objective: bool | None = None  # measure the global objective; none: in simulations, if possible

    def __post_init__(self) -> None:
        least = {"k": 1, "bank": 1, "queries": 1, "health": 2, "draws": 1, "clients": 1, "every": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"evaluate.{name} is {value}; it must be at least {bound}")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"evaluate.temperature is {self.temperature}; it must be above 0")
        if self.whiten is not False and self.whiten < 1:
            raise ConfigError(
                f"evaluate.whiten is {self.whiten}; give true, or at least 1 direction"
            )
        if self.tuning is not None and self.tuning not in PRESETS:
            raise UnknownSetting(f"unknown views '{self.tuning}': {suggest(self.tuning, PRESETS)}")
        if any(count < 1 for count in self.labels_per_class):
            raise ConfigError(
                f"evaluate.labels_per_class is {list(self.labels_per_class)}; each must be at "
                "least 1, or the list empty"
            )

    @property
    def directions(self) -> int:
        """How many directions whitened features have, at most."""
        return DIRECTIONS if isinstance(self.whiten, bool) else self.whiten

    def due(self, round: int, rounds: int) -> bool:
        """Whether a round ends with an evaluation; the first and last always do."""
        every = self.every or max(1, rounds // 10)
        return round % every == 0 or round == rounds


class Tested(NamedTuple):
    """What the test part says of an encoder."""

    figures: dict[str, Any]  # as JSON has them
    answers: dict[str, Answers]  # by probe; empty without labels, or where it has diverged


@dataclass(frozen=True)
class Evaluator:
    """The images and rules by which encoders of one run are judged."""

    settings: Evaluation
    data: Dataset
    views: Views
    seed: int
    untrained: nn.Module  # the encoder at initialisation, to tell collapse from how it began
    warns: bool = True  # of collapse; labels may rightly leave no more directions than classes

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        notes = list(self.data.notes)
        voters = 0 if self.bank is None else len(_some(_known(self.bank), self.settings.bank))
        if 0 < voters < self.settings.k:
            notes.append(
                f"evaluate.k={self.settings.k}, but only {voters} training images can vote: all "
                "of them do, and kNN says little. Set a smaller evaluate.k"
            )
        return notes

    def look(self, encoder: nn.Module, whitening: nn.Module | None = None) -> dict[str, Any]:
        """Figures during training, from validation images only; also whitened where it is given."""
        return {"health": self._health(encoder), **self.validated(encoder, whitening)}

    def validated(
        self, encoder: nn.Module, whitening: nn.Module | None = None
    ) -> dict[str, float | None]:
        """The kNN accuracy on validation images; empty where there is nothing to tell it by."""
        if self.bank is None or not len(self.queries):
            return {}
        found = self._validated(encoder, whitening)
        if found is None:
            return {"knn": None}
        return {key: one.accuracy for key, one in found.items()}

    def validation(self, encoder: nn.Module) -> Answers | None:
        """What kNN says of the validation images; none where the encoder has diverged."""
        found = self._validated(encoder)
        return None if found is None else found["knn"]

    def _validated(
        self, encoder: nn.Module, whitening: nn.Module | None = None
    ) -> dict[str, Answers] | None:
        assert self.bank is not None  # asked only where there are labels
        bank = _some(_known(self.bank), self.settings.bank)
        known, asked = self._embed(encoder, bank), self._embed(encoder, self.queries)
        if not _finite(known, asked):
            return None
        found = {"knn": self._knn(known, bank, asked, self.queries)}
        if whitening is not None:
            found["knn_whitened"] = self._knn(
                whitening(known), bank, whitening(asked), self.queries
            )
        return found

    @property
    def queries(self) -> Images:
        """The validation images that are asked about during training."""
        return _some(_known(self.data.validation), self.settings.queries)

    def verdict(self, encoder: nn.Module) -> dict[str, Any]:
        """Figures at the end of a run, from the test part; None where the encoder has diverged."""
        return self.tested(encoder).figures

    def tested(self, encoder: nn.Module) -> Tested:
        """The same, with the answers of every probe to every test image."""
        figures: dict[str, Any] = {"health": self._health(encoder)}
        if not self.has_labels:
            return Tested(figures, {})
        found = self.answers(encoder)
        if found is None:
            lost = dict.fromkeys(self.probes)
            more = ("balanced", "auroc") if self._two_classes else ("balanced",)
            return Tested({**figures, **lost, **dict.fromkeys(more, lost)}, {})
        return Tested({**figures, **figures_of(found)}, found)

    @property
    def has_labels(self) -> bool:
        """Whether encoders can be judged by labels of the test part."""
        return self.bank is not None and self.data.test.labelled

    @property
    def probes(self) -> list[str]:
        """The probes of a verdict, in their order."""
        held = ["linear_labelled"] if self._labelled is not None else []
        few = [f"linear_{count}" for count in self.settings.labels_per_class]
        return ["knn", "linear", *held, *few]

    def settles(self, probe: str) -> dict[str, Any]:
        """The settings that a probe's answers depend on, beside features and labels."""
        if probe == "knn":
            return {"k": self.settings.k, "temperature": self.settings.temperature}
        if probe == VALIDATION:
            names = ("k", "temperature", "bank", "queries")
            return {name: getattr(self.settings, name) for name in names}
        if probe in ("linear", "linear_labelled"):
            return {}
        return {"draws": self.settings.draws, "seed": self._few_seed}

    def answers(
        self, encoder: nn.Module, probes: Sequence[str] | None = None
    ) -> dict[str, Answers] | None:
        """What probes on frozen features say of the test images; none where it has diverged."""
        probes = self.probes if probes is None else probes
        bank, validation, test = self.bank, self.data.validation, self.data.test
        assert bank is not None  # asked only where there are labels
        nothing = bank.subset([])
        validation = validation if "linear" in probes else nothing
        kept = self._labelled if "linear_labelled" in probes else None
        parts = (bank, validation, test, nothing if kept is None else kept)
        known, chosen, asked, few_known = (self._embed(encoder, part) for part in parts)
        if not _finite(known, chosen, asked, few_known):
            return None
        known_labels, asked_labels = _labels(bank), _labels(test)
        found: dict[str, Answers] = {}
        for probe in probes:
            if probe == "knn":
                found[probe] = self._knn(known, bank, asked, test)
            elif probe == "linear":
                found[probe] = linear_probe(
                    known, known_labels, chosen, _labels(validation), asked, asked_labels
                ).answers
            elif probe == "linear_labelled":
                assert kept is not None
                # Its penalty is fixed: validation labels would be further labels.
                found[probe] = linear_probe(
                    few_known,
                    _labels(kept),
                    known[:0],
                    known_labels[:0],
                    asked,
                    asked_labels,
                    strengths=(FEW_STRENGTH,),
                ).answers
            else:
                found[probe] = few_label_probe(
                    known,
                    known_labels,
                    asked,
                    asked_labels,
                    per_class=int(probe.removeprefix("linear_")),
                    draws=self.settings.draws,
                    seed=self._few_seed,
                ).answers
        return found

    @property
    def _two_classes(self) -> bool:
        assert self.bank is not None
        labels = np.union1d(self.bank.labels, self.data.test.labels)
        return int((labels != UNKNOWN).sum()) == 2

    @property
    def _few_seed(self) -> int:
        return seeds.seed_of(self.seed, "few labels")

    @property
    def _labelled(self) -> Images | None:
        """The held-out labelled part, where probes do not learn from it anyway."""
        return self.data.labelled if self.data.labelled is not self.bank else None

    def _knn(self, known: Tensor, bank: Images, asked: Tensor, queries: Images) -> Answers:
        return knn_answers(
            known,
            _labels(bank),
            asked,
            _labels(queries),
            k=self.settings.k,
            temperature=self.settings.temperature,
        )

    @cached_property
    def bank(self) -> Images | None:
        """The images that probes learn from: the training part, else the labelled one.

        None where there are no classes to tell apart: naming the only one is always right.
        """
        for images in (self.data.train, self.data.labelled):
            if images is not None and len(np.unique(images.labels[images.labels != UNKNOWN])) > 1:
                return images
        return None

    def _embed(self, encoder: nn.Module, images: Images) -> Tensor:
        if len(images) == 0:  # data without a validation part
            return torch.zeros(0, 1)
        return embed(encoder, images, self.views.plain, watch=partial(tell, "features"))

    def _health(self, encoder: nn.Module) -> dict[str, Any]:
        """Label-free figures; a number that is not finite is left out of JSON's way as None."""
        found = self._measure(encoder)
        figures = {
            key: value if math.isfinite(value) else None for key, value in asdict(found).items()
        }
        warned = found.warnings(self._start) if self.warns or not found.finite else ()
        return {**figures, "warnings": list(warned)}

    @cached_property
    def _start(self) -> Health:
        return self._measure(self.untrained)

    def _measure(self, encoder: nn.Module) -> Health:
        """Health from two views of held-out images, or of any where those are too few to tell."""
        train, held = self.data.train, self.data.validation
        held = held if len(held) >= min(FEWEST, len(train)) else train
        pixels = torch.from_numpy(np.array(_some(held, self.settings.health).pixels))
        views = self.views(pixels, seeds.torch_rng(self.seed, "health"))
        views = views if len(views) > 1 else views * 2
        with evaluating(encoder), single_thread(), torch.inference_mode():
            return health(encoder(views[0]), encoder(views[1]))


def figures_of(answers: Mapping[str, Answers]) -> dict[str, Any]:
    """Accuracy by probe; `balanced` accuracies, and `auroc` where there are two classes."""
    areas = {probe: one.auroc for probe, one in answers.items() if one.auroc is not None}
    return {
        **{probe: one.accuracy for probe, one in answers.items()},
        "balanced": {probe: one.balanced for probe, one in answers.items()},
        **({"auroc": areas} if areas else {}),
    }


def probes_of(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The accuracies by probe among the figures of a verdict."""
    return {key: value for key, value in figures.items() if key not in NOT_PROBES}


def average(many: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several encoders' figures; warnings of any of them are kept once."""
    mean: dict[str, Any] = {}
    for key, first in many[0].items():
        values = [figures[key] for figures in many]
        if isinstance(first, dict):
            mean[key] = average(values)
        elif isinstance(first, list):
            mean[key] = sorted({item for value in values for item in value})
        elif isinstance(first, bool):
            mean[key] = all(values)
        elif None in values:
            mean[key] = None
        elif all(value == first for value in values):
            mean[key] = first
        else:
            mean[key] = float(np.mean(values))
    return mean


def _some(images: Images, count: int) -> Images:
    """The first images; the parts are in random order already."""
    return images if len(images) <= count else images.subset(np.arange(count))


def _known(images: Images) -> Images:
    """Those with labels, of which there may be few among many."""
    rows = np.flatnonzero(images.labels != UNKNOWN)
    return images if len(rows) == len(images) else images.subset(rows)


def _finite(*features: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in features)


def _labels(images: Images) -> Tensor:
    return torch.from_numpy(np.array(images.labels))
