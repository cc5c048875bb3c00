"""The bare steps: forward, backward and optimiser on views that were made before."""

from __future__ import annotations

import random

import torch
from common import network, nt_xent, rounds, task
from pillow_views import lean_views
from torch import Tensor


def main() -> None:
    """Play all rounds."""
    of, rng = task(), random.Random(0)
    images, model = of.images(), network(of.width, of.groups).train()
    model.to(memory_format=torch.channels_last)  # as the views are; the fastest here

    def ready(client: int) -> list[Tensor]:
        share = of.share(client)
        pieces = [share[start : start + of.batch] for start in range(0, len(share), of.batch)]
        return [lean_views(images[piece], rng) for piece in pieces]

    batches = [ready(client) for client in range(of.clients)]

    def play() -> None:
        for own in batches:
            optimiser = torch.optim.SGD(model.parameters(), lr=of.lr, momentum=of.momentum)
            for views in own:
                optimiser.zero_grad()
                nt_xent(model(views), of.temperature).backward()
                optimiser.step()

    rounds(of, play)


if __name__ == "__main__":
    main()
