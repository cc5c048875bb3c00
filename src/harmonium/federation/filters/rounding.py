"""Smaller messages: weights are rounded for transport, whatever the method.

A model goes down in half precision. A client sends up the change of the model that it received, in
half precision or in 8 bits with a scale for every row of a tensor; weights that are not a changed
model, such as SCAFFOLD's control variates, are rounded directly. The server adds a change to its
own model, which it never rounds, so small steps add up over rounds. Plans, folds and aggregations
see models in full precision.

Rounding is to the nearest number, which has the least error in a single reply. By itself it would
lose the same small numbers in every round, so the client keeps the rounding error and adds it to
its next reply (error feedback; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). Over all
rounds only the last error is lost.

Integers and BatchNorm's statistics are not rounded: they are few, and a rounded variance could fall
below 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, WireError, counted
from harmonium.core.types import ClientId, Kind, Weights
from harmonium.federation.filters.base import Asked, Filter, Message
from harmonium.federation.filters.update_noise import STATISTICS
from harmonium.federation.wire import Ask, Exchange, changes_model

if TYPE_CHECKING:
    from harmonium.federation.method import Method
    from harmonium.learning.client import Client
    from harmonium.recipe.privacy import Privacy

How = Literal["none", "fp16", "int8"]
UNSENT = "unsent"  # key in a client's state: rounding errors, by exchange and field
SCALE = " scale"  # suffix to the name of a tensor in 8 bits: the size of a step, by row
MOST = torch.finfo(torch.float16).max
STEPS = 127  # of 8 bits, either way from 0
TYPES = {"none": torch.float32, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class Transport:
    """How weights travel."""

    up: How = "none"  # what changes of weights are rounded to on their way to the server
    down: Literal["none", "fp16"] = "none"  # what weights are rounded to on their way to clients
    error_feedback: bool = True  # clients add the rounding error to their next answer

    @property
    def is_plain(self) -> bool:
        """Whether nothing is rounded."""
        return self.up == self.down == "none"

    def check(self, privacy: Privacy) -> None:
        """Refuse noise that rounding would make too small; `Masks.check` refuses rounding."""
        if self.up != "none" and privacy.update_noise and privacy.update_place == "server":
            raise ConfigError(
                f"transport.up={self.up} may make a change longer than privacy.update_clip, on "
                "which the server's noise counts: set privacy.update_place=client, or "
                "transport.up=none"
            )

    @property
    def obstacle(self) -> str:
        """Why replies cannot be summed under masks; empty where they can."""
        if self.up != "none":
            why = f"transport.up={self.up} rounds each client's numbers to another scale, which"
            return f"{why} masks cannot add up; set transport.up=none"
        if self.down != "none":
            why = f"with transport.down={self.down} the server must read single changes"
            return f"{why}; set transport.down=none"
        return ""

    def keeping(self, method: Method) -> dict[str, Kind]:
        """What a client keeps between rounds for rounding, and what that reveals."""
        sent = any(_parts_sent(exchange) for exchange in method.exchanges().values())
        return {UNSENT: "weights"} if sent and self.up != "none" and self.error_feedback else {}

    def words(self) -> str:
        """A description in plain words; empty where nothing is rounded."""
        if self.is_plain:
            return ""
        coding = {"none": "as they are", "fp16": "in 16 bits", "int8": "in 8 bits, a scale a row"}
        up = f"changes of weights go up {coding[self.up]}"
        if self.up != "none":
            lost = "kept and added to the next answer" if self.error_feedback else "lost"
            up += f", and the rounding error is {lost}"
        return f"weights go down {coding[self.down]}; {up}"


# ---- numbers ---------------------------------------------------------------------------------


def lossy(key: str, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a tensor is rounded."""
    return dtype == torch.float32 and shape.numel() > 0 and not key.endswith(STATISTICS)


def pack(values: Weights, how: How) -> Weights:
    """Float tensors as they are sent; values that are not finite stay so, for the server to refuse.

    >>> pack({"w": torch.tensor([[1.27, -0.5, 0.004]])}, "int8")["w"]
    tensor([[127, -50,   0]], dtype=torch.int8)
    """
    if how == "none":
        return values
    if how == "fp16":
        return {
            key: value.where(~value.isfinite(), value.clamp(-MOST, MOST)).half()
            for key, value in values.items()
        }
    packed = {}
    for key, value in values.items():
        rows = _rows(value)
        step = rows.abs().amax(1) / STEPS
        whole = (rows / step.where(step > 0, 1.0)[:, None]).round().clamp(-STEPS, STEPS)
        packed[key] = whole.nan_to_num(0).to(torch.int8).view_as(value)
        packed[key + SCALE] = step
    return packed


def unpack(packed: Mapping[str, Tensor], how: How) -> Weights:
    """Float tensors from packed ones; WireError if they are not packed according to `how`."""
    values = {}
    for key, value in packed.items():
        if how == "int8" and key.endswith(SCALE):
            continue
        if value.dtype != TYPES[how]:
            raise WireError(f"{key} comes as {value.dtype}, not as {TYPES[how]}")
        values[key] = value.float()
        if how == "int8":
            rows, step = _rows(values[key]), packed.get(key + SCALE)
            if step is None or step.dtype != torch.float32 or step.shape != rows.shape[:1]:
                raise WireError(
                    f"{key} comes without a scale for each of its {counted(len(rows), 'row')}"
                )
            values[key] = (rows * step[:, None]).view_as(value)
    return values


