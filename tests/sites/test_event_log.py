"""The log of a server or client: one line an event, in UTC, and no names of images above debug."""

import json
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sites.test_site import Bench

from harmonium.cli.main import main
from harmonium.core.errors import ConfigError, DataError, UnknownSetting
from harmonium.core.notes import Level, Note
from harmonium.federation.driver import Reply
from harmonium.sites.client import SiteImages
from harmonium.sites.event_log import LEVELS, EventLog, LogWatcher
from harmonium.sites.folder import init
from harmonium.sites.settings import KEYS, LogSettings, SiteSettings

LINE = re.compile(r"(\S+) (error|warning|info|debug) north: (.+)")
SECRET = "doe-jane-19610704"


def log_of(folder: Path, **settings: Any) -> EventLog:
    return EventLog(LogSettings(file="log.txt", **settings), folder, "north")


def lines(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_line_an_event_at_its_level_and_above(level: Level, tmp_path: Path) -> None:
    log = log_of(tmp_path, level=level)
    for one in LEVELS:
        log.write(one, "event", f"it is\nan {one}\x1b[2J")
    log.close()
    found = [LINE.fullmatch(line) for line in lines(tmp_path)]
    assert all(found)
    assert [match[2] for match in found if match] == list(LEVELS)[: 1 + list(LEVELS).index(level)]
    for match in found:
        assert match is not None
        assert datetime.fromisoformat(match[1]).utcoffset() == timedelta(0) and match[1][-1] == "Z"
        assert match[3] == f"it is an {match[2]}?[2J"


def test_json_has_the_facts_as_keys(tmp_path: Path) -> None:
    log = log_of(tmp_path, json=True)
    watcher = LogWatcher(log)
    watcher.names = {0: "south"}
    watcher.round({"round": 2, "loss": 0.5, "answered": 3, "missing": 0, **ways()}, 1.25)
    watcher.task(Reply(0, None, "its node is gone"))
    watcher.task(Reply(0, None, "its node is gone"))  # once for each reason
    log.close()
    first, second = map(json.loads, lines(tmp_path))
    assert (first["level"], first["event"], first["round"]) == ("info", "round", 2)
    assert (first["loss"], first["seconds"], first["who"]) == (0.5, 1.25, "north")
    assert (second["level"], second["site"]) == ("warning", "south")


def ways() -> dict[str, int]:
    return {"bytes_down": 1, "bytes_up": 2}


def test_a_large_file_is_renamed_and_old_ones_are_deleted(tmp_path: Path) -> None:
    log = log_of(tmp_path, megabytes=0.001, files=2)
    for number in range(100):
        log.write("info", "event", f"{number} {'x' * 50}")
    log.close()
    names = sorted(path.name for path in tmp_path.glob("log.txt*"))
    assert names == ["log.txt", "log.txt.1", "log.txt.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.glob("log.txt*"))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """A folder with images of which some are broken, odd or of an unknown kind."""
    from PIL import Image

    folder = tmp_path / "scans"
    folder.mkdir()
    for number in range(6):
        pixels = np.full((8, 8), 20 * number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    Image.new("RGB", (8, 8), 9).save(folder / f"colour-{SECRET}.png")
    (folder / f"broken-{SECRET}.png").write_bytes(b"no image")
    (folder / f"{SECRET}.xyz").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("level", ["warning", "info", "debug"])
def test_names_of_images_are_logged_at_debug_only(
    level: Level, scans: Path, tmp_path: Path
) -> None:
    log = log_of(tmp_path, level=level)
    found = SiteImages.parse(f"folder:{scans}").inspect(log.note)
    log.close()
    text = "\n".join(lines(tmp_path))
    assert found == (7, 1)
    assert "1 of 8 images cannot be read" in text
    assert (SECRET in text) == (level == "debug")
    assert (str(scans) in text) <= (level == "debug")


@pytest.mark.parametrize("level", ["info", "debug"])
@pytest.mark.parametrize("wrong", ["in it", "missing", "bare", "bare and missing", "unknown"])
def test_a_command_that_fails_is_one_line_and_names_only_what_was_typed(
    wrong: str,
    level: Level,
    scans: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = init(tmp_path / "federation", ["north"], ["localhost"]).kit("north")
    (scans / "sub").mkdir(exist_ok=True)
    (scans / "sub" / f"{SECRET}.png").write_bytes((scans / "0.png").read_bytes())
    typed = {
        "in it": f"folder:{scans}",
        "missing": f"folder:{scans}/away",
        "bare": str(scans),
        "bare and missing": f"{scans}/away",
        "unknown": "folders:x",
    }[wrong]
    words = ["--kit", str(kit), "--data", typed, "--log-level", level]
    monkeypatch.setattr(sys, "argv", ["harmonium", "client", "start", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    if wrong == "in it":
        assert " error north: " in line and (str(scans) in line) == (level == "debug")
    else:
        assert typed.partition(":")[0] in line and SECRET not in line


def test_a_fault_of_the_sites_own_files_is_not_named_above_debug(tmp_path: Path) -> None:
    def fail(*_: Any) -> Any:
        raise DataError(f"/data/{SECRET}.png cannot be read")

    for level in ("info", "debug"):
        folder = tmp_path / level
        folder.mkdir()
        log = log_of(folder, level=level)
        bench = Bench(folder / "kept", open_host=fail)
        bench.site.note = log.note
        assert SECRET not in bench.refusal()
        log.close()
        text = "\n".join(lines(folder))
        assert "warning north: refused: " in text and (SECRET in text) == (level == "debug")


def test_a_bug_is_one_line_and_its_traceback_is_debug(tmp_path: Path) -> None:
    for level, count in (("info", 1), ("debug", 2)):
        folder = tmp_path / level
        folder.mkdir()
        log = log_of(folder, level=level)
        bench = Bench(folder / "kept")
        bench.site.note = log.note
        bench.refusal(down={**model_of(bench), "fault": 2})
        log.close()
        assert len(lines(folder)) == count
        assert all(LINE.fullmatch(line) for line in lines(folder))


def model_of(bench: Bench) -> dict[str, Any]:
    return {"model": bench.recipe.method_for((12, 12, 3), 0).blueprint.shared()}


def test_what_leaves_is_logged_by_size_alone(tmp_path: Path) -> None:
    log = log_of(tmp_path, level="debug")
    bench = Bench(tmp_path / "kept")
    bench.site.note = log.note
    bench.say()
    log.close()
    (line,) = lines(tmp_path)
    assert re.search(r"info north: round 1, train: sent [\d.]+ k?B$", line)


def test_a_note_is_a_text_with_a_level() -> None:
    note = Note("all of it", "warning", "some")
    assert note == "all of it" and f"{note}!" == "all of it!"
    assert (note.level, note.brief, Note("x").level) == ("warning", "some", "info")


# ---- settings ------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment" / "settings.yaml"


def test_the_example_has_every_setting_with_its_default(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(EXAMPLE.read_bytes())
    assert SiteSettings.read(tmp_path, limited=True) == SiteSettings()
    text = EXAMPLE.read_text()
    for key in KEYS:
        assert re.search(rf"^  {key.partition('.')[2]}: ", text, re.MULTILINE), key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("log:\n  levle: info\n", "log.level"),
        ("log:\n  level: loud\n", "log.level"),
        ("log:\n  files: 0\n", "log.files"),
        ("metrics:\n  port: 0\n", "metrics.port"),
        ("metrics:\n  address: everywhere\n", "metrics.address"),
        ("limits:\n  seconds: 0\n", "limits.seconds"),
        ("limits:\n  memory: -1\n", "limits.memory"),
        ("limits: 5\n", "limits"),
        ("limit:\n  memory: 1\n", "limits"),
        ("[]\n", "settings"),
        ("log: {\n", "settings.yaml"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        SiteSettings.read(tmp_path, limited=True)
    assert "\n" not in str(caught.value)


def test_a_server_has_no_limits(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("limits:\n  memory: 1\n")
    with pytest.raises(UnknownSetting, match="limits"):
        SiteSettings.read(tmp_path, limited=False)
    (tmp_path / "settings.yaml").write_text("metrics:\n")
    assert SiteSettings.read(tmp_path, limited=False) == SiteSettings()
