"""What a plan says before a run: figures that the run has afterwards, and findings."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import harmonium
from harmonium.cli.main import main
from harmonium.core import machine
from harmonium.core.errors import ConfigError
from harmonium.core.machine import MachineMemory
from harmonium.data.images import Dataset, Images
from harmonium.data.splits.column import Column
from harmonium.runs import findings, footprint
from harmonium.runs import plan as planning
from harmonium.runs.footprint import Memory
from harmonium.runs.plan import RunPlan
from harmonium.runs.replay import Answers, Replay, Spending, replay
from harmonium.sites.folder import init

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

TINY = {
    "data": "shapes",
    "data.count": 120,
    "data.test_count": 30,
    "clients": 3,
    "rounds": 3,
    "encoder.width": 4,
    "local.batch": 16,
    "local.epochs": 1,
    "engine.workers": 0,
    "evaluate.labels_per_class": [],
}
FedAvg = "fedavg"


def planned(method: str = FedAvg, **settings: Any) -> RunPlan:
    return harmonium.plan(method, **{**TINY, **settings})


def about(found: RunPlan, level: str, topic: str) -> str:
    """The only finding of a level about a topic."""
    (text,) = (one.text for one in found.findings if (one.level, one.about) == (level, topic))
    return text


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings that need no step of training."""
    monkeypatch.setattr(planning._Planning, "_measure", lambda self, data: None)


# ---- figures -------------------------------------------------------------------------------------

SENDING = {
    "fedavg": {},
    "orchestra": {"method.clusters": 8, "method.global_steps": 10},
    "fedsc": {"evaluate.every": 2},
    "masked": {"privacy.secure_aggregation": True},
    "lost": {"participation.dropout": 0.4, "participation.fraction": 0.7, "seed": 3},
    "measured": {"batch_norm": "recalibrate", "encoder.norm": "batch", "evaluate.every": 2},
    "rounded": {"transport.up": "int8"},
}


@pytest.mark.parametrize("name", SENDING)
def test_bytes_and_disk_are_those_of_the_run(name: str, home: Path, tmp_path: Path) -> None:
    method = name if name in ("orchestra", "fedsc") else FedAvg
    found = planned(method, **SENDING[name])
    assert not found.stops and found.traffic is not None and found.disk is not None
    rows = harmonium.run(method, **{**TINY, **SENDING[name]}, out=tmp_path / "run").rounds
    for way, key in (("down", "bytes_down"), ("up", "bytes_up"), ("measuring", "bytes_measuring")):
        assert getattr(found.traffic, way) == sum(row.get(key, 0) for row in rows), way
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert found.disk.folder - footprint.PLOT == pytest.approx(size, rel=0.2, abs=12_000)


def test_rounds_beyond_patience_are_like_those_before(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"rounds": 9, "evaluate.every": 3, "batch_norm": "recalibrate"}
    settings |= {"encoder.norm": "batch"}
    whole = planned(**settings)
    monkeypatch.setattr("harmonium.runs.replay.PATIENCE", -1.0)
    monkeypatch.setattr("harmonium.runs.replay.LEAST", 4)
    brief = planned(**settings)
    assert whole.traffic == brief.traffic


def test_a_plan_is_text_and_json_and_leaves_nothing(home: Path) -> None:
    found = planned()
    plain = json.loads(json.dumps(found.plain()))
    assert plain["works"] and plain["time"]["seconds"] > 0 and plain["clients"]["fewest"] == 36
    words = found.summary()
    for heading in ("clients", "time", "bytes", "disk"):
        assert f"\n{heading} " in f"\n{words}"
    assert not (home / "runs").exists()


@pytest.mark.skipif(machine.memory() is None, reason="needs /proc")
def test_memory_grows_with_the_batch_and_with_workers(home: Path) -> None:
    few = planned(**{"local.batch": 4, "data.size": 32}).memory
    many = planned(**{"local.batch": 36, "data.size": 32, "engine.workers": 2}).memory
    assert few is not None and many is not None
    assert (few.workers, many.workers) == (0, 2) and many.worker > footprint.PRIVATE
    assert many.total == many.main + 2 * many.one_worker


