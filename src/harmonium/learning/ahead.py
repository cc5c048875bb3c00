"""Views of several batches made at a time, by the random numbers that each would draw alone.

With small images most of the cost of views is calling: sixteen batches of 16 images take a quarter
of the time when they are made together. What a batch gets stays the same to the bit. Views that
were made ahead are used only if the generator is, when the batch asks for them, exactly where its
draws were made from, and it then moves to where they left it. A loss that draws from the same
generator between two batches therefore gets every batch by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harmonium.data.augment.views import Views

if TYPE_CHECKING:
    from harmonium.learning.client import Examples


@dataclass(frozen=True)
class Made:
    """The images and views of a batch, and the generator's state after the draws of its views."""

    pixels: Tensor
    views: list[Tensor]
    after: Tensor


class Ahead:
    """Makes the views of a client's batches, in the order in which they are trained on."""

    def __init__(self, examples: Examples, make: Views, rng: torch.Generator) -> None:
        """Make views of these examples, by draws from this generator."""
        self.rng = rng
        self._examples, self._make = examples, make
        self._coming: Sequence[Tensor] = ()  # positions of the examples of the epoch's batches
        self._made: dict[int, Made] = {}  # by the batch's place in the epoch
        self._expected: Tensor | None = None  # the generator's state if nothing else draws from it
        self._next = 0  # place of the batch that is expected to ask
        self._alone = False  # whether something else has drawn: then nothing is made ahead

    def epoch(self, coming: Sequence[Tensor]) -> None:
        """Begin an epoch with these batches, whose order was just drawn."""
        self._coming, self._made, self._next = coming, {}, 0
        if self._expected is not None:
            self._expected = self.rng.get_state()

    def of(self, place: int) -> Made:
        """The views of one of the epoch's batches; the generator moves past their draws."""
        drawn = self._expected is not None and not torch.equal(self._expected, self.rng.get_state())
        self._alone |= drawn
        if drawn or place != self._next or place not in self._made:
            together = 1 if self._alone else self._together(place)
            self._made = self._render(range(place, place + together))
        made = self._made.pop(place)
        self.rng.set_state(made.after)
        self._expected, self._next = made.after, place + 1
        return made

    def _together(self, place: int) -> int:
        """For how many batches, from this one on, views are best made at once."""
        images = self._make.at_once(*self._examples.sides)
        most = max(1, images // len(self._coming[place]))
        return min(most, len(self._coming) - place)

    def _render(self, places: range) -> dict[int, Made]:
        indices = [self._coming[place] for place in places]
        together = self._examples.pixels(torch.cat(indices), count=False)
        pixels = torch.split(together, [len(index) for index in indices])
        chances, after = [], []
        for images in pixels:
            chances.append(self._make.chances(images, self.rng))
            after.append(self.rng.get_state())
        views = self._make.of_batches(pixels, chances)
        made = map(Made, pixels, views, after)
        return dict(zip(places, made, strict=True))
