"""What a study would do, without doing it."""

import json
import sys
from pathlib import Path

import pytest

from harmonium.cli.main import main
from harmonium.core.errors import ConfigError
from harmonium.evaluation.evaluator import Evaluator
from harmonium.studies.tuning import forecast
from harmonium.studies.tuning.forecast import forecast_study
from harmonium.studies.tuning.study import tune

pytestmark = pytest.mark.usefixtures("all_unrendered")

SMALL = ["data=shapes", "data.count=40", "data.test_count=4", "data.size=10", "clients=2"]
SMALL += ["encoder.width=4", "local.batch=8", "local.epochs=1", "engine.workers=0"]
GRID = [*SMALL, "rounds=4", "evaluate.every=1", "grid.local.lr=0.1,0.01,-1"]


@pytest.fixture(autouse=True)
def _no_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """No study uses test images, not even to measure how long that takes."""

    def refused(evaluator: Evaluator, *given: object) -> None:
        raise AssertionError("test images were used")

    monkeypatch.setattr(Evaluator, "test", refused)


def test_it_lists_settings_and_what_they_take(home: Path) -> None:
    found = forecast_study("fedavg", GRID, check=(2,))
    first, second, refused = found.settings
    assert [dict(one.setting) for one in (first, second, refused)] == [
        {"local.lr": "0.1"}, {"local.lr": "0.01"}, {"local.lr": "-1"},
    ]  # fmt: skip
    assert refused.run is None and "lr" in refused.why
    assert first.run and second.run and first.run.rounds == 4
    assert found.checks == (2,) and found.share == (4 + 2) / 8
    most = found.most
    assert most.seconds and most.seconds > 0 and most.sent
    assert min(most.sent.values()) > 4 * 2 * 2 * 1000  # models of 4 rounds, 2 clients, 2 settings
    lines = found.lines()
    assert lines[0] == "3 settings: 2 runs of 4 rounds on shapes; 1 refused"
    assert lines[1:3] == ["setting  local.lr=0.1", "setting  local.lr=0.01"]
    assert lines[3] == f"refused  local.lr=-1: {refused.why}"
    assert lines[4] == "checks   after round 2, at least 50 % of the settings go on"
    assert lines[5].startswith("time     about 0:0") and "if none does; by a few" in lines[5]
    assert lines[6].startswith("bytes    about ") and "if settings stop" in lines[6]
    everything = forecast_study("fedavg", GRID, keep_all=True)
    assert everything.checks == () and everything.share == 1.0
    assert not any("if none does" in line for line in everything.lines())


def test_a_study_that_was_stopped_is_estimated_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmonium.studies.tuning.study.plot_study", lambda *given: False)
    out = tmp_path / "study"
    tune("fedavg", *GRID, out=out, check=(2,), keep=0.5, margin=0.0)
    held = sorted(path for path in out.rglob("*") if path.is_file())
    found = forecast_study("fedavg", GRID, out, check=(2,))
    done = {one.run.done: one.run.complete for one in found.settings if one.run}
    assert done == {4: True, 2: False}
    assert found.share == 0.0  # nothing is left if settings stop
    assert any("2 of 4 rounds done" in line for line in found.lines())
    assert sorted(path for path in out.rglob("*") if path.is_file()) == held
    with pytest.raises(ConfigError, match="holds another study"):
        forecast_study("fedavg", [*GRID, "seed=1"], out)


def test_a_setting_that_cannot_be_measured_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "a run would be refused: no"
    monkeypatch.setattr(forecast, "estimated", lambda recipe, *, verdict: told)
    found = forecast_study("fedavg", GRID)
    assert found.most.seconds is None and found.most.sent is None
    assert f"setting  local.lr=0.1: time not known: {told}" in found.lines()


def test_the_command_writes_nothing_and_has_it_as_json(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for more in ([], ["--json"]):
        words = ["harmonium", "tune", "fedavg", *GRID, "--check", "2", "--dry-run", *more]
        monkeypatch.setattr(sys, "argv", words)
        main()
        shown = capsys.readouterr().out
        if not more:
            assert "3 settings: 2 runs" in shown and "runs     a new folder" in shown
    told = json.loads(shown)
    assert told["runs"] == 2 and told["seconds"] > 0 and told["sent"]["up"] > 0
    assert told["least"] == 0.75 and told["checks"] == [2]
    assert [bool(one["why"]) for one in told["settings"]] == [False, False, True]
    assert not (home / "tune").exists()
