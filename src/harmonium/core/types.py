"""Names of types that several packages share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

ClientId = int
Weights = dict[str, Tensor]
Kind = Literal["weights", "statistic", "per_example", "scalar", "public"]  # what it reveals
Rule = Literal["mean", "row", "local", "fresh"]  # how a part of the model is shared
Of = Literal[
    "model", "encoder", "parameters", "statistics"
]  # which tensors a `parts` fold is about
