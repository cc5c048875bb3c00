"""Damaged, missing and foreign files in a run's folder."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import harmonium
from harmonium.core.callbacks import Callback
from harmonium.core.errors import (
    CallbackError,
    ConfigError,
    DataError,
    Diverged,
    HarmoniumError,
    StoreError,
)
from harmonium.data.partition import make_split
from harmonium.federation.method import Method
from harmonium.federation.wire import Ask
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import Result
from harmonium.runs.start import resume, run
from harmonium.storage.run_folder import RunFolder
from harmonium.studies.comparison.study import compare
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")

RECIPE = Recipe.from_tree(
    {
        **TINY,
        "method": "alone",
        "rounds": 4,
        "engine": {"workers": 0},
        "evaluate": {"every": 2, "labels_per_class": []},
    }
)


class Stop(Exception):
    """Thrown into a run after some round."""


class StopAfter(Callback):
    def __init__(self, last: int) -> None:
        self.last, self.notes = last, []

    def round(self, row, seconds) -> None:  # type: ignore[no-untyped-def]
        if row["round"] == self.last:
            raise Stop

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(RECIPE, out=tmp_path_factory.mktemp("calm") / "run")


@pytest.fixture(scope="module")
def once_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(CallbackError, match="Stop"):
        run(RECIPE, out=folder, callbacks=StopAfter(3))
    return folder


@pytest.fixture
def stopped(tmp_path: Path, once_stopped: Path) -> Path:
    """A run that was stopped after its third round of four, to do with as one likes."""
    return shutil.copytree(once_stopped, tmp_path / "run")


def same(folder: Path, calm: Result) -> None:
    for name in ("metrics.jsonl", "ledger.jsonl", "result.json"):
        assert (folder / name).read_bytes() == (calm.folder / name).read_bytes(), name


def test_a_stopped_run_resumes_to_the_same_end(stopped: Path, calm: Result) -> None:
    resume(stopped)
    same(stopped, calm)


def test_a_finished_run_is_returned_and_not_run_again(calm: Result) -> None:
    class Never(Callback):
        def begin(self, *_) -> None:  # type: ignore[no-untyped-def]
            raise AssertionError("the run began again")

    again = run(RECIPE, out=calm.folder, callbacks=Never())
    assert again.figures == calm.figures


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_commit_is_named_and_the_one_before_used(
    stopped: Path, calm: Result, suffix: str, damage: str
) -> None:
    path = stopped / "commits" / f"000003.{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes({"flip": data, "cut": data[: len(data) // 2], "empty": b""}[damage])
    watcher = StopAfter(99)
    resume(stopped, callbacks=watcher)
    assert "000003" in watcher.notes[0]
    same(stopped, calm)


def test_with_no_sound_commit_the_run_says_so(stopped: Path) -> None:
    for path in (stopped / "commits").glob("*.json"):
        path.write_text("nonsense")
    with pytest.raises(StoreError, match="no checkpoint"):
        resume(stopped)


def test_a_damaged_client_state_is_named_and_the_commit_before_used(
    stopped: Path, calm: Result
) -> None:
    path = max((stopped / "clients" / "0").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    watcher = StopAfter(99)
    resume(stopped, callbacks=watcher)
    assert path.name in watcher.notes[0]
    same(stopped, calm)


def test_states_of_real_sites_are_not_looked_for_here(stopped: Path) -> None:
    shutil.rmtree(stopped / "clients")
    newest, faults = RunFolder(stopped).newest_readable(with_states=False)
    assert newest is not None and newest.clients and not faults
    with pytest.raises(StoreError, match="no checkpoint"):
        RunFolder(stopped).newest_readable()


@dataclass(frozen=True)
class Remembers(Method):
    """Keeps in the server's memory what would not be the same after reading it back."""

    remembers = {"table": "statistic", "told": "scalar", "kinds": "public"}

    def round(self, server, cohort):  # type: ignore[no-untyped-def]
        got = yield Ask("train", cohort, {"model": server.model})
        table = server.memory.get("table", torch.arange(1000.0).reshape(10, 100))
        table = (table / 3 + 0.1).T  # transposed: summed in another order than a new tensor
        model = {key: value + table.sum() * 1e-9 for key, value in got.model.items()}
        told, kinds = server.memory.get("told", ()), server.memory.get("kinds", ())
        memory = {"table": table, "told": (*told, *got.ids), "kinds": [*kinds, str(type(told))]}
        return replace(server, model=model, memory=memory)


