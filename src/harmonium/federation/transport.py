"""Smaller messages: weights are rounded on their way, whatever the method.

A model goes down in half precision. What comes up is what a client changed in the model that it
really had, in half precision or in 8 bits with a scale for every row of a tensor; weights that are
no changed model, such as SCAFFOLD's variates, are rounded as they are. The server adds a change to
its own model, which it never rounds, so that small steps add up over rounds. Plans, folds and
aggregations see models in full.

Rounding is to the nearest number, the least error in a single answer. By itself it would lose the
same small numbers again and again, so the client keeps what it took and adds it to the next answer
(error feedback; Karimireddy et al., Error Feedback Fixes SignSGD, 2019): all that was ever sent is
all that ever changed, but for the last rounding.

Whole numbers go as they are, and so do BatchNorm's statistics: they are few, and a rounded variance
could fall below 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError, WireError, counted
from harmonium.core.types import ClientId, Kind, Weights
from harmonium.federation.updates import STATISTICS, covers
from harmonium.federation.wire import Ask, Exchange

if TYPE_CHECKING:
    from harmonium.federation.method import Method
    from harmonium.learning.client import Client
    from harmonium.recipe.privacy import Privacy

How = Literal["none", "fp16", "int8"]
UNSENT = "unsent"  # in a client's state: what rounding took, by exchange and field
SCALE = " scale"  # behind the name of a tensor in 8 bits: the size of a step, by row
MOST = torch.finfo(torch.float16).max
STEPS = 127  # of 8 bits, either way from 0
TYPES = {"none": torch.float32, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class Transport:
    """How weights travel."""

    up: How = "none"  # what changes of weights are rounded to on their way to the server
    down: Literal["none", "fp16"] = "none"  # what weights are rounded to on their way to clients
    error_feedback: bool = True  # clients add what rounding took to their next answer

    @property
    def is_plain(self) -> bool:
        """Whether everything goes as it is."""
        return self.up == self.down == "none"

    def check(self, privacy: Privacy) -> None:
        """Refuse noise that rounding would make too small; masks refuse it themselves."""
        if self.up != "none" and privacy.update_noise and privacy.update_place == "server":
            raise ConfigError(
                f"transport.up={self.up} may make a change longer than privacy.update_clip, on "
                "which the server's noise counts: set privacy.update_place=client, or "
                "transport.up=none"
            )

    @property
    def obstacle(self) -> str:
        """Why answers cannot be added up under masks; nothing where they can."""
        if self.up != "none":
            steps = "in steps of their own, which masks cannot add up"
            return f"transport.up={self.up} rounds a client's numbers {steps}; set it to none"
        if self.down != "none":
            return f"transport.down={self.down} has the server read single changes; set it to none"
        return ""

    def keeping(self, method: Method) -> dict[str, Kind]:
        """What a client keeps for it, and what that reveals."""
        sent = any(_up(one) for one in method.exchanges().values())
        return {UNSENT: "weights"} if sent and self.up != "none" and self.error_feedback else {}

    def words(self) -> str:
        """What it does, for people; nothing where it does nothing."""
        if self.is_plain:
            return ""
        said = {"none": "as they are", "fp16": "in 16 bits", "int8": "in 8 bits, a scale a row"}
        up = f"changes of weights go up {said[self.up]}"
        if self.up != "none":
            lost = "kept and added to the next answer" if self.error_feedback else "lost"
            up += f", and what rounding takes is {lost}"
        return f"weights go down {said[self.down]}; {up}"


# ---- numbers ---------------------------------------------------------------------------------


def lossy(key: str, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a tensor is rounded."""
    return dtype == torch.float32 and shape.numel() > 0 and not key.endswith(STATISTICS)


