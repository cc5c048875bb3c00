"""Shared by measures that evaluate an encoder on data sets: parts, encoders, tables and bars."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from harmonium.core.errors import ConfigError, DataError
from harmonium.core.settings import plain as plain_settings
from harmonium.data.images import Images
from harmonium.evaluation.feature_cache import encoder_digest
from harmonium.evaluation.metrics import Answers, commonest_class
from harmonium.evaluation.references import COMMONEST, RAW, WHITENED
from harmonium.measures import Figures, Measure, Shown
from harmonium.measures.eval_data import OWN, EvalData
from harmonium.measures.result_cache import ResultCache
from harmonium.measures.run_reader import Run
from harmonium.report.metric_names import times
from harmonium.report.tables import estimate

FIGURES = {"accuracy": "accuracy", "balanced": "balanced", "auroc": "AUROC"}
"""The figures of every probe, by their keys in JSON; values are headings of tables."""
BALANCED = "balanced: mean recall over classes"
ALWAYS = f"{COMMONEST}: always predicting the most frequent training label"
BESIDE = f"{BALANCED}; whitened: along the leading principal directions, without labels; {ALWAYS}"
PIXELS = f"{BALANCED}; {RAW}, {WHITENED}: linear probes with the same labels; {ALWAYS}"
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class ProbeMeasure(Measure):
    """A measure of an encoder on each of the sets that a call names."""

    part: Literal["test", "validation"] = "test"  # to evaluate on; choose settings on validation

    def needs(self, names: Sequence[str]) -> list[str]:
        """All of them."""
        return list(names)

    def compute(self, run: Run) -> Figures:
        """The figures of one run on every set."""
        names = self.needs(run.sets.names)
        several, by_name, left_out = len(names) > 1, dict[str, Figures](), list[str]()
        for name in names:
            try:
                by_name[name] = self.evaluate(run, run.eval_data(name))
            except DataError as error:  # of one set among several
                if not several or (name == names[-1] and not by_name):
                    raise
                left_out.append(f"{self.name} is left out: {error}")
        return Figures(
            {
                "round": run.commit.round,
                "part": self.part,
                "sets": {name: dict(one.plain) for name, one in by_name.items()},
            },
            [
                f"{name}: {note}" if several else note
                for name, one in by_name.items()
                for note in (*run.overlap(name), *one.notes)
            ]
            + left_out,
            {f"{name}/{key}": v for name, one in by_name.items() for key, v in one.arrays.items()},
        )

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """The figures of one run on one set."""
        raise TypeError(f"{type(self).__name__} must define `evaluate`")

    def beside(self, each: Sequence[tuple[Columns, Mapping[str, Columns]]]) -> Shown:
        """The table of references, from the columns of each row and the figures by reference."""
        rows = [
            {**which, "reference": name, **shown(figures)}
            for which, references in each
            for name, figures in references.items()
        ]
        return Shown(f"References for {self.name}, {self.part} images, percent", rows, 1)

    def at_least(self, **bounds: float) -> None:
        """Refuse settings below their least value; none is allowed."""
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                what = f"{self.name}.{name} is {value}"
                raise ConfigError(f"{what}; it must be at least {least}")

    def above_zero(self, *names: str) -> None:
        """Refuse settings that are not above 0; none is allowed."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{self.name}.{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Frozen(ProbeMeasure):
    """A probe of frozen features, reported with its references.

    These are an untrained encoder, raw and whitened pixels, and the commonest class.
    """

    legend = BESIDE

    whiten: bool | int = False  # also whitened features: true (64) or how many directions

    def accuracy(
        self, run: Run, data: EvalData, encoder: nn.Module, test_images: Images, whose: str
    ) -> dict[str, Any]:
        """The accuracy of one encoder, and the hyperparameters chosen for it."""
        raise TypeError(f"{type(self).__name__} must define `accuracy`")

    def remarks(self, run: Run, data: EvalData) -> list[str]:
        """Notes for readers of the figures."""
        return []

    def evaluate(self, run: Run, data: EvalData) -> Figures:
        """The mean over the final encoders, and the references."""
        test_images = data.part(self.part)
        encoders = run.final_encoders
        each = [
            self.accuracy(run, data, encoder, test_images, whose)
            for whose, encoder in encoders.items()
        ]
        untrained = self.accuracy(run, data, run.untrained, test_images, "the untrained encoder")
        mean = float(np.mean([one["accuracy"] for one in each]))
        run.note(f"{run.label}: {self.name} on {data.name}: {100 * mean:.1f} %")
        balanced = [one["balanced"] for one in each]
        areas = [one["auroc"] for one in each if one["auroc"] is not None]
        plain = {
            "accuracy": mean,
            "balanced": float(np.mean(balanced)),
            **({"auroc": float(np.mean(areas))} if areas else {}),
            "untrained": untrained["accuracy"],
            "chance": data.chance(test_images),
            "references": {
                "untrained": untrained,
                **self._references(run, data, test_images),
                COMMONEST: counted_right(commonest_class(data.bank.labels, test_images.labels)),
            },
            **self._whitened(run, data, test_images, each),
            "pictures": len(test_images),
            "learnt_from": each[0].get("learnt_from", len(data.bank)),
            "encoders": [{"of": whose, **one} for whose, one in zip(encoders, each, strict=True)],
        }
        broken = [
            whose for whose, one in zip(encoders, each, strict=True) if not one.get("finite", True)
        ]
        notes = [
            f"the classifier of {whose} diverged, so its predictions are arbitrary"
            for whose in broken
        ]
        return Figures(plain, [*self.remarks(run, data), *notes])

    def check_whiten(self) -> None:
        """Refuse a number of directions below 1."""
        if self.whiten is not False and self.whiten < 1:
            raise ConfigError(f"{self.name}.whiten is {self.whiten}; give true, or at least 1")

    def _whitened(
        self, run: Run, data: EvalData, test_images: Images, each: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The same encoders with whitened features, and the differences."""
        if self.whiten is False:
            return {}
        encoders = {
            whose: run.whitened(encoder, data, self.whiten)
            for whose, encoder in run.final_encoders.items()
        }
        accuracies = [
            self.accuracy(run, data, encoder, test_images, whose)
            for whose, encoder in encoders.items()
        ]
        mean = {
            key: float(np.mean([one[key] for one in accuracies]))
            for key in ("accuracy", "balanced")
        }
        gain = mean["accuracy"] - float(np.mean([one["accuracy"] for one in each]))
        return {"whitened": {**mean, "change": gain, "encoders": accuracies}}

    def depends(self, run: Run) -> dict[str, Any]:
        """Further inputs of the pixels' figures, besides images, labels and settings."""
        return {}

    def _references(self, run: Run, data: EvalData, test_images: Images) -> dict[str, Any]:
        """The figures of pixels, cached on disk: they are the same for all runs on these images."""
        finished = ResultCache(run.finished.folder)  # its counts are of trainings that a call names
        references = {}
        for name, encoder in run.pixels(data).items():
            about = {
                "reference": encoder_digest(encoder),
                "measure": self.name,
                "settings": plain_settings(replace(self, whiten=False)),
                **self.depends(run),
                "parts": [
                    identity(run, part)
                    for part in (data.bank, data.dataset.validation, test_images)
                ],
                "prepared": plain_settings(run.method.views.pipelines[0]),
            }

            def work(encoder: nn.Module = encoder, name: str = name) -> dict[str, Any]:
                return self.accuracy(run, data, encoder, test_images, name)

            references[name] = finished(about, work)
        return references

    def tables(self, results: Mapping[str, Figures]) -> list[Shown]:
        """One row per run and set, then the same for every reference."""
        rows, each = [], []
        for label, name, one in by_set(results):
            figures = {
                **{heading: one.get(key) for key, heading in FIGURES.items()},
                "whitened": one.get("whitened", {}).get("accuracy"),
                "untrained": one["untrained"],
            }
            percent = {key: 100 * value for key, value in figures.items() if value is not None}
            which = columns(label, name, results)
            rows.append({**which, **percent, "images": one["pictures"]})
            each.append((which, one["references"]))
        title = f"{self.title()}, {self.part} images, percent"
        return [Shown(title, rows, 1), self.beside(each)]

    def title(self) -> str:
        """What the accuracies are of."""
        return self.name

    def draw(self, path: Path, results: Mapping[str, Figures]) -> bool:
        """Two bars per run and set."""
        groups = {
            called(label, name, results): {
                key: (100 * one[key], None) for key in ("accuracy", "untrained")
            }
            for label, name, one in by_set(results)
        }
        return barred(path, groups, f"{self.title()}: {self.part} images")


def counted_right(answers: Answers) -> dict[str, Any]:
    """Accuracy, balanced accuracy, and AUROC where there are two classes."""
    return {"accuracy": answers.accuracy, "balanced": answers.balanced, "auroc": answers.auroc}


def identity(run: Run, images: Images) -> list[str]:
    """Digests of images and of their labels."""
    labels = hashlib.sha256(images.labels.astype("<i8").tobytes()).hexdigest()
    return [run.feature_cache.images_digest(images), labels]


def by_set(results: Mapping[str, Figures]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Run, set and figures, for every run and set."""
    return [
        (label, name, one)
        for label, figures in results.items()
        for name, one in figures.plain["sets"].items()
    ]


def called(label: str, name: str, results: Mapping[str, Figures]) -> str:
    """The name of a run on a set in plots: the run alone if all are on their own images."""
    return label if _alone(results) else f"{label} on {name}"


def columns(label: str, name: str, results: Mapping[str, Figures]) -> dict[str, str]:
    """The columns that name a run on a set: the run alone if all are on their own images."""
    return {"run": label} if _alone(results) else {"run": label, "on": name}


def _alone(results: Mapping[str, Figures]) -> bool:
    return all(list(one.plain["sets"]) == [OWN] for one in results.values())


Bars = Mapping[str, Mapping[str, tuple[float, float | None]]]


def barred(path: Path, groups: Bars, title: str) -> bool:
    """Draw accuracies as bars."""
    from harmonium.report.plots import bars

    bars(path, groups, "accuracy (%)", title, "standard error over draws")
    return True


def summed(draws: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Mean and standard error of every figure over draws; none where one of them diverged.

    AUROC is left out where no draw has one, because there are not exactly two classes.

    >>> summary = summed([{"accuracy": 0.5, "balanced": 0.4, "auroc": None}] * 2)
    >>> summary["accuracy"], summary["stderr"], summary["draws"], summary["balanced_stderr"]
    (0.5, 0.0, [0.5, 0.5], 0.0)
    """
    summary = dict[str, Any]()
    for key in FIGURES:
        values = [one[key] for one in draws]
        known = [value for value in values if value is not None]
        if key == "auroc" and not known:
            continue
        mean, error = estimate(known) if len(known) == len(values) else (None, None)
        summary |= {key: mean, _of(key, "stderr"): error, _of(key, "draws"): values}
    return summary


def shown(figures: Mapping[str, Any]) -> dict[str, tuple[float, float | None] | None]:
    """The columns of figures in percent, with their errors over draws; AUROC if there is one."""
    cells = dict[str, tuple[float, float | None] | None]()
    for key, heading in FIGURES.items():
        if key in figures and (key != "auroc" or figures[key] is not None):
            mean, error = (times(100, figures.get(name)) for name in (key, _of(key, "stderr")))
            cells[heading] = None if mean is None else (mean, error)
    return cells


def _of(key: str, what: str) -> str:
    """The key of a figure's standard error or draws; accuracy's has no prefix."""
    return what if key == "accuracy" else f"{key}_{what}"
