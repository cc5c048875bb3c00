"""Random views of images: what self-supervised learning compares, made for a batch at a time.

A `View` is one random pipeline whose fields are settings of a recipe; a `Views` is the two or more
pipelines that a method compares; `preset` gives the ones of the published systems by name, as
`views.yaml` lists them; `plain` is no view at all, for evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from harmonium.core.errors import ConfigError, suggest
from harmonium.core.joined import Joined
from harmonium.data.augment.checks import check_normalisation, check_pixels, normalise
from harmonium.data.augment.operations import quarter_turns
from harmonium.data.augment.parameters import Floats
from harmonium.data.augment.pipeline import View

__all__ = ["PRESETS", "View", "Views", "plain", "preset", "quarter_turns"]


@dataclass(frozen=True)
class Views:
    """The views that a method compares: one pipeline each.

    >>> pixels = torch.zeros(4, 8, 8, 1, dtype=torch.uint8)
    >>> [view.shape[0] for view in preset("digits")(pixels, torch.Generator())]
    [4, 4]
    """

    pipelines: tuple[View, ...]

    def __call__(self, pixels: Tensor, rng: torch.Generator) -> list[Tensor]:
        """One tensor for each pipeline; see `View.__call__` for shapes."""
        return self.of_batches([pixels], [self.chances(pixels, rng)])[0]

    def chances(self, pixels: Tensor, rng: torch.Generator) -> list[Floats]:
        """The uniform numbers of the views of a batch, for `of_batches`."""
        count, _, _, channels = check_pixels(pixels)
        return [view.chance(times * count, channels, rng) for view, times in self._runs]

    def of_batches(
        self, batches: Sequence[Tensor], chances: Sequence[Sequence[Floats]]
    ) -> list[list[Tensor]]:
        """The views of several batches, which take fewer calls than of one after another.

        Args:
            batches: uint8 `(n, height, width, channels)` each, of images of the same size.
            chances: what `chances` returned for each of them.

        Returns:
            For each batch what `__call__` returns, to the bit if there is no more than one batch or
            no more than `at_once` images.
        """
        views: list[list[Tensor]] = [[] for _ in batches]
        for number, (view, times) in enumerate(self._runs):
            # Equal neighbours are made together: the same numbers for about half the calls.
            copies = [pixels for pixels in batches for _ in range(times)]
            images = copies[0] if len(copies) == 1 else torch.cat(copies)
            chance = [numbers[number] for numbers in chances]
            rendered = view.render(
                images, chance[0] if len(chance) == 1 else np.concatenate(chance)
            )
            counts = [len(pixels) for pixels in batches]
            whole = torch.split(rendered, [times * count for count in counts])
            made = [
                Joined(rows, [count] * times) for rows, count in zip(whole, counts, strict=True)
            ]
            if len(self._runs) == 1:
                return list[list[Tensor]](made)
            for own, more in zip(views, made, strict=True):
                own += more
        return views

    def at_once(self, height: int, width: int) -> int:
        """How many images of this size are best made into views together; see `View.at_once`."""
        return min(max(1, view.at_once(height, width) // times) for view, times in self._runs)

    @cached_property
    def _runs(self) -> list[tuple[View, int]]:
        """The pipelines, equal neighbours as one with their number."""
        return [(view, len(list(same))) for view, same in itertools.groupby(self.pipelines)]

    def plain(self, pixels: Tensor) -> Tensor:
        """The images themselves, normalised and sized like the first pipeline's views."""
        first = self.pipelines[0]
        return plain(pixels, first.mean, first.std, first.size)


def plain(
    pixels: Tensor,
    mean: tuple[float, ...] | None = (0.5,),
    std: tuple[float, ...] | None = (0.5,),
    size: int | None = None,
) -> Tensor:
    """The images themselves in the layout of views: resized if `size` says so, normalised.

    Args:
        pixels: uint8 `(n, height, width, channels)`.
        mean: subtracted from values in [0, 1]; one for all channels, or one for each.
        std: divided by.
        size: side of the result; None keeps height and width.

    Returns:
        float32 `(n, channels, height, width)`, channels last in memory.
    """
    if size is None:
        check_pixels(pixels)
        check_normalisation(mean, std)
        images = pixels.float().div_(255)
        normalise(images, mean, std)
        return images.permute(0, 3, 1, 2)
    still = View(size=size, mean=mean, std=std, crop_min=1.0, flip=0.0, jitter=0.0, gray=0.0)
    return still(pixels, torch.Generator())


def _presets() -> dict[str, tuple[View, ...]]:
    """The published systems' views, which are data: see views.yaml."""
    text = (resources.files("harmonium.data.augment") / "views.yaml").read_text(encoding="utf-8")
    return {
        name: tuple(View(**settings) for settings in pipelines)
        for name, pipelines in yaml.safe_load(text).items()
    }


PRESETS: dict[str, tuple[View, ...]] = _presets()


def preset(name: str, **changes: Any) -> Views:
    """The views of a published system, with `changes` to the settings of every pipeline.

    >>> preset("orchestra", mode="fast").pipelines[1].solarise
    0.2
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown views '{name}': {suggest(name, PRESETS)}")
    known = [field.name for field in dataclasses.fields(View)]
    for key in changes:
        if key not in known:
            raise ConfigError(f"unknown setting of views '{key}': {suggest(key, known)}")
    return Views(tuple(dataclasses.replace(view, **changes) for view in PRESETS[name]))
