"""Reading every image once, as a tiny copy, and some of them again in more detail.

The tiny copies are for near-duplicates; that they can be made proves that an image can be read to
its end. The details are of images drawn at random, the same in every call, and are what kinds of
image are told by.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.progress import emit, work
from harmonium.core.seeds import numpy_rng
from harmonium.data.cache import Writer
from harmonium.data.decoding.conversion import shaped
from harmonium.data.decoding.dicom import check_installed
from harmonium.data.decoding.pool import Decoders
from harmonium.data.decoding.worker import Answer, Order, Source
from harmonium.data.images import UNKNOWN, Pixels
from harmonium.data.inspection.listing import Listed
from harmonium.data.sets.npz import read_archive

TINY = 12  # side of the copies that are compared with each other
SOME, SIDE = 800, 64  # images that kinds are told by, and their side at most
FEW, LARGE = 64, 256  # images that a size is chosen by, and their side at most
DEEP = 32  # 16-bit images whose bits are counted
AT_ONCE = 64  # images in one order to a decoding process

WIDE = "16-bit grey"  # as `conversion.kind_of` calls it


@dataclass
class Read:
    """What was read of a source's images."""

    places: npt.NDArray[np.int64]  # of every image that can be read, its file in the listing
    broken: list[tuple[int, str]]  # position of every other, with the reason
    sizes: list[tuple[int, int]]  # width and height of those that can be read
    kinds: list[str]  # what they are in words, e.g. colour
    tiny: Pixels  # (n, TINY, TINY, 3)
    some: Pixels  # a sample, (m, side, side, 3)
    large: Pixels  # fewer of them with more detail, (k, side, side, 3)
    depth: int | None = None  # bits that 16-bit grey images use; none: there are none
    columns: dict[str, list[str]] = field(default_factory=dict)  # of an archive
    parts: list[str] = field(default_factory=list)  # of an archive
    notes: list[str] = field(default_factory=list)  # of an archive