GROWS = """
import numpy as np
from harmonium.core import machine
with machine.memory_growth() as grown:
    held = np.ones(40_000_000, np.uint8)
    del held
print(grown())
"""


def test_growth_is_measured_after_freed_memory_is_returned() -> None:
    """In a process of its own: what other tests have freed here could be taken instead."""
    if machine.memory() is None:
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True)
    assert 35_000_000 < int(done.stdout) < 80_000_000, done.stderr


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert machine.free_space(tmp_path / "not" / "there") > 0


# ---- privacy -------------------------------------------------------------------------------------

NOISY = {"privacy.update_clip": 1.0, "privacy.update_noise": 4.0, "privacy.noise": "simulated"}
NOISY |= {"objective.norm": "group"}


def test_epsilon_is_that_of_the_report(home: Path, tmp_path: Path) -> None:
    found = planned(**NOISY, **{"privacy.delta": 0.01})
    folder = harmonium.run(FedAvg, **{**TINY, **NOISY, "privacy.delta": 0.01}, out=tmp_path / "run")
    report = harmonium.privacy.report(folder.folder)
    assert found.privacy is not None and found.privacy.clients == 3
    assert found.privacy.worst == pytest.approx(report.clients[0].epsilon)
    assert found.privacy.neighbours == report.neighbours == "client"


def test_a_budget_that_ends_early_is_a_warning_and_one_for_no_round_a_stop(home: Path) -> None:
    once = planned(**NOISY).privacy
    assert once is not None
    short = planned(**NOISY, **{"privacy.epsilon": 0.7 * once.worst})
    assert "before round" in about(short, "warning", "privacy")
    assert not short.stops and short.privacy is not None and short.time is not None
    assert short.time.rounds == (short.privacy.ends or 0) - 1 < 3
    assert short.privacy.worst <= 0.7 * once.worst
    none = planned(**NOISY, **{"privacy.epsilon": 0.01})
    assert "privacy.epsilon=0.01" in about(none, "stop", "recipe")


def test_a_delta_beyond_one_image_is_a_warning() -> None:
    recipe = harmonium.Recipe.of(FedAvg)
    spending = Spending(1.0, 1.0, 0.1, None, "replace", 3, {"correlate": (2, 5)}, None)
    texts = [one.text for one in findings.of_spending(recipe, spending, 50)]
    assert any("0.002" in text or "2e-03" in text for text in texts)
    assert any("`correlate` from round 5" in text for text in texts)
    by_client = dataclasses.replace(spending, neighbours="client", refused={})
    assert not findings.of_spending(recipe, by_client, 50)


# ---- clients and participation -------------------------------------------------------------------


def test_clients_with_too_few_images(home: Path, unmeasured: None) -> None:
    assert "local.batch=36" in about(planned(**{"local.batch": 64}), "warning", "clients")
    assert "2 images" in about(planned(clients=100), "stop", "clients")
    recipe = harmonium.Recipe.of(FedAvg, **{**TINY, "participation.quorum": 3})
    method = recipe.method_for((16, 16, 3), 2)
    (idle,) = findings.of_clients(harmonium.Recipe.of(FedAvg, **TINY), method, {0: 20, 1: 1, 2: 20})
    assert idle.level == "warning" and "client 1 of 3" in idle.text
    (short,) = findings.of_clients(recipe, method, {0: 20, 1: 1, 2: 20})
    assert short.level == "stop" and "participation.quorum" in short.text


def test_more_workers_than_clients_are_noted(home: Path, unmeasured: None) -> None:
    assert "engine.workers=8" in about(planned(**{"engine.workers": 8}), "note", "clients")


def test_a_client_whose_images_are_all_held_out_is_named() -> None:
    def images(owners: list[int]) -> Images:
        count = len(owners)
        pixels = np.zeros((count, 8, 8, 1), np.uint8)
        return Images(pixels, np.zeros(count, np.int64), {"client": np.array(owners)})

    parts = images([0, 0, 2]), images([1]), images([0])
    names = {"client": ("north", "south", "west")}
    dataset = Dataset("own", *parts, ("a",), "", names=names)
    (lost,) = findings.of_lost_clients(Column(), dataset)
    assert lost.level == "warning" and "'south'" in lost.text and "data.validation" in lost.text


