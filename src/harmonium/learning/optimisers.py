"""Torch's optimisers without its compiler.

Their first step imports the compiler, to tell it to leave them alone: more than a second in every
process that trains, for nothing is compiled here. What they compute is torch's own, bit for bit.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _plain(kind: type[Kind]) -> type[Kind]:
    """The same optimiser with its own methods instead of the wrapped ones."""
    names = ("add_param_group", "zero_grad", "step")
    own: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    own["step"] = torch.no_grad()(own["step"])
    return type(kind.__name__, (kind,), {"__module__": __name__, **own})


SGD = _plain(torch.optim.SGD)
Adam = _plain(torch.optim.Adam)
