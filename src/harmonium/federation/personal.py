"""What a client has of its own: a whole model that it keeps, and what it makes of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harmonium.core.errors import NotEnoughReplies
from harmonium.core.types import Weights
from harmonium.learning.parts import Parts

if TYPE_CHECKING:
    from harmonium.federation.method import Method


@dataclass(frozen=True)
class Own:
    """A client's own features: of a frozen encoder, then of what learns beside a classifier.

    Both are networks of the client's own, and neither leaves it. An adapter that adds to some of
    the features, as FedStyle's does in its equation 4, finds them first among those it is given:
    what a client has without its adapter are the first features, as many as the adapter returns.
    """

    encoder: nn.Module  # of images, as `evaluate.embed` takes it
    adapter: nn.Module | None = None  # of its features; none: they are used as they are

    def without(self, features: Tensor) -> Tensor:
        """Of the encoder's features `(n, dim)`, those that a client has without its adapter."""
        if self.adapter is None:
            return features
        with torch.no_grad():
            return features[:, : self.adapter(features[:1]).shape[1]]


def as_sent(method: Method, model: Weights, state: Mapping[str, Any]) -> nn.Module:
    """The encoder of the model that a client last sent, with what the client kept of it."""
    sent = {key: value for key, value in model.items() if key.startswith("encoder.")}
    if method.recalibrates and not set(method.blueprint.statistics("encoder")) <= set(sent):
        raise NotEnoughReplies("BatchNorm's statistics were not measured on this model")
    return method.blueprint.copy_from(sent, state.get("parts", {})).eval()["encoder"]


def resumed(method: Method, kept: Weights | None) -> Parts:
    """A model of the client's own, as it kept it or else at initialisation, ready for training."""
    parts = method.blueprint.copy_from(kept or {})
    method.objective.prepare(parts, first=kept is None)
    return parts


def whole(parts: Parts) -> Weights:
    """Copies of a model's tensors, BatchNorm's statistics too, but not of parts made anew."""
    return {
        key: tensor.clone()
        for key, tensor in parts.state_dict().items()
        if parts.rules[key.partition(".")[0]] != "fresh"
    }
