"""The comparison of an encoder with references that need no training, in one sentence.

Every probe's answers are compared image by image with those of each reference. A difference counts
when it is larger than chance explains on the same test images: McNemar's test with its continuity
correction, at 95 %; where a probe drew its labels several times, the scatter over draws is added.
A smaller difference is a tie. Over seeds, Student's interval decides; where few seeds
make it so wide that it includes a difference beyond the noise of the test part, the sentence says
that the encoder is above or below, and that the seeds are too few to confirm it.

Where the encoder is not better, label-free figures may say why: a collapsed representation, too few
steps, views that have little in common. They make a reason probable, never certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from harmonium.core.errors import counted
from harmonium.evaluation.metrics import Answers

CONFIDENCE = 1.959964  # standard errors of a two-sided interval of 95 %
FEW_STEPS = 300  # local steps over all rounds: below it, little can have been learnt
FALLING = 0.15  # of the whole fall of the loss, in the last quarter of the rounds
FAR = 0.7  # distance of two views, in units of that of two images: they share little
CALLED = {  # in a sentence
    "commonest class": "always naming the commonest class",
    "untrained": "the untrained encoder",
}
Outcome = Literal["better", "tie", "worse"]


@dataclass(frozen=True)
class Difference:
    """An encoder's accuracy less a reference's on the same test images; shares between 0 and 1."""

    encoder: float
    reference: float
    margin: float  # smaller differences may be chance
    seeds: int = 1  # whose means these are
    noise: float = math.inf  # of several seeds: differences up to this are level

    @property
    def outcome(self) -> Outcome:
        """Whether the encoder is better, worse, or neither beyond the noise."""
        apart = self.encoder - self.reference
        if abs(apart) <= self.margin:
            return "tie"
        return "better" if apart > 0 else "worse"

    @property
    def standing(self) -> tuple[str, str]:
        """The words of a sentence before the name of the reference, and those after the figures."""
        if self.outcome != "tie":
            return f"{self.outcome.capitalize()} than", ""
        apart = self.encoder - self.reference
        if abs(apart) <= self.noise:
            return "No better than", ""
        seeds = counted(self.seeds, "seed")
        return (
            "Below" if apart < 0 else "Above",
            f", which {seeds} {'is' if self.seeds == 1 else 'are'} too few to confirm",
        )


def difference(encoder: Tensor, reference: Tensor) -> Difference:
    """Compare right answers `(draws, images)`, as shares where they are means over encoders.

    >>> some = torch.tensor([[1.0] * 30 + [0.0] * 10])
    >>> difference(some, some.flip(1)).outcome, difference(some, 0 * some).outcome
    ('tie', 'better')
    """
    first, second = encoder.double(), reference.double()
    apart = first - second  # a reference without draws is the same in each
    draws, images = apart.shape
    noise = float(apart.mean(dim=0).square().sum()) / images**2
    if draws > 1:
        noise += float(apart.mean(dim=1).var(correction=1)) / draws
    margin = CONFIDENCE * math.sqrt(noise) + 1 / images
    return Difference(float(first.mean()), float(second.mean()), margin)


@dataclass(frozen=True)
class Verdict:
    """How an encoder compares with its references."""

    text: str  # one sentence
    reasons: tuple[str, ...]  # probable ones, where it is not better throughout
    probes: Mapping[str, Mapping[str, Mapping[str, Any]]]  # by probe and reference: the difference

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {"text": self.text, "reasons": list(self.reasons), "probes": dict(self.probes)}


def verdict(
    encoders: Sequence[Mapping[str, Answers]],
    references: Mapping[str, Mapping[str, Answers]],
    reasons: Sequence[str] = (),
) -> Verdict | None:
    """How the mean of some encoders compares with references; none without labels.

    Args:
        encoders: answers by probe of every encoder; empty where one has diverged.
        references: answers by probe of every reference, the weakest first.
        reasons: why it may be no better, used where it is not.
    """
    probes = [probe for answers in references.values() for probe in answers]
    probes = list(dict.fromkeys(probes))
    if not probes or not encoders:
        return None
    if not all(encoders):
        return Verdict("Unusable: its features are not finite numbers.", tuple(reasons), {})
    differences: dict[str, dict[str, Difference]] = {}
    for probe in probes:
        right = torch.stack([answers[probe].right.double() for answers in encoders]).mean(dim=0)
        differences[probe] = {
            name: difference(right, answers[probe].right)
            for name, answers in references.items()
            if probe in answers
        }
    better = all(
        gap.outcome == "better" for by_name in differences.values() for gap in by_name.values()
    )
    plain = {
        probe: {
            name: {
                "encoder": gap.encoder,
                "reference": gap.reference,
                "margin": gap.margin,
                "outcome": gap.outcome,
            }
            for name, gap in by_name.items()
        }
        for probe, by_name in differences.items()
    }
    return Verdict(sentence(differences), () if better else tuple(reasons), plain)


def label_free(health: Mapping[str, Any], untrained: Mapping[str, Any]) -> str:
    """What can be said of an encoder without labels, in plain words.

    Args:
        health: of the encoder, as `Evaluator` gives it.
        untrained: the same of the encoder before training.

    >>> before = {"finite": True, "directions": 3.0, "effective_rank": 9.1, "spread": 0.12}
    >>> label_free({**before, "directions": 7.21}, before).partition(";")[0]
    'Not collapsed: features use about 7.2 directions (untrained 3.0)'
    """
    if not health.get("finite"):
        return "Unusable: its features are not finite numbers."
    if warnings := health.get("warnings"):
        return f"Collapsed. {warnings[0]}"

    def of(key: str, digits: int, unit: str = "") -> str:
        before = untrained.get(key)
        known = "" if before is None else f" (untrained {before:.{digits}f})"
        return f"{health[key]:.{digits}f}{unit}{known}"

    return (
        f"Not collapsed: features use about {of('directions', 1, ' directions')}; effective rank "
        f"{of('effective_rank', 1)}, spread {of('spread', 2)}. Without labels nothing more can "
        "be said: give labels by class folders, by data.label_column of a table, or to "
        "`harmonium classify fit`."
    )


def changes(plain: Mapping[str, Answers], whitened: Mapping[str, Answers]) -> dict[str, Any]:
    """What whitening changes, by probe: accuracies before and after, and whether beyond noise."""
    differences = {
        probe: difference(answers.right, plain[probe].right) for probe, answers in whitened.items()
    }
    return {
        probe: {
            "plain": gap.reference,
            "whitened": gap.encoder,
            "margin": gap.margin,
            "outcome": gap.outcome,
        }
        for probe, gap in differences.items()
    }


def sentence(differences: Mapping[str, Mapping[str, Difference]]) -> str:
    """Which probes beat every reference, and which do not, with the strongest that they miss."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for probe, by_name in differences.items():
        missed = {name: gap for name, gap in by_name.items() if gap.outcome != "better"}
        if not missed:
            names = _listed(CALLED.get(name, name) for name in by_name)
            groups.setdefault(("Better than", names, ""), []).append(by(probe))
            continue
        name = max(missed, key=lambda name: missed[name].reference)
        gap = missed[name]
        how, after = gap.standing
        figures = f"({100 * gap.encoder:.1f} against {100 * gap.reference:.1f} %)"
        key = (how, CALLED.get(name, name), after)
        groups.setdefault(key, []).append(f"{by(probe)} {figures}")
    order = ("Worse than", "Below", "No better than", "Above", "Better than")
    clauses = [
        f"{how} {name} {_listed(groups[how, name, after])}{after}"
        for how, name, after in sorted(groups, key=lambda key: order.index(key[0]))
    ]
    if len(clauses) == 1 and len(differences) > 1 and clauses[0].startswith("Better"):
        _, names, _ = next(iter(groups))
        return f"Better than {names} by every probe."
    return (
        "; ".join([clauses[0], *(clause[0].lower() + clause[1:] for clause in clauses[1:])]) + "."
    )


