"""CBAFed: pseudo-labels by thresholds that are lower for classes with few images so far.

Li et al., Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, 2023,
without residual weight connections, as Louizos et al., A Mutual Information Perspective on
Federated Contrastive Learning, 2024, appendix B.2, compare with it.

    C       number of classes
    n_c     images of class c: labelled ones of all clients that answered before round 1, plus those
            accepted in the last round by the clients that took part in it
    p_c     n_c / sum(n) * C / 10, the class's share; 0.1 for all classes if they are balanced
    T_c     min(p_c + base - std(p), upper), the class's threshold
    q_c     the received model's probability of class c, in evaluation mode, without augmentation

An image without a label is accepted as its most probable class c if q_c > T_c, else as its second
most probable class if that one is rare (p_c < lower). Accepted labels are fixed for the round. The
client then trains on labelled and accepted images alike, by cross-entropy summed over both views,
and its model is weighted in the average by their number.

Messages:

    ask     to                     down                               up
    count   all, before round 1    nothing                            labelled: counts by class
    train   cohort                 model; shares: p; thresholds: T    model; loss; used: number of
                                                                      images; accepted: counts

The server remembers `labelled` and the last round's `accepted`; a client keeps nothing.

As in the released code, std divides by C - 1, and images are accepted above T_c and not at it.
Differences from it: the code trains on one weak view, here there are two as for the other methods
compared. The code has clients with all or no labels, here each has some. In a small cohort,
labelled images count for more in n_c, as they are those of all clients.

The server learns how many labelled and accepted images of each class there are. Without secure
aggregation it learns this for every client: a label distribution, which reveals what a client has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from harmonium.core.devices import to_device, to_host
from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId
from harmonium.data.images import UNKNOWN
from harmonium.federation.method import Method, Server
from harmonium.federation.wire import Ask, Plan, Value, exchange, scalar, statistic, weights
from harmonium.learning.client import Client
from harmonium.learning.context import Context
from harmonium.learning.objectives import Seen
from harmonium.learning.objectives.supervised import known_cross_entropy
from harmonium.learning.parts import Parts
from harmonium.methods import methods
from harmonium.methods.pseudo_labels import class_probabilities, need

COUNTS = statistic("sum", shape=lambda method, examples: (method.world.classes,))  # by class


@dataclass(frozen=True, kw_only=True)
class Labelled(Context):
    """The label of each of the client's images, known or accepted."""

    target: Tensor  # (n,), on the CPU; -1: neither


