"""The encoder as a file that anyone can use: safetensors, with all that is needed to rebuild it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from harmonium import store
from harmonium.data.views import plain as plain_pictures
from harmonium.encoders import encoders
from harmonium.errors import DataError, StoreError, counted
from harmonium.federation.method import Method
from harmonium.recipe import Recipe
from harmonium.settings import choose, plain


class LoadedEncoder(nn.Module):
    """An encoder that takes pictures as they are stored."""

    def __init__(self, network: nn.Module, about: dict[str, Any]) -> None:
        """Wrap a network; `about` says what it was trained on and how to prepare pictures."""
        super().__init__()
        self.network = network
        self.about = about
        view = about["prepare"]
        self._mean, self._std = (view[key] and tuple(view[key]) for key in ("mean", "std"))
        self._size = view["size"]

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (n, dim) of uint8 pictures (n, height, width, channels)."""
        channels = self.about["channels"]
        if pixels.ndim == 4 and pixels.shape[3] != channels:
            raise DataError(
                f"this encoder takes pictures of {counted(channels, 'channel')}, "
                f"got {pixels.shape[3]}"
            )
        features: Tensor = self.network(plain_pictures(pixels, self._mean, self._std, self._size))
        return features


def save_encoder(path: Path, encoder: nn.Module, recipe: Recipe, method: Method, data: str) -> None:
    """Write an encoder with its architecture, its recipe's digest and the name of its data."""
    view = recipe.views.build().pipelines[0]
    about = {
        "format": 1,
        "encoder": plain(recipe.encoder),
        "channels": method.world.channels,
        "side": method.world.side,
        "prepare": {"mean": view.mean, "std": view.std, "size": view.size},
        "data": data,
        "method": recipe.method.name,
        "recipe": recipe.digest,
    }
    weights = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    frame = safetensors.torch.save(weights, {"harmonium": json.dumps(about)})
    store.write_atomic(path, frame)


def load_encoder(path: str | Path) -> LoadedEncoder:
    """The encoder of a run's folder or of an `encoder.safetensors`, ready for pictures.

    Features of uint8 pictures (n, height, width, channels) are `load_encoder(run)(pixels)`. An
    encoder that is not ours needs its module to be imported already.
    """
    path = Path(path)
    path = path / "encoder.safetensors" if path.is_dir() else path
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["harmonium"])
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        done = (path.parent / "result.json").exists()
        why = "its clients keep their own" if done else "has the run finished?"
        why = why if path.parent.exists() else "nor such a folder"
        raise StoreError(f"there is no encoder {path}: {why}") from None
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise StoreError(f"{path} is not an encoder of Harmonium: {error}") from None
    name = str(about["encoder"]["name"])
    if (
        ":" in name and name.partition(":")[0] not in sys.modules
    ):  # a file must not choose what runs
        raise StoreError(
            f"{path} is an encoder of {name}, which is not part of Harmonium: import that module "
            "first, if you trust it"
        )
    with torch.random.fork_rng(devices=[]):
        network = choose("encoder", encoders, about["encoder"]).build(
            about["channels"], about["side"]
        )
    network.load_state_dict(weights)
    return LoadedEncoder(network.eval(), about).eval()
