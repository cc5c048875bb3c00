"""Clusters of equal size on the unit sphere: at a client among its rows, at the server among all.

Lubana et al., Orchestra, 2022, after Genevay et al., Differentiable Deep Clustering with Cluster
Size Constraints, 2019. A Sinkhorn assignment is balanced in its soft shares alone: the clusters
that its largest shares make may be of any size. `equal` assigns every row to one cluster so that
sizes differ by at most one, at the least total cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy  # a part of it is loaded when it is first used
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.core.progress import emit
from harmonium.learning.objectives.sinkhorn import scaled, scaling
from harmonium.learning.optimisers import SGD

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Balance = Literal["exact", "argmax"]
GlobalBalance = Literal["soft", "exact"]
SHARPNESS = 25.0  # of Sinkhorn's assignments, by which cosines are multiplied
TEMPERATURE = 0.1  # of the softmax in the server's descent
TURNS = 5  # of assigning rows and moving centroids, at a client


class Recent:
    """The newest rows and the images they show; it lives as long as one task of a client."""

    def __init__(self, size: int, *, distinct: bool) -> None:
        """Hold `size` rows; with `distinct`, only the newest of each image."""
        self._size, self._distinct = size, distinct
        self._held: deque[tuple[Tensor, Tensor]] = deque()
        self._count = 0

    def push(self, pictures: Tensor, rows: Tensor) -> None:
        """Add the rows (n, dim) of some images (n,), and drop batches that are too old.

        An epoch shows no image twice: at its end, the newest rows are of different images, or
        all images are among them.
        """
        self._held.append((pictures, rows))
        self._count += len(rows)
        while self._count - len(self._held[0][1]) >= self._size:
            self._count -= len(self._held.popleft()[1])

    def __len__(self) -> int:
        return min(self._count, self._size)

    def newest(self) -> tuple[Tensor, Tensor]:
        """Images (n,) and rows (n, dim), the newest last."""
        pictures = torch.cat([some for some, _ in self._held])
        rows = torch.cat([some for _, some in self._held])
        if not self._distinct:
            return pictures[-self._size :], rows[-self._size :]
        last = {picture: place for place, picture in enumerate(pictures.tolist())}
        index = torch.tensor(sorted(last.values())[-self._size :])
        return pictures[index], rows[index]


def equal(scores: Tensor) -> Tensor:
    """Labels (n,) by scores (n, clusters): sizes differ by at most 1, the sum of scores is largest.

    >>> equal(torch.tensor([[9.0, 0.0], [8.0, 0.0], [7.0, 6.0], [7.0, 5.0]]))
    tensor([0, 0, 1, 1])
    """
    return torch.from_numpy(_equal(scores.double().numpy()))


def _equal(scores: Floats) -> Integers:
    n, clusters = scores.shape
    seats = np.arange(n) % clusters
    _, seat = scipy.optimize.linear_sum_assignment(-scores[:, seats])
    found: Integers = seats[seat]
    return found


def largest(scores: Tensor) -> Tensor:
    """Labels (n,) by the largest shares of a Sinkhorn assignment; sizes are as they come."""
    return scaled(SHARPNESS * scores, 10).argmax(1)


def _largest(scores: Floats, rng: torch.Generator) -> Integers:
    """With a row drawn at random for every cluster that would be empty."""
    labels = largest(torch.from_numpy(scores)).numpy()
    for empty in set(range(scores.shape[1])) - set(labels.tolist()):
        labels[torch.randint(len(labels), (1,), generator=rng)] = empty
    return labels


@torch.no_grad()
def local_clusters(
    rows: Tensor, count: int, balance: Balance, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Unit centroids (count, dim) of unit rows (n, dim), and the label of each row.

    They start as rows drawn at random. With `argmax` a cluster may end empty: its centroid is then
    a row drawn at random, and that row gets its label.
    """
    points = rows.double().numpy()  # numpy has less to do around small sums
    centroids = points[torch.randperm(len(rows), generator=rng)[:count].numpy()]
    labels = np.full(len(rows), -1)
    for _ in range(TURNS):
        scores, before = points @ centroids.T, labels
        labels = _equal(scores) if balance == "exact" else _largest(scores, rng)
        if np.array_equal(before, labels):
            break
        centroids = _means(points, labels, centroids)
    return torch.from_numpy(centroids).to(rows.dtype), torch.from_numpy(labels)


def means(rows: Tensor, labels: Tensor, before: Tensor) -> Tensor:
    """Unit means of the rows with each label; a label that no row has keeps what was `before`."""
    made = _means(rows.double().numpy(), labels.numpy(), before.numpy())
    return torch.from_numpy(made).to(before.dtype)


def _means(rows: Floats, labels: Integers, before: Floats) -> Floats:
    members = np.eye(len(before))[labels].T
    sums = members @ rows
    units = sums / np.sqrt((sums * sums).sum(1, keepdims=True)).clip(1e-12)
    found: Floats = np.where(members.any(1, keepdims=True), units, before)
    return found


def smallest(labels: Tensor, pictures: Tensor, count: int) -> int:
    """How many different images the cluster with the fewest of them has.

    >>> smallest(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([7, 7, 7, 3, 4]), 2)
    1
    """
    pairs = set(zip(labels.tolist(), pictures.tolist(), strict=True))
    return int(torch.tensor([label for label, _ in pairs]).bincount(minlength=count).min())


