"""A dictionary of projections that many clients fill: whose rows, how many, and means of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from harmonium.federation.client import Client, Decline
from harmonium.federation.wire import ClientId

Sampling = Literal["client", "server", "replace"]  # see `quotas`


def quotas(
    size: int, sampling: Sampling, examples: Mapping[ClientId, int], ready: Sequence[ClientId]
) -> dict[ClientId, int]:
    """Rows that each client sends, never more than it has pictures.

    By `client`, shares of `size` among those who are ready, by their numbers of pictures; by
    `replace`, shares among all clients, as absent ones' rows stay; by `server`, a row a picture.
    Shares are rounded so that they add up to `size` wherever there are enough pictures.

    >>> quotas(5, "client", {0: 10, 1: 10, 2: 10, 3: 99}, [0, 1, 2])
    {0: 2, 1: 2, 2: 1}
    """
    among = list(examples) if sampling == "replace" else list(ready)
    if sampling == "server":
        return {client: examples[client] if size else 0 for client in among}
    total = sum(examples[client] for client in among)
    wanted = {client: size * examples[client] / total for client in among}
    counts = {client: min(int(wanted[client]), examples[client]) for client in among}
    missing = min(size, total) - sum(counts.values())
    for client in sorted(among, key=lambda one: (int(wanted[one]) - wanted[one], one)):
        if missing > 0 and counts[client] < examples[client]:
            counts[client] += 1
            missing -= 1
    return counts


def collected(rows: Mapping[str, Tensor], size: int) -> Tensor:
    """The dictionary made of clients' rows: `size` of them at random, some twice if there are few.

    Args:
        rows: by client, each (count, dim).
        size: of the dictionary; where nobody sent a row it stays empty.

    >>> collected({"1": torch.ones(2, 3), "0": torch.zeros(1, 3)}, size=5).shape
    torch.Size([5, 3])
    """
    whole = torch.cat([rows[client] for client in sorted(rows, key=int)])
    if len(whole) > size:
        return whole[torch.randperm(len(whole))[:size].sort().values]
    if not len(whole):
        return whole
    again = torch.randint(len(whole), (size - len(whole),))
    return torch.cat([whole, whole[again]])


def public_batches(client: Client, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Public pictures and what the alignment model makes of them, batch by batch, for ever."""
    while True:
        if client.public is None:
            raise Decline("it has no public pictures to align with")
        h, z = client.state["align_h"], client.state["align_z"]
        for index in torch.split(torch.randperm(len(h), generator=client.rng), size):
            pixels = torch.from_numpy(client.public.batch(index.numpy()).copy())
            yield client.views.plain(pixels), h[index], z[index]


def grouped_means(rows: Tensor, least: int) -> Tensor:
    """Means of groups of at least `least` similar rows each; (count, dim) to (count // least, dim).

    Rows are halved again and again along the direction in which they differ most, so that groups
    are of equal size to within one row for every `least`.

    >>> grouped_means(torch.tensor([[0.0], [9.0], [1.0], [10.0]]), 2).flatten().sort().values
    tensor([0.5000, 9.5000])
    """
    parts = len(rows) // least
    if parts < 1:
        return rows[:0]
    if parts == 1:
        return rows.mean(0, keepdim=True)
    centred = rows - rows.mean(0)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[0]
    order = (centred @ direction).argsort(stable=True)
    cut = len(rows) * (parts // 2) // parts
    return torch.cat([grouped_means(rows[half], least) for half in (order[:cut], order[cut:])])
