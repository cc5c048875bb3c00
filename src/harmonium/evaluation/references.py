"""References for an encoder's figures: predictions that need no training of an encoder.

Always predicting the commonest class of the training labels; the pixels themselves as features; and
the pixels whitened along their leading principal directions (`whitening.py`), which needs no labels
and is often much better than raw pixels. All of them are evaluated by the probes of the encoder.

None of them depends on a run, so their answers are kept in `HARMONIUM_HOME/references`, by the
digests of the images, of the labels and of the probes' settings. Any file there may be deleted.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmonium.core import codec, files
from harmonium.core.devices import cache_key
from harmonium.core.errors import DataError, StoreError, WireError
from harmonium.core.paths import home
from harmonium.core.settings import plain
from harmonium.data.cache import digest_of
from harmonium.data.images import UNKNOWN, Images, Integers
from harmonium.evaluation.evaluator import VALIDATION, Evaluator
from harmonium.evaluation.feature_cache import FeatureCache
from harmonium.evaluation.features import embed
from harmonium.evaluation.metrics import Answers, commonest_class
from harmonium.evaluation.pixels import Pixels
from harmonium.evaluation.whitening import DIRECTIONS, moments_of, whitening

COMMONEST, RAW, WHITENED = "commonest class", "raw pixels", "whitened pixels"
REFERENCES = (COMMONEST, RAW, WHITENED)
GIVEN = "given weights"  # the encoder that a run started from, of a run with `init`
FORMAT = 1  # raise it when their figures would come out differently


def references(evaluator: Evaluator) -> dict[str, dict[str, Answers]]:
    """Answers by reference, then by probe; empty where the data have no labels."""
    return _References(evaluator).answers() if evaluator.has_labels else {}


def validation_levels(evaluator: Evaluator) -> dict[str, float]:
    """The validation kNN accuracy of the references, as shares.

    Empty where there are no labels.
    """
    return _References(evaluator).levels()


class _References:
    """The references of one evaluator."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Use the data and the probes of an evaluator."""
        self.evaluator = evaluator

    def answers(self) -> dict[str, dict[str, Answers]]:
        """By reference, then by probe."""
        answers = {COMMONEST: self._commonest(), RAW: self._cached_answers(RAW)}
        with suppress(DataError):  # pixels that never vary cannot be whitened
            answers[WHITENED] = self._cached_answers(WHITENED)
        return answers

    def levels(self) -> dict[str, float]:
        """The validation kNN of each."""
        evaluator, asked = self.evaluator, self.evaluator.queries
        if evaluator.bank is None or not len(asked):
            return {}
        levels = {COMMONEST: commonest_class(_labels(evaluator.bank), _labels(asked)).accuracy}
        for name in (RAW, WHITENED):
            with suppress(DataError):
                path = self._path(name, VALIDATION)
                answers = _read(path)
                if (
                    answers is None
                    and (answers := evaluator.validation_answers(self._encoder(name))) is not None
                ):
                    _write(path, answers)
                levels |= {} if answers is None else {name: answers.accuracy}
        return levels

    def _encoder(self, name: str) -> nn.Module:
        if name == RAW:
            return Pixels()
        return whitened_pixels(self.evaluator.data.train, self.evaluator.views.plain)

    def _commonest(self) -> dict[str, Answers]:
        """Always predicting one class does not depend on how a probe learns."""
        assert self.evaluator.bank is not None  # there are labels
        constant = commonest_class(_labels(self.evaluator.bank), _labels(self.evaluator.data.test))
        return dict.fromkeys(self.evaluator.probes, constant)

    def _cached_answers(self, name: str) -> dict[str, Answers]:
        """The answers of pixels, from disk where they are there."""
        answers: dict[str, Answers] = {}
        missing = []
        for probe in self.evaluator.probes:
            cached = _read(self._path(name, probe))
            if cached is None:
                missing.append(probe)
            else:
                answers[probe] = cached
        if missing:
            computed = self.evaluator.answers(self._encoder(name), missing)
            for probe, predictions in (computed or {}).items():
                _write(self._path(name, probe), predictions)
                answers[probe] = predictions
        return {probe: answers[probe] for probe in self.evaluator.probes if probe in answers}

    def _path(self, name: str, probe: str) -> Path:
        about = {
            "reference": name,
            "probe": probe,
            **self._about,
            **self.evaluator.settings_of(probe),
        }
        return references_folder() / f"{digest_of(about)[:32]}.safetensors"

    @cached_property
    def _about(self) -> dict[str, Any]:
        evaluator, cache = self.evaluator, FeatureCache()
        data, first = evaluator.data, evaluator.views.pipelines[0]
        parts = {
            "train": data.train,
            "bank": evaluator.bank,
            "validation": data.validation,
            "test": data.test,
            "labelled": data.labelled,
        }

        def digest(images: Images | None) -> list[str] | None:
            if images is None:
                return None
            labels = hashlib.sha256(images.labels.astype("<i8").tobytes()).hexdigest()
            return [cache.images_digest(images), labels]

        return {
            "format": FORMAT,
            "torch": torch.__version__,
            **cache_key(),
            "prepared": plain([first.mean, first.std, first.size]),
            "parts": {name: digest(images) for name, images in parts.items()},
        }


def whitened_pixels(images: Images, prepare: Any) -> nn.Module:
    """Pixels whitened by the moments of some images, which need no labels."""
    features = embed(Pixels(), images, prepare)
    return nn.Sequential(Pixels(), whitening(moments_of(features), DIRECTIONS))


def _labels(images: Images) -> Integers:
    """The labels that are known."""
    known: Integers = images.labels[images.labels != UNKNOWN]
    return known


def references_folder() -> Path:
    """The folder of the files; deleting it loses nothing but time."""
    return home() / "references"


def _read(path: Path) -> Answers | None:
    """The answers in a file; none where there is no file, or it is damaged."""
    try:
        content: Mapping[str, Any] = codec.decode(path.read_bytes())
        right: Tensor = content["right"]
        if content["digest"] != _digest(right):
            return None
        return Answers(right, content["balanced"], content["auroc"])
    except (OSError, WireError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, answers: Answers) -> None:
    """Keep answers; where that is impossible, the next run computes them again."""
    frame = codec.encode({**asdict(answers), "digest": _digest(answers.right)})
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_atomic(beside, frame, private=True)
        os.replace(beside, path)  # another run may have finished the same at this very moment
    except (OSError, StoreError):
        with suppress(OSError):
            beside.unlink()


def _digest(right: Tensor) -> str:
    return hashlib.sha256(right.contiguous().numpy().data).hexdigest()