def test_rounds_without_a_quorum(home: Path) -> None:
    settings = {"participation.quorum": 3, "participation.dropout": 0.5, "rounds": 6}
    assert "of 6 rounds" in about(planned(**settings), "warning", "participation")
    settings |= {"participation.dropout": 0.99, "rounds": 2}
    assert "participation.quorum" in about(planned(**settings), "stop", "participation")


# ---- images and encoder --------------------------------------------------------------------------


def test_images_without_labels_and_too_few_of_them(
    home: Path, unmeasured: None, tmp_path: Path
) -> None:
    np.savez(tmp_path / "bare.npz", x=np.zeros((60, 8, 8, 1), np.uint8))
    bare = {"data": "npz", "data.path": str(tmp_path / "bare.npz")}
    own = {k: v for k, v in TINY.items() if k not in ("data", "data.count", "data.test_count")}
    found = harmonium.plan(FedAvg, **{**own, **bare})
    assert "label" in about(found, "warning", "evaluation")
    few = planned(**{"evaluate.labels_per_class": [500]})
    assert "labels_per_class" in about(few, "warning", "evaluation")


def test_images_that_are_scaled_by_much(home: Path, unmeasured: None, tmp_path: Path) -> None:
    for number in range(12):
        Image.new("L", (130, 140)).save(tmp_path / f"{number}.png")
    own = {k: v for k, v in TINY.items() if k not in ("data", "data.count", "data.test_count")}
    folder = {"data": "folder", "data.path": str(tmp_path), "data.size": 8, "clients": 2}
    found = harmonium.plan(FedAvg, **{**own, **folder})
    assert "130 pixels are scaled to 8" in about(found, "warning", "images")
    larger = harmonium.plan(FedAvg, **{**own, "data": "digits", "data.size": 32})
    assert "16 times" in about(larger, "warning", "images")


def test_an_encoder_that_strides_over_the_whole_image(home: Path, unmeasured: None) -> None:
    found = planned(**{"encoder": "resnet18", "encoder.width": 2, "data.size": 8})
    assert "3 layers" in about(found, "warning", "encoder")


def test_what_the_first_round_would_refuse_is_a_stop(home: Path, tmp_path: Path) -> None:
    refused = {
        "views.pad_crop": {"data": "digits", "views.pad_crop": 8},
        "engine.device": {"engine.device": "cuda:7"},
        "cifar10": {"data": "cifar10"},
        "data.validation": {"data.validation": 1.5},
    }
    own = {k: v for k, v in TINY.items() if k not in ("data", "data.count", "data.test_count")}
    for key, settings in refused.items():
        found = harmonium.plan(FedAvg, **{**own, "data": "shapes", **settings})
        assert any(key.partition(".")[2] in one.text for one in found.stops), key
        assert found.time is None
    with pytest.raises(ConfigError, match="local.lr"):
        planned(**{"local.lr": -1})
    harmonium.run(FedAvg, **TINY, out=tmp_path / "run")
    other = harmonium.plan(FedAvg, **{**TINY, "seed": 5}, out=tmp_path / "run")
    assert "holds another run" in about(other, "stop", "recipe")


# ---- memory and disk -----------------------------------------------------------------------------

GB = 10**9


@pytest.mark.parametrize(
    ("machine_has", "free", "level", "remedy"),
    [
        (100, 100, None, ""),
        (100, 7, "warning", "engine.workers=2"),
        (6, 5, "stop", "engine.workers=1"),
    ],
)
def test_a_run_that_needs_more_memory_than_there_is(
    machine_has: int, free: int, level: str | None, remedy: str
) -> None:
    recipe = harmonium.Recipe.of(FedAvg)
    each = 2 * GB + footprint.LIBRARIES
    memory = Memory(GB, each, 3, 7 * GB, machine_has * GB, free * GB)
    found = findings.of_memory(recipe, memory)
    assert [one.level for one in found] == ([level] if level else [])
    assert all(remedy in one.text for one in found)


