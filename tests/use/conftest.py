"""A run to use, and folders of images to use it on."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import harmonium
from harmonium.cli.main import main

SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "size": 12, "limit": 80, "count": 100, "test_count": 20},
    "rounds": 1,
    "clients": 2,
    "encoder": {"name": "cnn-small", "width": 4, "out": 8},
    "evaluate": {"k": 2, "health": 16, "labels_per_class": [], "whiten": True},
    "engine": {"workers": 0},
}


@pytest.fixture(autouse=True)
def _decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in this process: starting others takes most of the time of a few images."""
    monkeypatch.setattr("harmonium.data.decoding.pool._cores", lambda: 0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on colour images of 12 x 12, with a whitening."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
        patch.setattr("harmonium.evaluation.logistic.PASSES", 2)
        harmonium.run("fedavg", out=folder, **SMALL)
    return folder


@pytest.fixture(scope="session")
def other(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run before training: another encoder of the same kind."""
    folder = tmp_path_factory.mktemp("other") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
        patch.setattr("harmonium.evaluation.logistic.PASSES", 2)
        harmonium.run("fedavg", "seed=9", out=folder, **SMALL)
    return folder


def save_image(path: Path, seed: int, size: tuple[int, int] = (15, 13), level: int = 128) -> None:
    """A coloured image of noise around a level."""
    rng = np.random.default_rng(seed)
    pixels = np.clip(rng.normal(level, 40, (*size, 3)), 0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 images in two folders, one of which is damaged."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(22):
        save_image(folder / ("north" if number % 2 else "south") / f"{number:02d}.png", number)
    (folder / "north" / "torn.png").write_bytes(b"nothing")
    return folder


@pytest.fixture
def call(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """A command called in this process; gives what it prints and what it says beside."""

    def called(*words: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["harmonium", *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        ended: Any = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return captured.out, captured.err

    return called
