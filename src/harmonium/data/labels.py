"""Stratified choice of labelled images, for semi-supervised clients and probes with few labels."""

from __future__ import annotations

import numpy as np

from harmonium.data.images import UNKNOWN, Integers


def stratified(labels: Integers, share: float, rng: np.random.Generator) -> Integers:
    """Sorted positions of the same share of every class, at least one of each that occurs.

    Images whose class is unknown are never chosen.

    >>> labels = np.array([0] * 20 + [1] * 3 + [-1] * 5)
    >>> labels[stratified(labels, 0.1, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    chosen = []
    for value in np.unique(labels[labels != UNKNOWN]):
        rows = np.flatnonzero(labels == value)
        chosen.append(rng.permutation(rows)[: max(1, round(share * len(rows)))])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)
