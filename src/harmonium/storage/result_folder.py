"""Result folders of runs, comparisons, sweeps, studies and evaluations.

A command without `--out` gets a new folder under `HARMONIUM_HOME`. With `--out`, a folder that
already holds the same run or study is continued, and one that holds anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import filelock

from harmonium.core.errors import ConfigError, StoreError
from harmonium.core.paths import home, make_folder
from harmonium.storage.run_folder import RECIPE

LOCK = ".lock"
PARTIAL = ".part"  # the suffix of a file that was being written when its process was killed


@dataclass(frozen=True)
class FolderKind:
    """A kind of result folder, and how to recognise what a folder of this kind holds."""

    name: str  # in messages, e.g. run
    parent: str  # where new ones go under HARMONIUM_HOME
    marker: str = ""  # the file that identifies the run or study; empty: the folder is shared
    early: frozenset[str] = frozenset()  # files that may exist before the marker does

    def new(self, name: str) -> Path:
        """The path of a new folder, which begins with the time; nothing is created."""
        return home() / self.parent / f"{datetime.now():%Y-%m-%d-%H%M%S}-{name}"

    def claim(self, folder: Path, difference: Callable[[], str] = lambda: "") -> bool:
        """Create a folder unless it exists; returns and refuses as `holds` does."""
        continued = self.holds(folder, difference)
        make_folder(folder)
        return continued

    def holds(self, folder: Path, difference: Callable[[], str] = lambda: "") -> bool:
        """Whether a folder holds the requested run or study; one that holds another is refused.

        Where the kind has no marker, a folder is refused only if it is a run's.

        Args:
            folder: the folder, which need not exist.
            difference: returns how the folder's run or study differs from the requested one, e.g.
                `rounds=5, not 10`; empty if it does not. Called only if there is a marker.
        """
        if self.marker and (folder / self.marker).exists():
            if differences := difference():
                raise ConfigError(
                    f"{folder} holds another {self.name} ({differences}): use another folder with "
                    "--out"
                )
            return True
        refuse_run(folder)
        if self.marker and folder.exists():
            present = {path.name for path in folder.iterdir() if path.suffix != PARTIAL}
            if foreign := sorted(present - self.early):
                raise ConfigError(
                    f"{folder} is not empty ({foreign[0]}) and holds no {self.name}: use a new "
                    "folder with --out"
                )
        return False


def refuse_run(folder: Path, runs: Iterable[Path] = ()) -> None:
    """Refuse a folder that is a run's, or lies inside one of these runs."""
    inside = any(folder.resolve().is_relative_to(run.resolve()) for run in runs)
    if inside or (folder / RECIPE).exists():
        raise ConfigError(f"{folder} belongs to a run and is not changed: use another --out")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and let one process at a time write to it.

    The lock ends with the process that holds it.
    """
    make_folder(folder)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StoreError(f"another process uses {folder}: wait for it, or stop it") from None
    except OSError as error:
        raise StoreError(
            f"{folder / LOCK} cannot be locked ({error.strerror}): remove what is at this path"
        ) from None
    try:
        yield
    finally:
        lock.release()
