"""Processes of our own modules, which are fed through pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress


def child_environment(**settings: str) -> dict[str, str]:
    """The environment of a process that runs our modules: this one's with our module path."""
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def start_module(
    module: str, *arguments: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a module in a new process whose standard input and output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0 if os.name == "posix" else None,  # Ctrl-C is for us to handle
        env=environment,
    )


def end_process(process: subprocess.Popen[bytes], seconds: float = 0) -> int:
    """Wait some seconds for a process to end, then kill it; returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(OSError):  # a pipe with unsent bytes to a dead process
                stream.close()
    return code
