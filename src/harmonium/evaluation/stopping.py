"""Ending a run early: when figures that need no labels have stopped improving.

The score of a round is Orchestra's, if clients were asked for it (`evaluate.tuning`), else one less
the distance of two views of an image, in units of the distance between images: how much of what the
features tell apart are images and not views. Both lie near 0 for an encoder that has learned
nothing, both rise and flatten as training does, and neither needs a label. The score of images is
always of the same images and views, so it does not waver by chance of the draw.

The rule looks at the logged rounds alone, so a run that is resumed ends at the same round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harmonium.core.errors import ConfigError, counted
from harmonium.evaluation.geometry import tuning_score


@dataclass(frozen=True)
class Stop:
    """When a run ends before its last round."""

    patience: int | None = None  # evaluations without improvement that end a run; none: no end
    least: float = 0.01  # how much the label-free score must rise to count as improvement

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"stop.patience is {self.patience}; it must be at least 1, or none")
        if not 0 <= self.least < math.inf:
            raise ConfigError(f"stop.least is {self.least}; it must be 0 or more")

    def why(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Why a run with these logged rounds ends now; empty if it goes on.

        >>> rows = [{"round": n, "health": {"view_distance": 0.5}} for n in range(4)]
        >>> Stop(patience=3).why(rows)
        'no rise of the label-free score by 0.01 in 3 evaluations: 0.500 after round 0, now 0.500'
        >>> Stop(patience=4).why(rows), Stop().why(rows)
        ('', '')
        """
        if self.patience is None:
            return ""
        best, at, since, last = -math.inf, 0, 0, math.nan
        for row in rows:
            score = label_free_score(row)
            if score is None:
                continue
            last, since = score, since + 1
            if score >= best + self.least or best == -math.inf:
                best, at, since = score, row["round"], 0
        if since < self.patience:
            return ""
        return (
            f"no rise of the label-free score by {self.least:g} in "
            f"{counted(since, 'evaluation')}: {best:.3f} after round {at}, now {last:.3f}"
        )


def label_free_score(row: Mapping[str, Any]) -> float | None:
    """The label-free score of a logged round; None if it was not evaluated.

    Features that are not finite score minus infinity, which is no improvement on anything.
    """
    reported, health = row.get("reported", {}), row.get("health", {})
    if "align" in reported and "unif" in reported:
        return tuning_score(reported["align"], reported["unif"])
    if "view_distance" not in health:
        return None
    distance = health["view_distance"]
    return -math.inf if distance is None else 1 - float(distance)
