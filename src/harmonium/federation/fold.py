"""Folding: how the server combines uploads, streaming, weighted and in a fixed order.

Each upload is added into float64 accumulators in the order the clients were asked and then
dropped, so memory does not grow with the number of clients and the result does not depend on
who answered first. Weights are normalised over the clients that answered. Parts of the model pass
through an aggregation first; one that compares clients keeps all uploads of a round in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harmonium.core.errors import NotEnoughReplies
from harmonium.core.types import ClientId, Of, Weights
from harmonium.federation.aggregation import Aggregation, Mean, Upload
from harmonium.federation.wire import (
    EXAMPLES,
    MOST_GROWTH,
    MOST_VALUE,
    Exchange,
    Field,
    Folded,
    fault,
)
from harmonium.learning.parts import Layout, Layouts

_MEAN = Mean()
_WEIGHTLESS = "every answer has weight 0: no client trained on anything"
_AGAINST = "no client's change agrees with the median change as aggregation.agreement asks"


class Tally:
    """The uploads of one ask, combined field by field as they arrive."""

    def __init__(
        self,
        declared: Exchange,
        layouts: Layouts,
        examples: Mapping[ClientId, int],
        *,
        uniform: bool = False,
        aggregation: Aggregation = _MEAN,
        reference: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start empty.

        Args:
            declared: what is uploaded, and how each field is combined.
            layouts: names, shapes and types of the model parts in an upload.
            examples: number of examples of each client, its weight in a mean.
            uniform: weight clients uniformly instead of by their numbers of examples.
            aggregation: how the averaged parts of the model are combined.
            reference: the model that was sent: aggregations look at changes of it, and no sent
                weight may be many times its largest.
        """
        self._declared = declared
        self._layouts = layouts
        self._examples = examples
        self._uniform = uniform
        self._ids: list[ClientId] = []
        self._most = most_weight(reference or {})
        # Once there is a result:
        self.bounded: dict[str, float] = {}  # how many changes the aggregation cut, and how far
        self.left_out: dict[ClientId, str] = {}  # clients that it did not count, and why
        trained = layouts.get("parameters", {})
        sent: dict[Of, Mapping[str, Tensor]] = {"model": reference or {}}  # others are changes
        self._sums: dict[str, _Sum] = {
            name: _Parts(part, layouts[part.of], aggregation, sent.get(part.of, {}), trained)
            if part.fold == "parts"
            else _Sum(part)
            for name, part in declared.up.items()
            if part.fold != "each"
        }
        self._each: dict[str, dict[ClientId, Any]] = {
            name: {} for name, part in declared.up.items() if part.fold == "each"
        }

    def refusal(self, client: ClientId, up: Mapping[str, Any]) -> str | None:
        """Why an upload must not be counted, or None if it may."""
        for name, part in self._declared.up.items():
            value = up[name]
            reason = None
            if part.fold == "parts":
                reason = _misfit(value, self._layouts[part.of])
            elif part.fold in ("mean", "sum", "concat"):
                reason = self._sums[name].misfit(value)
            most = self._most if part.fold == "parts" else MOST_VALUE
            if reason := reason or fault(value, most) or _negative_variance(value):
                return f"`{name}` {reason}"
            weight = 0 if part.by in (None, EXAMPLES) else up[part.by]
            if not 0 <= weight <= self._examples[client]:
                shown = "not finite" if fault(weight) else f"{float(weight):g}"
                return f"weight `{part.by}` is {shown}, not within 0 and the client's examples"
        return None

    def add(self, client: ClientId, up: Mapping[str, Any]) -> None:
        """Count one upload; call in the order the clients were asked."""
        self._ids.append(client)
        for name, part in self._declared.up.items():
            if part.fold == "each":
                self._each[name][client] = up[name]
                continue
            self._sums[name].add(client, up[name], self._weight(part, client, up))

    def _weight(self, part: Field, client: ClientId, up: Mapping[str, Any]) -> float:
        if part.by is None or (part.by == EXAMPLES and self._uniform):
            return 1.0
        return float(self._examples[client] if part.by == EXAMPLES else up[part.by])

    def result(self) -> Folded:
        """Who answered, and every field combined by its declared rule."""
        combined = {name: total.result() for name, total in self._sums.items()}
        for total in self._sums.values():
            if isinstance(total, _Parts):
                self.bounded |= total.bounded()
                self.left_out |= total.left_out
        return Folded(ids=list(self._ids), **self._each, **combined)