@methods("cbafed")
@dataclass(frozen=True)
class CBAFed(Method):
    """FedAvg with pseudo-labels accepted by class-balanced thresholds."""

    paper = "Li et al., 2023"
    context = Labelled
    uses_labels: ClassVar[bool] = True
    remembers = {"labelled": "statistic", "accepted": "statistic"}
    reveals = "How many labelled and accepted images of each class a client has leaves it."

    base: float = 0.84  # threshold before p_c is added and std(p) subtracted
    upper: float = 0.95  # largest threshold; published 0.9 for SVHN
    lower: float = 0.03  # classes with a smaller p_c are rare: second choices count

    def __post_init__(self) -> None:
        need(self, 2, "fedsimclr")
        for name in ("base", "upper", "lower"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"method.{name} is {getattr(self, name)}; it must lie between 0 and 1"
                )

    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Count the labelled images of all clients."""
        replies = yield Ask("count", server.everyone)
        if not replies.labelled.sum() > 0:
            raise ConfigError("cbafed needs labels, but no client that answered has any")
        counts = {"labelled": replies.labelled, "accepted": torch.zeros_like(replies.labelled)}
        return replace(server, memory={**server.memory, **counts})

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Send the model and the thresholds; average by the number of images used."""
        # Counts of accepted images are the last round's alone, and not summed over rounds.
        p = shares(server.memory["labelled"] + server.memory["accepted"])
        down = {"shares": p, "thresholds": thresholds(p, self.base, self.upper)}
        replies = yield Ask("train", cohort, {"model": server.model, **down})
        memory = {**server.memory, "accepted": replies.accepted}
        return replace(self.merge(server, replies.model), memory=memory)

    @exchange(up={"labelled": COUNTS})
    def count(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """How many labelled images of each class the client has."""
        return {"labelled": self.counts(client.examples.host_labels())}

    @exchange(
        down={"model": weights(), "shares": statistic(), "thresholds": statistic()},
        up={
            "model": weights(by="used"),
            "loss": scalar("mean", by="used"),
            "used": scalar("sum"),  # images with a label, known or accepted
            "accepted": COUNTS,
        },
    )
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Accept labels once with the received model, then train on all images with a label."""
        parts = self.pull(client, got.model)
        labels = client.examples.host_labels()
        q = class_probabilities(parts, client, self.world.classes)
        q, limits, p = to_host([q, got.thresholds, got.shares])
        guess = accept(q, limits, p < self.lower)
        guess = torch.where(labels == UNKNOWN, guess, UNKNOWN)
        target = torch.where(labels == UNKNOWN, guess, labels)
        used = (target != UNKNOWN).nonzero().flatten()
        context = Labelled(me=client.id, anchor=got.model, target=target)
        done = self.fit(parts, client, among=used, context=context)
        return {
            "model": self.push(client, parts),
            "loss": done.loss,
            "used": len(used),
            "accepted": self.counts(guess),
        }

    def passes_of(self, step: str) -> float:
        """Beside training, one pass accepts labels."""
        return super().passes_of(step) + (1 if step == "train" else 0)

    def score(self, parts: Parts, seen: Seen, context: Labelled) -> Tensor:
        """Cross-entropy of known and accepted labels, summed over the views."""
        logits = parts["classifier"](torch.cat(seen.h))
        target = to_device(context.target[seen.batch.index], logits.device).repeat(len(seen.h))
        return len(seen.h) * known_cross_entropy(logits, target)

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Refuse counts below 0, and counts of more images than the client has."""
        for name in {"labelled", "accepted"} & set(up):
            if up[name].min() < 0 or up[name].sum() > examples:
                return f"`{name}` does not count some of the client's {examples} images"
        return super().reply_fault(step, down, up, examples)

    def counts(self, labels: Tensor) -> Tensor:
        """How many labels there are of each class; unknown ones are left out."""
        known = labels[labels != UNKNOWN]
        return torch.bincount(known, minlength=self.world.classes).float()


def shares(counts: Tensor) -> Tensor:
    """p_c by class, given n_c; 0.1 for each if classes are balanced, whatever their number.

    >>> shares(torch.tensor([3.0, 1.0])), shares(torch.ones(100))[:2]
    (tensor([0.1500, 0.0500]), tensor([0.1000, 0.1000]))
    """
    return counts / counts.sum() * (len(counts) / 10)


def thresholds(p: Tensor, base: float, upper: float) -> Tensor:
    """T_c by class, given the shares p_c.

    >>> thresholds(torch.tensor([0.1, 0.1, 0.1]), base=0.84, upper=0.95)
    tensor([0.9400, 0.9400, 0.9400])
    >>> thresholds(torch.tensor([0.01, 0.09, 0.2]), base=0.84, upper=0.9)  # std(p) = 0.0954
    tensor([0.7546, 0.8346, 0.9000])
    """
    spread = p.std(correction=min(1, len(p) - 1))  # C - 1, but 0 and not nan for a single class
    return (p + base - spread).clamp(max=upper)


def accept(q: Tensor, thresholds: Tensor, rare: Tensor) -> Tensor:
    """The accepted label of each row of q, `(n, classes)`, or -1; `(n,)`.

    Args:
        q: class probabilities.
        thresholds: T_c, what the most probable class must exceed, `(classes,)`.
        rare: whether a class is accepted as second choice, bool `(classes,)`.

    >>> q = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.6, 0.1, 0.3]])
    >>> accept(q, torch.full((3,), 0.8), torch.tensor([False, True, False])).tolist()
    [0, 1, -1]
    """
    probability, first = q.max(1)
    second = q.scatter(1, first[:, None], -1.0).argmax(1)  # the most probable without the first
    # With a single class `second` is the first choice again, which does not count.
    second_choice = torch.where(rare[second] & (second != first), second, UNKNOWN)
    return torch.where(probability > thresholds[first], first, second_choice)
