"""Files of features and of predictions: one row for each image, and how the rows came about.

Features are written as Parquet, as an NPZ archive or as CSV. `about`, a JSON object, is part of a
Parquet file's metadata and of an archive; beside a CSV it is a file of its own, `NAME.csv.json`.
All files are written piece by piece and get their names when they are complete. The same rows give
the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from harmonium.core import files
from harmonium.core.errors import ConfigError, DataError

BLOCK = 8192  # rows written or read at a time
ABOUT = "harmonium"  # the key of `about` in a Parquet file's metadata, and its array in an archive
FORMATS = (".parquet", ".npz", ".csv")
NAME, FEATURES = "name", "features"

Rows = npt.NDArray[np.float32]
About = Mapping[str, Any]


def check_ending(path: Path, endings: Sequence[str] = FORMATS) -> None:
    """Refuse a file of another format, or one that cannot be written here, before any work."""
    if path.suffix.lower() not in endings:
        raise ConfigError(f"--out {path}: name a file that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: name a file in it")
    if path.suffix.lower() == ".parquet":
        _parquet()


def write_features(
    path: Path, names: Sequence[str], about: About, blocks: Iterable[Rows], dimension: int
) -> None:
    """Write features in the format of the path's ending.

    Args:
        path: the file.
        names: of the images.
        about: how the features came about, as JSON values.
        blocks: the rows `(n, dimension)` in the order of the names, in pieces of any sizes.
        dimension: how many features there are.
    """
    even = _even(blocks, dimension)
    kind = path.suffix.lower()
    if kind == ".csv":
        columns = [f"f{number}" for number in range(dimension)]
        shown = (block.astype(str) for block in even)
        write_csv(path, names, about, columns, shown)
        return
    with files.atomic_file(path) as file:
        write = _write_parquet if kind == ".parquet" else _write_archive
        write(file, names, json.dumps(about), even, dimension)


def write_csv(
    path: Path,
    names: Sequence[str],
    about: About,
    columns: Sequence[str],
    blocks: Iterable[npt.NDArray[np.str_]],
) -> None:
    """Write a CSV of names and cells, and `about` with the digest of the CSV beside it."""
    digest, start = hashlib.sha256(), 0
    with files.atomic_file(path) as file:

        def put(lines: Iterable[Sequence[str]]) -> None:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(lines)
            data = text.getvalue().encode()
            digest.update(data)
            file.write(data)

        put([[NAME, *columns]])
        for block in blocks:
            some = names[start : start + len(block)]
            put([name, *cells] for name, cells in zip(some, block.tolist(), strict=True))
            start += len(block)
        beside = {**about, "csv_sha256": digest.hexdigest()}
        files.write_atomic(_beside(path), (json.dumps(beside, indent=1) + "\n").encode())


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _even(blocks: Iterable[Rows], dimension: int) -> Iterator[Rows]:
    """The same rows in pieces of `BLOCK`, whatever pieces they come in."""
    waiting, count = list[Rows](), 0
    for block in blocks:
        waiting.append(block)
        count += len(block)
        while count >= BLOCK:
            together = np.concatenate(waiting)
            yield together[:BLOCK]
            waiting, count = [together[BLOCK:]], count - BLOCK
    if count:
        yield np.concatenate(waiting)


def _parquet() -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`, an optional extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            ".parquet needs pyarrow: run `pip install 'harmonium[parquet]'`, or use .npz or .csv"
        ) from None
    return pyarrow, pyarrow.parquet


def _write_parquet(
    file: IO[bytes], names: Sequence[str], about: str, blocks: Iterable[Rows], dimension: int
) -> None:
    arrow, parquet = _parquet()
    vectors = arrow.list_(arrow.float32(), dimension)
    schema = arrow.schema([(NAME, arrow.string()), (FEATURES, vectors)], metadata={ABOUT: about})
    start = 0
    with parquet.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for block in blocks:
            flat = arrow.array(np.ascontiguousarray(block).reshape(-1))
            columns = [
                arrow.array(names[start : start + len(block)], arrow.string()),
                arrow.FixedSizeListArray.from_arrays(flat, dimension),
            ]
            writer.write_table(arrow.Table.from_arrays(columns, schema=schema))
            start += len(block)


def _write_archive(
    file: IO[bytes], names: Sequence[str], about: str, blocks: Iterable[Rows], dimension: int
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, array in (("names", np.array(names, np.str_)), (ABOUT, np.array(about))):
            with archive.open(f"{key}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        with archive.open(f"{FEATURES}.npy", "w", force_zip64=True) as entry:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), dimension)}
            np.lib.format.write_array_header_1_0(entry, header)
            for block in blocks:
                entry.write(np.ascontiguousarray(block, "<f4").tobytes())


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features:
    """The features of images, in a file or in memory.

    Attributes:
        names: of the images, one for each row.
        dimension: how many features there are.
        about: how they came about: the encoder's digest, the whitening, versions, what was left
            out.
        blocks: returns the rows in order, some at a time.
    """

    names: Sequence[str] = field(repr=False)
    dimension: int
    about: About = field(repr=False)
    blocks: Callable[[], Iterator[Rows]] = field(repr=False)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.names)

    def matrix(self) -> Rows:
        """All rows at once, `(images, dimension)`."""
        rows = np.empty((len(self), self.dimension), np.float32)
        start = 0
        for block in self.blocks():
            rows[start : start + len(block)] = block
            start += len(block)
        return rows

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of every name."""
        return {name: row for row, name in enumerate(self.names)}


