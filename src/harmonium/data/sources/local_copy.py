"""Copies that the user supplies with `data fetch NAME --from PATH`, in any common form."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harmonium.core.errors import DataError
from harmonium.data.cache import Writer
from harmonium.data.images import Pixels
from harmonium.data.published_datasets import GIVEN, Published, Source
from harmonium.data.sets.npz import read_archive
from harmonium.data.sources.download import Progress, md5_of
from harmonium.data.sources.layout import (
    CandidateFiles,
    holds,
    listing,
    official_names,
    refuse_pickled,
    wanted,
)
from harmonium.data.sources.packages import convert
from harmonium.data.sources.unpack import kind_of, unpack


def find(source: Source, path: Path, work: Path, report: Progress) -> CandidateFiles:
    """The files of a set in an archive, a package, a folder, or a folder of downloads."""
    refuse_pickled(source, str(path), [path.name])
    links: list[Path] = []
    files, archives = {path.name: path}, [path]
    if path.is_dir():
        files = listing(path, links)
        published = {remote.name for remote in source.remotes}
        archives = [file for file in files.values() if file.name in published]
    if links:
        report(f"{path}: {len(links)} links are left out, e.g. {links[0].name}", 0, None)
    candidates = CandidateFiles(str(path), files, ours=False, verified=False)
    archives = [file for file in archives if kind_of(file)]
    if archives and not holds(source, files):
        candidates = _unpacked(source, path, archives, work, report)
    if holds(source, candidates.files):
        return candidates
    for package in source.packages:
        converted = convert(package, candidates, work, source.most_bytes)
        if converted is not None:
            return converted
    refuse_pickled(source, str(path), candidates.files)
    if path.is_file() and not archives:
        raise DataError(f"{path} is not a tar, zip, deb or npz archive, nor an official file")
    return candidates


def _unpacked(
    source: Source, path: Path, archives: list[Path], work: Path, report: Progress
) -> CandidateFiles:
    to = work / "unpacked"
    to.mkdir()
    for archive in archives:
        report(f"unpacking {archive.name}", 0, None)
        unpack(archive, to, wanted(source, str(archive)), source.most_bytes)
    verified = all(_is_official(source, archive) for archive in archives)
    return CandidateFiles(str(path), listing(to), verified=verified)


def _is_official(source: Source, archive: Path) -> bool:
    """Whether an archive has an official checksum; DataError if only its name is official."""
    sums = [md5 for layout in source.layouts for md5 in layout.values()]
    if sums and None not in sums:
        return False  # the checksums of its members will be verified
    actual = md5_of(archive)
    for remote in source.remotes:
        if remote.md5 == actual:
            return True
        if remote.name == archive.name:
            raise DataError(f"{archive} is not the official file (md5 {actual}, not {remote.md5})")
    return False


def is_npz(source: Source, path: Path) -> bool:
    """Whether a path is an `.npz` of other images, and not an official file."""
    return path.suffix == ".npz" and path.is_file() and path.name not in official_names(source)


def take_npz(spec: type[Published], path: Path, folder: Path) -> list[str]:
    """Copy an archive to `folder` in place of the official files, if its images fit."""
    _refuse_bomb(path, spec.source.most_bytes)
    seen = _CountingWriter(folder)
    classes = read_archive(path, seen, spec.about.classes)
    misfit = _misfit(spec, seen, len(classes))
    if misfit:
        raise DataError(f"{path} does not fit {spec.name}: {misfit}")
    shutil.copyfile(path, folder / GIVEN)
    height, width, channels = seen.shape
    return [
        f"{spec.name} here is not the official set but {path.name} given with --from: "
        f"{seen.counts['train']:,} training images of {height}x{width}x{channels}"
    ]


class _CountingWriter(Writer):
    """A writer that only counts images."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.counts: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()

    def append(
        self,
        part: str,
        pixels: Pixels,
        labels: npt.NDArray[Any],
        factors: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.counts[part] = self.counts.get(part, 0) + len(pixels)
        if self.shape and self.shape != pixels.shape[1:]:
            raise DataError(f"the {part} images are {pixels.shape[1:]}, others {self.shape}")
        self.shape = pixels.shape[1:]


def _misfit(spec: type[Published], seen: _CountingWriter, classes: int) -> str | None:
    about = spec.about
    if "train" not in seen.counts:
        return "it has no training images"
    if about.shape and about.shape[2] != seen.shape[2]:
        kinds = {1: "grey", 3: "in colour"}
        return f"its images are {kinds[seen.shape[2]]}, those of the set {kinds[about.shape[2]]}"
    if about.classes and classes > about.classes:
        return f"it has {classes} classes, the set {about.classes}"
    if about.test and "test" not in seen.counts:
        return "it has no test images (test_x, test_y), which the set has"
    return None


def _refuse_bomb(path: Path, most_bytes: int) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # `read_archive` says what is wrong
    if size > most_bytes:
        raise DataError(f"{path} holds more than {most_bytes:,} bytes: refused")