def sides(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The sides of the sample and of its details: those of typical images, up to a limit."""
    shorter = int(np.median([min(size) for size in sizes])) if sizes else SIDE
    return max(1, min(SIDE, shorter)), max(1, min(LARGE, shorter))


# ---- files ---------------------------------------------------------------------------------------


def read_files(images: Sequence[Listed], depth: int | None, workers: int | None = None) -> Read:
    """Read image files; `depth` says how many bits 16-bit grey uses, else they are counted."""
    paths = [str(image.path) for image in images]
    check_installed(paths)
    with Decoders(workers) as decoders:
        heads = _answers(decoders, "headers", paths, Order(head=True))
        files = [row for row, head in enumerate(heads) if not head.error]
        intact = [row for row in files for _ in range(heads[row].frames)]
        sources = [source for row in files for source in _images_of(paths[row], heads[row])]
        wide = [paths[row] for row in files if heads[row].kind == WIDE]
        if wide and depth is None:
            depth = _bits_used(decoders, wide)
        read = partial(Order, channels=3, depth=depth or 16)
        tiny = np.zeros((len(intact), TINY, TINY, 3), np.uint8)
        failed: dict[int, str] = {}

        def keep(position: int, answer: Answer) -> None:
            if answer.pixels is None:
                failed[intact[position]] = answer.error
            else:
                tiny[position] = answer.pixels

        rough = read(rough=True, size=TINY)
        _each(decoders, "reading images", sources, rough, keep)
        good = np.array([row not in failed for row in intact], bool)
        places = np.array(intact, np.int64)[good]
        sizes = [heads[row].size for row in places]
        readable = [sources[at] for at in np.flatnonzero(good)]
        some, large = (
            _sample(decoders, readable, count, read(size=side))
            for count, side in zip((SOME, FEW), sides(sizes), strict=True)
        )
    broken = [(row, head.error) for row, head in enumerate(heads) if head.error]
    return Read(
        places,
        sorted([*broken, *failed.items()]),
        sizes,
        [heads[row].kind for row in places],
        tiny[good],
        some,
        large,
        depth if wide else None,
    )


def _images_of(path: str, head: Answer) -> list[Source]:
    """The images of a file: one, except of a DICOM file with several frames."""
    return [path] if head.frames == 1 else [(path, number) for number in range(head.frames)]


def _each(
    decoders: Decoders,
    what: str,
    paths: Sequence[Source],
    order: Order,
    keep: Callable[[int, Answer], None],
) -> None:
    """Call `keep` with each position and its answer, in order, and show how far it is."""
    done = 0
    with work(what, len(paths), "images") as at:
        for answers in decoders.run(paths, order, AT_ONCE):
            for answer in answers:
                keep(done, answer)
                done += 1
            at(done)


def _answers(decoders: Decoders, what: str, paths: Sequence[Source], order: Order) -> list[Answer]:
    answers: list[Answer] = []
    _each(decoders, what, paths, order, lambda _, answer: answers.append(answer))
    return answers


def _sample(decoders: Decoders, paths: Sequence[Source], count: int, order: Order) -> Pixels:
    """Some images drawn at random, always the same ones, in the order of the listing."""
    rows = np.sort(numpy_rng(0, "inspection").permutation(len(paths))[:count])
    answers = _answers(decoders, "a sample", [paths[row] for row in rows], order)
    pixels = [answer.pixels for answer in answers if answer.pixels is not None]
    return np.stack(pixels) if pixels else np.zeros((0, 1, 1, 3), np.uint8)


def _bits_used(decoders: Decoders, paths: Sequence[str]) -> int:
    """How many of 16 bits the brightest of some images uses, from 8 to 16.

    They are read as 8 bits of all 16: then 12 bits end at level 16, since 4095 * 255 / 65535 is
    15.9.
    """
    rows = np.sort(numpy_rng(0, "inspection").permutation(len(paths))[:DEEP])
    answers = _answers(decoders, "bits in use", [paths[r] for r in rows], Order(channels=1))
    brightest = max((int(a.pixels.max()) for a in answers if a.pixels is not None), default=255)
    return bits_of(brightest)


def bits_of(level: int) -> int:
    """The bits of 16-bit values whose greatest is `level` on a scale of 255.

    >>> [bits_of(round((2**bits - 1) * 255 / 65535)) for bits in (8, 10, 12, 14, 16)]
    [8, 10, 12, 14, 16]
    """
    least = max(0.0, level - 0.5) * 65535 / 255
    return int(min(16, max(8, np.ceil(np.log2(least + 1)))))


# ---- an archive ----------------------------------------------------------------------------------


def read_npz(path: Path) -> Read:
    """Read all images of an archive of arrays."""
    sink = _Sink()
    classes = read_archive(path, sink)
    return sink.read(classes)


class _Drawn:
    """So many images drawn at random from a stream, scaled down to at most a side."""

    def __init__(self, count: int, most: int) -> None:
        self._count, self._most = count, most
        self._heap: list[tuple[float, int, Pixels]] = []

    def offer(self, number: int, priority: float, image: Pixels) -> None:
        """Take an image if its priority is among the highest so far."""
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, (priority, number, self._small(image)))
        elif priority > self._heap[0][0]:
            heapq.heapreplace(self._heap, (priority, number, self._small(image)))

    def _small(self, image: Pixels) -> Pixels:
        small: Pixels = shaped(image[None], min(self._most, *image.shape[:2]), 3)[0]
        return small.copy()  # not the whole archive

    def pixels(self) -> Pixels:
        """The images drawn, all as small as the smallest, in the order of the stream."""
        images = [image for _, _, image in sorted(self._heap, key=lambda entry: entry[1])]
        side = min(len(image) for image in images)
        return np.concatenate([shaped(image[None], side, 3) for image in images])


class _Sink(Writer):
    """Takes images as a cache does, and keeps tiny copies of all and details of some."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._rng = numpy_rng(0, "inspection")
        self._tiny: list[Pixels] = []
        self._sizes: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        self._parts_of: list[str] = []
        self._labels: list[int] = []
        self._columns: dict[str, list[int]] = {}
        self._drawn = (_Drawn(SOME, SIDE), _Drawn(FEW, LARGE))

    def append(
        self,
        part: str,
        pixels: Pixels,
        labels: npt.NDArray[Any],
        factors: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        """Look at some images of a part."""
        (height, width, channels), count = pixels.shape[1:], len(pixels)
        before = len(self._labels)
        self._tiny.append(shaped(pixels, TINY, 3))
        self._sizes += [(width, height)] * count
        self._kinds += ["grey" if channels == 1 else "colour"] * count
        self._parts_of += [part] * count
        self._labels += labels.tolist()
        for name, values in (factors or {}).items():
            column = self._columns.setdefault(name, [])
            column += [UNKNOWN] * (before - len(column)) + values.tolist()
        for number, priority in enumerate(self._rng.random(count).tolist()):
            for drawn in self._drawn:
                drawn.offer(before + number, priority, pixels[number])
        emit("reading images", len(self._labels), None)

    def read(self, classes: Sequence[str]) -> Read:
        """Everything that was kept, with numbers replaced by names."""
        count = len(self._labels)
        emit("reading images", count, count)
        numbers = {name: [*c, *[UNKNOWN] * (count - len(c))] for name, c in self._columns.items()}
        columns = {name: _named(n, self.names.get(name, ())) for name, n in numbers.items()}
        if max(self._labels, default=UNKNOWN) > UNKNOWN:
            columns["label"] = _named(self._labels, classes)
        some, large = (drawn.pixels() for drawn in self._drawn)
        return Read(
            np.arange(count),
            [],
            self._sizes,
            self._kinds,
            np.concatenate(self._tiny),
            some,
            large,
            columns=columns,
            parts=self._parts_of,
            notes=self.notes,
        )


def _named(values: Sequence[int], names: Sequence[str]) -> list[str]:
    return ["" if k == UNKNOWN else names[k] if 0 <= k < len(names) else str(k) for k in values]
