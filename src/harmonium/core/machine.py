"""This machine: memory of a process and of all of them, and free space on a disk.

Figures of processes come from Linux's `/proc`; elsewhere they are not known.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_OWN, _CGROUP = Path("/proc/self"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of memory that processes of this machine, or of this container, can have."""

    total: int
    available: int  # without moving anything to a disk


def memory() -> MachineMemory | None:
    """The memory of this machine, or of the container in which this process is; None: not known."""
    facts = _numbers(Path("/proc/meminfo"))
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    if total is None or available is None:
        return None
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        used -= _numbers(_CGROUP / "memory.stat", unit=1).get("inactive_file", 0)
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MachineMemory(total, available)


@contextmanager
def memory_growth() -> Iterator[Callable[[], int | None]]:
    """Measure by how many bytes this process grows within the block, at its peak.

    Freed memory that the allocator holds is returned to the system first, because a block that is
    served from it would not show. The function gives None where nothing can be measured.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)
    before: int | None = None
    with suppress(OSError):
        (_OWN / "clear_refs").write_text("5")  # the peak begins anew
        before = _numbers(_OWN / "status").get("VmRSS")

    def grown() -> int | None:
        peak = _numbers(_OWN / "status").get("VmHWM")
        return None if before is None or peak is None else max(0, peak - before)

    yield grown


def free_space(path: Path) -> int:
    """Free bytes on the disk of a file or folder, which need not exist yet."""
    existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(existing).free


def _numbers(file: Path, unit: int = 1024) -> dict[str, int]:
    """The first number of each line that begins with a name, in bytes; empty without the file."""
    found = dict[str, int]()
    with suppress(OSError):
        for line in file.read_text(encoding="ascii", errors="replace").splitlines():
            name, *values = line.replace(":", " ").split()
            if values and values[0].isdigit():
                found[name] = unit * int(values[0])
    return found
