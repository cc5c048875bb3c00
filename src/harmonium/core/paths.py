"""Where data, caches and runs live: `HARMONIUM_HOME`, or the platform's user data folder."""

from __future__ import annotations

import os
from pathlib import Path

from harmonium.core.errors import StoreError


def home() -> Path:
    """The folder for everything Harmonium keeps between commands."""
    chosen = os.environ.get("HARMONIUM_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("harmonium", appauthor=False))


def make_folder(path: Path) -> Path:
    """Create a folder that will be written to, or say in one line why it cannot be."""
    at_home = path.absolute().is_relative_to(home())
    advice = (
        "Set HARMONIUM_HOME to a folder you can write to." if at_home else "Name another place."
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError as error:
        raise StoreError(f"cannot create {path}: {error.strerror}. {advice}") from None
    if not writable:
        raise StoreError(f"cannot write to {path}. {advice}")
    return path
