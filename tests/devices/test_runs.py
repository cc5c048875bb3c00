"""Whole runs on a pretend accelerator: rounds, evaluation, measures, worker processes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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


FEW: dict[str, list[str]] = {
    "knn": ["knn.k=5"],
    "personal": ["personal.clients=2"],
    "sites": ["sites.least=1"],
    "semi": ["semi.draws=1", "semi.epochs=3"],
    "transfer": ["transfer.epochs=2", "on=digits", "on.digits.limit=40"],
}
OF_STYLES: list[list[str]] = [
    ["styles", "styles.pictures=8"],
    ["personal"],  # each client's adapter learns beside its classifier
    ["personal", "personal.epochs=0", "personal.adapter=frozen"],
    ["personal", "personal.epochs=0", "personal.adapter=mlp", "personal.hidden=8"],
]


def same_figures(here: Path, there: Path, *words: str) -> None:
    """A measure of two runs, one evaluated on the CPU and one on the device."""
    figures = []
    for run, device in ((here, "cpu"), (there, NAME)):
        engine = ("engine.workers=0", f"engine.device={device}")
        with counted() as waits:
            found = harmonium.evaluate_run(run, *words, *engine).figures
        assert not waits["item"] and not waits["index"]
        assert bool(waits["copy"]) is (device == NAME)  # it did compute there
        figures.append([next(iter(each.values())) for each in found.values()])
    assert figures[1] == figures[0]


@pytest.mark.parametrize("name", sorted(set(measures.table()) - {"styles"}))
def test_every_measure_has_the_figures_of_the_cpu(
    name: str, runs: dict[str, Any], all_unrendered: None
) -> None:
    folders = (run.folder for run in runs.values())
    same_figures(*folders, name, *FEW.get(name, []))


@pytest.fixture(scope="module")
def styled(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A run whose clients have style networks and adapters of their own."""
    data = {**SMALL["data"], "count": 40, "styles": 2, "validation": 0.0}
    method = {"name": "fedstyle", "style_epochs": 1, "hidden": 8}
    own = {"data": data, "method": method, "split": "styles", "clients": 2, "rounds": 1}
    engine = {"workers": 0, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harmonium.runs.loop.RunLoop._test", lambda loop, *_: NO_FIGURES)
        folder = tmp_path_factory.mktemp("styled") / "run"
        return harmonium.run("fedstyle", **{**SMALL, **own}, engine=engine, out=folder).folder


NO_FIGURES: dict[str, Any] = {"figures": {}, "untrained": {}}


@pytest.mark.parametrize("words", OF_STYLES, ids=" ".join)
def test_clients_own_features_have_the_figures_of_the_cpu(
    words: list[str], styled: Path, all_unrendered: None
) -> None:
    same_figures(styled, styled, *words)


# ---- other processes -------------------------------------------------------------------------

IN_CHILDREN = '''
"""Python imports this module first: the device is there, and a file lists the tasks."""
import sys
from pathlib import Path

if {{"harmonium.runs.worker", "harmonium.sites.rehearsal"}} & set(sys.orig_argv):
    from harmonium.engines.runtime import ClientRuntime
    from tests.devices.pretend import counted

    perform = ClientRuntime.perform

    def noted(runtime, task, broadcast):
        with counted() as waits:
            done = perform(runtime, task, broadcast)
        with Path({file!r}).open("a") as file:
            file.write(f"{{task.step}} {{runtime.device}} {{waits['copy'] + waits['item']}}\\n")
        return done

    ClientRuntime.perform = noted
'''


@pytest.mark.parametrize("kind", ["local", "flower"])
def test_workers_and_nodes_compute_on_the_device(
    kind: str, runs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are other processes, and end with the bits of the CPU; a task reads the device once."""
    tasks = tmp_path / "tasks"
    (tmp_path / "sitecustomize.py").write_text(IN_CHILDREN.format(file=str(tasks)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("harmonium.runs.loop.RunLoop._test", lambda loop, *_: NO_FIGURES)
    engine = {"kind": kind, "workers": 1, "device": NAME}
    quick = {**SMALL, "evaluate": {**SMALL["evaluate"], "every": 9}}
    run = harmonium.run("fedavg", **quick, engine=engine, out=tmp_path / "run")
    steps = ["train"] * 2 * SMALL["clients"] + ["measure_moments"] * SMALL["clients"]
    assert tasks.read_text().split("\n")[:-1] == [f"{step} {DEVICE} 1" for step in steps]
    here, there = (load_file(one.folder / "encoder.safetensors") for one in (runs["cpu"], run))
    assert here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)


# ---- pieces ----------------------------------------------------------------------------------


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
    count = sum(1 for _ in there.network.parameters())
    assert steps == {"send": count, "copy": count}  # the network goes there, and comes home
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
