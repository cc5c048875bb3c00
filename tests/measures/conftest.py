"""Small runs that the measures are tried on, each made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.measures.run_reader import Run, open_run
from harmonium.runs.loop import RunLoop
from harmonium.runs.start import changed_recipe

SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "count": 64, "test_count": 40, "size": 10, "unlabelled": True},
    "encoder": {"name": "cnn-small", "width": 4, "out": 16},
    "local": {"epochs": 1, "batch": 8, "schedule": "constant"},
    "evaluate": {"k": 5, "labels_per_class": [], "every": 9},
    "engine": {"workers": 0},
    "clients": 4,
    "rounds": 2,
}
FEDCA: dict[str, Any] = {
    "data": {**SMALL["data"], "unlabelled": False},
    "method": {"name": "fedca", "size": 16, "align_epochs": 1, "align_batch": 8},
    "public": {"name": "shapes", "count": 30, "test_count": 4, "size": 10},
    "views": "simclr",
    "split": {"name": "by_class", "classes_per_client": 2},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run, by the recipe's name and settings; the same ones give the same run."""
    folders: dict[str, Path] = {}

    def make(name: str, **settings: Any) -> Path:
        key = f"{name} {settings}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(name) / "run"
            with pytest.MonkeyPatch.context() as patch:  # verdicts and images take most time
                nothing = {"figures": {}, "untrained": {}}
                patch.setattr(RunLoop, "_test", lambda *given: nothing)
                patch.setattr(RunLoop, "_plot", lambda loop: None)
                harmonium.run(name, out=folders[key], **{**SMALL, **settings})
        return folders[key]

    return make


@pytest.fixture(scope="session")
def fedca(made: Callable[..., Path]) -> Path:
    return made("fedca", **FEDCA)


@pytest.fixture
def opened() -> Callable[..., Run]:
    def make(path: Path, *changes: str, **rest: Any) -> Run:
        return open_run(path, path.name, changed_recipe(path, changes), **rest)

    return make
