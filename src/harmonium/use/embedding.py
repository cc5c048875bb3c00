"""Features of many images, written to a file; a killed command continues where it was.

Images are decoded in several processes and pass the encoder in batches at fixed places: an image
that cannot be read keeps its place in its batch and is left out afterwards. So rows depend neither
on where a command was interrupted nor on how many cores there are, and the output of a command that
was killed and started again has the same bytes as that of one that was not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from harmonium import __version__
from harmonium.core import devices
from harmonium.core.devices import AUTO
from harmonium.core.errors import ConfigError, DataError, StoreError, counted
from harmonium.core.paths import make_folder
from harmonium.core.progress import emit
from harmonium.evaluation import features as evaluation
from harmonium.runs.export import HasFolder, LoadedEncoder, load_encoder
from harmonium.storage.result_folder import locked_folder
from harmonium.use import tables
from harmonium.use.sources import ImageSource, Piece, open_images
from harmonium.use.tables import FEATURES, Features, in_memory
from harmonium.use.unfinished import Unfinished, folder_of

FORMAT = 1  # raise it when the same images and encoder would give other rows
BATCH = 256  # images of a batch, at most
BATCH_BYTES = 1 << 22  # of the pixels of a batch, at most
NAMED = 5  # images that a message names

Corrupt = Literal["skip", "refuse"]
Note = Callable[[str], None]
Rows = npt.NDArray[np.float32]
T = TypeVar("T")


class Part(NamedTuple):
    """The rows of consecutive images."""

    stop: int  # the row in the source that follows
    rows: Rows  # of the images that could be read
    kept: list[int]  # their rows in the source
    left_out: list[tuple[int, str]]  # the others, and why


def silent(text: str) -> None:
    """Take a note and do nothing with it."""


def used_encoder(
    encoder: str | Path | HasFolder | LoadedEncoder, whiten: bool | int = False
) -> LoadedEncoder:
    """An encoder as it is used on images: loaded if need be, in evaluation mode."""
    if isinstance(encoder, LoadedEncoder):
        return encoder.eval()
    return load_encoder(encoder, layout="NHWC", whiten=whiten)


def embed(
    encoder: str | Path | HasFolder | LoadedEncoder,
    *images: str | Path | ImageSource,
    out: str | Path | None = None,
    whiten: bool | int = False,
    batch: int | None = None,
    device: str = AUTO,
    corrupt: Corrupt = "skip",
    column: str = "path",
    note: Note = silent,
) -> Features:
    """The features of images, in a file or in memory.

    Args:
        encoder: a run's folder, its `Result`, a bundle's folder, an `encoder.safetensors`, or what
            `load_encoder` returned.
        images: a folder, files, a table (`.csv`) or an archive (`.npz`).
        out: the file to write, `.parquet`, `.npz` or `.csv`; none: the features stay in memory.
        whiten: as for `load_encoder`, which takes a path.
        batch: images of a batch; chosen by their size where it is left out.
        device: where to compute: auto, cpu, cuda, cuda:1 or mps.
        corrupt: leave out images that cannot be read (`skip`), or refuse them.
        column: of a table, the column that names the files.
        note: is called with what users should know.

    Returns:
        The features; their `about` names the encoder and the images that were left out.
    """
    if out is not None:
        tables.check_ending(Path(out))
    _check(batch, corrupt)
    model = used_encoder(encoder, whiten)
    source = open_images(*images, column=column, frames=model.order().frames)
    job = Job(model, model, source, FEATURES, model.features, batch, corrupt, note)
    with on_device(device, model):
        if out is None:
            return job.in_memory()
        job.into(Path(out), lambda names, about, blocks: tables.write_features(
            Path(out), names, about, blocks, model.features
        ))  # fmt: skip
    return tables.read_features(out)


def _check(batch: int | None, corrupt: str) -> None:
    if batch is not None and batch < 1:
        raise ConfigError(f"batch is {batch}; it must be at least 1")
    if corrupt not in ("skip", "refuse"):
        raise ConfigError(f"corrupt is {corrupt!r}: use skip or refuse")


@contextmanager
def on_device(named: str, *modules: nn.Module) -> Iterator[None]:
    """Compute on a device within the block, with these modules on it."""
    place = devices.resolve(named)[0]
    devices.select(place)
    with devices.use_device(place), devices.on_current_device(*modules):
        yield


@dataclass(frozen=True)
class Job:
    """Rows to compute of images: features, or what a classifier makes of them.

    Attributes:
        model: takes uint8 images, and returns a row for each.
        encoder: the encoder in it, which says how files are decoded.
        source: the images.
        kind: what the rows are: `features` or `predictions`.
        width: numbers in a row.
        batch: images of a batch; None: chosen by their size.
        corrupt: what to do with images that cannot be read.
        note: is called with what users should know.
        more: further facts that the rows depend on.
        remedy: what else to do about images that cannot be read, where they are refused.
    """

    model: nn.Module
    encoder: LoadedEncoder
    source: ImageSource
    kind: str
    width: int
    batch: int | None = None
    corrupt: Corrupt = "skip"
    note: Note = silent
    more: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ", or leave them out with --corrupt skip"

    # ---- what is computed ----

    def identity(self) -> dict[str, Any]:
        """All that the rows depend on, as JSON values."""
        encoder, whitening = self.encoder, self.encoder.whitening
        return {
            "kind": self.kind,
            "format": FORMAT,
            "encoder": encoder.digest,
            "whitening": whitening.directions if whitening else None,
            "images": self.source.digest,
            "batch": self._batch,
            "device": devices.current().type,
            "precision": str(next((p.dtype for p in encoder.parameters()), torch.float32))[6:],
            "versions": {
                "harmonium": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "machine": platform.machine(),
            },
            **self.more,
        }

    def _about(self, left_out: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """What a file says of its rows."""
        encoder = self.encoder
        return {
            **self.identity(),
            "dimension": self.width,
            "trained": {"method": encoder.method, "data": encoder.data, "recipe": encoder.recipe},
            "size": list(encoder.size),
            "channels": encoder.channels,
            "frames": encoder.order().frames,
            "count": len(self.source) - len(left_out),
            "left_out": [{"name": self.source.names[row], "why": why} for row, why in left_out],
        }

    @property
    def _batch(self) -> int:
        if self.batch is not None:
            return self.batch
        height, width = self.encoder.size
        return max(1, min(BATCH, BATCH_BYTES // (height * width * self.encoder.channels)))

    # ---- where it goes ----

    def in_memory(self) -> Features:
        """All rows at once."""
        parts = list(self._parts(0))
        left_out = [one for part in parts for one in part.left_out]
        self._report(left_out)
        names = [self.source.names[row] for part in parts for row in part.kept]
        return in_memory(names, self._about(left_out), np.concatenate([p.rows for p in parts]))

    def into(
        self,
        path: Path,
        write: Callable[[Sequence[str], Mapping[str, Any], Iterator[Rows]], None],
    ) -> None:
        """Compute rows into a file; those of an interrupted command are continued.

        Args:
            path: the file.
            write: writes it from the names, its metadata and the rows, in one atomic step.
        """
        make_folder(path.absolute().parent)
        unfinished = Unfinished(folder_of(path), self.width)
        if self._is_done(path):
            self.note(f"{path} is complete already: nothing to do")
            unfinished.remove()
            return
        with locked_folder(unfinished.folder):
            self._continue(unfinished)
            for part in self._parts(unfinished.stop):
                unfinished.add(part.stop, part.rows, part.left_out)
            if not unfinished.kept:
                unfinished.remove()  # there is nothing to continue
            self._report(unfinished.left_out)
            gone = {row for row, _ in unfinished.left_out}
            names = [name for row, name in enumerate(self.source.names) if row not in gone]
            write(names, self._about(unfinished.left_out), unfinished.blocks(tables.BLOCK))
        unfinished.remove()

    def _is_done(self, path: Path) -> bool:
        """Whether a file has these rows already; one that is not of this kind is refused."""
        if not path.exists():
            return False
        about = tables.read_about(path)
        if about is None or about.get("kind") != self.kind:
            raise StoreError(f"{path} exists and holds no {self.kind}: use another --out")
        if not (changes := self._changes(about)):
            return tables.is_complete(path, about)
        self.note(f"{path} is of {_other(changes)}: it is replaced when the new one is complete")
        return False

    def _continue(self, unfinished: Unfinished) -> None:
        """Take over the parts of an interrupted command if they are of the same rows."""
        if (earlier := unfinished.earlier()) is None:
            unfinished.begin(self.identity())
        elif changes := self._changes(earlier):
            done = counted(unfinished.stop, "image")
            self.note(f"an interrupted command was at {done} of {_other(changes)}: starting anew")
            unfinished.begin(self.identity())
        else:
            done = f"{unfinished.stop:,} of {counted(len(self.source), 'image')}"
            self.note(f"continuing an interrupted command, which had done {done}")

    def _changes(self, about: Mapping[str, Any]) -> list[str]:
        """What differs between other rows and these."""
        return [key for key, value in self.identity().items() if about.get(key) != value]

    # ---- computing ----

    def _parts(self, start: int) -> Iterator[Part]:
        """The rows of the images from `start` on, some batches at a time."""
        count, what = len(self.source), self.kind
        size = self._batch * max(4, 2 * (os.cpu_count() or 1))
        emit(what, start, count)
        try:
            if start < count:
                with torch.random.fork_rng(devices=[]):
                    for piece in _ahead(self.source.pieces(self.encoder, start, size)):
                        yield (part := self._part(piece))
                        emit(what, min(part.stop, count - 1), count)
        finally:
            emit(what, count, count)

    def _part(self, piece: Piece) -> Part:
        """The rows of a piece."""
        left_out = sorted(piece.errors.items())
        if left_out and self.corrupt == "refuse":
            raise DataError(f"{self._unreadable(left_out)}. Repair or remove them{self.remedy}")
        places = [n for n in range(len(piece.pixels)) if piece.start + n not in piece.errors]
        rows: Rows = evaluation.embed(
            self.model, piece.pixels, lambda pixels: pixels, self._batch
        ).float().numpy()[places]  # fmt: skip
        kept = [piece.start + place for place in places]
        wrong = [kept[place] for place in np.flatnonzero(~np.isfinite(rows).all(axis=1))]
        if wrong:
            raise DataError(
                f"{self.kind} of {counted(len(wrong), 'image')}, e.g. "
                f"{self.source.names[wrong[0]]}, are not finite numbers: the encoder has diverged"
            )
        return Part(piece.start + len(piece.pixels), rows, kept, left_out)

    def _report(self, left_out: Sequence[tuple[int, str]]) -> None:
        """Note what was left out; nothing at all that can be read is an error."""
        if len(left_out) == len(self.source):
            raise DataError(self._unreadable(left_out))
        if left_out:
            self.note(f"left out: {self._unreadable(left_out)}")

    def _unreadable(self, left_out: Sequence[tuple[int, str]]) -> str:
        named = [f"{self.source.names[row]} ({why})" for row, why in left_out[:NAMED]]
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        of = counted(len(self.source), "image")
        return f"{len(left_out):,} of {of} cannot be read: {', '.join(named)}{more}"


_WORDS = {
    "encoder": "another encoder",
    "images": "other images",
    "whitening": "another whitening",
    "versions": "other versions",
    "probe": "another probe",
}


def _other(changes: Sequence[str]) -> str:
    return ", ".join(_WORDS.get(key, f"another {key}") for key in changes)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, the next of which is made while one is used."""
    end = object()
    with ThreadPoolExecutor(1, "harmonium-ahead") as thread:
        coming = thread.submit(next, items, end)
        try:
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]
        finally:
            thread.submit(getattr(items, "close", lambda: None))
