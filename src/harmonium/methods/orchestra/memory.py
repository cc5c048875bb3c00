"""The memory of a client of Orchestra: the target network's newest projections of its images.

Algorithm 1, line 18, clusters f_T(x) of all images of a client. Section C.2 clusters the 128 most
recent of those that training has computed anyway, at no extra cost; as the target moves slowly,
they are close to the projections by its last state.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from harmonium.core.devices import to_host


class ProjectionMemory:
    """The newest projections and the images they belong to; it lives for one task of a client.

    The released code holds it in the network's state, which the client uploads with all
    projections. Here it is a local variable of a handler and cannot leave.
    """

    def __init__(self, size: int, *, distinct: bool) -> None:
        """Hold `size` projections; with `distinct`, only the newest of each image.

        Without `distinct`, as in the released code, the memory of a client with few images has
        several views of each, so that a cluster of many rows may be of few images.
        """
        self._size, self._distinct = size, distinct
        self._batches: deque[tuple[Tensor, Tensor]] = deque()
        self._count = 0

    def push(self, images: Tensor, projections: Tensor) -> None:
        """Add the projections (n, dim) of some images (n,), and drop batches that are too old.

        No image occurs twice in an epoch. So at the end of an epoch the newest `size` projections
        are of different images, or all images of the client are among them, and dropping whole
        batches that lie before them loses nothing that `distinct` would keep.
        """
        self._batches.append((images, projections))
        self._count += len(projections)
        while self._count - len(self._batches[0][1]) >= self._size:
            self._count -= len(self._batches.popleft()[1])

    def __len__(self) -> int:
        return min(self._count, self._size)

    def newest(self) -> tuple[Tensor, Tensor]:
        """Images (n,) and their projections (n, dim), the newest last; on the CPU."""
        images = torch.cat([batch for batch, _ in self._batches])
        projections = to_host(torch.cat([batch for _, batch in self._batches]))
        if not self._distinct:
            return images[-self._size :], projections[-self._size :]
        last = {image: place for place, image in enumerate(images.tolist())}
        index = torch.tensor(sorted(last.values())[-self._size :])
        return images[index], projections[index]
