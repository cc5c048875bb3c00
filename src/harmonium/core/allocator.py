"""How the C library's allocator treats freed memory: it is kept for the next training step.

By default glibc returns large blocks to the system as soon as they are freed. A training step frees
and takes the same blocks again and again, and the system clears every page each time, which took
10 to 30 % of a step's time where it was measured. Kept memory changes no result.
"""

from __future__ import annotations

import ctypes
import os

MAPPED = 2**28  # bytes: larger blocks are mapped one by one, and returned when they are freed
KEPT = 2**30  # bytes at the end of the heap beyond which freed memory is returned


def _chosen() -> bool:
    """Whether the user has settings of their own."""
    return any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)


def allocator_environment() -> dict[str, str]:
    """The environment of a process that trains; large pages too, where they are known.

    Other C libraries ignore it, and settings of the user's own are left as they are.
    """
    if _chosen():
        return {}
    tunables = {"mmap_threshold": MAPPED, "trim_threshold": KEPT, "hugetlb": 1}
    text = ":".join(f"glibc.malloc.{name}={value}" for name, value in tunables.items())
    return {"GLIBC_TUNABLES": text}


def keep_freed_memory() -> None:
    """The same for this process, which has started already; without large pages."""
    if _chosen() or os.name != "posix":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
        mallopt(mmap_threshold, MAPPED)
        mallopt(trim_threshold, KEPT)
