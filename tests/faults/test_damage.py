"""Every file of a run, damaged in every way: noticed by its path, or made again with the same bits.

The files are those that the folder has, so that a new one is tried without a word here.
"""

import errno
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import harmonium
from harmonium.cli.main import main
from harmonium.core import codec
from harmonium.core import files as store
from harmonium.core.callbacks import Callback
from harmonium.core.errors import CallbackError, HarmoniumError, StoreError
from harmonium.evaluation.evaluator import Evaluator
from harmonium.measures.run_reader import open_run
from harmonium.recipe.presets import read_yaml
from harmonium.recipe.schema import Recipe
from harmonium.runs.loop import RunLoop
from harmonium.runs.privacy_report import report
from harmonium.runs.start import changed_recipe, resume, run
from harmonium.storage.run_folder import ASKED, LOGS, RunFolder
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn", "unjudged")

ENDS = ("metrics.jsonl", "ledger.jsonl", "result.json", "encoder.safetensors")


@pytest.fixture(scope="module")
def unjudged() -> Iterator[None]:
    """Without what takes most of the time and is not tried here: probes, parsing, syncing."""
    parsed: dict[str, Recipe] = {}
    parse, read = Recipe.from_tree, cache(read_yaml)

    def known(tree: dict[str, Any]) -> Recipe:
        try:
            name = json.dumps(tree)
        except TypeError:  # settings that are objects
            return parse(tree)
        if name not in parsed:
            parsed[name] = parse(tree)
        return parsed[name]

    def tested(loop: RunLoop, evaluator: Any, encoders: Any, *_: Any) -> dict[str, Any]:
        sums = [float(value.double().sum()) for value in encoders[0].state_dict().values()]
        return {"figures": {"sums": sums}, "untrained": {}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLoop, "_test", tested)
        patch.setattr(Evaluator, "validate", lambda *_: {})
        patch.setattr(
            "harmonium.runs.open_run.Recipe.from_tree", known
        )  # recipes that were read before
        patch.setattr("harmonium.runs.open_run.read_yaml", lambda text, name: read(text, "recipe"))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Stop(Callback):
    """Ends a run after its first round of two."""

    def round(self, row: Any, seconds: float) -> None:
        if row["round"] == 1:
            raise KeyError("enough")


@dataclass
class Made:
    """A run that came to its end and one that did not, and the same of another seed."""

    done: Path
    stopped: Path
    others: dict[str, Path]
    seen: dict[tuple[str, str], Any]  # by state and deed: what an undamaged run gives


def recipe(seed: int) -> Recipe:
    """Clients keep models of their own; weights are given."""
    first = Recipe.from_tree(TINY).any_method().blueprint.copy_from()["encoder"].state_dict()
    torch.manual_seed(seed)
    given = {name: torch.randn_like(value) / 8 for name, value in first.items()}
    return Recipe.of(
        Recipe.from_tree({**TINY, "method": "ditto"}),
        **{"data.count": 16, "data.test_count": 2, "clients": 2, "rounds": 2, "seed": seed},
        **{"evaluate.every": 2, "evaluate.labels_per_class": []},
        **{"engine.workers": 0, "init": given},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, undrawn: None, unjudged: None) -> Made:
    found: dict[str, Path] = {}
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"seed-{seed}")
        run(recipe(seed), out=folder / "done")
        with pytest.raises(CallbackError):
            run(recipe(seed), out=folder / "stopped", callbacks=Stop())
        found |= {f"{state}{seed}": folder / state for state in ("done", "stopped")}
    others = {"done": found["done1"], "stopped": found["stopped1"]}
    one = Made(found["done0"], found["stopped0"], others, {})
    for state in others:
        for name, deed in DEEDS[state].items():
            copy = folder / f"{name} of {state}" / "run"
            one.seen[state, name] = deed(shutil.copytree(getattr(one, state), copy))
    return one


def resumed(folder: Path) -> dict[str, Any]:
    figures = dict(resume(folder).figures)
    last = folder / "commits" / "000002.safetensors"
    return {"figures": figures, last.name: last.read_bytes()} | {
        name: (folder / name).read_bytes() for name in ENDS
    }


def evaluated(folder: Path) -> dict[str, Any]:
    """What `harmonium eval` measures; the round is in its tables."""
    found = open_run(folder, "run", changed_recipe(folder, []))
    (encoder,) = found.final_encoders.values()
    weights = {key: value.tolist() for key, value in encoder.state_dict().items()}
    kept = [store.digest_of(codec.encode(found.state(client))) for client in (0, 1)]
    return {"round": found.commit.round, "weights": weights, "kept": kept}


def loaded(folder: Path) -> dict[str, Any]:
    return {k: v.tolist() for k, v in harmonium.load_encoder(folder).network.state_dict().items()}


def spent(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in vars(report(folder)).items() if key != "folder"}


def started_from(folder: Path) -> str:
    init = Recipe.of("fedavg", init=str(folder)).init
    assert init is not None
    return init.digest


DEEDS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "done": {
        "eval": evaluated,
        "load": loaded,
        "privacy": spent,
        "init": started_from,
        "resume": resumed,
    },
    "stopped": {"eval": evaluated, "privacy": spent, "resume": resumed},
}


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    if not other.exists():  # its name is its digest: another of the same kind
        other = min(other.parent.glob(f"*{other.suffix}"), default=other)
    if other.exists():
        shutil.copy(other, path)


def folder_instead(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "flipped": flip,
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, other: path.write_bytes(b""),
    "deleted": lambda path, other: path.unlink(),
    "a folder": folder_instead,
    "another run's": swap,
}


