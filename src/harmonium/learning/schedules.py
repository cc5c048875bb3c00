"""Schedules: the learning rate over rounds, the same for clients and for the server.

A rate is constant within a round. In the first `warmup` rounds it grows evenly, from lr / warmup
to lr; then the schedule runs over the rounds that are left (as in SimCLR; Chen et al., 2020).

| schedule    | the rate after a share p of the rounds that are left     |
|-------------|----------------------------------------------------------|
| constant    | lr                                                       |
| cosine      | lr (1 + cos(pi p)) / 2                                   |
| linear      | lr (1 - p)                                               |
| step        | lr, times `decay` for each of the `milestones` reached   |
| exponential | lr, times `decay` for each round                         |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from harmonium.core.errors import ConfigError, suggest

Schedule = Literal["constant", "cosine", "linear", "step", "exponential"]
MILESTONES = (0.5, 0.75)
_DECAY = {"step": 0.1, "exponential": 0.99}  # when none is given


def factor(
    schedule: Schedule,
    round: int,
    rounds: int,
    warmup: int = 0,
    decay: float | None = None,
    milestones: Sequence[float] = MILESTONES,
) -> float:
    """The factor of the learning rate in a round (the first is 1; 0 counts as the first).

    >>> [factor("step", round, 4) for round in (1, 2, 3)]
    [1.0, 1.0, 0.1]
    >>> [factor("constant", round, 9, warmup=4) for round in (1, 2, 3, 4, 5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if round <= warmup:
        return max(round, 1) / warmup if warmup else 1.0
    done, left = max(round - warmup - 1, 0), max(rounds - warmup, 1)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done / left))
    if schedule == "linear":
        return 1 - done / left
    by = _DECAY.get(schedule, 1.0) if decay is None else decay
    if schedule == "step":
        return float(by ** sum(done / left >= milestone for milestone in milestones))
    return float(by**done) if schedule == "exponential" else 1.0


def check(
    section: str,
    schedule: str,
    warmup: int,
    decay: float | None,
    milestones: Sequence[float],
) -> None:
    """Raise an error for invalid settings of a schedule; `section` is their section."""
    if schedule not in get_args(Schedule):
        near = suggest(schedule, get_args(Schedule))
        raise ConfigError(f"{section}.schedule is {schedule}: {near}")
    if warmup < 0:
        raise ConfigError(f"{section}.warmup is {warmup}; it must be 0 or more rounds")
    if decay is not None and not 0 < decay <= 1:
        raise ConfigError(f"{section}.decay is {decay}; it must be above 0 and at most 1, or none")
    for milestone in milestones:
        if not 0 < milestone < 1:
            raise ConfigError(
                f"{section}.milestones has {milestone}; each is a share of the rounds, "
                f"above 0 and below 1"
            )
