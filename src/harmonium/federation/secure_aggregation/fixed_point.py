"""Fields that a sum over clients can express, and fixed-point numbers that add up exactly.

Under secure aggregation the server learns sums and nothing else. A mean is a sum of weighted
values; values become whole numbers modulo 2**64 (fixed point), so that masks cancel to the bit and
the order of adding does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.core.types import ClientId
from harmonium.federation.aggregation import Mean
from harmonium.federation.wire import EXAMPLES, Exchange, Field, changes_model, fault
from harmonium.learning.contract import called

if TYPE_CHECKING:
    from harmonium.federation.method import Method

FEWEST = 3  # in a sum of two, each learns the other's value
FAR = 10.0  # longest change of what is trained, in lengths of the model that was sent
WIDE = 1e4  # largest number in the rest of a model, in sizes of the largest one that was sent
ROOM = 62  # bits that a sum may fill; with more its sign would be lost
UNREAD = "num_batches_tracked"  # BatchNorm's counter, which nothing reads: its mean suffices
_SUMMED = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
KINDS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _SUMMED}


@dataclass(frozen=True)
class Masks:
    """Secure aggregation, and how many clients it takes."""

    threshold: float = 0.66  # share of those who began a masked ask that must stay to its end

    def shares(self, began: int) -> int:
        """How many clients must reveal their shares: always more than half.

        >>> [Masks().shares(began) for began in (3, 4, 10)]
        [2, 3, 7]
        """
        return max(began // 2 + 1, math.ceil(self.threshold * began - 1e-9))

    def answers(self, began: int) -> int:
        """How many clients a sum must be over."""
        return max(FEWEST, self.shares(began))

    def check(self, method: Method, clients: int) -> None:
        """Refuse a method with an exchange that cannot be summed, and too few clients."""
        for step, fields in obstacles(method).items():
            for name, why in fields.items():
                if why:
                    raise ConfigError(
                        f"privacy.secure_aggregation cannot hide `{name}` of "
                        f"{called(method)}.{step}: {why}, or leave secure aggregation off"
                    )
        if clients < FEWEST:
            raise ConfigError(
                f"privacy.secure_aggregation needs at least {FEWEST} clients a round, because "
                f"of two each learns the other's answer; this recipe asks {clients}"
            )


def obstacles(method: Method) -> dict[str, dict[str, str]]:
    """Why a sum cannot express a field, by exchange and field; empty text where it can."""
    return {
        step: {name: _obstacle(method, declared, name) for name in declared.up}
        for step, declared in method.exchanges().items()
    }


def _obstacle(method: Method, exchange: Exchange, name: str) -> str:
    """Why a sum cannot express one field; empty where it can."""
    field = exchange.up[name]
    if any(other.by == name for other in exchange.up.values()) and field.fold != "sum":
        return 'it weighs other fields and is no sum; declare it scalar("sum")'
    if field.fold == "each":
        return "the server gets it client by client (each); declare a mean or a sum"
    if field.fold == "concat":
        return "the server gets the rows of every client (concat); declare a mean or a sum"
    return _obstacle_of_parts(method, field) if field.fold == "parts" else ""


def _obstacle_of_parts(method: Method, field: Field) -> str:
    """Why parts of the model cannot be averaged by a sum; empty where they can."""
    layout = method.blueprint.layouts()[field.of]
    if layout and method.transport.obstacle:
        return method.transport.obstacle
    if layout and type(method.aggregation) is not Mean:
        way = method.aggregation.name or type(method.aggregation).__name__
        return f"aggregation={way} looks at single clients; set aggregation=mean"
    for key, slot in layout.items():
        if slot.rule == "row":
            return (
                f"{key} has a row for each client, so the server must know whose it is; leave out "
                "what has such rows"
            )
        if not slot.dtype.is_floating_point and not key.endswith(UNREAD):
            return f"{key} is a counter, of which the largest is kept; keep its part at the client"
    return ""


# ---- numbers ---------------------------------------------------------------------------------


def bits(part: Field) -> int:
    """Binary digits after the point: a mean's values are small, a sum's grow with the clients."""
    return 32 if part.fold == "sum" else 40


def most(part: Field, clients: int) -> float:
    """The largest absolute value for which the sum over `clients` clients fits."""
    return float(2 ** (ROOM - bits(part)) / (clients if part.fold == "sum" else 1))


@dataclass(frozen=True)
class Weighing:
    """Weights of clients in a masked ask: shares of the whole, so that sums stay in range."""

    examples: Mapping[ClientId, int]  # registered numbers; a client knows its own alone
    total: int  # examples of all who began
    began: int  # number of clients that began
    uniform: bool  # weight clients uniformly instead of by examples

    def share(self, part: Field, client: ClientId, up: Mapping[str, Any]) -> float:
        """A client's share in a field: what its value is multiplied by."""
        if part.fold == "sum":
            return 1.0
        if part.by is None or (part.by == EXAMPLES and self.uniform):
            return 1.0 / self.began
        weight = self.examples[client] if part.by == EXAMPLES else up[part.by]
        return float(weight) / max(self.total, 1)

    def whole(self, part: Field, counted: list[ClientId], sums: Mapping[str, Any]) -> float:
        """The divisor of a sum over some clients; `sums` has the fields that weight others."""
        if part.fold == "sum":
            return 1.0
        if part.by not in (None, EXAMPLES):
            return float(sums[str(part.by)]) / max(self.total, 1)
        return math.fsum(self.share(part, client, {}) for client in counted)


