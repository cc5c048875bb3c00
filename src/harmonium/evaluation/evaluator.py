"""Evaluation of encoders: validation during a run, and the test at its end.

During training only validation images are used, so that a round or a setting is never chosen by the
test part, which is read once, at the end. Data without labels get the label-free figures alone.
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
from harmonium.core.devices import on_current_device, to_device, to_host, without_gradients
from harmonium.core.errors import ConfigError, UnknownSetting, suggest
from harmonium.core.progress import emit
from harmonium.core.threads import single_thread
from harmonium.data.augment.views import PRESETS, Views
from harmonium.data.images import UNKNOWN, Dataset, Images
from harmonium.evaluation.features import embed, evaluating
from harmonium.evaluation.geometry import Health, health
from harmonium.evaluation.knn import knn_answers
from harmonium.evaluation.linear import FEW_STRENGTH, few_label_probe, linear_probe
from harmonium.evaluation.metrics import Answers
from harmonium.evaluation.whitening import DIRECTIONS

VALIDATION = "validation kNN"  # the probe that is used during training
NOT_PROBES = ("health", "balanced", "auroc")  # among the figures of a test
MOST_BINS = 1000  # in which scores are counted; with more, a bin is of a single image
FEWEST = 64  # held-out images for label-free figures; below it, training images are used


@dataclass(frozen=True)
class Evaluation:
    """How and when encoders are evaluated."""

    every: int | None = None  # rounds between evaluations; none: about ten in a run
    k: int = 200  # neighbours that vote
    temperature: float = 0.1  # of the votes' weights
    bank: int = 5000  # training images that vote during training; at the end all do
    queries: int = 2000  # validation images classified during training
    health: int = 512  # images for the label-free figures
    labels_per_class: tuple[int, ...] = (10,)  # sizes of the few-label probe; []: none
    draws: int = 5  # choices of those few labels
    clients: int = 10  # clients whose own encoders are evaluated, where each has one
    tuning: str | None = None  # views by which clients score the encoder without labels; none: no
    tuning_centre: bool = False  # take a client's mean feature away before; not of the paper
    tuning_over: Literal["clients", "images"] = "clients"  # what the tuning score averages
    whiten: bool | int = False  # also evaluate whitened features: true (64) or how many directions
    objective: bool | None = None  # measure the global objective; none: in simulations, if possible
    sites: Literal["probe", "ridge"] | None = None  # counts of clients with labels; none: no counts
    sites_held_out: float = 0.3  # share of its labelled images that a client tests on
    sites_least: int = 10  # fewest images of a class that a client counts; others are left out
    sites_bins: int = 32  # of scores, for AUROC; 0: scores are not counted
    sites_classes: tuple[str, ...] = ()  # names of all classes, in a federation of real sites

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
        self._check_sites()
        if self.tuning is not None and self.tuning not in PRESETS:
            raise UnknownSetting(f"unknown views '{self.tuning}': {suggest(self.tuning, PRESETS)}")
        if any(count < 1 for count in self.labels_per_class):
            raise ConfigError(
                f"evaluate.labels_per_class is {list(self.labels_per_class)}; each must be at "
                "least 1, or the list empty"
            )

    def _check_sites(self) -> None:
        if not 0 < self.sites_held_out < 1:
            raise ConfigError(
                f"evaluate.sites_held_out is {self.sites_held_out}; it must be above 0 and below 1"
            )
        if self.sites_least < 1:
            raise ConfigError(f"evaluate.sites_least is {self.sites_least}; it must be at least 1")
        if not 0 <= self.sites_bins <= MOST_BINS:
            raise ConfigError(
                f"evaluate.sites_bins is {self.sites_bins}; it must be from 0 to {MOST_BINS}"
            )
        if len(set(self.sites_classes)) < len(self.sites_classes):
            raise ConfigError("evaluate.sites_classes names a class twice: give each once")

    @property
    def directions(self) -> int:
        """How many directions whitened features have, at most."""
        return DIRECTIONS if isinstance(self.whiten, bool) else self.whiten

    def due(self, round: int, rounds: int) -> bool:
        """Whether a round ends with an evaluation; the first and last always do."""
        every = self.every or max(1, rounds // 10)
        return round % every == 0 or round == rounds


class TestScores(NamedTuple):
    """The evaluation of an encoder on the test part."""

    figures: dict[str, Any]  # as JSON has them; None where the encoder has diverged
    answers: dict[
        str, Answers
    ]  # to every test image, by probe; empty without labels or if diverged


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the encoders of one run, on its validation part and on its test part."""

    settings: Evaluation
    data: Dataset
    views: Views
    seed: int
    untrained: nn.Module  # the encoder at initialisation, for comparison
    warns: bool = (
        True  # of collapse; not with labels, which may leave only as many directions as classes
    )

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the figures."""
        notes = list(self.data.notes)
        voters = 0 if self.bank is None else len(_some(_known(self.bank), self.settings.bank))
        if 0 < voters < self.settings.k:
            notes.append(
                f"evaluate.k={self.settings.k}, but only {voters} training images can vote: all "
                "of them do, and kNN says little. Set a smaller evaluate.k"
            )
        return notes

    def validate(self, encoder: nn.Module, whitening: nn.Module | None = None) -> dict[str, Any]:
        """Figures during training, from validation images only; with `whitening` also whitened."""
        return {"health": self._health(encoder), **self.validation_accuracy(encoder, whitening)}

    def validation_accuracy(
        self, encoder: nn.Module, whitening: nn.Module | None = None
    ) -> dict[str, float | None]:
        """The kNN accuracy on validation images; empty where there are no labels or no images."""
        if self.bank is None or not len(self.queries):
            return {}
        answers = self._validation_answers(encoder, whitening)
        if answers is None:
            return {"knn": None}
        return {key: each.accuracy for key, each in answers.items()}

    def validation_answers(self, encoder: nn.Module) -> Answers | None:
        """The answers of kNN to the validation images; none where the encoder has diverged."""
        answers = self._validation_answers(encoder)
        return None if answers is None else answers["knn"]

    def _validation_answers(
        self, encoder: nn.Module, whitening: nn.Module | None = None
    ) -> dict[str, Answers] | None:
        assert self.bank is not None  # asked only where there are labels
        bank = _some(_known(self.bank), self.settings.bank)
        known, asked = self._embed(encoder, bank), self._embed(encoder, self.queries)
        if not _finite(known, asked):
            return None
        answers = {"knn": self._knn(known, bank, asked, self.queries)}
        if whitening is not None:
            answers["knn_whitened"] = self._knn(
                whitening(known), bank, whitening(asked), self.queries
            )
        return answers

    @property
    def queries(self) -> Images:
        """The validation images that are classified during training."""
        return _some(_known(self.data.validation), self.settings.queries)

    def test(self, encoder: nn.Module) -> TestScores:
        """Figures at the end of a run, from the test part."""
        figures: dict[str, Any] = {"health": self._health(encoder)}
        if not self.has_labels:
            return TestScores(figures, {})
        answers = self.answers(encoder)
        if answers is None:
            diverged = dict.fromkeys(self.probes)
            more = ("balanced", "auroc") if self._two_classes else ("balanced",)
            return TestScores({**figures, **diverged, **dict.fromkeys(more, diverged)}, {})
        return TestScores({**figures, **figures_of(answers)}, answers)

    @property
    def has_labels(self) -> bool:
        """Whether the test part has labels, and probes have labelled images to learn from."""
        return self.bank is not None and self.data.test.labelled

    @property
    def probes(self) -> list[str]:
        """The probes of a test, in their order."""
        labelled = ["linear_labelled"] if self._labelled is not None else []
        few = [f"linear_{count}" for count in self.settings.labels_per_class]
        return ["knn", "linear", *labelled, *few]

    def settings_of(self, probe: str) -> dict[str, Any]:
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
        """The answers of probes on frozen features to the test images; none if it has diverged."""
        probes = self.probes if probes is None else probes
        bank, validation, test = self.bank, self.data.validation, self.data.test
        assert bank is not None  # asked only where there are labels
        nothing = bank.subset([])
        validation = validation if "linear" in probes else nothing
        labelled = self._labelled if "linear_labelled" in probes else None
        parts = (bank, validation, test, nothing if labelled is None else labelled)
        known, chosen, asked, few_known = (self._embed(encoder, part) for part in parts)
        if not _finite(known, chosen, asked, few_known):
            return None
        known_labels, asked_labels = _labels(bank), _labels(test)
        answers: dict[str, Answers] = {}
        for probe in probes:
            if probe == "knn":
                answers[probe] = self._knn(known, bank, asked, test)
            elif probe == "linear":
                answers[probe] = linear_probe(
                    known, known_labels, chosen, _labels(validation), asked, asked_labels
                ).answers
            elif probe == "linear_labelled":
                assert labelled is not None
                # Its penalty is fixed: validation labels would be further labels.
                answers[probe] = linear_probe(
                    few_known,
                    _labels(labelled),
                    known[:0],
                    known_labels[:0],
                    asked,
                    asked_labels,
                    strengths=(FEW_STRENGTH,),
                ).answers
            else:
                answers[probe] = few_label_probe(
                    known,
                    known_labels,
                    asked,
                    asked_labels,
                    per_class=int(probe.removeprefix("linear_")),
                    draws=self.settings.draws,
                    seed=self._few_seed,
                ).answers
        return answers

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

        None where there are fewer than two classes to distinguish.
        """
        for images in (self.data.train, self.data.labelled):
            if images is not None and len(np.unique(images.labels[images.labels != UNKNOWN])) > 1:
                return images
        return None

    def _embed(self, encoder: nn.Module, images: Images) -> Tensor:
        if len(images) == 0:  # data without a validation part
            return torch.zeros(0, 1)
        return embed(encoder, images, self.views.plain, watch=partial(emit, "features"))

    def _health(self, encoder: nn.Module) -> dict[str, Any]:
        """Label-free figures; None stands for numbers that are not finite: JSON has none."""
        measured = self._measure(encoder)
        figures = {
            key: value if math.isfinite(value) else None for key, value in asdict(measured).items()
        }
        warned = measured.warnings(self._start) if self.warns or not measured.finite else ()
        return {**figures, "warnings": list(warned)}

    @cached_property
    def _start(self) -> Health:
        return self._measure(self.untrained)

    def _measure(self, encoder: nn.Module) -> Health:
        """Health from two views of held-out images; of training images if those are too few."""
        train, images = self.data.train, self.data.validation
        images = images if len(images) >= min(FEWEST, len(train)) else train
        pixels = torch.from_numpy(np.array(_some(images, self.settings.health).pixels))
        with (
            on_current_device(encoder) as device,
            evaluating(encoder),
            single_thread(),
            without_gradients(device),
        ):
            views = self.views(to_device(pixels, device), seeds.torch_rng(self.seed, "health"))
            views = views if len(views) > 1 else views * 2
            first, second = to_host([encoder(view) for view in views[:2]])
            return health(first, second)


def figures_of(answers: Mapping[str, Answers]) -> dict[str, Any]:
    """Accuracy by probe; `balanced` accuracies, and `auroc` where there are two classes."""
    areas = {probe: each.auroc for probe, each in answers.items() if each.auroc is not None}
    return {
        **{probe: each.accuracy for probe, each in answers.items()},
        "balanced": {probe: each.balanced for probe, each in answers.items()},
        **({"auroc": areas} if areas else {}),
    }


def probes_of(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The accuracies by probe among the figures of a test."""
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
    """The images whose label is known."""
    rows = np.flatnonzero(images.labels != UNKNOWN)
    return images if len(rows) == len(images) else images.subset(rows)


def _finite(*features: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in features)


def _labels(images: Images) -> Tensor:
    return torch.from_numpy(np.array(images.labels))
