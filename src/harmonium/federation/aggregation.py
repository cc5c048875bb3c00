"""Aggregation of clients' model parts, also robust against malicious clients.

`mean` trusts every client: a single one can move the result anywhere. The others bound the
influence of a few malicious clients, at a cost in accuracy where honest clients differ. They act on
the tensors of the model that are averaged; rows of one client are not mixed with others, counters
take the maximum, and other statistics of a method are combined as it declares.

- `median` and `trimmed`: coordinate by coordinate (Yin et al., Byzantine-Robust Distributed
  Learning, 2018, definitions 1 and 2). As there, every client counts alike: numbers of examples
  are not used, but a client of weight 0 is left out. BatchNorm's statistics are treated in the same
  way, because they can be poisoned, too.
- `norm-bound`: a longer change is shortened to the bound and keeps its direction (Sun et al., Can
  You Really Backdoor Federated Learning?, 2019). Weights count as in the mean. A given bound is
  for trained parameters; BatchNorm's statistics and EMA twins are then averaged plainly. Without
  one the bound is the median length of the round's changes, and changes of all other tensors are
  bounded by their own median, because statistics can be poisoned, too. A client with many more
  images than the median takes more steps, so that its change is shortened much; `weighted` takes
  the median over images, which is safe while malicious clients hold fewer than half of them. A
  bounded change can still point in the wrong direction in every round. With `agreement`, a client
  whose change of the trained parameters has a smaller cosine with the coordinate-wise median of all
  changes is left out of the round's mean.

`median`, `trimmed` and a norm bound that is not given need all uploads of a round at once: memory
grows with the number of clients. `mean` and a given norm bound need only one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.registry import Registry
from harmonium.core.types import ClientId, Weights


class Upload(NamedTuple):
    """One client's upload of the tensors that are averaged."""

    weight: float  # in the mean
    tensors: Weights  # the floating ones, by name
    factor: float = 1.0  # by which its change was shortened
    client: ClientId | None = None  # none: the settled upload of several clients
    note: str = ""  # why it is left out, if it is


@dataclass(frozen=True)
class Aggregation:
    """How uploads are combined; the base class averages them as they are."""

    name: ClassVar[str] = ""

    def check(self, clients: int) -> None:
        """Refuse settings that have no effect with this number of clients per round."""

    @property
    def holds(self) -> bool:
        """Whether all uploads of a round are needed at once."""
        return False

    def settle(
        self, uploads: Sequence[Upload], sent: Mapping[str, Tensor], trained: Collection[str]
    ) -> Iterator[Upload]:
        """The uploads to average instead of these, in the same types.

        Args:
            uploads: all of a round if `holds`, else one; each has a weight above 0.
            sent: what the clients started from; a tensor that it lacks was uploaded as a change.
            trained: names of the trained tensors.
        """
        yield from uploads


aggregations: Registry[Aggregation] = Registry("aggregation", "harmonium.federation", Aggregation)


@aggregations("mean")
@dataclass(frozen=True)
class Mean(Aggregation):
    """The weighted mean; it trusts every client."""


