"""Moving fetched files into the official layout, and verifying their official checksums.

Files are found by name anywhere below the folder or archive, and `.gz` files are decompressed if
the official file is not compressed. Links and hidden files are left out.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from harmonium.core.errors import DataError
from harmonium.data.published_datasets import Source
from harmonium.data.sources.download import md5_of
from harmonium.data.sources.unpack import Wanted, decompress


@dataclass(frozen=True)
class CandidateFiles:
    """Files that may be a data set, from a download, a package or the user."""

    what: str  # where they come from, for messages
    files: Mapping[str, Path]  # name within the archive or folder, and current path
    ours: bool = True  # in a temporary folder of ours, so that they may be moved
    verified: bool = True  # unpacked from downloads with the official checksum


def listing(folder: Path, links: list[Path] | None = None) -> dict[str, Path]:
    """Every regular file below a folder by its relative name; no links, nothing hidden.

    Args:
        folder: where to look.
        links: receives the links that were left out.
    """
    files = {}
    for place, folders, names in os.walk(folder):
        if links is not None:
            links += [
                path for name in (*folders, *names) if (path := Path(place, name)).is_symlink()
            ]
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        inside = "" if place == str(folder) else f"{Path(place).relative_to(folder).as_posix()}/"
        for name in sorted(names):
            path = Path(place, name)
            if not _is_hidden(name) and stat.S_ISREG(path.lstat().st_mode):
                files[inside + name] = path
    return files


def _is_hidden(name: str) -> bool:
    """Whether a name is one of the files and folders that operating systems leave behind."""
    return name.startswith(".") or name == "__MACOSX"


def wanted(source: Source, what: str) -> Wanted:
    """A function that selects the members of an archive to unpack; refuses pickled ones."""
    bases = official_names(source)

    def choice(name: str) -> bool:
        refuse_pickled(source, what, [name])
        base = _base(name)
        return bool(source.tree) or base in bases or base.removesuffix(".gz") in bases

    return choice


def official_names(source: Source) -> set[str]:
    """The names of all official files and of the members of packages, without folders."""
    names = [name for layout in source.layouts for name in layout]
    names += [name for package in source.packages for name in package.members]
    return {_base(name) for name in names}


def refuse_pickled(source: Source, what: str, names: Iterable[str]) -> None:
    """Raise an error for pickled editions, which names the edition to use instead."""
    for name in names:
        if not set(source.pickled).isdisjoint(name.split("/")):
            better = " and ".join(remote.name for remote in source.remotes) or "another edition"
            raise DataError(
                f"{what} holds pickled objects, which are never read because they can run code: "
                f"take {better} from {source.page} instead"
            )


def holds(source: Source, files: Mapping[str, Path]) -> bool:
    """Whether files form an official layout, by their names."""
    complete = any(all(choose(layout, files).values()) for layout in source.layouts)
    return complete or (bool(source.tree) and _root(source.tree, files) is not None)


def move_into_layout(source: Source, candidates: CandidateFiles, folder: Path) -> list[str]:
    """Move or copy the files of one official layout into the empty `folder`.

    Returns:
        The names of files without an official checksum, or [""] for an unverified tree.

    Raises:
        DataError: a file is missing or is not the official one.
    """
    lacking: list[str] = []
    for layout in source.layouts:
        chosen = choose(layout, candidates.files)
        missing = [name for name in layout if not chosen[name]]
        if not missing:
            for name, md5 in layout.items():
                _place_verified(chosen[name], folder / name, md5, candidates, source.most_bytes)
            return (
                [] if candidates.verified else [name for name, md5 in layout.items() if md5 is None]
            )
        if not lacking or len(missing) < len(lacking):
            lacking = missing
    if source.tree:
        root = _root(source.tree, candidates.files)
        if root is not None:
            _place_tree(root, candidates, folder, source.most_bytes)
            return [] if candidates.verified else [""]
        names = ", ".join(name.partition("|")[0] for name in source.tree)
        raise DataError(f"{candidates.what} holds no folder with {names} in it")
    raise DataError(f"{candidates.what} lacks {len(lacking)} expected files, e.g. {lacking[0]}")


def choose(names: Collection[str], files: Mapping[str, Path]) -> dict[str, list[Path]]:
    """For each official name the candidate files, the likeliest first."""
    by_base: dict[str, list[str]] = defaultdict(list)
    for name in files:
        by_base[_base(name)].append(name)
    shared = Counter(_base(name) for name in names)
    chosen = {}
    for name in names:
        base = _base(name)
        options = by_base[base] + by_base[base + ".gz"]
        if shared[base] > 1:  # only the whole path tells them apart
            whole = (f"/{name}", f"/{name}.gz")
            options = [option for option in options if f"/{option}".endswith(whole)]
        ranked = sorted(options, key=lambda option: _unlikeness(option, name))
        chosen[name] = [files[option] for option in ranked]
    return chosen


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _unlikeness(option: str, name: str) -> tuple[int, bool, int, str]:
    """Sort key: most folders in common, then uncompressed, then fewest folders."""
    folders = (path.split("/")[-2::-1] for path in (option, name))
    common = list(takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False)))
    return -len(common), option.endswith(".gz"), option.count("/"), option


def _place_verified(
    options: list[Path], target: Path, md5: str | None, candidates: CandidateFiles, most_bytes: int
) -> None:
    """Take the first candidate with the official checksum, or the first if it is unknown."""
    sums = []
    for option in options:
        place_file(option, target, candidates.ours, most_bytes)
        if md5 is None or (actual := md5_of(target)) == md5:
            return
        sums.append(actual)
        target.unlink()
    raise DataError(
        f"{candidates.what}: {target.name} is not the official file (md5 {sums[0]}, expected {md5})"
    )


def _root(tree: Collection[str], files: Mapping[str, Path]) -> str | None:
    """The topmost folder that holds all names of the tree, "" for the root; None if none does."""
    inside: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in files:
        parts = tuple(name.split("/"))
        for depth, part in enumerate(parts):
            inside[parts[:depth]].add(part)
    needed = [set(name.split("|")) for name in tree]  # `Real World|RealWorld`: either will do
    roots = [place for place, names in inside.items() if all(names & either for either in needed)]
    nearest = min(roots, key=lambda place: (len(place), place), default=None)
    return None if nearest is None else "/".join(nearest)


def _place_tree(root: str, candidates: CandidateFiles, folder: Path, most_bytes: int) -> None:
    prefix = f"{root}/" if root else ""
    below = {n.removeprefix(prefix): p for n, p in candidates.files.items() if n.startswith(prefix)}
    if sum(path.stat().st_size for path in below.values()) > most_bytes:
        raise DataError(f"{candidates.what} holds more than {most_bytes:,} bytes: refused")
    for name, path in below.items():
        place_file(path, folder / name, candidates.ours, most_bytes)


def place_file(path: Path, target: Path, ours: bool, most_bytes: int) -> None:
    """Move a file to its target if it is ours, else copy it; decompress it if necessary."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz" and target.suffix != ".gz":
        decompress(path, target, most_bytes)
    elif path.stat().st_size > most_bytes:
        raise DataError(f"{path.name} holds more than {most_bytes:,} bytes: refused")
    elif ours:
        path.replace(target)
    else:
        shutil.copyfile(path, target)
