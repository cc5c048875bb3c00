"""Helpers shared by methods with pseudo-labels: SemiFed and CBAFed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harmonium.core.devices import to_device
from harmonium.core.errors import ConfigError
from harmonium.data.images import UNKNOWN
from harmonium.learning.client import Client
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.parts import Parts

if TYPE_CHECKING:
    from harmonium.federation.method import Method


def need(method: Method, views: int, preset: str) -> None:
    """Refuse objectives without a classifier and presets with another number of views."""
    if not isinstance(method.objective, Supervised):
        raise ConfigError(
            f"method={method.name} needs a classifier: objective is {method.objective.name}; set "
            "objective=supervised"
        )
    if (count := len(method.views.pipelines)) != views:
        raise ConfigError(
            f"method={method.name} needs {views} views, but there are {count}: set views={preset}"
        )


def class_probabilities(parts: Parts, client: Client, classes: int) -> Tensor:
    """Class probabilities q of the images without a label, without augmentation.

    The model is put into evaluation mode and left in it. Rows of labelled images are zeros: their
    labels are known, so no method asks for predictions of them.

    Returns:
        `(n, classes)` on the client's device, one row for each of its examples; without gradient.
    """
    parts.eval()
    q = torch.zeros(len(client.examples), classes, device=client.device)
    unlabelled = (client.examples.host_labels() == UNKNOWN).nonzero().flatten()
    if len(unlabelled):
        logits = client.features(lambda x: parts["classifier"](parts["encoder"](x)), unlabelled)
        q[to_device(unlabelled, client.device)] = logits.softmax(1)
    return q