def size(key: str, shape: torch.Size, dtype: torch.dtype, how: How) -> int:
    """Bytes of a tensor in a message."""
    if not lossy(key, dtype, shape):
        return shape.numel() * dtype.itemsize
    scales = (shape[0] if len(shape) > 1 else 1) * torch.float32.itemsize
    return shape.numel() * TYPES[how].itemsize + (scales if how == "int8" else 0)


def _rows(value: Tensor) -> Tensor:
    """A tensor as a table; one without rows is one row."""
    return value.reshape(len(value) if value.ndim > 1 else 1, -1)


# ---- messages --------------------------------------------------------------------------------


class Rounding(Filter):
    """Rounds weights when they leave and restores them on arrival, according to `transport`."""

    def outgoing(self, ask: Ask) -> Ask:
        """Round the weights of an ask."""
        how = self.method.transport.down
        if how == "none":
            return ask

        def rounded(values: Message) -> dict[str, Any]:
            names = self._sent_down
            return {k: _rounded(v, how) if k in names else v for k, v in values.items()}

        each = {client: rounded(values) for client, values in ask.each.items()}
        return replace(ask, down=rounded(ask.down), each=each)

    def received(self, down: Message) -> Message:
        """Restore the type of weights that came rounded."""
        if self.method.transport.down == "none":
            return down
        names = self._sent_down
        return {k: _restored(v) if k in names else v for k, v in down.items()}

    def reply(self, client: Client, down: Message, up: Message) -> Message:
        """Round changes of weights; the client keeps the error for its next reply."""
        how, residuals = self.method.transport, client.state.get(UNSENT, {})
        if how.up == "none":
            return up
        sent, unsent = dict(up), {}
        for name in self._sent_up:
            before = self._weights_before(name, down, client.id)
            left = residuals.get(self.exchange.name, {}).get(name, {})
            change = {
                key: value - before[key] if key in before else value
                for key, value in up[name].items()
                if lossy(key, value.dtype, value.shape)
            }
            change = {k: value + left[k] if k in left else value for k, value in change.items()}
            packed = pack(change, how.up)
            sent[name] = {**up[name], **packed}
            if how.error_feedback and change:
                arrives = unpack(packed, how.up)
                unsent[name] = {key: value - arrives[key] for key, value in change.items()}
        if unsent:
            client.state[UNSENT] = {**residuals, self.exchange.name: unsent}
        return sent

    def arrived(self, asked: Asked, up: Message) -> Message:
        """Restore weights: the server's own, which were never rounded, with the client's change."""
        if self.method.transport.is_plain:
            return up
        return {
            **up,
            **{name: self._weights_after(name, asked, up[name]) for name in self._sent_up},
        }

    def _weights_after(self, name: str, asked: Asked, value: Weights) -> Weights:
        """One field of a reply in full precision."""
        how = self.method.transport.up
        layout = self.method.blueprint.layouts()[self.exchange.up[name].of]
        keys = {k for k, slot in layout.items() if lossy(k, slot.dtype, torch.Size(slot.shape))}
        scales = {key + SCALE for key in keys if how == "int8"}
        packed = {key: tensor for key, tensor in value.items() if key in keys or key in scales}
        for key, tensor in packed.items():
            if key in keys and (shape := tuple(tensor.shape)) != layout[key].shape:
                raise WireError(f"`{name}` {key} has shape {shape}, not {layout[key].shape}")
        change = unpack(packed, how)
        if how == "none":  # the client sent its model: subtract the rounded one it started from
            start = self._weights_before(name, self.received(asked.sent), asked.client)
            change = {k: v - start[k] if k in start else v for k, v in change.items()}
        before = self._weights_before(name, asked.down, asked.client)
        after = {k: before[k] + v if k in before else v for k, v in change.items()}
        return {k: after.get(k, v) for k, v in value.items() if k not in scales}

    def _weights_before(self, name: str, down: Message, client: ClientId) -> Weights:
        """The tensors of a field as the client received them; of tables its row."""
        if name != "model" or not changes_model(self.exchange):
            return {}
        return {
            key: down[name][key][client] if slot.rule == "row" else down[name][key]
            for key, slot in self.method.blueprint.layouts()["model"].items()
            if key in down[name]
        }

    @property
    def _sent_down(self) -> list[str]:
        """Fields of an ask that are rounded."""
        return [name for name, field in self.exchange.down.items() if field.kind == "weights"]

    @property
    def _sent_up(self) -> list[str]:
        """Fields of a reply that are rounded."""
        return _parts_sent(self.exchange)


def _parts_sent(exchange: Exchange) -> list[str]:
    """Fields of a reply that are shaped like the model or parts of it."""
    return [name for name, field in exchange.up.items() if field.fold == "parts"]


def _rounded(value: Weights, how: How) -> Weights:
    return {**value, **pack({k: t for k, t in value.items() if lossy(k, t.dtype, t.shape)}, how)}


def _restored(value: Weights) -> Weights:
    return {k: t.float() if t.dtype == TYPES["fp16"] else t for k, t in value.items()}
