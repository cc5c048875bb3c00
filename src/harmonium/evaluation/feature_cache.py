"""The cache of features on disk, so that the same features are not computed again.

A file is identified by the digests of the encoder's weights and code, of the images and of how they
are prepared, so it can never be the wrong one, and any of them may be deleted at any time. Files
are in `HARMONIUM_HOME/features`, readable by their owner only, because features reveal information
about images. If all files together would exceed `MOST`, the least recently used are deleted first.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harmonium.core import codec, files
from harmonium.core.devices import cache_key
from harmonium.core.errors import StoreError, WireError
from harmonium.core.paths import home
from harmonium.core.progress import emit, work
from harmonium.data.cache import digest_of
from harmonium.data.images import Images
from harmonium.evaluation.features import embed

FORMAT = 1  # raise it when features would come out differently
MOST = 4 << 30  # bytes of all files
LEFTOVER = 24 * 3600  # seconds after which an incomplete file is deleted
PIECE = 4096  # images digested at once

Prepare = Callable[[Tensor], Tensor]


def features_folder() -> Path:
    """The folder of the cache; deleting it loses nothing but time."""
    return home() / "features"


def encoder_digest(encoder: nn.Module) -> str:
    """The sha256 of a network: its layers, their code, and every parameter and buffer."""
    total = hashlib.sha256(str(encoder).encode())
    for name in sorted({type(layer).__module__ for layer in encoder.modules()}):
        total.update(_code(name))
    for key, value in encoder.state_dict().items():
        total.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _code(module: str) -> bytes:
    """The source of a module, as other code may compute other features; empty for torch."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] == "torch" or file is None:
        return b""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


@dataclass(eq=False)
class FeatureCache:
    """Computes features, or reads them from disk where they were computed before."""

    computed: int = 0  # images that went through an encoder
    found: int = 0  # images whose features were on disk
    note: Callable[[str], None] = field(default=lambda text: None, repr=False)
    _images: dict[int, tuple[Images, str]] = field(default_factory=dict, repr=False)

    def images_digest(self, images: Images) -> str:
        """The sha256 of images, read once for each object; labels do not matter."""
        if id(images) not in self._images:
            total = hashlib.sha256(str((len(images), *images.shape)).encode())
            with work("digest of the images", len(images), "images") as at:
                for start in range(0, len(images), PIECE):
                    at(start)
                    rows = np.arange(start, min(start + PIECE, len(images)))
                    total.update(np.ascontiguousarray(images.batch(rows)).data)
            self._images[id(images)] = images, total.hexdigest()
        return self._images[id(images)][1]

    def features(
        self,
        encoder: nn.Module,
        images: Images,
        prepare: Prepare,
        how: Mapping[str, Any],
        views: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """Frozen features `(n, dim)`, as `embed` gives them.

        Args:
            encoder: the network.
            images: the images.
            prepare: what makes a network's input of them; see `embed`.
            how: plain values that identify what `prepare`, or `views`, does.
            views: see `embed`.
        """
        key = digest_of(
            {
                "format": FORMAT,
                "torch": torch.__version__,
                "encoder": encoder_digest(encoder),
                "pictures": self.images_digest(images),
                "how": how,
                **cache_key(),
            }
        )
        path = features_folder() / f"{key}.safetensors"
        if (cached := _read(path, len(images))) is not None:
            self.found += len(images)
            return cached
        features = embed(encoder, images, prepare, views=views, watch=partial(emit, "features"))
        self.computed += len(images)
        self._write(path, features)
        return features

    def _write(self, path: Path, features: Tensor) -> None:
        """Keep features if there is room; without, the next call computes them again."""
        frame = codec.encode({"features": features, "digest": _digest(features)})
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _make_room(path.parent, len(frame)):
                return
            files.write_atomic(beside, frame, private=True)
            os.replace(beside, path)
        except (OSError, StoreError) as error:
            with suppress(OSError):
                beside.unlink()
            self.note(f"features are not kept: {error}")


def _digest(features: Tensor) -> str:
    return hashlib.sha256(features.contiguous().numpy().data).hexdigest()


def _read(path: Path, count: int) -> Tensor | None:
    """The features of a file; None where there is none, or it is damaged."""
    try:
        content = codec.decode(path.read_bytes())
        features: Tensor = content["features"]
        if len(features) != count or _digest(features) != content["digest"]:
            return None
        os.utime(path)  # it was used just now
    except (OSError, WireError, KeyError, TypeError, AttributeError):
        return None
    return features


def _make_room(folder: Path, size: int) -> bool:
    """Delete the files that were used longest ago until so many bytes fit; whether they do."""
    if size > MOST:
        return False
    present = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process may have deleted it
            about = path.stat()
            if path.suffix != ".safetensors" and time.time() - about.st_mtime > LEFTOVER:
                path.unlink()
            else:
                present.append((about.st_mtime, about.st_size, path))
    total = size + sum(file_size for _, file_size, _ in present)
    for _, file_size, path in sorted(present, key=lambda file: file[0]):
        if total <= MOST:
            break
        path.unlink(missing_ok=True)
        total -= file_size
    return True
