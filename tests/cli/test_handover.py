"""`harmonium export` and `harmonium verify` as commands."""

import json
import sys
from pathlib import Path

import pytest

from harmonium.cli import main
from harmonium.cli.handover import _whitened
from harmonium.core.errors import ConfigError
from harmonium.handover import export as exporting


def test_whiten_is_all_or_a_number() -> None:
    assert [_whitened(text) for text in (None, "all", "8")] == [False, True, 8]
    for wrong in ("0", "-1", "some"):
        with pytest.raises(ConfigError, match="--whiten"):
            _whitened(wrong)


def test_export_and_verify_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", ["harmonium", *words])
        monkeypatch.setattr("sys.path", list(sys.path))
        try:
            main.main()
            seen = 0
        except SystemExit as ended:
            seen = int(ended.code or 0)
        assert seen == code
        shown = capsys.readouterr()
        return shown.out, shown.err

    monkeypatch.setattr("harmonium.runs.loop.RunLoop._plot", lambda loop: None)
    monkeypatch.setattr(exporting, "_programs", lambda *_: ({}, {"encoder.onnx": "no time"}))
    run, bundle = str(tmp_path / "run"), str(tmp_path / "bundle")
    small = ["data.limit=60", "clients=2", "rounds=1", "encoder.width=4", "engine.workers=0"]
    command("run", "fedavg", *small, "evaluate.labels_per_class=[]", "--out", run)
    said, _ = command("export", run, "--out", bundle)
    assert "not signed" in said and "without  encoder.onnx: no time" in said
    told = json.loads(command("export", run, "--out", f"{bundle}-2", "--json")[0])
    assert told["left_out"] == {"encoder.onnx": "no time"} and not told["signed_by"]
    said, _ = command("verify", bundle)
    assert [line.split()[0] for line in said.splitlines()] == [
        "digests", "signature", "safetensors", "encoder.onnx"
    ]  # fmt: skip
    (tmp_path / "bundle" / "MODEL_CARD.md").write_text("")
    said, told = command("verify", bundle, code=2)
    assert "digests      WRONG: MODEL_CARD.md" in said and len(told.splitlines()) == 1
    _, told = command("export", run, "--out", bundle, code=2)
    assert "not empty" in told
