"""A result that cannot be read: the run is complete but for its verdict."""

import json
from pathlib import Path

import pytest

import harmonium
from harmonium.core.callbacks import Callback

TINY = (
    "data=shapes", "data.count=48", "data.test_count=24", "data.size=10", "encoder.width=4",
    "encoder.out=16", "clients=2", "rounds=1", "local.batch=12", "evaluate.k=5",
    "evaluate.labels_per_class=[]", "engine.workers=0",
)  # fmt: skip


class Noting(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("text", ["", '{"figures": {"knn"'])
def test_a_damaged_result_is_judged_again(
    text: str, tmp_path: Path, home: Path, undrawn: None
) -> None:
    first = harmonium.run("fedavg", *TINY, out=tmp_path / "run")
    held = (tmp_path / "run" / "result.json").read_text()
    (tmp_path / "run" / "result.json").write_text(text)
    watcher = Noting()
    again = harmonium.run("fedavg", *TINY, out=tmp_path / "run", callbacks=watcher)
    assert again.figures == first.figures
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == json.loads(held)
    assert any("result.json is damaged" in note for note in watcher.notes)
