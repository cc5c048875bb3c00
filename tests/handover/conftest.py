"""Encoders without a run, and one small run for all tests of bundles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harmonium
from harmonium.handover.export import Bundle, export
from harmonium.runs.export import LoadedEncoder

Build = Callable[..., LoadedEncoder]


@pytest.fixture(scope="session")
def loaded() -> Build:
    """A `LoadedEncoder` of a network that nobody has trained."""

    def build(network: nn.Module, size: Any, channels: int, **more: Any) -> LoadedEncoder:
        prepare = {"mean": [0.4], "std": [0.3], "size": more.pop("views", None)}
        about = {
            "encoder": {"name": "cnn-small"},
            "prepare": prepare | more.pop("prepare", {}),
            "side": size[0],
            "size": size,
            "channels": channels,
            "features": 8,
            "method": "fedavg",
            "data": "nothing",
            "recipe": "",
        }
        return LoadedEncoder(network, about | more, layout="NHWC").eval()

    return build


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on colour images of 12 x 12, with whitening."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
        patch.setattr("harmonium.evaluation.logistic.PASSES", 2)
        harmonium.run(
            "fedavg",
            data={"name": "shapes", "size": 12, "limit": 80},
            out=folder,
            rounds=1,
            clients=2,
            encoder={"name": "cnn-small", "width": 4, "out": 8},
            evaluate={"k": 2, "health": 16, "labels_per_class": [1], "whiten": True},
            engine={"workers": 0},
        )
    return folder


@pytest.fixture(scope="session")
def bundle(run: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of the run, signed."""
    return export(run, tmp_path_factory.mktemp("bundles") / "bundle", key=key, licence="For tests.")


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key; its public half is beside it."""
    from harmonium.sites.kit import keygen

    return keygen(tmp_path_factory.mktemp("keys") / "keys").with_name("site.key")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
