"""References for an encoder's figures: predictions that need no training of an encoder.

Always naming the commonest class of the training labels; the pixels themselves as features; and the
pixels whitened along their leading principal directions (`whitening.py`), which needs no labels and
is often much better than raw pixels. All of them are judged by the same probes as the encoder.

Neither depends on a run, so what they come to is kept in `HARMONIUM_HOME/references`, found by the
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
from harmonium.core.errors import DataError, StoreError, WireError
from harmonium.core.paths import home
from harmonium.core.settings import plain
from harmonium.data.cache import digest_of
from harmonium.data.images import UNKNOWN, Images, Integers
from harmonium.evaluation.evaluator import VALIDATION, Evaluator
from harmonium.evaluation.feature_cache import Kept
from harmonium.evaluation.features import embed
from harmonium.evaluation.metrics import Answers, commonest_class
from harmonium.evaluation.pixels import Pixels
from harmonium.evaluation.whitening import DIRECTIONS, moments_of, whitening

COMMONEST, RAW, WHITENED = "commonest class", "raw pixels", "whitened pixels"
REFERENCES = (COMMONEST, RAW, WHITENED)
GIVEN = "given weights"  # the encoder that a run started from, of a run with `init`
FORMAT = 1  # raise it when their figures would come out differently


def references(judge: Evaluator) -> dict[str, dict[str, Answers]]:
    """Answers by reference, then by probe; empty where the data have no labels to judge by."""
    return _References(judge).answers() if judge.has_labels else {}


def validation_levels(judge: Evaluator) -> dict[str, float]:
    """What the references reach where kNN is validated during training, as shares.

    Empty where there are no labels to validate by.
    """
    return _References(judge).levels()


class _References:
    """The references of one judge."""

    def __init__(self, judge: Evaluator) -> None:
        """Those on the data and by the probes of a judge."""
        self.judge = judge

    def answers(self) -> dict[str, dict[str, Answers]]:
        """By reference, then by probe."""
        found = {COMMONEST: self._commonest(), RAW: self._kept(RAW)}
        with suppress(DataError):  # pixels that never vary cannot be whitened
            found[WHITENED] = self._kept(WHITENED)
        return found

    def levels(self) -> dict[str, float]:
        """The validation kNN of each."""
        judge, asked = self.judge, self.judge.queries
        if judge.bank is None or not len(asked):
            return {}
        found = {COMMONEST: commonest_class(_labels(judge.bank), _labels(asked)).accuracy}
        for name in (RAW, WHITENED):
            with suppress(DataError):
                path = self._path(name, VALIDATION)
                held = _read(path)
                if held is None and (held := judge.validation(self._encoder(name))) is not None:
                    _write(path, held)
                found |= {} if held is None else {name: held.accuracy}
        return found

    def _encoder(self, name: str) -> nn.Module:
        if name == RAW:
            return Pixels()
        return whitened_pixels(self.judge.data.train, self.judge.views.plain)

    def _commonest(self) -> dict[str, Answers]:
        """Naming one class does not depend on how a probe learns."""
        assert self.judge.bank is not None  # there are labels
        one = commonest_class(_labels(self.judge.bank), _labels(self.judge.data.test))
        return dict.fromkeys(self.judge.probes, one)

    def _kept(self, name: str) -> dict[str, Answers]:
        """The answers of pixels, from disk where they are there."""
        found: dict[str, Answers] = {}
        missing = []
        for probe in self.judge.probes:
            held = _read(self._path(name, probe))
            if held is None:
                missing.append(probe)
            else:
                found[probe] = held
        if missing:
            made = self.judge.answers(self._encoder(name), missing)
            for probe, one in (made or {}).items():
                _write(self._path(name, probe), one)
                found[probe] = one
        return {probe: found[probe] for probe in self.judge.probes if probe in found}

    def _path(self, name: str, probe: str) -> Path:
        about = {"reference": name, "probe": probe, **self._about, **self.judge.settles(probe)}
        return references_folder() / f"{digest_of(about)[:32]}.safetensors"

    @cached_property
    def _about(self) -> dict[str, Any]:
        judge, kept = self.judge, Kept()
        data, first = judge.data, judge.views.pipelines[0]
        parts = {
            "train": data.train,
            "bank": judge.bank,
            "validation": data.validation,
            "test": data.test,
            "labelled": data.labelled,
        }

        def digest(images: Images | None) -> list[str] | None:
            if images is None:
                return None
            labels = hashlib.sha256(images.labels.astype("<i8").tobytes()).hexdigest()
            return [kept.images_digest(images), labels]

        return {
            "format": FORMAT,
            "torch": torch.__version__,
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
    """Where the files are; removing it loses nothing but time."""
    return home() / "references"


def _read(path: Path) -> Answers | None:
    """The answers in a file; none where there is no file, or it is damaged."""
    try:
        held: Mapping[str, Any] = codec.decode(path.read_bytes())
        right: Tensor = held["right"]
        if held["digest"] != _digest(right):
            return None
        return Answers(right, held["balanced"], held["auroc"])
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