def anonymous(
    recent: Recent, count: int, least: int, balance: Balance, rng: torch.Generator
) -> tuple[Tensor, int]:
    """Centroids that a client may send, and how many images the smallest cluster has.

    Args:
        recent: its newest rows.
        count: of clusters, at most; fewer where images are too few. 0: the rows as they are.
        least: images in every cluster. Where one has fewer, no centroid is sent and 0 said.
        balance: how rows become clusters.
        rng: draws where centroids start.
    """
    pictures, rows = recent.newest()
    if not count:
        return rows, 1
    count = min(count, len(set(pictures.tolist())) // least)
    if not count:
        return rows[:0], 0
    centroids, labels = local_clusters(rows, count, balance, rng)
    found = smallest(labels, pictures, count)
    return (centroids, found) if found >= least else (rows[:0], 0)


def odd_centroids(rows: Tensor, anonymity: float, examples: int, least: int | None) -> str | None:
    """What shows that centroids are not an honest client's; nothing if nothing does.

    Args:
        rows: the centroids, (count, dim).
        anonymity: images in the smallest cluster, as the client says; 0 without centroids.
        examples: the client's images.
        least: fewest images of a cluster; none: centroids have noise, and no number is told.

    >>> odd_centroids(torch.eye(3), 2.5, 100, 2)
    '`anonymity` is 2.5, not a whole number of images from 2 to 100'
    """
    lengths: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    if bool(((lengths - 1).abs() > 1e-3).any()):
        return "`centroids` are not of unit length"
    if least is None or not len(rows):
        return None if anonymity == 0 else f"`anonymity` is {anonymity:g}, not 0"
    if not (least <= anonymity <= examples and anonymity == int(anonymity)):
        wanted = f"a whole number of images from {least} to {examples}"
        return f"`anonymity` is {anonymity:g}, not {wanted}"
    return None


def in_words(count: int, least: int, epsilon: float | None) -> str:
    """What a server learns of a client's rows, for the card.

    >>> in_words(8, 5, None).partition(";")[0]
    'Centroids leave, each of the projections of at least 5 images'
    """
    what = f"Centroids leave, each of the projections of at least {least} images"
    if epsilon is not None:
        what = f"Centroids with noise leave, at an epsilon of {epsilon:g} each time"
    if not count:
        what = "Projections of single images leave"
    return f"{what}; clusters that the server makes of them go to all clients."


def gathered(sent: Iterable[Tensor], width: int) -> Tensor:
    """What clients sent, (n, width).

    >>> gathered([torch.eye(2)[:1], torch.eye(2)], 2).shape
    torch.Size([3, 2])
    """
    return torch.cat([torch.zeros(0, width), *sent])


def check(clusters: int, clients: int, local_clusters: int, least: int, memory: int) -> None:
    """Refuse more global clusters than centroids that clients can send in a round.

    Each sends up to `local_clusters` (0: its rows) of at least `least` of `memory` images.
    """
    each = min(local_clusters or memory, memory // least)
    if clients * each < clusters:
        raise ConfigError(
            f"method.clusters is {clusters}, but {clients} clients send at most {clients * each} "
            f"centroids in a round ({each} each, of method.k_min={least} or more of the "
            f"method.memory={memory} newest images): lower method.clusters or method.k_min"
        )


def regrouped(rows: Tensor, start: Tensor, balance: GlobalBalance, steps: int) -> Tensor:
    """Unit centroids (clusters, dim) of the centroids (n, dim) of all clients.

    Args:
        rows: what clients sent; where there are none, nothing moves.
        start: the centroids of the round before, (clusters, dim).
        balance: `soft` descends so that softmax assignments resemble Sinkhorn's; `exact` moves
            centroids to the means of clusters whose sizes differ by at most 1, until none changes.
        steps: at most.
    """
    start = functional.normalize(start)
    if not len(rows):
        return start
    return (_descended if balance == "soft" else _settled)(rows, start, steps)


def _descended(rows: Tensor, start: Tensor, steps: int) -> Tensor:
    """SGD on minus the mean cosine of each row's shares; Sinkhorn goes on from the step before."""
    centroids, factors = nn.Parameter(start.clone()), None
    optimiser = SGD([centroids], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for step in range(steps):
        emit("clustering at the server", step, steps, "steps")
        scores = rows @ centroids.T
        kernel = (SHARPNESS * scores.detach().double()).softmax(1)
        factors, across = scaling(kernel, 100, factors)
        wanted = (factors[:, None] * kernel * across).to(scores.dtype)
        shares = (scores / TEMPERATURE).softmax(1)
        optimiser.zero_grad()
        loss = -functional.cosine_similarity(wanted, shares).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            centroids.copy_(functional.normalize(centroids))
    emit("clustering at the server", steps, steps, "steps")
    return centroids.detach()


def _settled(rows: Tensor, centroids: Tensor, steps: int) -> Tensor:
    """Balanced assignment and means in turn."""
    labels = None
    for _ in range(steps):
        held, labels = labels, equal(rows @ centroids.T)
        if held is not None and torch.equal(held, labels):
            break
        centroids = means(rows, labels, centroids)
    return centroids
