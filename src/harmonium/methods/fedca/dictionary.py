"""FedCA's dictionary module: the rows that clients send, and the dictionary made of them.

A row is the normalised projection of one image (eq. 10), of size `objective.out`. The dictionary
has K rows (`method.size`, 1024 in the paper). Algorithm 1, line 9, concatenates all rows of all
clients, which with five clients of 10,000 images are 50,000 and not 1024; the paper does not say
how the two fit together. `method.sampling` decides who chooses:

    client    each client sends its share of K rows, by its number of images, drawn at random
    server    clients send all rows, and the server draws K of them
    replace   as `client`, and the server keeps the newest rows of clients that are absent

(The paper's `dim = 1` of line 9 is of a layout with projections in columns; here they are rows.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core.errors import counted
from harmonium.core.types import ClientId
from harmonium.learning.client import Client
from harmonium.learning.unit_rows import non_unit_length
from harmonium.privacy.mechanisms import Release

Sampling = Literal["client", "server", "replace"]  # who chooses rows; see above
_MODEL_IS_UNPROTECTED = (
    "This is for rows alone: the model goes up beside them, trained on the same images."
)


def quotas(
    size: int, sampling: Sampling, examples: Mapping[ClientId, int], ready: Sequence[ClientId]
) -> dict[ClientId, int]:
    """How many rows each client sends, never more than it has images.

    Under `client` they are shares of `size` among the clients of this round, by their numbers of
    images; under `replace` shares among all clients, as the rows of absent ones stay; under
    `server` a row for every image. Shares are rounded by largest remainders, so that they add up to
    `size` wherever there are enough images.

    Args:
        size: rows of the dictionary (K).
        sampling: who chooses rows.
        examples: every client's number of images.
        ready: the clients that train in this round.

    >>> quotas(5, "client", {0: 10, 1: 10, 2: 10, 3: 99}, [0, 1, 2])
    {0: 2, 1: 2, 2: 1}
    """
    among = list(examples) if sampling == "replace" else list(ready)
    if sampling == "server":
        return {client: examples[client] if size else 0 for client in among}
    total = sum(examples[client] for client in among)
    shares = {client: size * examples[client] / total for client in among}
    counts = {client: min(int(shares[client]), examples[client]) for client in among}
    missing = min(size, total) - sum(counts.values())
    for client in sorted(among, key=lambda one: (int(shares[one]) - shares[one], one)):
        if missing > 0 and counts[client] < examples[client]:
            counts[client] += 1
            missing -= 1
    return counts


def build_dictionary(rows: Mapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """The dictionary of exactly `size` rows: drawn at random, some twice if there are too few.

    Algorithm 1, line 9. Clients are taken in the order of their numbers, not of their answers.

    Args:
        rows: what each client sent, (count, dim).
        size: rows of the dictionary (K); if nobody sent a row it stays empty.

    Returns:
        The rows, (size, dim), and the client that each belongs to, (size,).

    >>> rows, owners = build_dictionary({"1": torch.ones(2, 3), "0": torch.zeros(1, 3)}, size=5)
    >>> rows.shape, owners.tolist()[:3]
    (torch.Size([5, 3]), [0, 1, 1])
    """
    clients = sorted(rows, key=int)
    all_rows = torch.cat([rows[client] for client in clients])
    counts = torch.tensor([len(rows[client]) for client in clients])
    owners = torch.tensor([int(client) for client in clients]).repeat_interleave(counts)
    if len(all_rows) > size:
        chosen = torch.randperm(len(all_rows))[:size].sort().values
    elif len(all_rows):
        repeated = torch.randint(len(all_rows), (size - len(all_rows),))
        chosen = torch.cat([torch.arange(len(all_rows)), repeated])
    else:
        return all_rows, owners
    return all_rows[chosen], owners[chosen]


def rows_fault(rows: Tensor, most: int) -> str | None:
    """Why rows for the dictionary cannot be an honest client's; None if they can.

    Some images may occur twice and have the same row, but an honest client's rows differ for at
    least half of its images.

    Args:
        rows: what the client sent, (count, dim).
        most: how many it was asked for.

    >>> rows_fault(torch.ones(2, 3), 2)
    '`rows` are not of unit length'
    >>> rows_fault(torch.eye(3)[[0, 0, 0]], 3)
    '`rows` hold 1 different row in 3'
    """
    if len(rows) > most:
        return f"`rows` are {len(rows)}, but {most} were asked for"
    if non_unit_length(rows) is not None:
        return "`rows` are not of unit length"
    different = len(torch.unique(rows, dim=0)) if len(rows) else 0
    if 2 * different < len(rows):
        return f"`rows` hold {counted(different, 'different row')} in {len(rows)}"
    return None


def protected(client: Client, rows: Tensor, noise: float, group: int) -> Tensor:
    """Unit rows to send: means of groups, rows with noise, or the rows unchanged.

    Neither protection is in the paper. Rows are normalised again afterwards.
    """
    if group > 1:
        return functional.normalize(grouped_means(rows, group))
    if not noise:
        return rows
    (release,) = costs(noise)
    rows = rows.nan_to_num(0.0, 0.0, 0.0)  # noise would not hide a row that is not finite
    return client.release("rows", rows, **release.how, then=functional.normalize)


def costs(noise: float) -> tuple[Release, ...]:
    """What rows with noise release of an image: its own row; two unit rows lie at most 2 apart."""
    return (Release("rows", "gaussian", 2.0, noise),) if noise else ()


def disclosure(
    size: int,
    sampling: Sampling,
    momentum: float,
    noise: float,
    group: int,
    *,
    exclude_own: bool = False,
) -> tuple[str, ...]:
    """What the server and other clients learn from rows, in plain words for the card.

    >>> disclosure(0, "client", 0.5, 0.0, 1)
    ()
    """
    if not size:
        return ()
    many = "as many as images" if sampling == "server" else f"{size:,} of all clients together"
    averaged = ", averaged over the rounds in which it took part" if momentum else ""
    of_images = f"at least {group} similar images, as a mean" if group > 1 else "one image"
    whose = "all other clients" if exclude_own else "all clients"
    sentences = [
        f"What the server gets: in each round rows of numbers, {many}, from each client by name. "
        f"A row is what the client's model makes of {of_images}{averaged}.",
        f"What other clients get: the next round's dictionary, rows of {whose} without names. "
        "With few clients, whoever knows its own rows may guess whose the others are.",
    ]
    if group > 1:
        sentences.append(
            "So no row belongs to a single image. What similar images have in common shows all "
            "the same, and no number bounds what a mean tells of one image: there is no epsilon."
        )
        return (*sentences, _MODEL_IS_UNPROTECTED)
    sentences.append(
        "Who has a row also has the model that made it, or one close to it. So they can tell which "
        "images are alike, follow an image through the rounds, test whether an image that they "
        "know is among a client's, and try to draw an image from its row."
    )
    if noise:
        sentences.append(
            f"Noise of {noise:g} on each number of a row makes all of that harder. The ledger has "
            "every release, from which its epsilon follows, for an image's own rows alone."
        )
        return (*sentences, _MODEL_IS_UNPROTECTED)
    return (
        *sentences,
        "Nothing hides these rows. Two settings can: method.noise adds noise to them, on record; "
        "method.group sends means of that many similar rows in their place.",
    )


def message_sizes(size: int, sampling: Sampling, projector: nn.Module) -> dict[str, str]:
    """Sizes of messages: the dictionary, a client's rows, and targets for public images."""
    parameters = list(projector.parameters())
    features, width = parameters[0].shape[1], len(parameters[-1])
    row = 4 * width  # bytes
    return {
        "dictionary": f"{size:,} rows of {width} numbers, {size * row:,} bytes, from round 2 on",
        "rows": f"{row:,} bytes an image"
        if sampling == "server" and size
        else f"at most {size * row:,} bytes of all clients together",
        "h": f"{4 * features:,} bytes a public image",
        "z": f"{row:,} bytes a public image",
    }


def grouped_means(rows: Tensor, least: int) -> Tensor:
    """Means of groups of at least `least` similar rows each; (count, dim) to (count // least, dim).

    Rows are halved recursively along their first principal direction, in proportion to the numbers
    of groups in the halves.

    >>> grouped_means(torch.tensor([[0.0], [9.0], [1.0], [10.0]]), 2).flatten().sort().values
    tensor([0.5000, 9.5000])
    """
    groups = len(rows) // least
    if groups < 1:
        return rows[:0]
    if groups == 1:
        return rows.mean(0, keepdim=True)
    centred = rows - rows.mean(0)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[0]
    order = (centred @ direction).argsort(stable=True)
    cut = len(rows) * (groups // 2) // groups
    return torch.cat([grouped_means(rows[half], least) for half in (order[:cut], order[cut:])])
