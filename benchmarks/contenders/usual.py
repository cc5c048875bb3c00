"""Local training as most code has it: a Dataset, a DataLoader, per-image transforms."""

from __future__ import annotations

import numpy as np
import torch
from common import Task, nt_xent
from PIL import Image
from pillow_views import usual_view
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each of a client's images."""

    def __init__(self, images: np.ndarray, share: np.ndarray) -> None:
        self.images, self.share = images, share

    def __len__(self) -> int:
        return len(self.share)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self.images[self.share[index]])
        return usual_view(image), usual_view(image)


def loader(of: Task, client: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Shuffled batches of a client."""
    return DataLoader(TwoViews(of.images(), of.share(client)), batch_size=of.batch, shuffle=True)


def train(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]], of: Task) -> float:
    """One epoch of SimCLR; returns the mean loss."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=of.lr, momentum=of.momentum)
    total = 0.0
    for first, second in batches:
        optimiser.zero_grad()
        loss = nt_xent(model(torch.cat([first, second])), of.temperature)
        loss.backward()
        optimiser.step()
        total += loss.item()
    return total / len(batches)
