"""Orchestra's clustering: C(., L) at a client, and C(., G) of all local centroids at the server.

All rows are of unit length, and a score is the cosine of a row and a centroid. The paper names
Genevay et al., Differentiable Deep Clustering with Cluster Size Constraints, 2019, for both and
leaves the rest to its released code, from which the constants are taken.

Equal sizes. The paper wants clusters of equal size: at the clients for anonymity (section D.4), at
the server for Proposition 3.3. The released code gets them from a Sinkhorn assignment, which is
balanced in its soft shares only: the clusters that the largest share of each row makes may be of
any size. `balanced_labels` assigns every row to one cluster so that sizes differ by at most one and
the sum of scores is largest; that is the `exact` way at either place.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy  # a part of it is loaded when it is first used
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.progress import emit
from harmonium.learning.objectives.sinkhorn import scaled, scaling
from harmonium.learning.optimisers import SGD

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Balance = Literal["exact", "argmax"]
GlobalBalance = Literal["soft", "exact"]

SHARPNESS = 25.0  # lambda of the Sinkhorn assignments: cosines are multiplied by it
LOCAL_SINKHORN = 10  # Sinkhorn's iterations at a client
LOCAL_ITERATIONS = 5  # of assigning rows and moving centroids, at a client
GLOBAL_SINKHORN = 100  # Sinkhorn's iterations in each step at the server, at most
TEMPERATURE = 0.1  # of the softmax in the server's gradient descent


# ---- assignments -----------------------------------------------------------------------------
def balanced_labels(scores: Tensor) -> Tensor:
    """Labels (n,) by scores (n, clusters): sizes differ by at most 1, the sum of scores is largest.

    >>> balanced_labels(torch.tensor([[9.0, 0.0], [8.0, 0.0], [7.0, 6.0], [7.0, 5.0]]))
    tensor([0, 0, 1, 1])
    """
    return torch.from_numpy(_balanced_labels(scores.double().numpy()))


def _balanced_labels(scores: Floats) -> Integers:
    """The assignment problem with every cluster repeated as often as it has places."""
    n, clusters = scores.shape
    places = np.arange(n) % clusters
    _, place = scipy.optimize.linear_sum_assignment(-scores[:, places])
    labels: Integers = places[place]
    return labels


def argmax_labels(scores: Tensor) -> Tensor:
    """Labels (n,) by the largest share of each row in a Sinkhorn assignment, of any sizes."""
    return scaled(SHARPNESS * scores, LOCAL_SINKHORN).argmax(1)


def _argmax_labels(scores: Floats, rng: torch.Generator) -> Integers:
    """The same, where every cluster that would be empty gets a row drawn at random.

    As in the released code. The centroid of such a cluster is the projection of a single image, so
    clients count the images of their smallest cluster before they send anything.
    """
    labels = argmax_labels(torch.from_numpy(scores)).numpy()
    for empty in set(range(scores.shape[1])) - set(labels.tolist()):
        labels[torch.randint(len(labels), (1,), generator=rng)] = empty
    return labels


def unit_means(rows: Tensor, labels: Tensor, before: Tensor) -> Tensor:
    """Unit means of the rows with each label; a label that no row has keeps what was `before`."""
    centroids = _unit_means(rows.double().numpy(), labels.numpy(), before.numpy())
    return torch.from_numpy(centroids).to(before.dtype)


def _unit_means(rows: Floats, labels: Integers, before: Floats) -> Floats:
    members = np.eye(len(before))[labels].T
    sums = members @ rows
    units = sums / np.sqrt((sums * sums).sum(1, keepdims=True)).clip(1e-12)
    centroids: Floats = np.where(members.any(1, keepdims=True), units, before)
    return centroids


# ---- at a client -----------------------------------------------------------------------------
@torch.no_grad()
def local_clustering(
    rows: Tensor, count: int, balance: Balance, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Local centroids mu_k^L (count, dim) of unit rows (n, dim), and the label (n,) of each row.

    Algorithm 1, line 18. Centroids start as different rows drawn at random; assigning rows and
    moving centroids to the unit means of their rows then alternate, until labels stay the same or
    for `LOCAL_ITERATIONS`.

    Args:
        rows: unit projections of the target network.
        count: of clusters (L); at most as many as rows.
        balance: `exact`, or `argmax` as in the released code.
        rng: draws the first centroids, and with `argmax` the row of a cluster that would be empty.
    """
    points = rows.double().numpy()  # numpy has less overhead around small sums
    centroids = points[torch.randperm(len(rows), generator=rng)[:count].numpy()]
    labels = np.full(len(rows), -1)
    for _ in range(LOCAL_ITERATIONS):
        scores, before = points @ centroids.T, labels
        labels = _balanced_labels(scores) if balance == "exact" else _argmax_labels(scores, rng)
        if np.array_equal(before, labels):
            break
        centroids = _unit_means(points, labels, centroids)
    return torch.from_numpy(centroids).to(rows.dtype), torch.from_numpy(labels)


# ---- at the server ---------------------------------------------------------------------------
def global_clustering(rows: Tensor, start: Tensor, balance: GlobalBalance, steps: int) -> Tensor:
    """Global centroids mu^G (G, dim), unit rows, of the local centroids of all clients.

    Algorithm 2, line 8.

    Args:
        rows: local centroids mu^L, unit rows (n, dim); if there are none, nothing moves.
        start: the global centroids of the round before, (G, dim).
        balance: `soft` as in the released code, by gradient descent towards Sinkhorn assignments;
            `exact` moves centroids to the means of clusters whose sizes differ by at most 1.
        steps: at most.
    """
    start = functional.normalize(start)
    if not len(rows):
        return start
    return (_soft_clustering if balance == "soft" else _exact_clustering)(rows, start, steps)


def _soft_clustering(rows: Tensor, start: Tensor, steps: int) -> Tensor:
    """SGD on minus the mean cosine of Q and P, two soft assignments of the rows to the centroids.

    Q is Sinkhorn's, in which all clusters have the same share, and gets no gradient;
    P = softmax(rows mu^T / 0.1). So sizes are equal only as far as P comes to resemble Q. Unlike in
    the released code, Sinkhorn's iteration continues from the factors of the step before, which are
    almost right, so it ends sooner.
    """
    centroids, row_factors = nn.Parameter(start.clone()), None
    optimiser = SGD([centroids], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for step in range(steps):
        emit("clustering at the server", step, steps, "steps")
        scores = rows @ centroids.T
        kernel = (SHARPNESS * scores.detach().double()).softmax(1)
        row_factors, column_factors = scaling(kernel, GLOBAL_SINKHORN, row_factors)
        q = (row_factors[:, None] * kernel * column_factors).to(scores.dtype)
        p = (scores / TEMPERATURE).softmax(1)
        optimiser.zero_grad()
        loss = -functional.cosine_similarity(q, p).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            centroids.copy_(functional.normalize(centroids))
    emit("clustering at the server", steps, steps, "steps")
    return centroids.detach()


def _exact_clustering(rows: Tensor, centroids: Tensor, steps: int) -> Tensor:
    """Spherical k-means with balanced assignments, until no label changes."""
    labels = None
    for _ in range(steps):
        before, labels = labels, balanced_labels(rows @ centroids.T)
        if before is not None and torch.equal(before, labels):
            break
        centroids = unit_means(rows, labels, centroids)
    return centroids
