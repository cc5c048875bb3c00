"""The weighted nearest-neighbour probe: no training, one number, the usual monitor of a run.

Features are scaled to unit length; each query takes the `k` nearest of the bank by cosine, and
each neighbour votes for its label with weight exp(cosine / temperature) (Wu et al. 2018).

Similarities are computed and discarded in blocks of `QUERIES` by at most `BANK`, so memory does not
grow with the numbers of queries and rows. Torch's threads share the queries, each computing on its
own, so the bits are those of one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.core.devices import current, has_double, room_for, to_device, to_host
from harmonium.core.errors import ConfigError, DataError
from harmonium.core.progress import work
from harmonium.core.threads import single_thread
from harmonium.evaluation.metrics import Answers, answers

QUERIES = 256  # in a block
BANK = 2**16  # rows in a block, at most: 67 MB of similarities a thread
THREADS = 8  # at most, because each needs memory for its block
GROUP = 16  # similarities in a group; the largest of each group is compared first
LEAST = 16  # queries and bank rows in a product: with fewer, equal rows may differ in their bits


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = QUERIES,
) -> Tensor:
    """The label that the neighbours of each query vote for; equal votes go to the smallest.

    Arguments as in `knn_votes`.

    >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> knn_predict(bank, torch.tensor([7, 3]), torch.tensor([[0.9, 0.1], [0.2, 0.5]])).tolist()
    [7, 3]
    """
    votes, classes = knn_votes(
        bank, bank_labels, queries, k=k, temperature=temperature, chunk=chunk
    )
    predicted: Tensor = classes[votes.argmax(dim=1)]
    return predicted


def knn_votes(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = QUERIES,
) -> tuple[Tensor, Tensor]:
    """The share of the votes that each class has from the neighbours of each query.

    Where several bank rows are exactly as near as the `k`-th, they share the places that are left,
    so the answer does not depend on the order of the bank.

    Args:
        bank: features `(n, dim)`.
        bank_labels: labels `(n,)`; rows labelled -1 are left out.
        queries: features `(m, dim)`.
        k: neighbours; more than the bank holds means all of it.
        temperature: how much nearer neighbours count more.
        chunk: queries at a time; memory is `chunk` times at most `BANK` similarities a thread.

    Returns:
        Votes `(m, classes)`, float64, and the sorted labels `(classes,)` that they are for.
    """
    if k < 1 or temperature <= 0 or chunk < 1:
        raise ConfigError(
            f"kNN needs k >= 1, temperature > 0 and chunk >= 1, got {k}, {temperature}, {chunk}"
        )
    known = bank_labels >= 0
    if not bool(known.any()):
        raise DataError("kNN needs at least one labelled image in its bank; all labels are -1")
    if not bool(known.all()):
        bank, bank_labels = bank[known], bank_labels[known]
    # Labels may be any numbers; votes are counted in one column for each that occurs.
    classes, columns = torch.unique(bank_labels.long(), return_inverse=True)
    device = current()
    if has_double(device) and room_for(4 * (bank.numel() + queries.numel()), device):
        bank, queries, columns = (to_device(one, device) for one in (bank, queries, columns))
    voters = _Bank.of(bank.detach().float(), columns, len(classes))
    votes = torch.empty(len(queries), len(classes), dtype=torch.float64, device=columns.device)
    workers = max(1, min(torch.get_num_threads(), THREADS, -(-len(queries) // chunk)))
    workers = workers if votes.device.type == "cpu" else 1

    def vote(first: int) -> None:
        space = bank.new_empty(max(chunk, LEAST) * voters.size, dtype=torch.float32)
        for start in range(first * chunk, len(queries), workers * chunk):
            some = functional.normalize(queries[start : start + chunk].detach().float(), dim=1)
            votes[start : start + chunk] = _votes(
                some, voters, min(k, voters.count), temperature, space
            )

    with single_thread(), ThreadPoolExecutor(workers) as threads, work("nearest neighbours"):
        list(threads.map(vote, range(workers)))
    return to_host(votes), classes


def knn_answers(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = QUERIES,
) -> Answers:
    """The votes of the neighbours, compared with the labels of the queries.

    Bank rows and queries labelled -1 are left out; see `knn_votes` for shapes and settings.
    """
    known = query_labels >= 0
    if not bool(known.any()):
        raise DataError("kNN accuracy needs at least one labelled query; all labels are -1")
    votes, classes = knn_votes(
        bank, bank_labels, queries[known], k=k, temperature=temperature, chunk=chunk
    )
    shares = votes / votes.sum(dim=1, keepdim=True)
    return answers([(shares.numpy(), classes.numpy())], query_labels[known].numpy())


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = QUERIES,
) -> float:
    """Share of labelled queries whose neighbours vote for the right label; see `knn_answers`."""
    return knn_answers(
        bank, bank_labels, queries, query_labels, k=k, temperature=temperature, chunk=chunk
    ).accuracy


@dataclass(frozen=True)
class _Bank:
    """Rows that vote, in blocks of `size`."""

    rows: Tensor  # (at least LEAST, dim), not scaled: a copy would be as large as the bank
    scale: Tensor  # (count,), one over the length of each row
    columns: Tensor  # (count,), the class that each votes for
    classes: int
    size: int

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, classes: int) -> _Bank:
        """The bank of all rows."""
        scale = 1 / torch.linalg.vector_norm(rows, dim=1).clamp(min=1e-12)
        rows = functional.pad(rows, (0, 0, 0, LEAST - len(rows))) if len(rows) < LEAST else rows
        blocks = -(-len(rows) // BANK)
        return cls(rows, scale, columns, classes, -(-len(rows) // blocks))

    @property
    def count(self) -> int:
        """Rows that vote."""
        return len(self.scale)

    def similarities(self, queries: Tensor, space: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Where a block begins, and the cosines `(m, block)` of queries of unit length with it."""
        count = len(queries)
        if count < LEAST:
            queries = functional.pad(queries, (0, 0, 0, LEAST - count))
        for start in range(0, self.count, self.size):
            rows = self.rows[start : start + self.size]
            cosines = space[: len(queries) * len(rows)].view(len(queries), len(rows))
            torch.mm(queries, rows.T, out=cosines)
            scale = self.scale[start : start + self.size]
            yield start, cosines[:count, : len(scale)].mul_(scale)


