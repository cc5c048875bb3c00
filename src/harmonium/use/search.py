"""The images whose features are nearest to those of query images, by cosine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core import files
from harmonium.core.devices import AUTO
from harmonium.core.errors import ConfigError, DataError, StoreError, counted
from harmonium.core.progress import emit
from harmonium.data.cache import printable
from harmonium.report.contact_sheets import FoundRow, Neighbour, plot_neighbours
from harmonium.report.search_page import search_page
from harmonium.runs.export import HasFolder, LoadedEncoder
from harmonium.use import tables
from harmonium.use.embedding import Note, embed, silent, used_encoder
from harmonium.use.sources import ImageSource, open_images
from harmonium.use.tables import Features, read_features

COUNT = 10  # images that are found for a query
SIDE = 128  # of a thumbnail, in pixels

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Found:
    """The nearest images of every query.

    Attributes:
        queries: their names.
        names: of the images found for each query, the nearest first.
        cosines: of the same images.
        about: of the features that were searched.
    """

    queries: Sequence[str]
    names: Sequence[Sequence[str]]
    cosines: Sequence[Sequence[float]]
    about: Mapping[str, Any] = field(repr=False)
    searched: int = 0  # images
    _of_names: int = 0  # queries that are names in the features; the others are files
    _sources: tuple[ImageSource | None, ImageSource | None] = field(  # of images, and of queries
        default=(None, None), repr=False
    )

    def plain(self) -> dict[str, Any]:
        """All of it as JSON values."""
        rows = zip(self.queries, self.names, self.cosines, strict=True)
        return {
            "searched": self.searched,
            "encoder": self.about["encoder"],
            "queries": [
                {
                    "query": query,
                    "found": [
                        {"name": name, "cosine": round(cosine, 6)}
                        for name, cosine in zip(names, cosines, strict=True)
                    ],
                }
                for query, names, cosines in rows
            ],
        }

    def plot(self, path: str | Path) -> None:
        """Draw a contact sheet: `.png`, `.pdf` or `.svg`."""
        plot_neighbours(path, self._rows(), self._title)

    def write_page(self, path: str | Path) -> None:
        """Write a page with thumbnails, as one HTML file."""
        lines = [
            f"By cosine between features of the encoder {self.about['encoder'][:12]}, which was "
            f"trained by {self.about['trained']['method']} on {self.about['trained']['data']}. "
            "1 is the same direction, 0 is none in common.",
        ]
        page = search_page(self._title, self._rows(), lines)
        files.write_atomic(Path(path), page.encode())

    @property
    def _title(self) -> str:
        return f"Nearest of {counted(self.searched, 'image')}"

    def _rows(self) -> list[FoundRow]:
        """Queries and images with their thumbnails."""
        images, queries = self._sources
        if images is None:
            raise ConfigError(
                "thumbnails need the images, which a file of features does not hold: name their "
                "place with --images"
            )
        wanted = [name for names in self.names for name in names]
        of_names = self._of_names
        shown = _thumbnails(images, [*wanted, *self.queries[:of_names]])
        asked = dict[str, Array]()
        if queries is not None:
            asked = _thumbnails(queries, self.queries[of_names:])
        return [
            FoundRow(
                query,
                (shown if place < of_names else asked).get(query),
                [
                    Neighbour(name, cosine, shown.get(name))
                    for name, cosine in zip(names, cosines, strict=True)
                ],
            )
            for place, (query, names, cosines) in enumerate(
                zip(self.queries, self.names, self.cosines, strict=True)
            )
        ]


def _thumbnails(source: ImageSource, names: Iterable[str]) -> dict[str, Array]:
    """Thumbnails of those images that the source has and that can be read, by name."""
    known = {name: row for row, name in enumerate(source.names)}
    some = [name for name in dict.fromkeys(names) if name in known]
    pixels = source.thumbnails([known[name] for name in some], SIDE)
    return {name: one for name, one in zip(some, pixels, strict=True) if one is not None}


def search(
    where: str | Path | Features | ImageSource,
    *queries: str | Path,
    encoder: str | Path | HasFolder | LoadedEncoder | None = None,
    k: int = COUNT,
    images: str | Path | ImageSource | None = None,
    whiten: bool | int = False,
    device: str = AUTO,
    column: str = "path",
    note: Note = silent,
) -> Found:
    """Find the images that are nearest to query images.

    Args:
        where: features that `embed` wrote or returned, or images: a folder, a table, an archive.
        queries: names of images among these, or image files and folders.
        encoder: the encoder; needed for images, and for queries that are files.
        k: how many to find for each query, which is never found itself.
        images: where the images of the features are, for thumbnails.
        whiten: compare whitened features, where images are given.
        device: where to compute features.
        column: of a table, the column that names the files.
        note: is called with what users should know.
    """
    if k < 1:
        raise ConfigError(f"k is {k}; it must be at least 1")
    if not queries:
        raise ConfigError("name a query: an image file, or a name in the features")
    features, source = _gallery(where, encoder, whiten, device, column, note)
    if images is not None:
        source = open_images(images, column=column, frames=features.about.get("frames", "all"))
    known, asked = _queries(features, queries)
    vectors, names, own = (
        _rows_of(features, known),
        list(known),
        list(map(features.rows.get, known)),
    )
    asked_source = None
    if asked:
        asked_source = open_images(*asked, frames=features.about.get("frames", "all"))
        more = _embedded(features, asked_source, encoder, device, note)
        vectors = np.concatenate([vectors, more.matrix()])
        names += more.names
        own += [None] * len(more)
    rows, cosines = nearest(features.blocks(), vectors, k, own, len(features))
    return Found(
        queries=names,
        names=[[features.names[row] for row in some] for some in rows],
        cosines=cosines,
        about=features.about,
        searched=len(features),
        _of_names=len(known),
        _sources=(source, asked_source),
    )


def _gallery(
    where: str | Path | Features | ImageSource,
    encoder: str | Path | HasFolder | LoadedEncoder | None,
    whiten: bool | int,
    device: str,
    column: str,
    note: Note,
) -> tuple[Features, ImageSource | None]:
    """The features to search, and the images that they are of, where these are known."""
    if isinstance(where, Features):
        return where, None
    if not isinstance(where, ImageSource):
        path = Path(where)
        if path.is_file() and path.suffix.lower() in tables.FORMATS and tables.read_about(path):
            return read_features(path), None
        if path.suffix.lower() == ".parquet":
            return read_features(path), None  # refuses it
    if encoder is None:
        raise ConfigError(
            "searching images needs their encoder: give it with --encoder, or write features once "
            "with `harmonium embed` and search these"
        )
    loaded = used_encoder(encoder, whiten)
    source = open_images(where, column=column, frames=loaded.order().frames)
    return embed(loaded, source, device=device, note=note), source


def _queries(features: Features, queries: Sequence[str | Path]) -> tuple[list[str], list[Path]]:
    """The queries that are names in the features, and those that are files or folders."""
    names, paths = list[str](), list[Path]()
    for query in queries:
        text = str(query)
        if text in features.rows:
            names.append(text)
        elif Path(text).exists():
            paths.append(Path(text))
        else:
            base = text.rpartition("/")[2]
            near = [name for name in features.names if name.rpartition("/")[2] == base]
            hint = f"did you mean '{near[0]}'?" if near else f"names are like {features.names[0]}"
            raise DataError(
                f"{printable(text)} is neither the name of one of the "
                f"{counted(len(features), 'image')} nor a file: {hint}"
            )
    return list(dict.fromkeys(names)), paths


def _rows_of(features: Features, names: Sequence[str]) -> Array:
    """The rows of some names, from one pass over the features."""
    vectors = np.empty((len(names), features.dimension), np.float32)
    wanted = np.array([features.rows[name] for name in names], np.int64)
    start = 0
    for block in features.blocks() if names else ():
        inside = np.flatnonzero((wanted >= start) & (wanted < start + len(block)))
        vectors[inside] = block[wanted[inside] - start]
        start += len(block)
    return vectors


def _embedded(
    features: Features,
    source: ImageSource,
    encoder: str | Path | HasFolder | LoadedEncoder | None,
    device: str,
    note: Note,
) -> Features:
    """The features of query images, by the encoder of the others."""
    if encoder is None:
        raise ConfigError(
            f"{source.names[0]} is an image file, which needs the encoder of the features: give it "
            "with --encoder, or query by a name in the features"
        )
    whitening = features.about["whitening"]
    loaded = used_encoder(encoder, whitening or False)
    if loaded.digest != features.about["encoder"]:
        raise StoreError(
            f"the features are of the encoder {features.about['encoder'][:12]}, not of "
            f"{loaded.digest[:12]}: features of two encoders cannot be compared"
        )
    return embed(loaded, source, device=device, note=note)


def nearest(
    blocks: Iterator[Array],
    queries: Array,
    k: int,
    own: Sequence[int | None] | None = None,
    total: int | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Rows and cosines of the `k` rows nearest to each query, the first of equal ones before.

    Args:
        blocks: the rows `(n, dim)`, in pieces; only one of them is in memory.
        queries: `(queries, dim)`.
        k: how many.
        own: a row that each query does not find: itself; None: it finds all.
        total: rows in all, for the progress.

    >>> rows, cosines = nearest(iter([np.eye(3), np.ones((1, 3))]), np.eye(3)[:1], 2, [0])
    >>> rows, [[round(one, 3) for one in some] for some in cosines]
    ([[3, 1]], [[0.577, 0.0]])
    """
    units = _unit(queries)
    rows = [np.empty(0, np.int64) for _ in units]
    cosines = [np.empty(0, np.float32) for _ in units]
    start = 0
    for block in blocks:
        scores = units @ _unit(block).T
        for query, row in enumerate(own or ()):
            if row is not None and start <= row < start + len(block):
                scores[query, row - start] = -np.inf
        most = scores.max(axis=1)
        for query, one in enumerate(scores):
            full = len(cosines[query]) == k
            if full and most[query] <= cosines[query][-1]:
                continue
            least = np.partition(one, len(one) - k)[len(one) - k] if len(one) > k else -2.0
            places = np.flatnonzero((one >= least) & (one >= -2.0))  # all that are equal
            both = np.concatenate([cosines[query], one[places]])
            numbers = np.concatenate([rows[query], start + places])
            order = np.lexsort((numbers, -both))[:k]
            rows[query], cosines[query] = numbers[order], both[order]
        start += len(block)
        if total is not None:
            emit("search", start, total)
    return [some.tolist() for some in rows], [some.tolist() for some in cosines]


def _unit(rows: Array) -> Array:
    """Rows of length 1; rows of zeros stay."""
    rows = np.asarray(rows, np.float32)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    units: Array = rows / np.maximum(lengths, 1e-12)[:, None]
    return units
