"""What methods share that give labels to images without one: pseudo-labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.data.images import UNKNOWN
from harmonium.learning.client import Client
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.parts import Parts

if TYPE_CHECKING:
    from harmonium.federation.method import Method


def need(method: Method, views: int, preset: str) -> None:
    """Refuse an objective without a classifier, and another number of views."""
    if not isinstance(method.objective, Supervised):
        raise ConfigError(
            f"method={method.name} needs a classifier: objective is {method.objective.name}; set "
            "objective=supervised"
        )
    if (count := len(method.views.pipelines)) != views:
        raise ConfigError(
            f"method={method.name} looks at {views} views, but these are {count}: set "
            f"views={preset}"
        )


def class_probabilities(parts: Parts, client: Client, classes: int) -> Tensor:
    """How likely each class is for the images without a label, seen as they are.

    The model is put into evaluation mode. Rows of labelled images are zeros.

    Returns:
        `(n, classes)`, one row for each of the client's examples; no gradient flows through it.
    """
    parts.eval()
    made = torch.zeros(len(client.examples), classes)
    unlabelled = (client.examples.labels() == UNKNOWN).nonzero().flatten()
    if len(unlabelled):
        logits = client.features(lambda x: parts["classifier"](parts["encoder"](x)), unlabelled)
        made[unlabelled] = logits.softmax(1)
    return made