@dataclass(frozen=True)
class Reach:
    """The largest plausible change of a model, for each client and so for their mean.

    A mean is at most as far from the sent model as its furthest client, so the server can detect
    from the mean alone that some client exceeded the bound, but not which.
    """

    sent: Mapping[str, Tensor]  # the model that clients began with; none: nothing is known
    trained: Collection[str]
    clip: float | None = None  # what clients shorten their changes to
    noise: float = 0.0  # standard deviation of what clients add to every number

    @classmethod
    def of(cls, method: Method, declared: Exchange, down: Mapping[str, Any]) -> Reach:
        """The reach of an exchange, given what is sent to clients."""
        sent = down.get("model", {}) if changes_model(declared) else {}
        trained, updates = method.blueprint.layouts()["parameters"], method.updates
        if updates is None:
            return cls(sent, trained)
        noise = 2 * updates.clip * updates.noise if updates.guards else 0.0
        return cls(sent, trained, updates.clip, noise)

    def excess(self, up: Mapping[str, Any]) -> str | None:
        """Where an upload, or the mean of uploads, goes too far; None if it does not."""
        model = up.get("model", {})
        floats = [k for k, t in self.sent.items() if t.is_floating_point() and k in model]
        moved = [key for key in floats if self.clip is not None or key in self.trained]
        length = _length(self.sent[key].double() for key in moved)
        limit = FAR * max(1.0, length)
        if self.clip is not None:  # the length of noise is close to its mean in many dimensions
            count = sum(self.sent[key].numel() for key in moved)
            limit = self.clip + self.noise * (math.sqrt(count) + 10)
        change = _length(model[key].double() - self.sent[key] for key in moved)
        if change > limit + 1e-5 * (length + limit):  # and rounding
            return f"`model` is {change:.4g} from the one that was sent, beyond {limit:.4g}"
        largest = max((size_of(self.sent[key]) for key in floats), default=0.0)
        limit = WIDE * max(1.0, largest)
        for key in sorted(set(floats) - set(moved)):
            if (size := size_of(model[key])) > limit:
                return f"`model` {key} is {size:.4g}, beyond {limit:.4g}"
        return None


def _length(tensors: Iterator[Tensor]) -> float:
    """The norm of all of them together."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def pieces(declared: Mapping[str, Field], up: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every tensor or number of an upload with its field and its name, in a fixed order."""
    for name in declared:
        if isinstance(up[name], Mapping):
            yield from ((name, key, up[name][key]) for key in sorted(up[name]))
        else:
            yield name, "", up[name]


def unfit(
    declared: Mapping[str, Field], client: ClientId, up: Mapping[str, Any], weighing: Weighing
) -> str | None:
    """Why an upload cannot be summed; None if it can. The server cannot check it under masks."""
    for name, key, value in pieces(declared, up):
        where = f"`{name}` {key}".rstrip()
        if isinstance(value, Tensor) and kind_of(value) not in KINDS:
            return f"{where} is {value.dtype}, which cannot be summed"
        if reason := fault(value):
            return f"{where} {reason}"
        size, limit = size_of(value), most(declared[name], weighing.began)
        if size > limit:
            return f"{where} is {size:g}, beyond {limit:g}, the most secure aggregation can carry"
    for by in {part.by for part in declared.values()} - {None, EXAMPLES}:
        weight = float(up[str(by)])
        if not 0 <= weight <= weighing.examples[client]:
            return f"weight `{by}` is {weight:g}, not within 0 and the client's examples"
    return None


def kind_of(tensor: Tensor) -> str:
    """The name of a tensor's type, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def size_of(value: Any) -> float:
    """The largest absolute value."""
    if not isinstance(value, Tensor):
        return abs(float(value))
    low, high = value.aminmax() if value.numel() else (0.0, 0.0)
    return max(-float(low), float(high))


def to_whole(
    declared: Mapping[str, Field], client: ClientId, up: Mapping[str, Any], weighing: Weighing
) -> np.ndarray:
    """All values of an upload as one vector of whole numbers modulo 2**64."""
    values_by_name = list(pieces(declared, up))
    vector = np.empty(sum(_count(value) for _, _, value in values_by_name), dtype=np.int64)
    start = 0
    for name, _, value in values_by_name:
        part, end = declared[name], start + _count(value)
        factor = weighing.share(part, client, up) * 2.0 ** bits(part)
        values = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1).numpy()
        vector[start:end] = np.rint(values * factor)
        start = end
    return vector.view(np.uint64)


def from_whole(vector: np.ndarray, part: Field) -> Tensor:
    """The weighted sums that a piece of an opened vector encodes."""
    return torch.from_numpy(vector.view(np.int64) / 2.0 ** bits(part))


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 1
