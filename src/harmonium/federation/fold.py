"""How the server combines what clients sent: streaming, weighted, in a fixed order.

Each upload is added into float64 accumulators in the order the clients were asked and then
dropped, so memory does not grow with the number of clients and the result does not depend on
who answered first. Weights are normalised over those who answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmonium.errors import NotEnoughReplies
from harmonium.federation.wire import (
    EXAMPLES,
    ClientId,
    Exchange,
    Field,
    Folded,
    Of,
    Rule,
    Weights,
    fault,
)


@dataclass(frozen=True)
class Slot:
    """What one shared tensor of the model looks like in an upload."""

    rule: Rule
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = Mapping[str, Slot]
Layouts = Mapping[Of, Layout]


class Tally:
    """The uploads of one ask, combined field by field as they arrive."""

    def __init__(
        self,
        declared: Exchange,
        layouts: Layouts,
        examples: Mapping[ClientId, int],
        *,
        uniform: bool = False,
    ) -> None:
        """Start empty; `layouts` say what model uploads must look like, `examples` weighs them.

        `uniform` counts every client alike wherever its number of examples would weigh it.
        """
        self._declared = declared
        self._layouts = layouts
        self._examples = examples
        self._uniform = uniform
        self._ids: list[ClientId] = []
        self._sums: dict[str, _Sum] = {
            name: _Sum(part) for name, part in declared.up.items() if part.fold != "each"
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
            if reason := reason or fault(value):
                return f"`{name}` {reason}"
            if part.by not in (None, EXAMPLES):
                weight = float(up[part.by])
                if not 0 <= weight <= self._examples[client]:
                    return (
                        f"weight `{part.by}` is {weight:g}, not within 0 and the client's examples"
                    )
        return None

    def add(self, client: ClientId, up: Mapping[str, Any]) -> None:
        """Count one upload; call in the order the clients were asked."""
        self._ids.append(client)
        for name, part in self._declared.up.items():
            if part.fold == "each":
                self._each[name][client] = up[name]
                continue
            weight, layout = self._weight(part, client, up), self._layouts[part.of]
            self._sums[name].add(client, up[name], weight, layout)

    def _weight(self, part: Field, client: ClientId, up: Mapping[str, Any]) -> float:
        if part.by is None or (part.by == EXAMPLES and self._uniform):
            return 1.0
        return float(self._examples[client] if part.by == EXAMPLES else up[part.by])

    def result(self) -> Folded:
        """Who answered, and every field combined by its declared rule."""
        combined = {name: total.result() for name, total in self._sums.items()}
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
        """Whether a tensor cannot be combined with those before it."""
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        dtype = value.dtype if isinstance(value, Tensor) else None
        if dtype is not None and dtype != (self._dtype or dtype):
            return f"is {dtype}, others {self._dtype}"
        if self._field.fold == "concat":
            before = tuple(self._pieces[0].shape[1:]) if self._pieces else shape[1:]
            if not shape:
                return "has no rows"
            return None if shape[1:] == before else f"has rows of {shape[1:]}, others {before}"
        held = self._total.get("")
        before = tuple(held.shape) if isinstance(held, Tensor) else shape if held is None else ()
        return None if shape == before else f"has shape {shape}, others {before}"

    def add(self, client: ClientId, value: Any, weight: float, layout: Layout) -> None:
        if isinstance(value, Tensor):
            self._dtype = value.dtype
        if self._field.fold == "concat":
            self._pieces.append(value)
            return
        self._weight += weight
        scale = 1.0 if self._field.fold == "sum" else weight
        if self._field.fold != "parts":
            self._accumulate("", value, scale)
            return
        for key, tensor in value.items():
            if layout[key].rule == "row":
                self._total.setdefault(key, {})[client] = tensor
            elif tensor.is_floating_point():
                self._accumulate(key, tensor, scale)
            else:  # counters such as BatchNorm's number of batches
                held = self._total.get(key)
                self._total[key] = tensor if held is None else torch.maximum(held, tensor)

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
        if self._field.fold != "sum":
            if self._total and not self._weight > 0:
                raise NotEnoughReplies("every answer has weight 0: no client trained on anything")
            for key in self._dtypes:
                self._total[key] = self._total[key] / self._weight
        for key, dtype in self._dtypes.items():
            # A mean of whole numbers is no whole number: it stays float64.
            if dtype is not None and (dtype.is_floating_point or self._field.fold == "sum"):
                self._total[key] = self._total[key].to(dtype)
        return self._total if self._field.fold == "parts" else self._total.get("")


def _misfit(value: Weights, layout: Layout) -> str | None:
    """Whether model parts are not exactly those that the layout shares."""
    if extra := sorted(set(value) - set(layout)):
        return f"has {extra[0]}, which is not a shared part"
    if missing := sorted(set(layout) - set(value)):
        return f"lacks {missing[0]}"
    for key, tensor in value.items():
        slot = layout[key]
        if not isinstance(tensor, Tensor):
            return f"{key} is no tensor"
        if tuple(tensor.shape) != slot.shape:
            return f"{key} has shape {tuple(tensor.shape)}, not {slot.shape}"
        if tensor.dtype != slot.dtype:
            return f"{key} is {tensor.dtype}, not {slot.dtype}"
    return None
