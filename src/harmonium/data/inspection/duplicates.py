"""Near-duplicates: images whose tiny copies nearly coincide.

Two images are near-duplicates if their copies of 12 by 12 pixels differ by at most 4 of 255 levels
(root mean square over pixels and colours) and by at most a tenth of their own contrast. So a file
that was compressed, scaled or renamed is found, and neither another image of the same scene nor one
that was mirrored, turned or cropped is. Blank images are not compared: all of them look alike.

No pair is missed. Copies that are close are also close along any direction, so images are sorted
along the direction in which they vary most, and only those within the limit are compared, first
along a few further directions and then in full. Images linked by near-duplicates are one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from harmonium.core.progress import work
from harmonium.core.seeds import numpy_rng
from harmonium.data.images import Integers, Pixels

LEVELS = 4.0  # of 255, root mean square: copies may differ by so much
CONTRAST = 0.1  # and by so much of their own deviation
BLANK = 1.0  # levels: an image that deviates less from its mean shows nothing
DIRECTIONS = 16  # along which distances are compared first
SAMPLE = 4000  # images that these directions are found from
ROWS = 1024  # images compared at once with those that follow, at most
PAIRS = 1 << 22  # compared at once, and kept before they are merged into groups

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Duplicates:
    """Groups of near-duplicates among the images that can be read."""

    images: int = 0  # in groups of two or more
    groups: int = 0
    extra: int = 0  # images that would go if one of each group stayed
    within: int = 0  # groups that lie within one client
    across: int = 0  # groups that reach over several clients
    parts: int = 0  # groups that reach over train, validation and test
    blank: int = 0  # images of one colour, which are not compared
    examples: tuple[tuple[str, ...], ...] = ()  # names of images of some groups


def near_duplicates(
    tiny: Pixels, names: Sequence[str], clients: Sequence[str], parts: Sequence[str]
) -> Duplicates:
    """The near-duplicates among tiny copies.

    Args:
        tiny: the copies, `(n, side, side, 3)`.
        names: what messages call the images.
        clients: who holds each image; all the same where clients are not known.
        parts: train, validation or test, of each image.
    """
    rows = tiny.reshape(len(tiny), -1)
    visible = np.flatnonzero(rows.std(1) > BLANK) if len(rows) else np.zeros(0, np.int64)
    labels = group_numbers(rows[visible])
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    groups = [visible[group] for group in np.split(order, cuts) if len(group) > 1]
    across = sum(len({clients[row] for row in group}) > 1 for group in groups)
    return Duplicates(
        images=sum(map(len, groups)),
        groups=len(groups),
        extra=sum(len(group) - 1 for group in groups),
        within=len(groups) - across,
        across=across,
        parts=sum(len({parts[row] for row in group}) > 1 for group in groups),
        blank=len(rows) - len(visible),
        examples=tuple(tuple(names[row] for row in group[:4]) for group in groups[:5]),
    )


def group_numbers(rows: Pixels) -> Integers:
    """A number for each row of `(n, dim)`; near-duplicates, and what they link, have the same.

    >>> image = np.arange(432, dtype=np.uint8)[None] % 200
    >>> group_numbers(np.concatenate([image, 255 - image, image + 1])).tolist()
    [0, 1, 0]
    """
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    merged = np.empty((0, 2), np.int64)
    pending: list[npt.NDArray[np.int64]] = []
    for pairs in _near(distinct):
        pending.append(pairs)
        if sum(map(len, pending)) > PAIRS:
            merged, pending = _links(_components(len(distinct), [merged, *pending])), []
    numbers = _components(len(distinct), [merged, *pending])[which.reshape(-1)]
    _, first, again = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[again]  # numbered in the order of their first rows


def _components(count: int, pairs: Sequence[npt.NDArray[np.int64]]) -> Integers:
    edges = np.concatenate(pairs)
    graph = coo_array((np.ones(len(edges), bool), (edges[:, 0], edges[:, 1])), (count, count))
    numbers: Integers = connected_components(graph, directed=False)[1].astype(np.int64)
    return numbers


def _links(numbers: Integers) -> npt.NDArray[np.int64]:
    """Pairs that link every row to the first of its group: as few as there can be."""
    _, first, again = np.unique(numbers, return_index=True, return_inverse=True)
    rows = np.arange(len(numbers))
    linked = first[again]
    pairs: npt.NDArray[np.int64] = np.stack([rows, linked], 1)[rows != linked]
    return pairs


def _near(rows: Pixels) -> Iterator[npt.NDArray[np.int64]]:
    """All pairs of near-duplicates, `(m, 2)` at a time."""
    count, dim = rows.shape
    if count < 2:
        return
    limit = LEVELS * dim**0.5
    places = _projected(rows)
    order = np.argsort(places[:, 0], kind="stable")
    places, along = places[order], places[order, 0]
    ends = np.searchsorted(along, along + limit * (1 + 1e-4), "right")  # rounding
    lengths = np.einsum("nd,nd->n", places, places)
    start = 0
    with work("near-duplicates", count, "images") as at:
        while start < count:
            stop = min(count, start + ROWS)
            while stop - start > 1 and (stop - start) * (ends[stop - 1] - start) > PAIRS:
                stop = start + (stop - start) // 2
            end = ends[stop - 1]
            near = lengths[start:stop, None] + lengths[start:end]
            near -= 2 * places[start:stop] @ places[start:end].T
            # Rounding of a difference of squares: rather too many pairs, all are checked below.
            slack = 1e-4 * lengths[start:end].max()
            one, other = np.nonzero(near <= limit**2 + slack)
            later = other > one
            yield from _checked(rows, order[start + one[later]], order[start + other[later]])
            at(start := stop)


def _projected(rows: Pixels) -> Floats:
    """Coordinates along the directions in which images vary most; distances can only shrink."""
    sample = np.sort(numpy_rng(0, "inspection").permutation(len(rows))[:SAMPLE])
    some = rows[sample].astype(np.float32)
    mean = some.mean(0)
    _, axes = np.linalg.eigh((some - mean).T @ (some - mean))  # the greatest variation is last
    axes = axes[:, ::-1][:, :DIRECTIONS].astype(np.float32)
    pieces = [
        (rows[start : start + SAMPLE].astype(np.float32) - mean) @ axes
        for start in range(0, len(rows), SAMPLE)
    ]
    return np.concatenate(pieces)


def _checked(rows: Pixels, one: Integers, other: Integers) -> Iterator[npt.NDArray[np.int64]]:
    """Those of the pairs that really are near-duplicates."""
    step = max(1, PAIRS // rows.shape[1])
    for start in range(0, len(one), step):
        first, second = one[start : start + step], other[start : start + step]
        a, b = rows[first].astype(np.float32), rows[second].astype(np.float32)
        apart = np.sqrt(((a - b) ** 2).mean(1))
        a -= a.mean(1, keepdims=True)
        b -= b.mean(1, keepdims=True)
        sizes = [np.sqrt((x**2).mean(1, keepdims=True)) for x in (a, b)]
        relative = np.sqrt(((a / sizes[0] - b / sizes[1]) ** 2).mean(1))
        near = (apart <= LEVELS) & (relative <= CONTRAST)
        yield np.stack([first[near], second[near]], 1)
