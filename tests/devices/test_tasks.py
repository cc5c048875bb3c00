"""Tasks on a pretend accelerator: the CPU's bits, and no waiting within a task."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, NAME, counted
from tests.methods.test_contract import QUICK

from harmonium.core import codec, devices
from harmonium.data.augment.views import PRESETS, preset
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.learning.encoders import encoders
from harmonium.learning.objectives import objectives
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, first_trial

FEWER = {"data": {**TINY["data"], "count": 40}, "clients": 3}
READS = {"cbafed": 1, "orchestra": 1, "semifed": 1}  # of methods that decide on the CPU
LABELS = {"name": "dirichlet", "alpha": 1.0, "labels": 0.5}
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
    engine = LocalEngine(Counting(**vars(runtime)), folder, workers=0, devices=(DEVICE,))
    _ = engine.runtime.resident  # all images are sent, once a run
    return engine


def check(
    name: str,
    reads: int | None = None,
    exact: bool = True,
    sends: bool = False,
    **settings: Any,
) -> None:
    """Two rounds here and there have the same bits; a task reads the device at most so often.

    One more copy brings the task's result home. With `sends` it may send a tensor unpinned.
    """
    reads = READS.get(name, 0) if reads is None else reads
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
        found = f"{name}.{step}: {dict(waits)}"
        assert not waits["index"] and not waits["shape"] and (sends or not waits["send"]), found
        assert waits["copy"] + waits["item"] <= reads + 1, found


@pytest.mark.parametrize("name", methods.table())
def test_every_method(name: str) -> None:
    check(name, split=LABELS)


SMALL: dict[str, dict[str, Any]] = {
    "moco": {"queue": 16},
    "swav": {"prototypes": 8, "queue": 24, "freeze": 1},
    "assignments": {"cluster_weight": 0},  # centroids are its own method's
}


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
                "reads": 1,
                "sends": True,  # the client's own encoder, before its first image
            },
        ),
        ("fedavg", {"evaluate": {"tuning": "simclr", "whiten": True}, "reads": 1}),
        ("fedavg", {"evaluate": {"sites": "ridge", "sites_least": 1}, "reads": 1}),
        ("fedavg", {"evaluate": {"sites": "probe", "sites_least": 1}, "reads": 1}),
        ("fedavg", {"objective": "spectral", "local": {**TINY["local"], "optimiser": "adam"}}),
        ("fedavg", {"objective": {"name": "spectral", "form": "orchestra"}}),
        ("fedavg", {"transport": {"up": "int8", "down": "fp16"}}),
        ("fedavg", {"privacy": {"update_clip": 1.0, "update_noise": 0.1}, "objective": PLAIN_NORM}),
        ("fedavg", {"privacy": {"secure_aggregation": True}}),
        ("fedavg", {"views": {"name": "simclr", "randaugment": 2}}),
        ("fedavg", {"views": {"name": "simclr", "mode": "fast"}}),
        ("fedavg", {"views": "digits"}),
        ("apfl", {"method": {"name": "apfl", "adaptive": True}, "reads": 1}),
        ("apfl", {"method": {"name": "apfl", "mixing": "weights", "adaptive": True}, "reads": 1}),
        ("apfl", {"method": {"name": "apfl", "mixing": "weights"}}),
        ("ditto", {"method": {"name": "ditto", "towards": "updated"}}),
        ("fedca", {"method": {**FEDCA, "sampling": "replace", "exclude_own": True}}),
        ("fedca", {"method": {**FEDCA, "group": 2}}),
        ("fedca", {"method": {**FEDCA, "noise": 0.1, "source": "received"}, "reads": 1}),
        ("fedca", {"method": FEDCA, "encoder": BATCH_NORM, "batch_norm": "recalibrate"}),
        (
            "fedsc",
            {"method": {"name": "fedsc", "epsilon": 5.0, "psd": True}, "objective": SPECTRAL},
        ),
        ("fedstyle", {"method": {"name": "fedstyle", "style_epochs": 1, "reduction": "sum"}}),
        ("fedu", {"method": {"name": "fedu", "divergence": "received"}, "reads": 1}),
        ("orchestra", {"method": {**ORCHESTRA, "balance": "argmax"}}),
        ("orchestra", {"method": {**ORCHESTRA, "epsilon": 50.0, "global_balance": "exact"}}),
    ],
)
def test_settings_that_compute_otherwise(name: str, settings: dict[str, Any]) -> None:
    check(name, **settings)


MOCO = {"name": "moco", "queue": 16, "negatives": "queue", "ema_buffers": "copy"}
BYOL = {"name": "byol", "ema_buffers": "copy", "update": "before"}
TURNS = {"name": "rotation", "turns": "one", "head": "projector", "augment": True}
RAW = {"name": "assignments", "target_view": "raw", "extra_forward": True}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"objective": MOCO}),
        ("fedavg", {"objective": BYOL, "local": {**TINY["local"], "weight_decay": 0.1}}),
        ("fedavg", {"objective": {"name": "infonce", "anchors": "both"}}),
        ("fedavg", {"objective": TURNS}),
        ("fedavg", {"objective": {"name": "swav", "prototypes": 8, "queue": 0}}),
        ("orchestra", {"objective": RAW}),
        ("fedrep", {"batch_norm": "recalibrate", "encoder": BATCH_NORM}),
        ("fedprox", {"method": {"name": "fedprox", "init_from_global": False}, "rounds": 2}),
        ("fedu", {"method": {"name": "fedu", "threshold": 0.0}, "rounds": 2}),
    ],
)
def test_settings_that_lead_to_other_code(name: str, settings: dict[str, Any]) -> None:
    check(name, **{"rounds": 1, **settings})


PRIVATE = {**TINY["local"], "dp_clip": 1.0, "dp_noise": 0.5}


def test_dp_sgd() -> None:
    check("fedavg", objective="autoencoder", local=PRIVATE, views="none", rounds=1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_of_views(name: str) -> None:
    pixels = torch.randint(256, (24, 12, 12, 3), dtype=torch.uint8)
    views = preset(name)
    here = [*views(pixels, torch.Generator().manual_seed(1)), views.plain(pixels)]
    there = devices.to_device(pixels, DEVICE)
    with counted() as waits:
        made = [*views(there, torch.Generator().manual_seed(1)), views.plain(there)]
        assert not +waits
    for one, other in zip(here, devices.to_host(made), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("apfl", {"method": {"name": "apfl", "mixing": "weights", "adaptive": True}}),
        ("diagnosis", {}),
        ("fedavg", {"batch_norm": "recalibrate", "encoder": BATCH_NORM}),
        ("fedavg", {"objective": "autoencoder", "local": PRIVATE, "views": "none", "rounds": 1}),
        ("fedavg", {"terms": {"uv": {"scale": 10.0}}, "reads": 0}),
        ("fedca", {"reads": 0}),
        ("fedsc", {}),
        ("fedstyle", {}),
        ("fedu", {}),
    ],
)
def test_a_device_without_float64(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `mps`: what needs it is computed on the CPU, and figures of the log in float32."""
    monkeypatch.setattr(devices, "WITHOUT_DOUBLE", {NAME})
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64, device=DEVICE)
    check(name, **{"reads": 10_000, "sends": True, **settings})


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
        torch.equal(there, there), there.repeat_interleave(there), torch.zeros(1).to(DEVICE)
        devices.to_device(torch.zeros(1), DEVICE), torch.zeros(1, device=DEVICE)
    assert waits == {"index": 1, "shape": 2, "item": 2, "copy": 1, "send": 1}
    with pytest.raises(RuntimeError, match=f"{DEVICE} and cpu"):
        torch.arange(4)[there]
    with pytest.raises(RuntimeError, match=f"{DEVICE} and cpu"):
        torch.stack([there.sum(), torch.tensor(2)])
    with pytest.raises(RuntimeError, match=f"{DEVICE} and cpu"):
        torch.zeros(()).add_(there.sum())
    there + torch.tensor(2), torch.where(there > 2, there, torch.tensor(0))  # as on a GPU


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_waits_for_nothing(precision: str, optimiser: str) -> None:
    check("fedavg", local={**TINY["local"], "precision": precision, "optimiser": optimiser})
