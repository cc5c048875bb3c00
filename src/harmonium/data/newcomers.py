"""Newcomers: clients that hold images but never train, to evaluate the model of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harmonium.data.images import Images, Integers

STYLE = "style"  # the column that data sets use for styles


def newcomers(
    images: Images, indices: Sequence[Integers], column: str, count: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """Draw `count` clients to be newcomers, taking styles in turn if there are any.

    Args:
        images: the training images.
        indices: the images of each client.
        column: the column of the styles; if there is no such column, `style` is used.
        count: number of newcomers, fewer than there are clients.
        rng: the random generator.
    """
    values = images.factors.get(column, images.factors.get(STYLE))
    groups = [0 if values is None else most_common(values[own]) for own in indices]
    return tuple(sorted(in_turn(groups, rng)[:count]))


def most_common(values: Integers) -> int:
    """The most frequent known value, or -1 if none is known."""
    known = values[values >= 0]
    return int(np.bincount(known).argmax()) if len(known) else -1


def in_turn(groups: Sequence[Any], rng: np.random.Generator) -> list[int]:
    """All positions in random order, with one of every group before a second of any.

    >>> order = in_turn([0, 0, 0, 1], np.random.default_rng(0))
    >>> sorted(order), 3 in order[:2]
    ([0, 1, 2, 3], True)
    """
    turns: dict[Any, int] = {}
    ranked = []
    for position in rng.permutation(len(groups)).tolist():
        turns[groups[position]] = turns.get(groups[position], 0) + 1
        ranked.append((turns[groups[position]], position))
    return [position for _, position in sorted(ranked, key=lambda pair: pair[0])]
