"""Workers that do not fit on an accelerator are refused; a full one names a batch that fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, NAME
from tests.devices.test_runs import SMALL

import harmonium
from harmonium.core import devices
from harmonium.core.errors import ConfigError, EngineError
from harmonium.engines import memory
from harmonium.engines.memory import Need
from harmonium.learning.client import Batch

GB = 10**9
LITTLE = Need(GB // 2, GB // 100)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend what the device has free and what training needs."""

    def pretend(free: int, needed: Need = LITTLE) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        monkeypatch.setattr(memory, "need", lambda method, device: needed)

    return pretend


def run(folder: Path, workers: int = 0, batch: int = 50) -> Any:
    settings = {**SMALL, "local": {"epochs": 1, "batch": batch}, "rounds": 1}
    engine = {"device": NAME, "workers": workers}
    return harmonium.run("fedavg", **settings, engine=engine, out=folder)


def test_workers_that_do_not_fit_side_by_side_are_refused(has: Any, tmp_path: Path) -> None:
    has(free=4 * GB)  # each takes 0.5 + 0.5 + 0.6 GB
    with pytest.raises(ConfigError, match=r"3 workers .*4\.8 GB.*4\.0 GB") as error:
        run(tmp_path / "run", workers=3)
    assert "engine.workers=2 or local.batch=" in str(error.value)
    assert not list((tmp_path / "run").glob("metrics*"))


def test_a_batch_that_does_not_fit_is_refused(has: Any, tmp_path: Path) -> None:
    has(free=GB)
    with pytest.raises(ConfigError, match="set local.batch=48"):
        run(tmp_path / "run", batch=64)
    has(free=GB // 4)
    with pytest.raises(ConfigError, match="a smaller encoder"):
        run(tmp_path / "other", batch=64)


def test_workers_are_counted_for_each_device(has: Any) -> None:
    has(free=4 * GB)
    recipe = harmonium.Recipe.of("fedavg", "data=shapes", "local.batch=50")
    method = recipe.build_method(recipe.data.load())
    two = [torch.device(f"{NAME}:{number}") for number in (0, 1)]
    memory.check(method, two, workers=4)
    with pytest.raises(ConfigError, match="engine.workers=4"):
        memory.check(method, two, workers=5)
    memory.check(method, [devices.CPU], workers=50)


def test_a_full_device_names_the_batch_that_would_fit(
    has: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(free=10 * GB, needed=Need(GB, GB // 10))

    def views(batch: Batch) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Batch, "views", property(views))
    with pytest.raises(EngineError, match=rf"memory of {DEVICE}.*local.batch=50") as e:
        run(tmp_path / "run")
    assert "local.batch=25 would fit" in str(e.value)


def test_other_errors_keep_their_traceback(
    has: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(free=10 * GB)
    monkeypatch.setattr(Batch, "views", property(lambda batch: [][0]))
    with pytest.raises(IndexError):
        run(tmp_path / "run")


def test_need_grows_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own counters, which a pretence cannot have: here they count outputs."""
    recipe = harmonium.Recipe.of("fedavg", "data=shapes")
    method = recipe.build_method(recipe.data.load())
    assert memory.need(method, DEVICE) is None  # torch cannot tell
    monkeypatch.setattr(memory, "_peak", lambda method, device, size: 5000 + 70 * size)
    found = memory.need(method, DEVICE)
    weights = sum(p.numel() * 4 for p in method.blueprint.parameters())
    assert found == Need(5000 + 2 * weights, 70)


def test_the_step_that_is_measured_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counters:
        empty_cache = staticmethod(lambda: None)
        memory_allocated = reset_peak_memory_stats = staticmethod(lambda device: 1000)
        max_memory_allocated = staticmethod(
            lambda device: sizes.append(1) or 1000 + 64 * len(sizes)
        )

    monkeypatch.setattr(memory, "Memory", Counters)
    recipe = harmonium.Recipe.of("orchestra", "data=shapes", "encoder.width=4")
    method = recipe.build_method(recipe.data.load())
    found = memory.need(method, DEVICE)
    assert found is not None and len(sizes) == 2 and found.each == 5  # 64 bytes for 12 images


def test_images_stay_if_they_take_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 10 * GB)
    assert devices.room_for(3 * GB, DEVICE) and not devices.room_for(4 * GB, DEVICE)
    monkeypatch.setattr(devices, "free_memory", lambda device: None)
    assert devices.room_for(GB, DEVICE) and not devices.room_for(2 * GB, DEVICE)
    assert devices.room_for(100 * GB, devices.CPU)
