"""Whole runs on a pretend accelerator: rounds, evaluation, measures, worker processes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, NAME, counted

import harmonium
from harmonium.core import devices
from harmonium.core.errors import ConfigError
from harmonium.engines import local, workers
from harmonium.engines.settings import EngineSettings
from harmonium.evaluation.finetune import TUNINGS, finetune
from harmonium.measures import measures

SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "count": 80, "test_count": 30, "size": 12, "validation": 0.3},
    "encoder": {"name": "cnn-small", "width": 4, "out": 16},
    "split": {"name": "dirichlet", "alpha": 1.0},
    "local": {"epochs": 1, "batch": 8},
    "evaluate": {"k": 5, "labels_per_class": [2], "whiten": True},
    "clients": 3,
    "rounds": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _here() -> Iterator[None]:
    """The pretence is the accelerator of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "accelerator", lambda: DEVICE)
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> dict[str, Any]:
    """The same run on the CPU and on the device."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name in ("cpu", NAME):
        engine = {"workers": 0, "device": name}
        made[name] = harmonium.run("fedavg", **SMALL, engine=engine, out=folder / name)
    return made


def test_a_run_ends_with_the_bits_of_the_cpu(runs: dict[str, Any]) -> None:
    here, there = runs["cpu"], runs[NAME]
    assert there.figures == here.figures
    assert there.untrained == here.untrained
    assert there.whitened == here.whitened
    for one, other in zip(here.rounds, there.rounds, strict=True):
        for key in ("loss", "knn", "health", "global_objective"):
            assert one.get(key) == other.get(key)
    timings = [json.loads(x) for x in (there.folder / "timings.jsonl").read_text().splitlines()]
    assert {line["device"] for line in timings} == {NAME}
    encoders = [(run.folder / "encoder.safetensors").read_bytes() for run in (here, there)]
    assert encoders[0] == encoders[1]


@pytest.mark.parametrize("name", sorted(set(measures.table()) - {"styles", "transfer"}))
def test_every_measure_has_the_figures_of_the_cpu(
    name: str, runs: dict[str, Any], all_unrendered: None
) -> None:
    quick = {"knn": {"k": 5}, "semi": {"draws": 1}, "personal": {"clients": 2}}.get(name, {})
    words = [f"{name}.{key}={value}" for key, value in quick.items()]
    figures = [
        harmonium.evaluate_run(run.folder, name, *words, "engine.workers=0").figures[name]
        for run in runs.values()
    ]
    here, there = (next(iter(one.values())) for one in figures)
    assert there == here


def test_an_encoder_stays_where_it_was(runs: dict[str, Any]) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    before = network[1].weight.detach().clone()
    with devices.use_device(DEVICE), devices.on_current_device(network) as place:
        assert devices.device_of(network) == place == DEVICE
    assert devices.device_of(network) == devices.CPU
    assert torch.equal(network[1].weight, before)


@pytest.mark.parametrize("head", TUNINGS)
def test_fine_tuning_has_the_bits_of_the_cpu(head: str, runs: dict[str, Any]) -> None:
    data = runs["cpu"].recipe.data.load()
    views = runs["cpu"].recipe.views.build()
    encoder = harmonium.load_encoder(runs["cpu"].folder).network
    how = replace(TUNINGS[head], epochs=2, batch=16, view=views.pipelines[0])
    here = finetune(encoder, data.train, how, views.plain, 0)
    with devices.use_device(DEVICE), counted() as waits:
        there = finetune(encoder, data.train, how, views.plain, 0)
        steps = +waits
    assert steps == {"copy": sum(1 for _ in there.network.parameters())}  # the result comes home
    for one, other in zip(here.network.parameters(), there.network.parameters(), strict=True):
        assert torch.equal(one, other) and other.device == devices.CPU


# ---- engine.device ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("cuda", "only pretend and the CPU are available here"),
        ("pretend:3", "devices here are 0 alone"),
        ("gpu", "give auto, cpu, cuda"),
        (["cpu", "cpu"], "each device once"),
        ([], "empty list"),
    ],
)
def test_a_device_that_is_not_here_is_refused(named: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        harmonium.run("fedavg", **SMALL, engine={"device": named}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_comparison_and_diagnosis_refuse_it_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine.device is cuda"):
        harmonium.compare("fedavg", "fedprox", "engine.device=cuda", out=tmp_path / "some")
    assert not (tmp_path / "some").exists()
    with pytest.raises(ConfigError, match="engine.device is cuda"):
        harmonium.diagnose("data=shapes", "engine.device=cuda")


def test_a_recipe_names_devices_that_are_elsewhere() -> None:
    """It can be read, checked and compared on a machine that lacks them; digests are the same."""
    recipe = harmonium.Recipe.of("fedavg", "engine.device=[cuda:0,cuda:1]")
    assert recipe.engine.device == ("cuda:0", "cuda:1")
    assert recipe.digest == harmonium.Recipe.of("fedavg").digest


def test_auto_is_a_cuda_device_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, wanted in ((None, "cpu"), ("mps:0", "cpu"), ("cuda:0", "cuda:0")):
        found = None if here is None else torch.device(here)
        monkeypatch.setattr(devices, "accelerator", lambda found=found: found)
        assert devices.resolve("auto") == (torch.device(wanted),)


def test_one_accelerator_needs_no_worker_and_several_have_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert EngineSettings(device=NAME).processes == 0
    assert EngineSettings(device=(f"{NAME}:0", f"{NAME}:1")).processes == 2
    assert EngineSettings(device=NAME, workers=3).processes == 3


def test_workers_are_spread_over_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also after a worker has died: its device becomes free."""

    class Process:
        stdin = stdout = None

    monkeypatch.setattr(workers, "start_module", lambda *_, **__: Process())
    monkeypatch.setattr(workers, "end_process", lambda process: None)
    pool = local._Pool(tmp_path, 3, [torch.device(f"{NAME}:{number}") for number in (0, 1)])
    first, *_ = [pool._take() for _ in range(3)]
    places = sorted(map(str, pool._all.values()))
    assert places == [f"{NAME}:0", f"{NAME}:0", f"{NAME}:1"]
    pool._replace(first)
    pool._take()
    assert sorted(map(str, pool._all.values())) == places


def test_what_a_run_computes_on_is_said(tmp_path: Path, undrawn: None) -> None:
    notes: list[str] = []

    class Listening(harmonium.Callback):
        def note(self, text: str) -> None:
            notes.append(text)

    quick = {**SMALL, "rounds": 1, "evaluate": {"k": 5, "labels_per_class": []}}
    engine = {"device": NAME, "workers": 0}
    harmonium.run("fedavg", **quick, engine=engine, out=tmp_path / "run", callbacks=Listening())
    assert f"computing on {DEVICE}" in notes


def test_a_message_comes_home_in_one_copy() -> None:
    tree = {
        "weights": {"w": torch.randn(3, 2), "n": torch.tensor(5), "empty": torch.zeros(0)},
        "list": [torch.tensor(2.5, dtype=torch.float64), torch.tensor([True, False])],
        "plain": 3,
    }
    there = devices.tree_to_device(tree, DEVICE)
    assert there["weights"]["n"].device == devices.CPU  # a counter
    with counted() as waits:
        home = devices.to_host(there)
    assert waits["copy"] == 1
    torch.testing.assert_close(home, tree, rtol=0, atol=0)
    assert devices.tree_to_device(tree, devices.CPU) is tree and devices.to_host(tree) is tree