def by(probe: str) -> str:
    """The probe in the words of a sentence.

    >>> by("knn"), by("linear_10"), by("linear_1")
    ('by kNN', 'with 10 labels a class', 'with 1 label a class')
    """
    count = probe.rpartition("_")[2]
    if count.isdigit():
        return f"with {count} {'label' if count == '1' else 'labels'} a class"
    phrases = {
        "knn": "by kNN",
        "linear": "by a linear probe",
        "linear_labelled": "with known labels",
    }
    return phrases.get(probe, f"by {probe}")


def _listed(words: Iterable[str]) -> str:
    """Words joined as in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def reasons(
    health: Mapping[str, Any],
    losses: Sequence[float | None],
    steps: float | None,
    *,
    compares_views: bool = True,
) -> tuple[str, ...]:
    """Why an encoder may be no better than its references, from figures that need no labels.

    Args:
        health: of the encoder, as `Evaluator` gives it; its warnings come first.
        losses: of all rounds, the first one first.
        steps: local optimiser steps that the model went through; none: not known.
        compares_views: whether the objective compares views of an image; if not, no reason is
            about views.
    """
    listed = [str(text) for text in health.get("warnings", ())]
    if steps is not None and steps < FEW_STEPS:
        listed.append(
            f"Too few steps: about {steps:.0f} local optimiser steps over all rounds; raise "
            "rounds or local.epochs, or lower local.batch."
        )
    if falling := _falling_loss(losses):
        listed.append(falling)
    if not compares_views:
        return tuple(listed)
    distance = health.get("view_distance")
    if distance is not None and distance > FAR and not health.get("warnings"):
        listed.append(
            "Views share little: two views of an image are "
            f"{distance:.2f} times as far apart as two images; weaken the augmentation, or train "
            "longer."
        )
    if not listed and health.get("finite", True):
        listed.append(
            "The representation is healthy and training has converged, so the views may "
            "remove what distinguishes these classes: leave out what changes it (crops, colours, "
            "mirror images)."
        )
    return tuple(listed)


def _falling_loss(losses: Sequence[float | None]) -> str:
    """That the loss was still falling in the last quarter of the rounds; empty if it was not."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(known) < 8:
        return ""
    quarter = len(known) // 4
    first = sum(known[:2]) / 2
    before, last = (sum(some) / 2 for some in (known[-quarter - 2 : -quarter], known[-2:]))
    fall = first - last
    if fall <= 0 or before - last <= FALLING * fall:
        return ""
    return (
        f"Training had not converged: the loss fell from {before:.3g} to {last:.3g} in the "
        "last quarter of the rounds; raise rounds."
    )
