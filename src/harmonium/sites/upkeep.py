"""Upkeep of a federation's files: access rights, locks, and deleting files no longer needed.

Everything that a server or a site of a federation writes is for its owner alone: folders 0700,
files 0600, whatever the umask of the user. Answers and states of finished runs may be deleted after
some days. Encoders and a site's log, which is its privacy account, always stay.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from harmonium.core.errors import ConfigError, StoreError

DAY = 24 * 3600.0
RUNNING = ".running"  # in a site's folder of kept files: locked by its running client
SERVING = ".serving"  # in a federation's folder: locked by its running server
LOOK = 0.3  # seconds in which another command may have looked whether a lock is held
_OPEN = 0o077  # the rights of all but the owner


@contextmanager
def owner_only() -> Iterator[None]:
    """Make files written meanwhile, also by child processes, readable by their owner only."""
    before = os.umask(_OPEN)
    try:
        yield
    finally:
        os.umask(before)


def restrict_to_owner(folder: Path) -> None:
    """Remove the access rights of other users from a folder and all that is in it.

    Files of other users, and files on a read-only disk, stay as they are.
    """
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            try:
                mode = path.lstat().st_mode
                if mode & _OPEN and not path.is_symlink():
                    path.chmod(mode & 0o7777 & ~_OPEN)
            except OSError:
                continue


@contextmanager
def single_instance(folder: Path, name: str, who: str) -> Iterator[None]:
    """Allow one process at a time; the lock ends with its process."""
    lock = _lock(folder / name)
    try:
        lock.acquire(timeout=LOOK)  # `is_locked` holds it for an instant
    except filelock.Timeout:
        raise StoreError(f"another {who} is running: wait for it, or stop it") from None
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path, name: str) -> bool:
    """Whether a process holds the lock."""
    if not (folder / name).exists():
        return False
    lock = _lock(folder / name)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    lock.release()
    return False


def _lock(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path, mode=0o600)


@dataclass(frozen=True)
class Removal:
    """A file or folder that is no longer needed."""

    path: Path
    size: int  # bytes
    what: str


def removable_at_site(folder: Path, days: float) -> list[Removal]:
    """Answers and states of a site's runs in which nothing was written for this many days.

    If the site's client is running, its newest run stays whatever its age.
    """
    if not days >= 0:
        raise ConfigError(f"{days:g} days are not valid: use 0 or more")
    runs = sorted((path for path in (folder / "runs").glob("*") if path.is_dir()), key=_newest)
    if is_locked(folder, RUNNING):
        runs = runs[:-1]
    limit = time.time() - days * DAY
    removals = []
    for run in runs:
        if _newest(run) > limit:
            continue
        for path in sorted(run.iterdir()):
            if path.name.startswith("answer-"):
                removals.append(_removal(path, "answer"))
            elif path.name == "clients":
                removals.append(_removal(path, "states"))
    return removals


def removable_at_server(folder: Path, *runs: Path) -> list[Removal]:
    """Messages of an earlier server process, and all but the last commits of complete runs."""
    removals = []
    if not is_locked(folder, SERVING):
        removals += [
            _removal(path, "messages") for path in sorted((folder / "link").glob("flower.db*"))
        ]
    for run in runs:
        if not (run / "recipe.yaml").exists():
            raise ConfigError(f"{run} holds no run: there is no recipe.yaml in it")
        if not (run / "result.json").exists() or is_locked(run, ".lock"):
            raise ConfigError(
                f"{run} is not complete: finish it with harmonium server resume {run} first"
            )
        newest = max((path.stem for path in (run / "commits").glob("*.json")), default="")
        older = [path for path in sorted((run / "commits").iterdir()) if path.stem < newest]
        removals += [_removal(path, "earlier commit") for path in older]
    return removals


def remove(removals: list[Removal]) -> None:
    """Delete files and folders; those that are gone already are ignored."""
    for one in removals:
        try:
            shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"cannot delete {one.path}: {error.strerror}") from None


def _newest(folder: Path) -> float:
    """When anything in a folder was last written."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        try:
            times.append(path.lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _removal(path: Path, what: str) -> Removal:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return Removal(path, sum(one.stat().st_size for one in files), what)