def _votes(queries: Tensor, bank: _Bank, k: int, temperature: float, space: Tensor) -> Tensor:
    """Votes `(m, classes)` of the `k` nearest of queries of unit length."""
    near = queries.new_empty(len(queries), 0)
    columns = bank.columns.new_empty(len(queries), 0)
    for start, similarity in bank.similarities(queries, space):
        values, rows = _largest(similarity, min(k + 1, similarity.shape[1]))
        near = torch.cat([near, values], dim=1)
        columns = torch.cat([columns, bank.columns[start + rows]], dim=1)
        near, kept = near.topk(min(k + 1, near.shape[1]), dim=1)
        columns = columns.gather(1, kept)
    beyond, near, columns = near[:, k:], near[:, :k], columns[:, :k]
    # The nearest neighbour's weight becomes 1: the order of the votes is the same and a small
    # temperature cannot overflow.
    weights = ((near - near[:, :1]) / temperature).double().exp()
    votes = weights.new_zeros(len(queries), bank.classes)
    last = near[:, -1:]
    crowded = (beyond == last).any(dim=1).nonzero().flatten()  # ties across the k-th place: rare
    if len(crowded):
        blocks = bank.similarities(queries, space) if start else [(start, similarity)]
        for start, similarity in blocks:
            for query in to_host(crowded).tolist():
                rows = (similarity[query] == last[query]).nonzero().flatten()
                votes[query] += bank.columns[start + rows].bincount(minlength=bank.classes)
        tied = (near == last)[crowded]
        share = tied.sum(dim=1) / votes[crowded].sum(dim=1) * weights[crowded, -1]
        votes[crowded] *= share[:, None]
        weights[crowded] = weights[crowded].masked_fill(tied, 0)
    return votes.scatter_add_(1, columns, weights)


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row of `(m, n)` and their places, largest first.

    They are in the `k` groups with the largest maxima, so most values are never compared alone.
    """
    count = values.shape[1]
    groups = count // GROUP
    if groups < 2 * k:
        return values.topk(k, dim=1)
    maxima = values[:, : GROUP * groups].view(-1, GROUP, groups).amax(dim=1)
    best = maxima.topk(k, dim=1, sorted=False).indices
    members = torch.arange(GROUP, device=values.device)[:, None] * groups + best[:, None]
    rest = torch.arange(GROUP * groups, count, device=values.device).expand(len(values), -1)
    places = torch.cat([members.flatten(1), rest], dim=1)
    largest, kept = values.gather(1, places).topk(k, dim=1)
    return largest, places.gather(1, kept)