def in_memory(names: Sequence[str], about: About, rows: Rows) -> Features:
    """Features that were just computed.

    >>> features = in_memory(["a", "b"], {}, np.eye(2, dtype=np.float32))
    >>> len(features), features.rows["b"], features.matrix()[1].tolist()
    (2, 1, [0.0, 1.0])
    """
    starts = range(0, len(rows), BLOCK)
    return Features(
        names, rows.shape[1], about, lambda: (rows[one : one + BLOCK] for one in starts)
    )


def _parquet_blocks(path: Path, dimension: int) -> Iterator[Rows]:
    _, parquet = _parquet()
    with parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):  # each is a block; iter_batches reads far ahead
            some = file.read_row_group(group, columns=[FEATURES], use_threads=False)
            flat = some.column(0).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            yield flat.reshape(-1, dimension)


def _archive_blocks(path: Path, dimension: int) -> Iterator[Rows]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{FEATURES}.npy") as entry:
        if np.lib.format.read_magic(entry) != (1, 0):
            raise ValueError("its features are not as they were written")
        np.lib.format.read_array_header_1_0(entry)
        while data := entry.read(4 * dimension * BLOCK):
            yield np.frombuffer(data, "<f4").reshape(-1, dimension)


def _csv_blocks(path: Path, dimension: int) -> Iterator[Rows]:
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines)
        while block := [line[1:] for line in islice(lines, BLOCK)]:
            yield np.array(block, np.float32)


def read_predictions(path: Path) -> tuple[list[str], list[str], Rows, About]:
    """Names, predicted classes, probabilities `(images, classes)` and `about` of a CSV."""
    about = read_about(path)
    with files.reading(path, "make it anew"), open(path, encoding="utf-8", newline="") as file:
        if about is None:
            raise ValueError("what is known about it is not beside it")
        lines = list(csv.reader(file))[1:]
        names, predicted = ([line[place] for line in lines] for place in (0, 1))
        return names, predicted, np.array([line[2:] for line in lines], np.float32), about


_BLOCKS = {".parquet": _parquet_blocks, ".npz": _archive_blocks, ".csv": _csv_blocks}


_REMEDY = "write it again with `harmonium embed`"


def read_about(path: Path) -> About | None:
    """How the rows of a file came about; None if it is no file of features or predictions."""
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            _, parquet = _parquet()
            with parquet.ParquetFile(path) as file:
                text = (file.schema_arrow.metadata or {})[ABOUT.encode()]
        elif kind == ".npz":
            with zipfile.ZipFile(path) as archive, archive.open(f"{ABOUT}.npy") as entry:
                text = str(np.lib.format.read_array(entry, allow_pickle=False))
        else:
            text = _beside(path).read_bytes()
        about = json.loads(text)
        return about if isinstance(about, dict) and "kind" in about else None
    except ConfigError:
        raise  # pyarrow is missing
    except Exception:  # noqa: BLE001  (a foreign file can make a parser raise anything)
        return None


def is_complete(path: Path, about: About) -> bool:
    """Whether a CSV is the one that `about` beside it is of; other formats are in one file."""
    if path.suffix.lower() != ".csv":
        return True
    digest = hashlib.sha256()
    with files.reading(path), open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return about.get("csv_sha256") == digest.hexdigest()


def read_features(path: str | Path) -> Features:
    """Features that `harmonium embed` wrote; rows are read when they are needed."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    about = read_about(path) if path.suffix.lower() in FORMATS else None
    if about is None or about["kind"] != FEATURES:
        raise DataError(f"{path} holds no features: write them with `harmonium embed`")
    kind, dimension = path.suffix.lower(), int(about["dimension"])
    with files.reading(path, _REMEDY):
        names = _names(path, kind)
        if len(names) != about["count"]:
            raise ValueError(f"{len(names)} names for {about['count']} images")

    def blocks() -> Iterator[Rows]:
        count = 0
        with files.reading(path, _REMEDY):
            for block in _BLOCKS[kind](path, dimension):
                count += len(block)
                yield block
            if count != len(names):
                raise ValueError(f"{count} rows for {len(names)} images")

    return Features(names, dimension, about, blocks)


def _names(path: Path, kind: str) -> list[str]:
    if kind == ".parquet":
        _, parquet = _parquet()
        with parquet.ParquetFile(path) as file:
            names: list[str] = file.read(columns=[NAME]).column(0).to_pylist()
            return names
    if kind == ".npz":
        with zipfile.ZipFile(path) as archive, archive.open("names.npy") as entry:
            listed: list[str] = np.lib.format.read_array(entry, allow_pickle=False).tolist()
            return listed
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines)
        return [line[0] for line in lines]
