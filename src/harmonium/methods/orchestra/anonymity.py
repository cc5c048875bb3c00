"""The number of images behind each local centroid that a client of Orchestra sends.

Section D.4 promises N/L-anonymity, N images in L clusters of equal size. The released code does not
ensure it: clusters by the largest Sinkhorn shares may have a single row, and the rows of a memory
may be views of the same few images. So a client counts different images in its smallest cluster,
sends that number with its centroids, and withholds the centroids if the number is below
`method.k_min`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harmonium.core.errors import ConfigError
from harmonium.learning.unit_rows import non_unit_length
from harmonium.methods.orchestra.clustering import Balance, local_clustering
from harmonium.methods.orchestra.memory import ProjectionMemory


def fewest_images(labels: Tensor, images: Tensor, count: int) -> int:
    """How many different images the cluster with the fewest of them has.

    Args:
        labels: the cluster of each row, (n,).
        images: the image of each row, (n,).
        count: of clusters.

    >>> fewest_images(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([7, 7, 7, 3, 4]), 2)
    1
    """
    pairs = set(zip(labels.tolist(), images.tolist(), strict=True))
    return int(torch.tensor([label for label, _ in pairs]).bincount(minlength=count).min())


def anonymous_centroids(
    memory: ProjectionMemory, count: int, k_min: int, balance: Balance, rng: torch.Generator
) -> tuple[Tensor, int]:
    """Local centroids that a client may send, and how many images its smallest cluster has.

    Args:
        memory: the target network's newest projections.
        count: of clusters (L), at most; fewer where images are too few. 0: the projections
            themselves, each of one image.
        k_min: images in every cluster. If one has fewer, no centroid is sent, and the number is 0.
        balance: how rows become clusters.
        rng: draws the first centroids.
    """
    images, projections = memory.newest()
    if not count:
        return projections, 1
    count = min(count, len(set(images.tolist())) // k_min)
    if not count:
        return projections[:0], 0
    centroids, labels = local_clustering(projections, count, balance, rng)
    fewest = fewest_images(labels, images, count)
    return (centroids, fewest) if fewest >= k_min else (projections[:0], 0)


def centroids_fault(rows: Tensor, anonymity: float, examples: int, k_min: int | None) -> str | None:
    """Why centroids cannot be an honest client's; None if they can.

    Args:
        rows: the centroids, (count, dim).
        anonymity: images in the smallest cluster, as reported; 0 without centroids.
        examples: the client's images.
        k_min: fewest images of a cluster; none: centroids have noise, and no number is reported.

    >>> centroids_fault(torch.eye(3), 2.5, 100, 2)
    '`anonymity` is 2.5, not a whole number of images from 2 to 100'
    """
    if non_unit_length(rows) is not None:
        return "`centroids` are not of unit length"
    if k_min is None or not len(rows):
        return None if anonymity == 0 else f"`anonymity` is {anonymity:g}, not 0"
    if not (k_min <= anonymity <= examples and anonymity == int(anonymity)):
        expected = f"a whole number of images from {k_min} to {examples}"
        return f"`anonymity` is {anonymity:g}, not {expected}"
    return None


def check_enough_centroids(
    clusters: int, clients: int, local_clusters: int, k_min: int, memory: int
) -> None:
    """Refuse more global clusters than centroids that clients can send in a round.

    Each sends up to `local_clusters` (0: its projections) of at least `k_min` of `memory` images.
    """
    each = min(local_clusters or memory, memory // k_min)
    if clients * each < clusters:
        raise ConfigError(
            f"method.clusters is {clusters}, but {clients} clients send at most {clients * each} "
            f"centroids in a round ({each} each, of method.k_min={k_min} or more of the "
            f"method.memory={memory} newest images): lower method.clusters or method.k_min"
        )


def disclosure(count: int, k_min: int, epsilon: float | None) -> str:
    """What the server learns from a client's centroids, in plain words for the card.

    >>> disclosure(8, 5, None).partition(";")[0]
    'Centroids leave, each of the projections of at least 5 images'
    """
    what = f"Centroids leave, each of the projections of at least {k_min} images"
    if epsilon is not None:
        what = f"Centroids with noise leave, at an epsilon of {epsilon:g} each time"
    if not count:
        what = "Projections of single images leave"
    return f"{what}; clusters that the server makes of them go to all clients."