def files(folder: Path) -> Iterator[Path]:
    return (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", DEEDS)
def test_every_damaged_file_is_named_or_made_again(
    made: Made, tmp_path: Path, state: str, damage: str
) -> None:
    undamaged, wrong = getattr(made, state), list[str]()
    for number, file in enumerate(files(undamaged)):
        place = tmp_path / str(number) / "run"
        shutil.copytree(undamaged, place)
        DAMAGES[damage](place / file, made.others[state] / file)
        for name, deed in DEEDS[state].items():  # the last of them may mend it
            try:
                found = deed(place)
            except HarmoniumError as error:
                told = str(error)
                if str(place / file) not in told or "\n" in told:
                    wrong.append(f"{name}, {file}: {told}")
            except BaseException as error:
                wrong.append(f"{name}, {file}: {type(error).__name__} {error}")
            else:
                usual = made.seen[state, name]
                earlier = state == "stopped" and found.get("round") != usual.get("round")
                if found != usual and not earlier:  # the round is said; resuming plays it again
                    wrong.append(f"{name}, {file}: another result")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def stopped(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.stopped, tmp_path / "run"))


def whole(made: Made) -> dict[str, Any]:
    """What a run that nothing happened to ends with."""
    return dict(made.seen["done", "resume"])


def test_the_commits_of_another_run_are_refused_by_name(made: Made, stopped: Path) -> None:
    shutil.rmtree(stopped / "commits")
    shutil.copytree(made.others["stopped"] / "commits", stopped / "commits")
    ours, theirs = (RunFolder(one).run[:8] for one in (stopped, made.others["stopped"]))
    with pytest.raises(StoreError, match=rf"000001\.json is of run {theirs}, .* of run {ours}: "):
        resume(stopped)


def test_a_command_says_it_in_one_line(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stopped / "recipe.yaml"
    path.write_text(path.read_text().replace("rounds: 2", "rounds: 5"))
    monkeypatch.setattr(sys, "argv", ["harmonium", "resume", str(stopped)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and len(said.splitlines()) == 1
    assert f"{path} is damaged, edited" in said and f"with this one: harmonium run {path}" in said


def test_a_run_of_an_earlier_version_goes_on_with_a_note(made: Made, stopped: Path) -> None:
    """It has no digests of files, and its commits have lengths only."""
    about = json.loads((stopped / "about.json").read_text())
    for key in ("run", "files", "sha256"):
        del about[key]
    (stopped / "about.json").write_text(json.dumps(about))
    for path in (stopped / "commits").glob("*.json"):
        record = json.loads(path.read_text().partition("\n")[2])
        del record["run"], record["logs"], record["sizes"]["asked.jsonl"]
        text = json.dumps(record)
        path.write_text(f"{store.digest_of(text.encode())}\n{text}\n")
    notes: list[str] = []
    watcher = Callback()
    watcher.note = notes.append  # type: ignore[method-assign]
    resume(stopped, callbacks=watcher)
    assert any("earlier version" in note and "digests" in note for note in notes)
    assert resumed(stopped) == whole(made)


def test_the_recipe_of_before_is_refused_in_a_run_that_was_trained_further(
    made: Made, stopped: Path
) -> None:
    before = (stopped / "recipe.yaml").read_bytes()
    resume(stopped, rounds=3)
    (stopped / "recipe.yaml").write_bytes(before)
    with pytest.raises(StoreError, match=r"recipe\.yaml is damaged"):
        resume(stopped)


def test_a_commit_seals_logs_without_reading_them_again(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    folder = RunFolder(tmp_path)
    for number in range(3):
        for log in (*LOGS, ASKED):
            folder.log(log, [json.dumps({"round": number})])
        folder.commit(number, {"model": {}}, {})
        if number == 1:  # what was committed is damaged while the run goes on
            data = (tmp_path / ASKED).read_bytes()
            (tmp_path / ASKED).write_bytes(data.replace(b"0", b"7"))
    with pytest.raises(StoreError, match=r"asked\.jsonl is damaged.*round"):
        folder.newest_readable()
    with pytest.raises(StoreError, match=r"asked\.jsonl is damaged"):
        folder.read_log(ASKED)
    (tmp_path / ASKED).write_bytes(b'{"round": 0}\n{"round": 1}\n{"round": 2}\n{"rou')
    commit, faults = folder.newest_readable()
    assert commit is not None and commit.round == 2 and not faults
    assert len(folder.read_log(ASKED)) == 3


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("nth", [2, 9, 12])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_named_and_loses_nothing(
    made: Made, tmp_path: Path, call: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, call), itertools.count(1)
    folder = tmp_path / "run"

    def sometimes(*given: Any) -> Any:
        return (full if next(calls) == nth else real)(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, sometimes)
        with pytest.raises(StoreError, match=rf"cannot write {folder}.*: No space left on") as told:
            run(recipe(0), out=folder)
    assert "\n" not in str(told.value)
    run(recipe(0), out=folder)
    assert resumed(folder) == whole(made)


@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_cannot_be_written_is_named(
    made: Made, stopped: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line is on the disk already."""
    opened = Path.open

    def half(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
        file = opened(path, mode, *given, **more)
        if path.name == log and mode == "a":
            file.write('{"round": 2, "lo')
            file.flush()
            file.close()
            full()
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", half)
        with pytest.raises(StoreError, match=rf"cannot write {stopped / log}: No space left"):
            resume(stopped)
    assert resumed(stopped) == whole(made)
