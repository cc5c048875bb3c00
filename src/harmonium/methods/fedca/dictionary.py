"""A dictionary of projections that many clients fill: whose rows, how many, and means of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import counted
from harmonium.core.types import ClientId
from harmonium.learning.client import Client, Decline
from harmonium.privacy.mechanisms import Release

Sampling = Literal["client", "server", "replace"]  # see `quotas`
_BESIDE = "This is for rows alone: the model goes up beside them, trained on the same images."


def quotas(
    size: int, sampling: Sampling, examples: Mapping[ClientId, int], ready: Sequence[ClientId]
) -> dict[ClientId, int]:
    """Rows that each client sends, never more than it has images.

    By `client`, shares of `size` among those who are ready, by their numbers of images; by
    `replace`, shares among all clients, as absent ones' rows stay; by `server`, a row an image.
    Shares are rounded so that they add up to `size` wherever there are enough images.

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


def collected(rows: Mapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """The dictionary made of clients' rows: `size` of them at random, some twice if there are few.

    Args:
        rows: by client, each (count, dim).
        size: of the dictionary; where nobody sent a row it stays empty.

    Returns:
        The rows, (size, dim), and the client that each belongs to, (size,).

    >>> rows, owners = collected({"1": torch.ones(2, 3), "0": torch.zeros(1, 3)}, size=5)
    >>> rows.shape, owners.tolist()[:3]
    (torch.Size([5, 3]), [0, 1, 1])
    """
    clients = sorted(rows, key=int)
    whole = torch.cat([rows[client] for client in clients])
    counts = torch.tensor([len(rows[client]) for client in clients])
    owners = torch.tensor([int(client) for client in clients]).repeat_interleave(counts)
    if len(whole) > size:
        some = torch.randperm(len(whole))[:size].sort().values
    elif len(whole):
        again = torch.randint(len(whole), (size - len(whole),))
        some = torch.cat([torch.arange(len(whole)), again])
    else:
        return whole, owners
    return whole[some], owners[some]


def odd_rows(rows: Tensor, most: int) -> str | None:
    """What shows that rows for the dictionary are not an honest client's; nothing if nothing does.

    Args:
        rows: what the client sent, (count, dim).
        most: how many it was asked for.

    Some images may be there twice and have the same row; half of all rows are different in any
    case.

    >>> odd_rows(torch.ones(2, 3), 2)
    '`rows` are not of unit length'
    >>> odd_rows(torch.eye(3)[[0, 0, 0]], 3)
    '`rows` hold 1 different row in 3'
    """
    if len(rows) > most:
        return f"`rows` are {len(rows)}, but {most} were asked for"
    lengths: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    if bool(((lengths - 1).abs() > 1e-3).any()):
        return "`rows` are not of unit length"
    different = len(torch.unique(rows, dim=0)) if len(rows) else 0
    if 2 * different < len(rows):
        return f"`rows` hold {counted(different, 'different row')} in {len(rows)}"
    return None


def public_batches(client: Client, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Public images and what the alignment model makes of them, batch by batch, for ever."""
    while True:
        if client.public is None:
            raise Decline("it has no public images to align with")
        h, z = client.state["align_h"], client.state["align_z"]
        for index in torch.split(torch.randperm(len(h), generator=client.rng), size):
            pixels = torch.from_numpy(client.public.batch(index.numpy()).copy())
            yield client.views.plain(pixels), h[index], z[index]


def protected(client: Client, rows: Tensor, noise: float, group: int) -> Tensor:
    """Unit rows as they leave: means of groups, rows with noise, or rows as they are."""
    if group > 1:
        return functional.normalize(grouped_means(rows, group))
    if not noise:
        return rows
    (by,) = costs(noise)
    rows = rows.nan_to_num(0.0, 0.0, 0.0)  # a row that is not finite would tell of its image
    return client.release("rows", rows, **by.how, then=functional.normalize)


def costs(noise: float) -> tuple[Release, ...]:
    """What rows with noise release of an image: its own row, and unit rows lie at most 2 apart."""
    return (Release("rows", "gaussian", 2.0, noise),) if noise else ()


def in_words(
    size: int,
    sampling: Sampling,
    momentum: float,
    noise: float,
    group: int,
    *,
    exclude_own: bool = False,
) -> tuple[str, ...]:
    """What others get to know by a dictionary, for people who must decide whether they may send it.

    >>> in_words(0, "client", 0.5, 0.0, 1)
    ()
    """
    if not size:
        return ()
    many = "as many as images" if sampling == "server" else f"{size:,} of all clients together"
    average = ", averaged over the rounds in which it took part" if momentum else ""
    one = f"at least {group} similar images, as a mean" if group > 1 else "one image"
    whose = "all other clients" if exclude_own else "all clients"
    found = [
        f"What the server gets: in each round rows of numbers, {many}, from each client by name. "
        f"A row is what the client's model makes of {one}{average}.",
        f"What other clients get: the next round's dictionary, rows of {whose} without names. "
        "With few clients, whoever knows its own rows may guess whose the others are.",
    ]
    if group > 1:
        found.append(
            "So no row belongs to a single image. What similar images have in common shows all "
            "the same, and no number bounds what a mean tells of one image: there is no epsilon."
        )
        return (*found, _BESIDE)
    found.append(
        "Who has a row also has the model that made it, or one close to it. So they can tell which "
        "images are alike, follow an image through the rounds, test whether an image that they "
        "know is among a client's, and try to draw an image from its row."
    )
    if noise:
        found.append(
            f"Noise of {noise:g} on each number of a row makes all of that harder. The ledger has "
            "every release, from which its epsilon follows, for an image's own rows alone."
        )
        return (*found, _BESIDE)
    return (
        *found,
        "Nothing hides these rows. Two settings can: method.noise adds noise to them, on record; "
        "method.group sends means of that many similar rows in their place.",
    )


def extents(size: int, sampling: Sampling, projector: nn.Module) -> dict[str, str]:
    """Sizes of messages: the dictionary, a client's rows, and targets for public images."""
    weights = list(projector.parameters())
    dim, width = weights[0].shape[1], len(weights[-1])
    row = 4 * width
    return {
        "dictionary": f"{size:,} rows of {width} numbers, {size * row:,} bytes, from round 2 on",
        "rows": f"{row:,} bytes an image"
        if sampling == "server" and size
        else f"at most {size * row:,} bytes of all clients together",
        "h": f"{4 * dim:,} bytes a public image",
        "z": f"{row:,} bytes a public image",
    }


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
