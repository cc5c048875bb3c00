"""Personal models: the model that a client keeps for itself, and the features it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harmonium.core.errors import NotEnoughReplies
from harmonium.core.types import Weights
from harmonium.learning.client import Client
from harmonium.learning.parts import Parts

if TYPE_CHECKING:
    from harmonium.federation.method import Method


@dataclass(frozen=True)
class Own:
    """A client's own networks: a frozen encoder, and an adapter trained along with a classifier.

    Neither leaves the client. An adapter that adds to some of the features, as FedStyle's does in
    equation 4, expects these first: without the adapter, the client uses the first features, as
    many as the adapter returns.
    """

    encoder: nn.Module  # on images, as `evaluation.features.embed` expects it
    adapter: nn.Module | None = None  # on the encoder's features; none: they are used unchanged

    def without(self, features: Tensor) -> Tensor:
        """The features `(n, dim)` that a client uses without its adapter."""
        if self.adapter is None:
            return features
        with torch.no_grad():
            return features[:, : self.adapter(features[:1]).shape[1]]


def as_sent(method: Method, model: Weights, state: Mapping[str, Any]) -> nn.Module:
    """The encoder as the client last sent it, completed by the parts that the client kept."""
    sent = {key: value for key, value in model.items() if key.startswith("encoder.")}
    if method.recalibrates and not set(method.blueprint.statistics("encoder")) <= set(sent):
        raise NotEnoughReplies("BatchNorm's statistics were not measured on this model")
    return method.blueprint.copy_from(sent, state.get("parts", {})).eval()["encoder"]


def resumed(method: Method, client: Client) -> Parts:
    """The client's own model, as kept or else at initialisation, ready for training."""
    weights: Weights | None = client.state.get("mine")
    parts = method.blueprint.copy_from(weights or {}, device=client.device)
    method.objective.prepare(parts, first=weights is None)
    return parts


def whole(parts: Parts) -> Weights:
    """Copies of a model's tensors and buffers, except those of parts with the rule `fresh`."""
    return {
        key: tensor.clone()
        for key, tensor in parts.state_dict().items()
        if parts.rules[key.partition(".")[0]] != "fresh"
    }
