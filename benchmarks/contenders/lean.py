"""Federated averaging in a plain loop that does as little as possible beside training.

Images are still augmented one by one with Pillow. One model serves all clients, batches are cut
without a DataLoader, and states are summed as they come.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from common import network, nt_xent, rounds, task
from pillow_views import lean_views


def main() -> None:
    """Play all rounds."""
    of, rng = task(), random.Random(0)
    images, model = of.images(), network(of.width, of.groups).train()
    model.to(memory_format=torch.channels_last)  # as the views are; the fastest here
    state = model.state_dict()
    weights = [value for value in state.values() if value.is_floating_point()]
    given = [value.clone() for value in weights]

    def play() -> None:
        total = [torch.zeros_like(value) for value in weights]
        for client in range(of.clients):
            torch._foreach_copy_(weights, given)
            optimiser = torch.optim.SGD(model.parameters(), lr=of.lr, momentum=of.momentum)
            order = np.random.permutation(of.share(client))
            for start in range(0, len(order), of.batch):
                optimiser.zero_grad()
                views = lean_views(images[order[start : start + of.batch]], rng)
                nt_xent(model(views), of.temperature).backward()
                optimiser.step()
            torch._foreach_add_(total, weights, alpha=1 / of.clients)
        torch._foreach_copy_(given, total)

    rounds(of, play)


if __name__ == "__main__":
    main()
