"""Kinds of image by written rules over measured numbers, and what views would do to each.

A rule is a list of conditions, each one measured number against one limit. The first rule of which
all conditions hold names the kind; where none does, the kind is unknown. Nothing else is
considered, so a reader can check every step: `harmonium inspect` prints each number and its limit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from harmonium.data.augment.views import PRESETS
from harmonium.data.inspection.measures import Measures

Kind = Literal["natural", "tissue", "scan", "document", "unknown"]

CALLED: dict[Kind, str] = {
    "natural": "natural images",
    "tissue": "stained tissue, or other images of one range of colours",
    "scan": "X-ray or other grey scans",
    "document": "documents or digits",
    "unknown": "unknown",
}

VIEWS: dict[Kind, str] = {
    "natural": "natural",
    "tissue": "tissue",
    "scan": "scan",
    "document": "document",
    "unknown": "simclr",
}
"""The preset of views for each kind; see data/augment/views.yaml."""

_COMPARE = {"at least": operator.ge, "at most": operator.le}


@dataclass(frozen=True)
class Condition:
    """One number against one limit."""

    number: str  # a field of `Measures`
    how: Literal["at least", "at most"]
    limit: float
    words: str  # what the number is

    def value(self, measures: Measures) -> float:
        """The number that was measured."""
        return float(getattr(measures, self.number))

    def holds(self, measures: Measures) -> bool:
        """Whether the number is on the right side of the limit."""
        return bool(_COMPARE[self.how](self.value(measures), self.limit))

    @property
    def bound(self) -> str:
        """The limit in words."""
        return f"{self.how} {_shown(self.limit)}"

    def said(self, measures: Measures) -> str:
        """The number and its limit in words."""
        return f"{self.words} {_shown(self.value(measures))} ({self.bound})"


def _shown(value: float) -> str:
    return f"{value:.0f}" if value > 1 else f"{value:.2f}"


SAMPLED = Condition("sampled", "at least", 20, "images that can be read")
LARGE_ENOUGH = Condition("side", "at least", 12, "side in pixels")
GREY = Condition("grey", "at least", 0.9, "share of grey images")
COLOURED = Condition("grey", "at most", 0.1, "share of grey images")
PLAIN = Condition("background", "at least", 0.4, "share of plain background")
THIN = Condition("thick", "at most", 0.12, "share of thick ink")
ONE_HUE = Condition("one_hue", "at least", 0.75, "closeness of hues")
MANY_HUES = Condition("one_hue", "at most", 0.75, "closeness of hues")

RULES: tuple[tuple[Kind, tuple[Condition, ...]], ...] = (
    ("document", (SAMPLED, LARGE_ENOUGH, GREY, PLAIN, THIN)),
    ("scan", (SAMPLED, LARGE_ENOUGH, GREY)),
    ("tissue", (SAMPLED, LARGE_ENOUGH, COLOURED, ONE_HUE)),
    ("natural", (SAMPLED, LARGE_ENOUGH, COLOURED, MANY_HUES)),
)
"""The rules in the order in which they are tried."""


@dataclass(frozen=True)
class Verdict:
    """The kind of images, and how it was found."""

    kind: Kind
    evidence: tuple[str, ...]  # one line for each rule that was tried


def kind_of(measures: Measures) -> Verdict:
    """The kind that the first fitting rule names."""
    evidence = []
    for kind, conditions in RULES:
        wrong = [one for one in conditions if not one.holds(measures)]
        said = ", ".join(one.said(measures) for one in wrong or conditions[2:])
        evidence.append(f"{'not ' if wrong else ''}{kind}: {said}")
        if not wrong:
            return Verdict(kind, tuple(evidence))
    return Verdict("unknown", tuple(evidence))


# ---- what augmentations would do -----------------------------------------------------------------

TELL = 0.6  # share of changed images told from the others from which a change leaves the data
SURE = 2.0  # standard errors that this share must be above one half
DULL = 0.65  # share of the variation that blur must leave
BARE = 0.15  # share of crops that may show nearly nothing


@dataclass(frozen=True)
class Removal:
    """An augmentation that would remove what tells images apart, or make what never occurs."""

    augmentation: str
    reason: str
    figure: float  # what was measured
    settings: tuple[str, ...] = ()  # changes to the preset of the kind, if it needs any


def removals(kind: Kind, measures: Measures) -> tuple[Removal, ...]:
    """The augmentations to leave out or to weaken for these images, each with its reason."""
    found = [_colour(kind, measures), *_poses(kind, measures), _crop(kind, measures)]
    if measures.blurred <= DULL:
        left = f"blur by one pixel of {measures.side} leaves {measures.blurred:.0%} of what varies"
        found.append(
            Removal("blur", f"texture and thin lines are the signal: {left}", measures.blurred)
        )
    return tuple(one for one in found if one is not None)


def _colour(kind: Kind, measures: Measures) -> Removal | None:
    """Colour jitter and grey, where colours lie close together and differ in little."""
    if kind != "tissue":
        return None
    near = f"hues are {measures.one_hue:.0%} alike at a saturation of {measures.saturation:.0%}"
    reason = f"small differences of colour carry the signal ({near})"
    return Removal("hue jitter and grey", reason, measures.one_hue)


def _poses(kind: Kind, measures: Measures) -> list[Removal | None]:
    """Mirror and turns, where changed images can be told from the others."""
    view = PRESETS[VIEWS[kind]][0]
    flip = ("views.flip=0",) if view.flip else ()
    turns = ("views.quarter_turn=false",) if view.quarter_turn else ()
    return [
        _told("mirror", "a mirrored image", measures.mirrored, measures, flip),
        _told("large turns", "an image turned by a quarter", measures.turned, measures, turns),
    ]


def _told(
    what: str, changed: str, share: float | None, measures: Measures, settings: tuple[str, ...]
) -> Removal | None:
    """The removal of a change that makes what never occurs, if it does."""
    if share is None or share < max(TELL, 0.5 + SURE * 0.5 / measures.sampled**0.5):
        return None
    reason = f"{changed} is told from the others in {share:.0%} of cases, by chance it were 50%"
    return Removal(what, reason, share, settings)


def _crop(kind: Kind, measures: Measures) -> Removal | None:
    """Small crops, where what stands out is tiny."""
    least = PRESETS[VIEWS[kind]][0].crop_min
    areas = sorted(measures.bare_crops)
    at = max((area for area in areas if area <= least + 1e-9), default=areas[0])
    share = measures.bare_crops[at]
    if share <= BARE:
        return None
    better = next((a for a in areas if measures.bare_crops[a] <= BARE), areas[-1])
    reason = f"{share:.0%} of crops of {at:.0%} of an image show nearly nothing of what stands out"
    return Removal("small crops", reason, share, (f"views.crop_min={better:g}",))