def test_going_on_and_resuming_see_the_same_memory(tmp_path: Path) -> None:
    recipe = RECIPE.changed(method=Remembers, objective={"name": "simclr", "norm": "none"})
    calm = run(recipe, out=tmp_path / "calm")
    with pytest.raises(CallbackError, match="Stop"):
        run(recipe, out=tmp_path / "run", callbacks=StopAfter(2))
    run(recipe, out=tmp_path / "run")
    same(tmp_path / "run", calm)
    ends = [(tmp_path / name / "commits" / "000004.safetensors") for name in ("calm", "run")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.parametrize("torn", [".split.npz.0a1b.part", "recipe.yaml.part", "about.json.part"])
def test_a_run_killed_while_it_began_begins_again(tmp_path: Path, torn: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / torn).write_bytes(b"half")
    with pytest.raises(CallbackError, match="Stop"):
        run(RECIPE, out=tmp_path / "run", callbacks=StopAfter(1))
    assert not (tmp_path / "run" / torn).exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"- 1", b"a: [", b"rounds: x"])
def test_a_damaged_recipe_is_one_line(stopped: Path, content: bytes) -> None:
    (stopped / "recipe.yaml").write_bytes(content)
    with pytest.raises(HarmoniumError):
        resume(stopped)


def test_half_written_leftovers_do_no_harm(stopped: Path, calm: Result) -> None:
    (stopped / "commits" / "000004.safetensors").write_bytes(b"half")
    (stopped / "commits" / "000004.json.part").write_bytes(b"half")
    (stopped / "clients" / "0" / "000004-0.safetensors").write_bytes(b"half")
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    resume(stopped)
    same(stopped, calm)


def test_old_rounds_are_forgotten(calm: Result) -> None:
    assert len(list((calm.folder / "commits").glob("*.json"))) == 2
    for client in (calm.folder / "clients").iterdir():
        assert len(list(client.iterdir())) <= 2
        assert all(path.stat().st_mode & 0o077 == 0 for path in client.iterdir())


def test_a_log_that_lost_lines_is_noticed(stopped: Path) -> None:
    (stopped / "ledger.jsonl").write_text("")
    with pytest.raises(StoreError, match=r"ledger.jsonl is shorter"):
        resume(stopped)


def test_another_recipe_does_not_continue_a_run(stopped: Path) -> None:
    with pytest.raises(ConfigError, match="holds another run"):
        run(RECIPE.changed(seed=5), out=stopped)
    with pytest.raises(ConfigError, match=r"seed=.*9.*only engine.\* .* may change"):
        resume(stopped, "seed=9")


