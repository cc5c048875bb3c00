"""Compiled networks: which batches, how often anything is compiled, and what is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import harmonium
from harmonium.core.errors import ConfigError
from harmonium.engines import trial
from harmonium.learning import compiling
from harmonium.learning.training import Local
from harmonium.recipe.schema import Recipe
from harmonium.runs.estimate import estimated
from harmonium.testing import TINY, Trial, first_trial

BATCH = 6
CPU = torch.device("cpu")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Networks are traced and run as graphs, without generating code, which takes long."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    return counters


def run(compiled: bool, name: str = "fedavg") -> Trial:
    return first_trial(name, local={**TINY["local"], "batch": BATCH, "compile": compiled})


def test_full_batches_are_compiled_once_for_all_tasks(traced: Any) -> None:
    plain, compiled = run(False), run(True)
    for key, tensor in compiled.server.model.items():
        torch.testing.assert_close(tensor, plain.server.model[key], rtol=1e-4, atol=1e-5)
    assert compiled.digest == compiled.again().digest
    # Encoder and projector, whatever the number of clients, rounds and steps.
    assert traced["stats"]["unique_graphs"] == 2
    assert not traced["graph_break"]


def test_a_target_is_compiled_too(traced: Any) -> None:
    plain, compiled = run(False, "fedu"), run(True, "fedu")
    for key, tensor in compiled.server.model.items():
        torch.testing.assert_close(tensor, plain.server.model[key], rtol=1e-3, atol=1e-4)
    assert 2 < traced["stats"]["unique_graphs"] <= 6


def test_other_batches_run_as_usual(traced: Any) -> None:
    parts = run(False).method.blueprint.copy_from()
    with parts.computing(None, compiled=BATCH):
        parts.through([torch.rand(BATCH - 1, 3, 12, 12)] * 2, "encoder")
        assert not traced["stats"]["unique_graphs"]
        parts.through([torch.rand(BATCH, 3, 12, 12)] * 2, "encoder")
    assert traced["stats"]["unique_graphs"] == 1


def test_what_it_costs_and_gains_is_said(traced: Any, tmp_path: Path, undrawn: None) -> None:
    notes: list[str] = []

    class Listening(harmonium.Callback):
        def note(self, text: str) -> None:
            notes.append(text)

    settings: dict[str, Any] = {**TINY, "local": {"epochs": 1, "batch": BATCH, "compile": True}}
    settings |= {"rounds": 1, "evaluate": {"k": 5, "labels_per_class": []}}
    engine = {"workers": 0, "device": "cpu"}
    harmonium.run("fedavg", **settings, engine=engine, out=tmp_path, callbacks=Listening())
    (said,) = [note for note in notes if note.startswith("local.compile: ")]
    assert "without compiling" in said


def test_code_is_generated_and_kept(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """By the real compiler, for one small network."""
    try:
        compiling.check(CPU)
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiling._compiled.cache_clear()
    network = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU())
    rows = torch.randn(3, 5)
    torch.testing.assert_close(compiling.through(network, rows), network(rows))
    assert any((home / "compiled").rglob("*.so"))
    compiling._compiled.cache_clear()


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="local.compile=true needs a C\\+\\+ compiler"):
        compiling.check(CPU)
    with pytest.raises(ConfigError, match="not for mps"):
        compiling.check(torch.device("mps"))
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton"):
        compiling.check(torch.device("cuda"))


def test_it_is_refused_for_dp_sgd_and_leaves_other_digests() -> None:
    with pytest.raises(ConfigError, match="local.compile=true"):
        Local(compile=True, dp_clip=1.0)
    plain = Recipe.of("fedavg")
    assert Recipe.of("fedavg", "local.compile=false").digest == plain.digest
    assert Recipe.of("fedavg", "local.compile=true").digest != plain.digest


def test_whether_it_pays_is_said() -> None:
    assert "does not pay here" in str(compiling.Gain(20.0, 5.0, 6.0))
    assert "after about 20,000 steps" in str(compiling.Gain(20.0, 6.0, 5.0))


def test_an_estimate_does_not_take_compiling_for_the_pace_of_steps(traced: Any) -> None:
    words = ("data=shapes", "data.count=60", "data.size=12", "clients=2", "rounds=2")
    recipe = Recipe.of("fedavg", *words, "local.batch=6", "local.compile=true", "evaluate.k=5")
    assert not isinstance(estimated(recipe), str)
    assert not traced["stats"]["unique_graphs"]


def test_a_gain_is_measured_forward_and_backward() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    calls: list[str] = []

    def loss(name: str) -> torch.Tensor:
        calls.append(name)
        return weight * 2

    compiling.measured(lambda: loss("plain"), lambda: loss("compiled"), CPU)
    assert calls[0] == "compiled" and set(calls) == {"plain", "compiled"}
    assert weight.grad == 2 * len(calls)
    assert trial.blank_pass(run(False).method, CPU, 3)(None).requires_grad
