"""Tasks on a pretend accelerator: the CPU's bits, and no waiting within a task."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, counted
from tests.methods.test_contract import QUICK

from harmonium.core import codec, devices
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.learning.encoders import encoders
from harmonium.learning.objectives import objectives
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, first_trial

FEWER = {"data": {**TINY["data"], "count": 40}, "clients": 3}
WAITS: list[tuple[str, Counter[str]]] = []  # of every task


@dataclass(frozen=True)
class Counting(ClientRuntime):
    """Notes for every task how often it made the host wait."""

    def perform(self, task: Task, broadcast: bytes) -> codec.Tree:
        with counted() as waits:
            done = super().perform(task, broadcast)
            WAITS.append((task.step, Counter(waits)))
        return done


def elsewhere(recipe: Recipe, runtime: ClientRuntime, folder: Path) -> LocalEngine:
    return LocalEngine(Counting(**vars(runtime)), folder, workers=0, devices=(DEVICE,))


def check(name: str, reads: int = 1, exact: bool = True, **settings: Any) -> None:
    """Two rounds here and there have the same bits; a task reads the device at most so often.

    One more copy brings the task's result home.
    """
    WAITS.clear()
    settings = {**FEWER, **QUICK.get(name, {}), **settings}
    here = first_trial(name, **settings)
    with devices.use_device(DEVICE):
        there = here.again(engine=elsewhere)
    assert (there.digest == here.digest) is exact
    assert there.lines == here.lines
    for key, tensor in there.server.model.items():
        torch.testing.assert_close(tensor, here.server.model[key])
    assert WAITS
    for step, waits in WAITS:
        assert not waits["index"] and not waits["shape"], f"{name}.{step}: {dict(waits)}"
        assert waits["copy"] + waits["item"] <= reads + 1, f"{name}.{step}: {dict(waits)}"


@pytest.mark.parametrize("name", methods.table())
def test_every_method(name: str) -> None:
    check(name)


SMALL: dict[str, dict[str, Any]] = {
    "moco": {"queue": 16},
    "swav": {"prototypes": 8, "queue": 24, "freeze": 1},
    "assignments": {"cluster_weight": 0},  # centroids are its own method's
}
LABELS = {"name": "dirichlet", "alpha": 1.0, "labels": 0.5}


@pytest.mark.parametrize("name", objectives.table())
def test_every_objective(name: str) -> None:
    check("fedavg", objective={"name": name, **SMALL.get(name, {})}, split=LABELS)


@pytest.mark.parametrize("name", encoders.table())
def test_every_encoder(name: str) -> None:
    more = {"cct-4-3x2": {"attention_dropout": 0.0}, "cnn-small": {"norm": "batch"}}.get(name, {})
    slim = {"resnet50": 2, "cct-4-3x2": None}.get(name, 4)
    more |= {} if slim is None else {"width": slim}
    # Torch has an attention of its own for CPUs.
    check("fedavg", exact=name != "cct-4-3x2", encoder={"name": name, **more}, rounds=1)


BATCH_NORM = {"name": "cnn-small", "width": 4, "norm": "batch", "out": 16}
SPECTRAL = {"name": "spectral", "form": "fedsc", "out": 8, "norm": "none"}
PLAIN_NORM = {"name": "simclr", "norm": "none"}
FEDCA = {"name": "fedca", "align_epochs": 1, "size": 12}
ORCHESTRA = {"name": "orchestra", "clusters": 8, "global_steps": 5, "local_clusters": 4, "k_min": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"terms": {"uv": {"scale": 10.0}}}),
        (
            "fedavg",
            {
                "terms": {"uv": {"pictures": "unlabelled"}},
                "split": LABELS,
                "objective": "semi-infonce",
            },
        ),
        ("fedavg", {"terms": "proximal", "participation": {"number": 2}}),
        ("fedavg", {"batch_norm": "recalibrate", "encoder": BATCH_NORM}),
        (
            "fedavg",
            {
                "batch_norm": "fedbn",
                "encoder": BATCH_NORM,
                "evaluate": {"tuning": "simclr"},
                "reads": 2,
            },
        ),
        ("fedavg", {"evaluate": {"tuning": "simclr", "whiten": True}}),
        ("fedavg", {"evaluate": {"sites": "ridge", "sites_least": 1}}),
        ("fedavg", {"evaluate": {"sites": "probe", "sites_least": 1}, "reads": 2}),
        ("fedavg", {"objective": "spectral", "local": {**TINY["local"], "optimiser": "adam"}}),
        ("fedavg", {"objective": {"name": "spectral", "form": "orchestra"}}),
        ("fedavg", {"transport": {"up": "int8", "down": "fp16"}}),
        ("fedavg", {"privacy": {"update_clip": 1.0, "update_noise": 0.1}, "objective": PLAIN_NORM}),
        ("fedavg", {"privacy": {"secure_aggregation": True}}),
        ("fedavg", {"views": {"name": "simclr", "randaugment": 2}}),
        ("fedavg", {"views": {"name": "simclr", "mode": "fast"}}),
        ("fedavg", {"views": "digits"}),
        ("apfl", {"method": {"name": "apfl", "adaptive": True}}),
        ("apfl", {"method": {"name": "apfl", "mixing": "weights", "adaptive": True}}),
        ("apfl", {"method": {"name": "apfl", "mixing": "weights"}}),
        ("ditto", {"method": {"name": "ditto", "towards": "updated"}}),
        ("fedca", {"method": {**FEDCA, "sampling": "replace", "exclude_own": True}}),
        ("fedca", {"method": {**FEDCA, "group": 2}}),
        ("fedca", {"method": {**FEDCA, "noise": 0.1, "source": "received"}}),
        ("fedca", {"method": FEDCA, "encoder": BATCH_NORM, "batch_norm": "recalibrate"}),
        (
            "fedsc",
            {"method": {"name": "fedsc", "epsilon": 5.0, "psd": True}, "objective": SPECTRAL},
        ),
        ("fedstyle", {"method": {"name": "fedstyle", "style_epochs": 1, "reduction": "sum"}}),
        ("fedu", {"method": {"name": "fedu", "divergence": "received"}, "reads": 2}),
        ("orchestra", {"method": {**ORCHESTRA, "balance": "argmax"}}),
        ("orchestra", {"method": {**ORCHESTRA, "epsilon": 50.0, "global_balance": "exact"}}),
    ],
)
def test_settings_that_compute_otherwise(name: str, settings: dict[str, Any]) -> None:
    check(name, **settings)


def test_dp_sgd() -> None:
    private = {**TINY["local"], "dp_clip": 1.0, "dp_noise": 0.5}
    check(
        "fedavg",
        objective={"name": "autoencoder"},
        local=private,
        views="none",
        rounds=1,
    )


def test_images_that_do_not_fit_are_sent_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harmonium.engines.runtime.room_for", lambda size, device: False)
    check("fedavg")
    check("fedstyle")


def test_a_mixture_of_devices_is_refused_by_the_pretence() -> None:
    """The tests above could not fail otherwise."""
    with pytest.raises(RuntimeError, match=f"{DEVICE} and cpu"):
        torch.ones(2).to(DEVICE) + torch.ones(2)
    with pytest.raises(RuntimeError, match="draws random numbers"):
        torch.randn(3, device=DEVICE)
    with counted() as waits:
        there = torch.arange(4, device=DEVICE)
        there[torch.tensor([1])], there[there > 2], there.sum().item(), there.to("cpu")
    assert waits == {"index": 1, "shape": 1, "item": 1, "copy": 1}


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_waits_for_nothing(precision: str, optimiser: str) -> None:
    check("fedavg", local={**TINY["local"], "precision": precision, "optimiser": optimiser})
