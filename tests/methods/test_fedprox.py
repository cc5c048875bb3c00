"""FedProx by hand: the gradient of the pull is mu (w - w_received)."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harmonium.core.errors import ConfigError
from harmonium.learning.context import Context
from harmonium.learning.parts import Part, Parts
from harmonium.learning.terms.proximal import squared_distance
from harmonium.methods.fedprox import FedProx


def test_the_pull_has_the_published_gradient() -> None:
    parts = Parts({"encoder": Part(nn.Linear(3, 2)), "held": Part(nn.Linear(2, 2))}, {})
    parts["held"].requires_grad_(False)
    anchor = {key: value + 0.5 for key, value in parts.state_dict().items()}
    method = FedProx(mu=0.3, objective=SimpleNamespace(score=lambda *_: torch.zeros(())))  # type: ignore[arg-type]
    method.score(parts, None, Context(me=0, anchor=anchor)).backward()  # type: ignore[arg-type, no-untyped-call]
    for key, parameter in parts.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, 0.3 * (parameter.detach() - anchor[key]))
        else:
            assert parameter.grad is None
    assert squared_distance(parts, anchor).item() == pytest.approx(0.25 * 8)


def test_a_negative_pull_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.mu is -1"):
        FedProx(mu=-1.0)