def test_another_number_of_workers_does_continue_it(stopped: Path, calm: Result) -> None:
    resume(stopped, "engine.workers=1")
    same(stopped, calm)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"is not empty \(thesis.txt\)"):
        run(RECIPE, out=tmp_path)
    with pytest.raises(StoreError, match="holds no run"):
        resume(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def as_earlier(folder: Path, **changes: Any) -> None:
    """Make a run one of a version that kept no digests of files."""
    about = {**RunFolder(folder).about(), **changes}
    (folder / "about.json").write_text(json.dumps({k: v for k, v in about.items() if k != "files"}))


def test_changed_data_are_noticed(tmp_path: Path, stopped: Path) -> None:
    as_earlier(stopped)
    tree = yaml.safe_load((stopped / "recipe.yaml").read_text())
    tree["data"]["seed"] = 9
    (stopped / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(HarmoniumError, match="images of .* changed"):
        resume(stopped)


def without(tree: dict[str, Any], *keys: str) -> None:
    for section, _, name in (key.partition(".") for key in keys):
        del tree[section][name]


@pytest.mark.parametrize("way", ["resume", "run", "further"])
def test_a_run_of_an_earlier_version_is_not_continued_with_new_defaults(
    stopped: Path, calm: Result, way: str
) -> None:
    folder = stopped if way != "further" else shutil.copytree(calm.folder, stopped.parent / "old")
    tree = yaml.safe_load((folder / "recipe.yaml").read_text())
    without(tree, "local.joint_views", "local.drop_last")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    as_earlier(folder, recipe="0" * 64)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=r"earlier version.* local\.drop_last, local\.joint_views"):
        if way == "run":
            run(RECIPE, out=folder)
        else:
            resume(folder, **({"rounds": 6} if way == "further" else {}))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    if way == "further":  # what it came to can still be seen
        assert resume(folder).figures == calm.figures


def test_an_edited_recipe_is_noticed(stopped: Path) -> None:
    tree = yaml.safe_load((stopped / "recipe.yaml").read_text())
    tree["local"]["lr"] = 0.5
    (stopped / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(StoreError, match=r"recipe\.yaml is damaged"):
        resume(stopped)
    as_earlier(stopped)
    with pytest.raises(StoreError, match=r"recipe\.yaml is not the recipe"):
        resume(stopped)


def test_two_processes_do_not_run_one_folder(stopped: Path) -> None:
    import filelock

    with filelock.FileLock(stopped / ".lock"), pytest.raises(StoreError, match="another process"):
        resume(stopped)


def test_a_run_that_diverges_stops_with_the_reason_and_can_be_looked_at(tmp_path: Path) -> None:
    wild = RECIPE.changed(method="fedavg", local={"lr": 1e30, "batch": 6})
    with pytest.raises(Diverged, match=r"round 1, `train`.* 4 clients .*finite.*local\.lr"):
        run(wild, out=tmp_path / "run")
    rows = RunFolder(tmp_path / "run").read_log("metrics.jsonl")
    assert [row["round"] for row in rows] == [0]


def test_a_disk_that_fills_up_loses_nothing(
    tmp_path: Path, calm: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, 0

    def sometimes(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sometimes)
    with pytest.raises(StoreError, match="No space left"):
        run(RECIPE, out=tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    same(tmp_path / "run", calm)


def test_the_api_reads_like_the_command_line(tmp_path: Path, calm: Result) -> None:
    shutil.copy(calm.folder / "recipe.yaml", tmp_path / "mine.yaml")
    again = harmonium.run(str(tmp_path / "mine.yaml"), "engine.workers=0", out=tmp_path / "run")
    assert again.figures == calm.figures
    assert json.loads((tmp_path / "run" / "result.json").read_text())["figures"] == again.figures


@pytest.fixture
def archive(tmp_path: Path) -> tuple[Path, Recipe]:
    """A recipe on an archive of one's own, and where that lies."""
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.integers(0, 256, (60, 12, 12), np.uint8), y=np.arange(60) % 3)
    recipe = RECIPE.changed(method="fedavg", data={"name": "npz", "path": str(path)}, rounds=2)
    return path, recipe


def begun(folder: Path, recipe: Recipe) -> Path:
    """A run that was stopped after its first round."""
    with pytest.raises(CallbackError, match="Stop"):
        run(recipe, out=folder, callbacks=StopAfter(1))
    return folder


@pytest.mark.parametrize("change", ["gone", "another"])
def test_a_run_goes_on_with_the_images_it_began_with(archive, tmp_path, home, change) -> None:
    """They are decoded: what becomes of the source does not matter, in workers either."""
    path, recipe = archive
    calm = run(recipe, out=tmp_path / "calm")
    folder = begun(tmp_path / "run", recipe)
    path.unlink()
    if change == "another":
        np.savez(path, x=np.zeros((60, 12, 12), np.uint8), y=np.arange(60) % 3)
    resume(folder, "engine.workers=1")
    assert (folder / "encoder.safetensors").read_bytes() == (
        calm.folder / "encoder.safetensors"
    ).read_bytes()


def test_other_images_in_the_place_of_lost_ones_are_noticed(archive, tmp_path, home) -> None:
    path, recipe = archive
    folder = begun(tmp_path / "run", recipe)
    shutil.rmtree(home / "cache")
    np.savez(path, x=np.zeros((60, 12, 12), np.uint8), y=np.arange(60) % 3)
    with pytest.raises(DataError, match="images of .* changed"):
        resume(folder)


@pytest.mark.parametrize("clients", [RECIPE.clients, RECIPE.clients + 1])
def test_another_split_in_a_runs_folder_is_noticed(stopped: Path, clients: int) -> None:
    recipe = RECIPE.changed(clients=clients, seed=7)
    data = recipe.data.load()
    make_split(recipe.split, data, None, clients, 7).save(stopped / "split.npz")
    with pytest.raises(StoreError, match=r"split\.npz is damaged"):
        resume(stopped)
    as_earlier(stopped)
    with pytest.raises(DataError, match="shares .* changed"):
        resume(stopped)


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_what_a_run_began_with_must_be_known(stopped: Path, content: str | None) -> None:
    (stopped / "about.json").unlink()
    if content is not None:
        (stopped / "about.json").write_text(content)
    with pytest.raises(StoreError, match="about.json (is missing|cannot be read).* start a"):
        resume(stopped)


def test_runs_on_different_images_are_not_compared(archive, tmp_path, home) -> None:
    path, recipe = archive
    (tmp_path / "mine.yaml").write_text(recipe.changed(method="fedavg", rounds=1).yaml())
    mine, out = str(tmp_path / "mine.yaml"), tmp_path / "compared"
    compare(mine, out=out)
    shutil.rmtree(tmp_path / "compared" / "mine")
    np.savez(path, x=np.full((60, 12, 12), 9, np.uint8), y=np.arange(60) % 5)
    with pytest.raises(DataError, match="alone and mine .*images"):
        compare(mine, out=out)
