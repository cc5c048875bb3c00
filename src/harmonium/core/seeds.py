"""One tree of random numbers: every draw is keyed by the run's seed, a purpose and a path.

Two places that use the same key draw the same numbers, on any engine and after any crash;
different keys are independent. Privacy noise is deliberately outside the tree.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def seed_of(seed: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `seed_of(run_seed, "client", round, step, client)`.

    >>> seed_of(0, "init") == seed_of(0, "init"), seed_of(0, "init") == seed_of(1, "init")
    (True, False)
    """
    text = "/".join(str(p) for p in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_rng(seed: int, *path: str | int) -> torch.Generator:
    """A torch generator for one purpose."""
    import torch

    return torch.Generator().manual_seed(seed_of(seed, *path))


def numpy_rng(seed: int, *path: str | int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    import numpy as np

    return np.random.default_rng(seed_of(seed, *path))
