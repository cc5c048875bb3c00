"""Commands called in this process, which is much quicker than a process each."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harmonium.cli.main import main
from harmonium.runs.loop import RunLoop


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test draw no plot of themselves; studies do."""
    monkeypatch.setattr(RunLoop, "_plot", lambda loop: None)


@pytest.fixture
def call(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """A command in a fresh home; gives what it prints and what it says beside."""

    def called(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["harmonium", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        try:
            main()
        except SystemExit as end:
            assert end.code == code
        else:
            assert code == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return called
