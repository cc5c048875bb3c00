"""The weighted nearest-neighbour probe: no training, one number, the usual monitor of a run.

Features are scaled to unit length; each query takes the `k` nearest of the bank by cosine, and
each neighbour votes for its label with weight exp(cosine / temperature) (Wu et al. 2018).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harmonium.errors import ConfigError, DataError


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = 1000,
) -> Tensor:
    """The label that the neighbours of each query vote for.

    Where several bank rows are exactly as near as the `k`-th, they share the places that are left,
    so the answer does not depend on the order of the bank. Equal votes go to the smallest label.

    Args:
        bank: features `(n, dim)`.
        bank_labels: labels `(n,)`; rows labelled -1 are left out.
        queries: features `(m, dim)`.
        k: neighbours; more than the bank holds means all of it.
        temperature: how much nearer neighbours count more.
        chunk: queries at a time; memory is `chunk * n` similarities.

    Returns:
        Labels `(m,)`, int64.

    >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> knn_predict(bank, torch.tensor([7, 3]), torch.tensor([[0.9, 0.1], [0.2, 0.5]])).tolist()
    [7, 3]
    """
    if k < 1 or temperature <= 0 or chunk < 1:
        raise ConfigError(
            f"kNN needs k >= 1, temperature > 0 and chunk >= 1, got {k}, {temperature}, {chunk}"
        )
    known = bank_labels >= 0
    if not bool(known.any()):
        raise DataError("kNN needs at least one labelled picture in its bank; all labels are -1")
    bank = functional.normalize(bank[known].float(), dim=1)
    queries = functional.normalize(queries.float(), dim=1)
    labels = bank_labels[known].long()
    # Labels may be any numbers; votes are counted in one column for each that occurs.
    classes = torch.tensor(sorted(set(labels.tolist())), device=labels.device)
    columns = torch.searchsorted(classes, labels)
    k = min(k, len(bank))
    chosen = torch.empty(len(queries), dtype=torch.long, device=labels.device)
    for start in range(0, len(queries), chunk):
        similarity = queries[start : start + chunk] @ bank.T
        votes = _votes(similarity, columns, len(classes), k, temperature)
        chosen[start : start + chunk] = votes.argmax(dim=1)
    return classes[chosen]


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    chunk: int = 1000,
) -> float:
    """Share of labelled queries whose neighbours vote for the right label.

    Bank rows and queries labelled -1 are left out; see `knn_predict` for shapes and settings.
    """
    known = query_labels >= 0
    if not bool(known.any()):
        raise DataError("kNN accuracy needs at least one labelled query; all labels are -1")
    predicted = knn_predict(
        bank, bank_labels, queries[known], k=k, temperature=temperature, chunk=chunk
    )
    return float((predicted == query_labels[known]).double().mean())


def _votes(similarity: Tensor, columns: Tensor, classes: int, k: int, temperature: float) -> Tensor:
    """Votes `(m, classes)` from similarities `(m, n)` and the class index `(n,)` of each row."""
    nearest, rows = similarity.topk(k, dim=1)
    # The nearest neighbour's weight becomes 1: the order of the votes is the same and a small
    # temperature cannot overflow.
    highest, last = nearest[:, :1], nearest[:, -1:]
    weights = ((nearest - highest) / temperature).double().exp()
    votes = weights.new_zeros(len(similarity), classes)
    votes.scatter_add_(1, columns[rows], weights)
    crowded = ((similarity >= last).sum(dim=1) > k).nonzero().flatten()
    for query in crowded.tolist():  # rare: exact ties across the k-th place
        line, bound = similarity[query], last[query]
        inside, tied = line > bound, line == bound
        share = ((line - highest[query]) / temperature).double().exp() * inside
        places = (k - inside.sum()) / tied.sum()
        share += tied * places * ((bound - highest[query]) / temperature).double().exp()
        votes[query] = share.new_zeros(classes).scatter_add_(0, columns, share)
    return votes