@aggregations("median")
@dataclass(frozen=True)
class Median(Aggregation):
    """The median of each coordinate; robust if fewer than half of the clients are malicious."""

    @property
    def holds(self) -> bool:
        """All uploads of a round are compared."""
        return True

    def settle(
        self, uploads: Sequence[Upload], sent: Mapping[str, Tensor], trained: Collection[str]
    ) -> Iterator[Upload]:
        """The middle value, or the mean of the two middle values."""
        yield Upload(1.0, _middle(uploads, (len(uploads) - 1) // 2))


@aggregations("trimmed")
@dataclass(frozen=True)
class Trimmed(Aggregation):
    """The mean of each coordinate without its extremes; robust to a share `trim` of clients."""

    trim: float = 0.1  # share of the clients cut off at each end, rounded down

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ConfigError(
                f"aggregation.trim is {self.trim}; it must be at least 0 and below 0.5"
            )

    def check(self, clients: int) -> None:
        """Refuse a share of less than one client, which would be the plain mean."""
        if self.trim and not self._cut(clients):
            right = f"at least {math.ceil(100 / clients) / 100:g}" if clients > 2 else "0"
            raise ConfigError(
                f"aggregation.trim is {self.trim}, which trims none of {clients} clients a round; "
                f"it must be {right}"
            )

    @property
    def holds(self) -> bool:
        """All uploads of a round are compared."""
        return True

    def _cut(self, clients: int) -> int:
        return math.floor(self.trim * clients + 1e-9)  # 0.29 * 100 is 28.999...

    def settle(
        self, uploads: Sequence[Upload], sent: Mapping[str, Tensor], trained: Collection[str]
    ) -> Iterator[Upload]:
        """The mean of the remaining values."""
        cut = self._cut(len(uploads))
        yield Upload(1.0, _middle(uploads, min(cut, (len(uploads) - 1) // 2)))


@aggregations("norm-bound")
@dataclass(frozen=True)
class NormBound(Aggregation):
    """The weighted mean of changes, none longer than a bound."""

    bound: float | None = None  # longest change; none: the median length of the round's changes
    agreement: float | None = None  # least cosine with the median change; none: clients may differ
    weighted: bool = False  # the median length counts clients by their weights, not alike

    def __post_init__(self) -> None:
        if self.bound is not None and not self.bound > 0:
            raise ConfigError(f"aggregation.bound is {self.bound}; it must be above 0, or none")
        if self.agreement is not None and not -1 <= self.agreement < 1:
            raise ConfigError(
                f"aggregation.agreement is {self.agreement}; it is a cosine, so it must be at "
                "least -1 and below 1, or none"
            )

    @property
    def holds(self) -> bool:
        """Medians need all changes of a round; a given bound needs one at a time."""
        return self.bound is None or self.agreement is not None

    def settle(
        self, uploads: Sequence[Upload], sent: Mapping[str, Tensor], trained: Collection[str]
    ) -> Iterator[Upload]:
        """Each upload in turn, shortened if its change is too long, else as it is."""
        factors = self._factors(uploads, sent, trained)
        others = {key for one in uploads for key in one.tensors} - set(trained)
        rest = self._factors(uploads, sent, others) if self.bound is None else [1.0] * len(factors)
        bounded = [
            upload._replace(
                tensors=_shortened(
                    _shortened(upload.tensors, factor, sent, trained), other, sent, others
                ),
                factor=min(factor, other),
            )
            for upload, factor, other in zip(uploads, factors, rest, strict=True)
        ]
        if self.agreement is None:
            yield from bounded
        else:
            yield from _agreeing(bounded, self.agreement, sent, trained)

    def _factors(
        self, uploads: Sequence[Upload], sent: Mapping[str, Tensor], keys: Collection[str]
    ) -> list[float]:
        """By how much each upload's change of some tensors must shrink; 1: not at all."""
        norms = [_norm(one.tensors, sent, keys) for one in uploads]
        bound = self.bound
        if bound is None:
            bound = _median(norms, [one.weight if self.weighted else 1 for one in uploads])
        return [1.0 if norm <= bound else bound / norm for norm in norms]


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median; of two middle values the lower, as the upper one may be malicious.

    >>> _median([5, 1, 9, 3], [1, 1, 1, 1]), _median([5, 1, 9, 3], [10, 1, 1, 1])
    (3, 5)
    """
    half, below = sum(weights) / 2, 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= half:
            return value
    return math.nan


def _agreeing(
    uploads: Sequence[Upload],
    agreement: float,
    sent: Mapping[str, Tensor],
    trained: Collection[str],
) -> Iterator[Upload]:
    """Each upload in turn; a change whose cosine with the median change is lower gets a note."""
    median = _middle(uploads, (len(uploads) - 1) // 2)
    for upload in uploads:
        cosine = _cosine(upload.tensors, median, sent, trained)
        note = f"left out of the mean: cosine {cosine:.2f} with the median change"
        yield upload if cosine >= agreement else upload._replace(note=note)


def _middle(uploads: Sequence[Upload], cut: int) -> Weights:
    """Coordinate-wise mean without the `cut` smallest and the `cut` largest values."""
    middle = {}
    for key, first in uploads[0].tensors.items():
        ordered = torch.stack([one.tensors[key] for one in uploads]).sort(dim=0).values
        kept = ordered[cut : len(uploads) - cut]
        middle[key] = kept.mean(dim=0, dtype=torch.float64).to(first.dtype)
    return middle


def _change(key: str, tensor: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    return tensor.double() - sent[key] if key in sent else tensor.double()


def _norm(tensors: Weights, sent: Mapping[str, Tensor], keys: Collection[str]) -> float:
    """The length of some changes together, added up in a fixed order."""
    keys = sorted(set(tensors).intersection(keys))
    return math.sqrt(sum(_change(k, tensors[k], sent).square().sum().item() for k in keys))


def _cosine(
    tensors: Weights, other: Weights, sent: Mapping[str, Tensor], keys: Collection[str]
) -> float:
    """The cosine between two changes of some tensors; 1 if one of them is zero."""
    keys = sorted(set(tensors).intersection(keys))
    pairs = ((_change(k, tensors[k], sent), _change(k, other[k], sent)) for k in keys)
    inner = sum((one * two).sum().item() for one, two in pairs)
    lengths = _norm(tensors, sent, keys) * _norm(other, sent, keys)
    return inner / lengths if lengths else 1.0


def _shortened(
    tensors: Weights, factor: float, sent: Mapping[str, Tensor], keys: Collection[str]
) -> Weights:
    """The upload with some of its changes times `factor`."""
    if factor == 1:
        return tensors
    shorter = dict(tensors)
    for key in set(tensors).intersection(keys):
        change = factor * _change(key, tensors[key], sent)
        shorter[key] = (sent[key] + change if key in sent else change).to(tensors[key].dtype)
    return shorter
