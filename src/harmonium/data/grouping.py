"""Groups of images, such as those of one patient, which no two parts and no two clients share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import DataError, Key, counted
from harmonium.data.images import GROUP, UNKNOWN, Images, Integers

# ---- which group ---------------------------------------------------------------------------------


def groups_of(images: Images) -> Integers | None:
    """The group of each image, numbered from 0, if there are any; others are groups of their own.

    >>> pixels, labels = np.zeros((4, 8, 8, 1), np.uint8), np.zeros(4, int)
    >>> groups_of(Images(pixels, labels, {"group": np.array([7, -1, 7, 2])})).tolist()
    [2, 0, 2, 1]
    """
    column = images.factors.get(GROUP)
    if column is None or (column == UNKNOWN).all():
        return None
    alone = np.flatnonzero(column == UNKNOWN)
    distinct = column.copy()
    distinct[alone] = min(0, int(column.min())) - 1 - np.arange(len(alone))
    return np.unique(distinct, return_inverse=True)[1].astype(np.int64)


def check_parts(parts: Mapping[str, Images]) -> None:
    """Raise an error if a group has images in two parts of the data."""
    columns = {name: images.factors.get(GROUP) for name, images in parts.items()}
    for one, other in itertools.combinations(columns, 2):
        if (first := columns[one]) is None or (second := columns[other]) is None:
            continue
        shared = np.intersect1d(first, second)
        if both := int((shared != UNKNOWN).sum()):
            raise DataError(
                f"{counted(both, 'group')} with images in the {one} part have some in the {other} "
                "part too: keep every group in one part, or keep none together, with ",
                *(Key("data", "group_column"), "=none or without ", Key("data", "group")),
            )


# ---- parts ---------------------------------------------------------------------------------------


def whole_groups(groups: Integers, wanted: int) -> npt.NDArray[np.bool_]:
    """Which images belong to the groups that are taken to have about `wanted` of them.

    Groups are taken from the end of the images' order while they fit, and then one more if that
    comes nearer.

    >>> whole_groups(np.array([0, 1, 1, 2, 2, 2]), 4).tolist()
    [True, False, False, True, True, True]
    """
    sizes = np.bincount(groups)
    taken, total = np.zeros(len(sizes), bool), 0
    for group in dict.fromkeys(groups[::-1].tolist()):
        if total + sizes[group] <= wanted:
            taken[group], total = True, total + int(sizes[group])
    left = np.flatnonzero(~taken & (sizes > 0))
    if len(left):
        smallest = left[sizes[left].argmin()]
        taken[smallest] = total + sizes[smallest] - wanted < wanted - total
    return taken[groups]


def covering_groups(
    groups: Integers, labels: Integers, share: Integers, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which images belong to groups, drawn at random, that have `share` images of every class."""
    missing = share.astype(np.int64, copy=True)
    inside = np.zeros(len(groups), bool)
    members = _members(groups)
    for place in rng.permutation(len(members)):
        own = labels[members[place]]
        has = np.bincount(own[own != UNKNOWN], minlength=len(missing))[: len(missing)]
        if (np.minimum(has, missing) > 0).any():
            inside[members[place]] = True
            missing = np.maximum(missing - has, 0)
        if not missing.any():
            break
    return inside


def _members(groups: Integers) -> list[Integers]:
    """The positions of the images of each group."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


# ---- clients -------------------------------------------------------------------------------------


def check_clients(groups: Integers, clients: int, called: str) -> None:
    """Raise an error if there are fewer groups than clients."""
    if clients > (most := len(np.unique(groups))):
        raise DataError(
            f"clients={clients}, but the training images of {called} are of "
            f"{counted(most, 'group')}, each of which stays at one client: use at most {most}"
        )


def divided(groups: Integers, indices: Sequence[Integers]) -> int:
    """The number of groups of which two clients or more hold images."""
    owner = np.repeat(np.arange(len(indices)), [len(own) for own in indices])
    pairs = np.unique(np.stack([groups[np.concatenate(indices)], owner], 1), axis=0)
    return int((np.bincount(pairs[:, 0]) > 1).sum())


def regrouped(
    groups: Integers, labels: Integers, indices: Sequence[Integers], rng: np.random.Generator
) -> list[Integers]:
    """Shares of whole groups, as like as possible to given shares of single images.

    The largest group first, each goes to the client with room that most lacks images of its
    classes, of what the given shares have. Every client has one group at least, and no image is
    left out.

    Args:
        groups: of all images.
        labels: of all images; -1 counts as a class.
        indices: the given shares; no more clients than groups.
        rng: breaks ties between groups of the same size.
    """
    classes = np.unique(labels, return_inverse=True)[1]
    width = int(classes.max(initial=0)) + 1
    lacking = np.array([np.bincount(classes[own], minlength=width) for own in indices], np.int64)
    members = _members(groups)
    tie = rng.permutation(len(members))
    order = sorted(range(len(members)), key=lambda k: (-len(members[k]), tie[k]))
    shares: list[list[Integers]] = [[] for _ in indices]
    empty = len(indices)
    for place, group in enumerate(order):
        has = np.bincount(classes[members[group]], minlength=width)
        # Of those with room the best fit; a group too large for all goes where most is lacking.
        room = lacking.sum(1)
        fits = np.minimum(np.maximum(lacking, 0), has).sum(1) * len(labels) + room
        fits = np.where(room >= has.sum(), fits + len(labels) ** 2, room)
        if len(order) - place <= empty:  # each of the last groups goes to a client without any
            fits[[bool(own) for own in shares]] = np.iinfo(np.int64).min
        client = int(fits.argmax())
        empty -= not shares[client]
        shares[client].append(members[group])
        lacking[client] -= has
    return [np.sort(np.concatenate(own)) for own in shares]
