"""Callbacks see a run and cannot harm it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.core.callbacks import called, labelled
from harmonium.core.errors import CallbackError, ConfigError

pytestmark = pytest.mark.usefixtures("undrawn", "unprobed")
SMALL: dict[str, Any] = {
    "data.limit": 60,
    "rounds": 2,
    "clients": 2,
    "encoder": {"name": "cnn-small", "width": 4, "out": 8},
    "evaluate": {"k": 2, "health": 16, "labels_per_class": []},
    "engine": {"workers": 0},
}


class Seeing(harmonium.Callback):
    def __init__(self, fail: str = "", at: int = 1) -> None:
        self.events: list[str] = []
        self.fail, self.at = fail, at

    def _see(self, event: str, place: int = 1) -> None:
        self.events.append(event)
        if event == self.fail and place == self.at:
            raise ZeroDivisionError("a slip of mine")

    def begin(self, recipe: Any, folder: Path, done: int, cohort: int) -> None:
        self._see("begin")

    def task(self, reply: Any) -> None:
        self._see("task")

    def round(self, row: Mapping[str, Any], seconds: float) -> None:
        self._see("round", row["round"])

    def end(self, result: Any) -> None:
        self._see("end")

    def close(self) -> None:
        self._see("close")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    return harmonium.run("fedavg", out=tmp_path_factory.mktemp("calm") / "run", **SMALL).folder


def test_all_of_them_see_everything_in_order(tmp_path: Path) -> None:
    seen = [Seeing(), Seeing()]
    harmonium.run("fedavg", out=tmp_path / "run", callbacks=seen, **SMALL)
    rounds = ["task", "task", "round"] * 2
    assert seen[0].events == seen[1].events == ["begin", *rounds, "end", "close"]


@pytest.mark.parametrize("where", ["begin", "task", "round", "end"])
def test_a_fault_ends_the_run_and_leaves_it_whole(where: str, calm: Path, tmp_path: Path) -> None:
    """A run that a callback has stopped goes on to the same bits."""
    folder, seeing = tmp_path / "run", Seeing(where)
    with pytest.raises(CallbackError, match=f"Seeing.{where}.*a slip of mine") as raised:
        harmonium.run("fedavg", out=folder, callbacks=seeing, **SMALL)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
    assert seeing.events[-1] == "close"
    harmonium.resume(folder, callbacks=Seeing())
    for name in ("metrics.jsonl", "ledger.jsonl", "result.json", "encoder.safetensors"):
        assert (folder / name).read_bytes() == (calm / name).read_bytes(), name


@pytest.mark.parametrize(
    "wrong",
    [Seeing, "progress", [Seeing(), print], lambda label: None],
    ids=["class", "text", "function", "nothing"],
)
def test_what_is_no_callback_is_refused_before_anything_runs(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Callback"):
        harmonium.run("fedavg", out=tmp_path / "run", callbacks=wrong, **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_comparison_calls_them_for_every_run_and_stops_at_a_fault(tmp_path: Path) -> None:
    seeing = Seeing("round")
    with pytest.raises(CallbackError, match=r"Seeing\.round"):
        harmonium.compare("fedavg", "fedprox", out=tmp_path / "a", callbacks=seeing, **SMALL)
    assert seeing.events.count("begin") == 1
    labels: list[str] = []

    def called(label: str) -> harmonium.Callback:
        labels.append(label)
        raise CallbackError("enough")

    with pytest.raises(CallbackError, match="enough"):
        harmonium.compare("fedavg", "fedprox", out=tmp_path / "b", callbacks=called, **SMALL)
    assert len(labels) == 1 and "of" in labels[0]


def test_labels_of_several_runs_say_where_they_belong() -> None:
    labels: list[str] = []

    def called(label: str) -> harmonium.Callback:
        labels.append(label)
        return harmonium.Callback()

    given = labelled(called, "local.lr=1, ")
    assert callable(given) and given("fedavg") and labels == ["local.lr=1, fedavg"]
    one = harmonium.Callback()
    assert labelled(one, "x") is one


def test_progress_is_shown_as_by_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harmonium.run("fedavg", out=tmp_path / "run", callbacks=harmonium.progress, **SMALL)
    said = capsys.readouterr()
    assert "round 2/2" in said.err and str(tmp_path / "run") in said.err and said.out == ""


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("on_round", "round(self, row, seconds)"),
        ("rounds", "round(self, row, seconds)"),
        ("on_round_end", "round(self, row, seconds)"),
        ("on_begin", "begin(self, recipe, folder, done, cohort)"),
        ("beginn", "begin(self, recipe, folder, done, cohort)"),
        ("notes", "note(self, text)"),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest(name: str, hook: str, tmp_path: Path) -> None:
    mine = type("Mine", (harmonium.Callback,), {name: lambda self, *about: None})
    with pytest.raises(ConfigError, match=f"Mine.{name} is never called") as error:
        harmonium.run("fedavg", out=tmp_path / "run", callbacks=mine(), **SMALL)
    assert f"`def {hook}`" in str(error.value) and not (tmp_path / "run").exists()


def test_helpers_are_no_misspelt_hooks() -> None:
    class Helped(harmonium.Callback):
        rounds_seen = 0

        def round(self, row: Mapping[str, Any], seconds: float) -> None: ...

        def rounds(self) -> int:  # beside `round`, so it is no slip
            return self.rounds_seen

        def send(self) -> None: ...

        def save_figures(self) -> None: ...

        def on_disk(self) -> None: ...

        def _rounds(self) -> None: ...

    with called(Helped()) as callback:
        callback.close()
