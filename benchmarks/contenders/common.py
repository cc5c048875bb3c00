"""What all contenders share: the task, the network, the loss, and how they report to the benchmark.

A contender is a program, `python CONTENDER.py TASK.json`. It trains round after round, prints
`round NUMBER` after each, and waits for a line on its standard input before the next one, so that
the rounds of several contenders can be measured in turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Task:
    """One federation, the same for everybody."""

    folder: str  # with images.npy, uint8 (n, side, side, 3), and shares.npy, (clients, images)
    width: int  # channels of the encoder's first layer
    side: int
    batch: int
    groups: Sequence[int]  # of each GroupNorm
    clients: int
    rounds: int
    workers: int  # clients that train at once
    lr: float
    momentum: float
    temperature: float
    views: str = "faithful"  # of Harmonium

    def with_views(self, views: str) -> Task:
        """The same task with other views of Harmonium."""
        return replace(self, views=views)

    def write(self, path: Path) -> None:
        """Write the task to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def words(self) -> list[str]:
        """The settings of Harmonium's recipe."""
        written = (Path(self.folder) / "recipe.txt").read_text(encoding="utf-8").split()
        return [
            *written,
            f"rounds={self.rounds}",
            f"views.mode={self.views}",
            f"engine.workers={self.workers}",
        ]

    def images(self) -> np.ndarray:
        """All training images, mapped from their file."""
        return np.load(Path(self.folder) / "images.npy", mmap_mode="r")

    def share(self, client: int) -> np.ndarray:
        """The positions of a client's images."""
        return np.load(Path(self.folder) / "shares.npy", mmap_mode="r")[client]


def task() -> Task:
    """The task that is named on the command line."""
    return Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def network(width: int, groups: Sequence[int]) -> nn.Module:
    """Encoder and projector, layer by layer the `cnn-small` and the SimCLR head of Harmonium."""
    layers: list[nn.Module] = []
    channels = 3
    for depth, stride in enumerate((1, 2, 2, 2)):
        wide = width * 2**depth
        layers += [nn.Conv2d(channels, wide, 3, stride, 1, bias=False)]
        layers += [nn.GroupNorm(groups[depth], wide), nn.ReLU(inplace=True)]
        channels = wide
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 256)]
    head = [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128)]
    return nn.Sequential(*layers, *head)


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """The loss of SimCLR for two views of every image, one after the other: (2n, dim)."""
    unit = functional.normalize(z)
    similar = (unit @ unit.T / temperature).fill_diagonal_(float("-inf"))
    return functional.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


def round_over(number: int) -> None:
    """Report a finished round and wait until the next one may begin."""
    print(f"round {number}", flush=True)
    sys.stdin.readline()


def rounds(of: Task, play: Callable[[], None]) -> None:
    """Play all rounds of a task on one thread."""
    torch.set_num_threads(1)
    for number in range(1, of.rounds + 1):
        play()
        round_over(number)