class _Sum:
    """One field's running combination."""

    def __init__(self, declared: Field) -> None:
        self._field = declared
        self._weight = 0.0
        self._total: dict[str, Any] = {}
        self._dtypes: dict[str, torch.dtype | None] = {}
        self._pieces: list[Tensor] = []
        self._dtype: torch.dtype | None = None  # of the first tensor; all others must have it too

    def misfit(self, value: Any) -> str | None:
        """Why a value cannot be combined with those before it; None if it can."""
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        dtype = value.dtype if isinstance(value, Tensor) else None
        if dtype is not None and dtype != (self._dtype or dtype):
            return f"is {dtype}, others {self._dtype}"
        if self._field.fold == "concat":
            before = tuple(self._pieces[0].shape[1:]) if self._pieces else shape[1:]
            if not shape:
                return "has no rows"
            return None if shape[1:] == before else f"has rows of {shape[1:]}, others {before}"
        total = self._total.get("")
        before = tuple(total.shape) if isinstance(total, Tensor) else shape if total is None else ()
        return None if shape == before else f"has shape {shape}, others {before}"

    def add(self, client: ClientId, value: Any, weight: float) -> None:
        if isinstance(value, Tensor):
            self._dtype = value.dtype
        if self._field.fold == "concat":
            self._pieces.append(value)
            return
        self._weight += weight
        self._accumulate("", value, 1.0 if self._field.fold == "sum" else weight)

    def _accumulate(self, key: str, value: Any, scale: float) -> None:
        if key not in self._total:
            is_tensor = isinstance(value, Tensor)
            self._dtypes[key] = value.dtype if is_tensor else None
            self._total[key] = torch.zeros_like(value, dtype=torch.float64) if is_tensor else 0.0
        if isinstance(value, Tensor):
            self._total[key].add_(value, alpha=scale)
        else:
            self._total[key] += scale * value

    def result(self) -> Any:
        if self._field.fold == "concat":
            return torch.cat(self._pieces) if self._pieces else None
        self._finish(mean=self._field.fold != "sum")
        return self._total.get("")

    def _finish(self, mean: bool) -> None:
        """Divide by the weights for a mean, and convert to the types that were uploaded."""
        if mean and self._total and not self._weight > 0:
            raise NotEnoughReplies(_WEIGHTLESS)
        for key, dtype in self._dtypes.items():
            if mean:
                self._total[key] = self._total[key] / self._weight
            # The mean of integers is not an integer: it stays float64.
            if dtype is not None and (dtype.is_floating_point or not mean):
                self._total[key] = self._total[key].to(dtype)


class _Parts(_Sum):
    """Parts of the model: rows by owner, counters by the largest, the rest by an aggregation."""

    def __init__(
        self,
        declared: Field,
        layout: Layout,
        aggregation: Aggregation,
        sent: Mapping[str, Tensor],
        trained: Collection[str],
    ) -> None:
        super().__init__(declared)
        self._layout = layout
        self._aggregation = aggregation
        self._sent = sent
        self._trained = trained
        self._uploads: list[Upload] = []
        self._factors: list[float] = []  # by which changes were scaled down
        self.left_out: dict[ClientId, str] = {}

    def bounded(self) -> dict[str, float]:
        """How many changes were shortened, the smallest factor, and how many were left out."""
        shown: dict[str, float] = {}
        if self._factors:
            shown["shortened"] = len(self._factors)
            shown["shortened_to"] = min(self._factors)  # the one that lost most
        if self.left_out:
            shown["left_out"] = len(self.left_out)
        return shown

    def add(self, client: ClientId, value: Any, weight: float) -> None:
        floats = {}
        for key, tensor in value.items():
            if self._layout[key].rule == "row":
                self._total.setdefault(key, {})[client] = tensor
            elif tensor.is_floating_point():
                floats[key] = tensor
            else:  # counters such as BatchNorm's number of batches
                largest = self._total.get(key)
                self._total[key] = tensor if largest is None else torch.maximum(largest, tensor)
        if self._aggregation.holds:
            self._uploads.append(Upload(weight, floats, client=client))
        else:
            self._settle([Upload(weight, floats, client=client)])

    def _settle(self, uploads: Sequence[Upload]) -> None:
        for settled in self._aggregation.settle(uploads, self._sent, self._trained):
            if settled.note and settled.client is not None:
                self.left_out[settled.client] = settled.note
                continue
            self._factors += [settled.factor] if settled.factor < 1 else []
            self._weight += settled.weight
            for key, tensor in settled.tensors.items():
                self._accumulate(key, tensor, settled.weight)

    def result(self) -> Weights:
        if self._uploads:
            counted = [upload for upload in self._uploads if upload.weight > 0]
            if not counted:
                raise NotEnoughReplies(_WEIGHTLESS)
            self._settle(counted)
            if len(self.left_out) == len(counted):
                raise NotEnoughReplies(_AGAINST)
            self._uploads.clear()
        self._finish(mean=True)
        return self._total


def most_weight(model: Mapping[str, Tensor]) -> float:
    """The largest absolute value that a weight trained from a model may have.

    >>> most_weight({"w": torch.tensor([0.5, -2.0])})
    2000000.0
    """
    floats = (tensor for tensor in model.values() if tensor.numel() and tensor.is_floating_point())
    ends = (torch.aminmax(tensor.detach()) for tensor in floats)
    return MOST_GROWTH * max([1.0, *(float(max(-low, high)) for low, high in ends)])


def _negative_variance(value: Any) -> str | None:
    """Which variance of a BatchNorm is below 0, if any; no data gives such a variance."""
    for key, tensor in value.items() if isinstance(value, dict) else ():
        if key.endswith("running_var") and bool((tensor < 0).any()):
            return f"{key} is a variance below 0"
    return None


def _misfit(value: Weights, layout: Layout) -> str | None:
    """How model parts differ from those of the layout; None if they do not."""
    if extra := sorted(set(value) - set(layout)):
        return f"has {extra[0]}, which is not a shared part"
    if missing := sorted(set(layout) - set(value)):
        return f"lacks {missing[0]}"
    for key, tensor in value.items():
        slot = layout[key]
        if not isinstance(tensor, Tensor):
            return f"{key} is not a tensor"
        if tuple(tensor.shape) != slot.shape:
            return f"{key} has shape {tuple(tensor.shape)}, not {slot.shape}"
        if tensor.dtype != slot.dtype:
            return f"{key} is {tensor.dtype}, not {slot.dtype}"
    return None
