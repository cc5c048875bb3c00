"""Torch's SGD and Adam without importing its compiler.

The first step of torch's optimisers imports the compiler, only to exclude themselves from it, which
takes more than a second in every process that trains. These compute the same, bit for bit.
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