def pack(values: Weights, how: How) -> Weights:
    """Float tensors as they travel; what is not finite stays so, for the server to refuse.

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
    """Float tensors again; WireError where they are not packed as they should be."""
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
    """Bytes of a tensor on its way."""
    if not lossy(key, dtype, shape):
        return shape.numel() * dtype.itemsize
    scales = (shape[0] if len(shape) > 1 else 1) * torch.float32.itemsize
    return shape.numel() * TYPES[how].itemsize + (scales if how == "int8" else 0)


def _rows(value: Tensor) -> Tensor:
    """A tensor as a table; one without rows is one row."""
    return value.reshape(len(value) if value.ndim > 1 else 1, -1)


# ---- messages --------------------------------------------------------------------------------


def outgoing(how: Transport, declared: Exchange, ask: Ask) -> Ask:
    """An ask as it is sent."""
    if how.down == "none":
        return ask

    def of(values: Mapping[str, Any]) -> dict[str, Any]:
        names = _down(declared)
        return {k: _rounded(v, how.down) if k in names else v for k, v in values.items()}

    return replace(ask, down=of(ask.down), each={c: of(own) for c, own in ask.each.items()})


def received(how: Transport, declared: Exchange, down: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as a client's handler sees it."""
    if how.down == "none":
        return down
    return {k: _whole(v) if k in _down(declared) else v for k, v in down.items()}


def answer(
    method: Method, declared: Exchange, client: Client, down: Mapping[str, Any], up: dict[str, Any]
) -> dict[str, Any]:
    """A client's answer as it is sent; what rounding takes of it goes into the client's state."""
    how, held = method.transport, client.state.get(UNSENT, {})
    if how.up == "none":
        return up
    sent, lost = dict(up), {}
    for name in _up(declared):
        had = _had(method, declared, name, down, client.id)
        left = held.get(declared.name, {}).get(name, {})
        change = {
            key: value - had[key] if key in had else value
            for key, value in up[name].items()
            if lossy(key, value.dtype, value.shape)
        }
        change = {k: value + left[k] if k in left else value for k, value in change.items()}
        packed = pack(change, how.up)
        sent[name] = {**up[name], **packed}
        if how.error_feedback and change:
            came = unpack(packed, how.up)
            lost[name] = {key: value - came[key] for key, value in change.items()}
    if lost:
        client.state[UNSENT] = {**held, declared.name: lost}
    return sent


def taken(
    method: Method, declared: Exchange, ask: Ask, sent: Ask, client: ClientId, up: Mapping[str, Any]
) -> Mapping[str, Any]:
    """An answer with its weights in full; `ask` is the plan's, `sent` is how it went out."""
    how = method.transport
    if how.is_plain:
        return up
    full = dict(up)
    for name in _up(declared):
        layout = method.blueprint.layouts()[declared.up[name].of]
        named = {k for k, slot in layout.items() if lossy(k, slot.dtype, torch.Size(slot.shape))}
        scales = {key + SCALE for key in named if how.up == "int8"}
        packed = {key: value for key, value in up[name].items() if key in named or key in scales}
        for key, value in packed.items():
            if key in named and (shape := tuple(value.shape)) != layout[key].shape:
                raise WireError(f"`{name}` {key} has shape {shape}, not {layout[key].shape}")
        values = unpack(packed, how.up)
        mine = _had(method, declared, name, {**ask.down, **ask.each.get(client, {})}, client)
        if how.up == "none":  # it came as it is: what counts is the change of what the client had
            down = received(how, declared, {**sent.down, **sent.each.get(client, {})})
            theirs = _had(method, declared, name, down, client)
            values = {k: v - theirs[k] if k in theirs else v for k, v in values.items()}
        values = {k: mine[k] + v if k in mine else v for k, v in values.items()}
        full[name] = {k: values.get(k, v) for k, v in up[name].items() if k not in scales}
    return full


def _up(declared: Exchange) -> list[str]:
    """Fields of an answer that are shaped like the model or some of it."""
    return [name for name, one in declared.up.items() if one.fold == "parts"]


def _down(declared: Exchange) -> list[str]:
    return [name for name, one in declared.down.items() if one.kind == "weights"]


def _rounded(value: Weights, how: How) -> Weights:
    return {**value, **pack({k: t for k, t in value.items() if lossy(k, t.dtype, t.shape)}, how)}


def _whole(value: Weights) -> Weights:
    return {k: t.float() if t.dtype == TYPES["fp16"] else t for k, t in value.items()}


def _had(
    method: Method, declared: Exchange, name: str, down: Mapping[str, Any], client: ClientId
) -> Weights:
    """What a client was sent of the tensors that a field brings back changed; of tables its row."""
    if name != "model" or not covers(declared):
        return {}
    return {
        key: down[name][key][client] if slot.rule == "row" else down[name][key]
        for key, slot in method.blueprint.layouts()["model"].items()
        if key in down[name]
    }
