"""What encoders are evaluated on: a run's own images, and other data sets by name.

`on=[own,mnist]` names the sets, `on.mnist.limit=1000` sets one of their settings. Images of other
sets are brought to the shape that the encoder was made for, and keep their own training, validation
and test parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, DataError, suggest
from harmonium.core.settings import choose
from harmonium.data.datasets import DataSpec, datasets, read_alike
from harmonium.data.images import UNKNOWN, Dataset, Images
from harmonium.recipe.overrides import Change, apply_changes

OWN = "own"  # the run's images, the training part as clients hold it
UPRIGHT = "upright"  # the same without the rotation that clients' images have
THEIRS = (OWN, UPRIGHT)
FIXED = ("size", "channels")  # given by the encoder


@dataclass(frozen=True, eq=False)
class EvalData:
    """A data set to evaluate on; a probe learns from `bank` and is tested on another part."""

    name: str
    dataset: Dataset

    @cached_property
    def bank(self) -> Images:
        """Labelled images that probes learn from: the training part, else the labelled one."""
        for images in (self.dataset.train, self.dataset.labelled):
            if images is not None:
                some = images.labels != UNKNOWN
                if len(np.unique(images.labels[some])) > 1:
                    return images if some.all() else images.subset(np.flatnonzero(some))
        raise DataError(
            f"{self._title} has no labelled training images of two classes, which this measure "
            "needs"
        )

    def part(self, name: str) -> Images:
        """The labelled images of a part."""
        images: Images = getattr(self.dataset, name)
        known = np.flatnonzero(images.labels != UNKNOWN)
        if len(known) == 0:
            raise DataError(f"{self._title} has no labelled {name} images to test on")
        return images if len(known) == len(images) else images.subset(known)

    @property
    def _title(self) -> str:
        return f"{self.dataset.name} (on={self.name})"

    def chance(self, test_images: Images) -> float:
        """The accuracy of always naming the commonest class of the training images."""
        commonest = np.bincount(self.bank.labels).argmax()
        return float((test_images.labels == commonest).mean())


@dataclass(frozen=True)
class EvalSets:
    """The data sets that a call names with `on`."""

    names: tuple[str, ...] = (OWN,)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by set
    _loaded: dict[Any, Dataset] = field(default_factory=dict, repr=False, compare=False)

    def spec(self, name: str) -> DataSpec:
        """A set with its settings."""
        return choose(f"on.{name}", datasets, {"name": name, **self.settings.get(name, {})})

    def load(self, name: str, shape: tuple[int, int, int], run: DataSpec) -> Dataset:
        """A set in the shape of a run's images and read as they were, read once."""
        height, width, channels = shape
        how = read_alike(self.spec(name), run)
        key = (name, shape, how)
        if key not in self._loaded:
            spec = replace(how, channels=channels)
            spec = replace(spec, size=height) if height == width else spec
            try:
                dataset = spec.load()
            except (ConfigError, DataError) as error:  # the same settings, of another section
                raise error.within(f"on.{name}") from None
            if dataset.train.shape != shape:
                raise DataError(
                    f"on={name}: the run's images are {height} x {width}, and those of another "
                    f"set are only made square: choose one of {height} x {width}"
                )
            self._loaded[key] = dataset
        return self._loaded[key]


def sets_of(changes: Sequence[Change]) -> tuple[EvalSets, list[Change]]:
    """The sets that `on` names, and the other changes."""
    mine = [change for change in changes if change.section == "on"]
    rest = [change for change in changes if change.section != "on"]
    names = [change for change in mine if change.key == "on"]
    tree = apply_changes({}, [change for change in mine if change not in names]).get("on", {})
    _check_settings(tree)
    sets = EvalSets(_set_names(apply_changes({}, names).get("on", OWN)), tree)
    if own := [name for name in THEIRS if name in tree]:
        raise ConfigError(f"on.{own[0]} has no settings: its images are as the run has them")
    for name in (*tree, *sets.names):
        if name not in THEIRS:
            sets.spec(name)  # refuses wrong settings before anything is read
    return sets, rest


def _check_settings(tree: Mapping[str, Any]) -> None:
    """Refuse what is not of the form `on.SET.key=value`, and what the encoder decides."""
    for name, settings in tree.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"on.{name}={settings} is not a setting: write on.SET.key=value")
        for key in FIXED:
            if key in settings:
                raise ConfigError(
                    f"on.{name}.{key} cannot be set: images are brought to the shape that the "
                    "encoder was made for"
                )


def _set_names(value: Any) -> tuple[str, ...]:
    """The names in `on`: one, several with commas between them, or a list."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(n, str) for n in listed):
        raise ConfigError(f"on is {listed!r}: name data sets, e.g. on=mnist or on=[{OWN},mnist]")
    names = tuple(name.strip() for name in listed)
    known = [*THEIRS, *datasets.table()]
    for name in names:
        place = name.removeprefix("folder:")
        if name not in known and Path(place).expanduser().is_dir():
            raise ConfigError(f"on={name} is a folder: write on=folder on.folder.path={place}")
        if name not in known and ":" not in name:
            raise ConfigError(f"on={name}: unknown data set: {suggest(name, known)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"on names a set twice: {', '.join(names)}")
    return names


def labels_of(images: Images) -> Tensor:
    """The labels, copied to a tensor."""
    return torch.from_numpy(np.array(images.labels))