def test_a_folder_that_does_not_fit_on_its_disk() -> None:
    where = Path("runs")
    assert not findings.of_disk(10, 100, where)
    assert [one.level for one in findings.of_disk(95, 100, where)] == ["warning"]
    (full,) = findings.of_disk(200, 100, where)
    assert full.level == "stop" and "--out" in full.text


def test_an_accelerator_that_is_too_small_stops(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise ConfigError("2 workers would not fit on cuda:0: set engine.workers=1")

    monkeypatch.setattr(planning.accelerators, "check", full)
    assert "engine.workers=1" in about(planned(), "stop", "recipe")


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.memory() is None:
        pytest.skip("needs /proc")
    for name, text in (("max", "1000000"), ("current", "400000"), ("stat", "inactive_file 100000")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory() == MachineMemory(1_000_000, 700_000)


# ---- sites, notes and the command ----------------------------------------------------------------


def test_a_federation_is_planned_without_images(home: Path) -> None:
    own = {"rounds": 2, "clients": 3, "encoder.width": 4, "data.size": 16, "local.batch": 8}
    found = harmonium.plan(FedAvg, data="sites", **own)
    assert not found.stops and found.time is None and "sites" in found.unknown
    assert found.image and found.traffic is not None and found.traffic.exact
    assert found.clients is not None and found.clients.fewest is None
    if found.memory is not None:
        assert found.memory.at_sites and found.memory.worker > 0
    assert "clients=3" in about(found, "note", "images")


def test_tf32_without_effect_is_noted(home: Path, unmeasured: None) -> None:
    assert "engine.tf32" in about(planned(**{"engine.tf32": True}), "note", "device")


def test_a_trial_that_fails_otherwise_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(planning, "measured", broken)
    found = planned()
    assert "mat1" in about(found, "warning", "trial") and found.time is None


def test_a_dry_run_is_the_same_plan(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{k}={str(v).lower()}" for k, v in TINY.items()]

    def call(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["harmonium", *more])
        monkeypatch.setattr("sys.path", list(__import__("sys").path))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    code, said, _ = call("plan", FedAvg, *words, "--json")
    plan = json.loads(said)
    dry_code, shown, _ = call("run", FedAvg, *words, "--dry-run", "--json")
    dry = json.loads(shown)
    assert (code, dry_code) == (0, 0)
    for key in ("traffic", "clients", "findings", "digest"):
        assert plan[key] == dry["plan"][key]
    few = [*(word for word in words if "clients" not in word), "clients=100"]
    for command in (["plan", FedAvg, *few], ["run", FedAvg, *few, "--dry-run"]):
        code, _, told = call(*command)
        assert code == 2 and told.count("harmonium: ") == 1 and "Traceback" not in told


def test_what_would_be_replayed_needs_no_images() -> None:
    """The kinds that a replay takes and gives, for whoever uses it apart from a plan."""
    recipe = harmonium.Recipe.of(FedAvg, **TINY)
    method = recipe.method_for((16, 16, 3), 2)
    model = method.blueprint.shared()
    answers: Answers = {"train": [{0: {"model": model, "loss": 1.0}}]}
    found = replay(recipe, method, {0: 40, 1: 40, 2: 40}, answers, delta=1e-5)
    assert isinstance(found, Replay) and found.rounds == 3 and not found.failed
    assert found.traffic.exact and found.asked == 3


def test_a_server_says_what_it_can_before_any_site_connects(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init(tmp_path / "federation", ["north", "south"], ["localhost"], 8443, 10)
    words = ["rounds=2", "encoder.width=4", "data.size=16", "local.batch=8", "--dry-run", "--json"]
    folder = ["-f", str(tmp_path / "federation")]
    monkeypatch.setattr("sys.argv", ["harmonium", "server", "start", FedAvg, *words, *folder])
    main()
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["works"] and plan["clients"]["count"] == 2 and plan["time"] is None
    assert plan["traffic"]["exact"] and plan["image"] > 0
    words += ["data=sites", "evaluate.sites=ridge", "evaluate.sites_classes=[a,b]"]
    monkeypatch.setattr("sys.argv", ["harmonium", "server", "start", FedAvg, *words, *folder])
    main()
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["works"] and shown["digest"] == shown["plan"]["digest"]
