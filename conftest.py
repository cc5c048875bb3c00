"""Every test and example has a home of its own: nothing leaks into the user's or is fetched."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")
torch.set_num_threads(1)  # two tests run at once on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in processes that tests start
# Compiled files stay: else every process, and there are many, would compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What all tests share stays to the end, so that the collector need not look at it again."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["HARMONIUM_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="session")
def _one_format() -> Iterator[None]:
    """Studies draw in one format, unless a test names others: three take three times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.report.figure.BY_DEFAULT", ("png",))
        yield


@pytest.fixture(autouse=True, scope="session")
def _unsynced() -> Iterator[None]:
    """No test loses power, so nothing waits for the disk; a file must still be an open one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def soon() -> float:
    """Seconds of CPU for what must not feel slow: two fifths of importing torch, on any machine."""
    code = "import os; start = os.times().user; import torch; print(os.times().user - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return 0.4 * float(done.stdout)


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """A test draws the same numbers alone and after any other.

    `torch.manual_seed` would also keep a formatted stack for each kind of device, for good.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARMONIUM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Runs draw no plot, which takes most of the time of small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
        yield


@pytest.fixture(scope="module")
def unprobed() -> Iterator[None]:
    """Linear probes stop after a few passes, for they take half of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.evaluation.logistic.PASSES", 2)
        yield


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made but not rendered, which takes most of their time: their files hold nothing."""
    _render_nothing(monkeypatch)


@pytest.fixture(scope="module")
def all_unrendered() -> Iterator[None]:
    """The same for a whole module, and for what its tests share."""
    with pytest.MonkeyPatch.context() as patch:
        _render_nothing(patch)
        yield


def _render_nothing(patch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(b"unrendered"))


@pytest.fixture(autouse=True)
def _plain_examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples in docstrings show no plots, so theirs are not rendered."""
    if (
        isinstance(request.node, pytest.DoctestItem)
        and "harmonium." in request.node.dtest.docstring
    ):
        request.getfixturevalue("unrendered")
        monkeypatch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
