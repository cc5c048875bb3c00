"""A few local steps of an objective on handwritten digits, through the real frame."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.encoders import Encoder
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.parts import Parts
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.privacy.mechanisms import Noise


@dataclass
class Practice:
    """A client, a model as it was received, and the same model to work on."""

    method: Method
    client: Client
    start: Parts
    parts: Parts

    def learn(self, **how: Any) -> float:
        """Train; the mean loss."""
        return self.method.fit(self.parts, self.client, **how).loss

    def see(self) -> Seen:
        """All images in one batch."""
        everything = torch.arange(len(self.client.examples))
        batch = Batch(everything, self.client.examples, self.client.views, self.client.rng)
        return self.method.objective.see(self.parts, batch)

    def moved(self) -> set[str]:
        """Parts with parameters that are no longer what they were."""
        before: Mapping[str, Tensor] = dict(self.start.named_parameters())
        now = self.parts.named_parameters()
        return {key.partition(".")[0] for key, value in now if not torch.equal(value, before[key])}


@pytest.fixture
def practise() -> Callable[..., Practice]:
    def begin(
        objective: Objective,
        *,
        seed: int = 0,
        count: int = 24,
        encoder: Encoder = CnnSmall(width=4, out=16),  # noqa: B008  (settings are frozen)
        **local: Any,
    ) -> Practice:
        pixels = (load_digits().images[:count, :, :, None] * 15.9).astype(np.uint8)
        method = Method(
            world=World(clients=2, rounds=1, channels=1, side=8, seed=seed),
            encoder=encoder,
            objective=objective,
            views=preset("digits"),
            local=Local(**{"epochs": 1, "batch": 8, **local}),
        )
        rng = torch.Generator().manual_seed(seed)
        examples = Examples(Images(pixels, np.full(count, -1)), np.arange(count))
        client = Client(0, 1, 1, examples, method.views, rng, Noise("simulated", rng))
        start, parts = (method.pull(client, method.blueprint.shared()) for _ in range(2))
        return Practice(method, client, start, parts.train())

    return begin
