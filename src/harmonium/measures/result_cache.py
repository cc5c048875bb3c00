"""Random views by pass, and a cache on disk for the results of long trainings."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmonium.core import files, seeds
from harmonium.core.devices import cache_key
from harmonium.data.augment.pipeline import View
from harmonium.data.cache import digest_of


@dataclass(frozen=True)
class RandomPass:
    """One pass of random views over images."""

    view: View
    seed: int
    number: int  # of the pass

    def __call__(self, pixels: Tensor, start: int) -> Tensor:
        """The views of a batch that begins with image `start`."""
        return self.view(pixels, seeds.torch_rng(self.seed, "pass", self.number, start))


@dataclass
class ResultCache:
    """Results of long trainings, kept one by one, so that a killed call continues where it was.

    A result is identified by everything that it depends on. Any file may be deleted at any time.
    """

    folder: Path | None = None  # none: nothing is stored
    found: int = 0
    computed: int = 0

    def __call__(
        self, about: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The result of `work`, which `about` identifies; both are plain values."""
        identity = {**about, "torch": torch.__version__, **cache_key()}
        path = self.folder and self.folder / f"{digest_of(identity)[:32]}.json"
        if path and (cached := _read(path)) is not None:
            self.found += 1
            return cached
        result = dict(work())
        self.computed += 1
        if path:
            text = json.dumps({"about": identity, "result": result}, indent=1)
            beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            files.write_atomic(beside, f"{text}\n".encode())
            os.replace(beside, path)  # another call may finish the same result at the same time
        return result


def _read(path: Path) -> dict[str, Any] | None:
    """The result in a file; None where there is none, or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["result"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
