"""A site's log: what is written stays, what was changed is found."""

import hashlib
import json
import math
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harmonium.core.errors import StoreError
from harmonium.privacy.budget import epsilon
from harmonium.report.tables import markdown
from harmonium.sites.log import START, SiteLog, bytes_by_step, last_image_count, table, totals

RELEASE = {
    "field": "corr",
    "mechanism": "gaussian",
    "sensitivity": 0.5,
    "sigma": 2.0,
    "noise": "system",
}


def entry(number: int, outcome: str = "sent", **more: Any) -> dict[str, Any]:
    return {
        "time": "2030-01-01T00:00:00+00:00",
        "run": "run-1",
        "round": number,
        "ask": 0,
        "step": "train",
        "outcome": outcome,
        "why": "",
        "up": {
            "model": {"kind": "weights", "bytes": 2_800_000},
            "loss": {"kind": "scalar", "bytes": 8},
        },
        "down": {"model": 2_800_000},
        "releases": [],
        "seconds": 1.5,
        **more,
    }


@pytest.fixture
def log(tmp_path: Path) -> SiteLog:
    log = SiteLog(tmp_path / "kit" / "log.jsonl")
    for number in range(20):
        log.append(entry(number, why=f'line {number}: \n, "sha256": "é\''))
    return log


def lines(log: SiteLog) -> list[bytes]:
    return log.path.read_bytes().splitlines(keepends=True)


def test_what_was_appended_is_read_back(log: SiteLog) -> None:
    again = SiteLog(log.path)
    again.verify()
    assert [one["round"] for one in again.entries()] == list(range(20))
    assert again.entries()[3] == entry(3, why='line 3: \n, "sha256": "é\'')
    assert again.head() == log.head() == SiteLog(log.path).head()
    assert again.head().number == 20
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    log = SiteLog(tmp_path / "log.jsonl")
    log.verify()
    assert (log.entries(), log.releases(), log.head()) == ([], [], START)
    assert list(tmp_path.iterdir()) == []


def changed(line: bytes, rng: random.Random) -> bytes:
    """One byte of a line, but not its end, flipped, removed or added."""
    place = rng.randrange(len(line) - 1)
    other = bytes([rng.choice([b for b in range(32, 127) if b != line[place]])])
    return rng.choice(
        [
            line[:place] + other + line[place + 1 :],
            line[:place] + line[place + 1 :],
            line[:place] + other + line[place:],
        ]
    )


def test_a_thousand_changes_are_found_and_named(log: SiteLog) -> None:
    whole, rng = lines(log), random.Random(5)
    for _ in range(1_000):
        some, place = list(whole), rng.randrange(len(whole))
        what = rng.choice(["edit", "edit", "delete", "swap", "move", "repeat", "forge"])
        first = place
        if what == "edit":
            some[place] = changed(some[place], rng)
        elif what == "delete":
            place = first = rng.randrange(len(whole) - 1)  # of the last, only a head can tell
            del some[place]
        elif what == "swap":
            other = rng.choice([k for k in range(len(whole)) if k != place])
            some[place], some[other] = some[other], some[place]
            first = min(place, other)
        elif what == "move":
            other = rng.choice([k for k in range(len(whole)) if k != place])
            some.insert(other, some.pop(place))
            first = min(place, other)
        elif what == "repeat":
            some.insert(place, some[place])
            first = place + 1
        else:  # a line that is whole in itself, but not the one that was there
            place = first = rng.randrange(len(whole) - 1)
            forged = SiteLog(log.path.with_name("forged"))
            forged.path.unlink(missing_ok=True)
            forged.path.write_bytes(b"".join(whole[:place]))
            forged.append(entry(place, outcome="refused"))
            some[place] = lines(forged)[place]
            first = place + 1  # the line itself is whole; the next one does not follow from it
        log.path.write_bytes(b"".join(some))
        with pytest.raises(StoreError, match=rf"line {first + 1} breaks the chain") as error:
            SiteLog(log.path).verify()
        assert "\n" not in str(error.value)
    for read in (SiteLog.entries, SiteLog.releases, SiteLog.head):
        with pytest.raises(StoreError, match="breaks the chain"):
            read(SiteLog(log.path))
    with pytest.raises(StoreError, match="breaks the chain"):
        SiteLog(log.path).append(entry(20))


def test_a_remembered_head_guards_the_end_and_a_rewritten_log(log: SiteLog) -> None:
    head, whole = log.head(), lines(log)
    log.append(entry(20))
    log.verify(head)
    log.path.write_bytes(b"".join(whole[:-1]))
    SiteLog(log.path).verify()
    with pytest.raises(StoreError, match="it had 20 lines and has 19"):
        SiteLog(log.path).verify(head)
    log.path.unlink()
    anew = SiteLog(log.path)
    for number in range(25):
        anew.append(entry(number, outcome="refused"))
    anew.verify()
    with pytest.raises(StoreError, match="line 20 differs"):
        anew.verify(head)


@pytest.mark.parametrize("left", [1, 40, -1])
def test_an_unfinished_line_is_cut_off_with_a_note(log: SiteLog, left: int) -> None:
    """A kill can stop a line after any byte, its newline included."""
    *whole, last = lines(log)
    log.path.write_bytes(b"".join(whole) + last[:left])
    again = SiteLog(log.path)
    again.verify()
    assert len(again.entries()) == again.head().number == 19
    again.append(entry(99))
    again.verify()
    *_, note, newest = SiteLog(log.path).entries()
    assert newest == entry(99)
    assert note["outcome"] == "noted"
    assert note["why"] == f"{len(last[:left])} bytes of an unfinished line were cut off"


def test_a_process_that_is_killed_leaves_a_whole_log(tmp_path: Path) -> None:
    """What was reported as appended is there."""
    path = tmp_path / "log.jsonl"
    script = (
        "import sys; from pathlib import Path; from harmonium.sites.log import SiteLog\n"
        "log = SiteLog(Path(sys.argv[1]))\n"
        "for k in range(10**6): log.append({'round': k}); print(k, flush=True)"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "30\n":
                process.kill()
                break
    log = SiteLog(path)
    log.append({"round": "next"})
    log.verify()
    rounds = [one["round"] for one in log.entries() if "round" in one]
    assert rounds[:31] == list(range(31))
    assert rounds[-1] == "next"


def test_two_writers_share_one_chain(log: SiteLog) -> None:
    other = SiteLog(log.path)
    for number in range(5):
        other.append(entry(number, releases=[RELEASE]))
        log.append(entry(number))
    log.verify()
    assert len(log.entries()) == 30
    assert log.releases() == [RELEASE] * 5


def test_a_log_that_shrinks_under_its_writer_is_refused(log: SiteLog) -> None:
    log.path.write_bytes(b"".join(lines(log)[:-1]))
    with pytest.raises(StoreError, match="became shorter"):
        log.append(entry(20))
    log.path.unlink()
    with pytest.raises(StoreError, match="became shorter"):
        log.releases()


def test_releases_count_once_and_from_their_line_on(log: SiteLog) -> None:
    other = {**RELEASE, "sigma": 1.0}
    log.append(entry(20, releases=[RELEASE, other]))
    log.append(entry(20, "stored answer sent again", releases=[RELEASE, other]))
    log.append(entry(21, "refused", releases=[RELEASE]))
    assert log.releases() == SiteLog(log.path).releases() == [RELEASE, other]
    log.releases().clear()
    assert len(log.releases()) == 2


@pytest.mark.parametrize("odd", [{"before": "x"}, {"what": {1, 2}}, {"sigma": math.nan}])
def test_what_cannot_be_recorded_is_refused_and_leaves_no_trace(
    log: SiteLog, odd: dict[str, Any]
) -> None:
    before = log.path.read_bytes()
    with pytest.raises(StoreError, match="an entry of"):
        log.append(odd)
    assert log.path.read_bytes() == before
    log.append(entry(20))
    log.verify()


@pytest.mark.skipif(os.name != "posix", reason="a folder in the place of the file")
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        SiteLog(tmp_path / "file" / "log.jsonl").append(entry(0))
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot read"):
        SiteLog(tmp_path / "log.jsonl").append(entry(0))


def test_the_table_says_what_left(log: SiteLog) -> None:
    some = [
        entry(1, releases=[RELEASE]),
        entry(1, "stored answer sent again", releases=[RELEASE]),
        entry(2, "refused", why="epsilon is spent"),
        {"time": "2030", "outcome": "noted", "why": "a note"},
    ]
    rows = table(some)
    assert rows[0] == {
        "time": "2030-01-01T00:00:00+00:00",
        "run": "run-1",
        "round": 1,
        "step": "train",
        "what left": "model (weights, 2.8 MB), loss (scalar, 8 B)",
        "outcome": "sent",
    }
    assert rows[1]["what left"] == rows[0]["what left"]
    assert (rows[2]["what left"], rows[2]["outcome"]) == ("nothing", "refused: epsilon is spent")
    assert "noted: a note" in markdown(rows)
    assert totals(some, 1e-5) == {
        "answers": 1,
        "bytes": {"weights": 5_600_000, "scalar": 16},
        "again": 2_800_008,
        "measuring": 0,
        "releases": 1,
        "epsilon": epsilon([RELEASE], 1e-5),
        "delta": 1e-5,
    }
    assert totals([], 1e-5)["epsilon"] == 0


def test_bytes_that_a_server_counts_apart_are_told_apart() -> None:
    some = [entry(1), {**entry(0), "step": "calibrate"}, {**entry(2), "run": "another"}]
    assert totals(some, 1e-5)["measuring"] == 2_800_008
    assert bytes_by_step(some, "run-1") == {
        "train": {"weights": 2_800_000, "scalar": 8},
        "calibrate": {"weights": 2_800_000, "scalar": 8},
    }
    told = [{"told": {"examples": 5}}, entry(1), {"told": {"examples": 7}}]
    assert last_image_count(told) == 7 and last_image_count(some) is None


def chained(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The format once more, from its description."""
    before = "0" * 64
    for number, one in enumerate(entries, 1):
        content = json.dumps({"number": number, "before": before, **one})[:-1]
        before = hashlib.sha256(content.encode()).hexdigest()
        yield f'{content}, "sha256": "{before}"}}\n'


def test_ten_thousand_lines_are_verified_within_a_second(log: SiteLog) -> None:
    log.path.write_text("".join(chained(entry(number) for number in range(10_000))))
    start = time.process_time()
    SiteLog(log.path).verify()
    assert time.process_time() - start < 1


def test_appending_does_not_read_the_log_again(log: SiteLog) -> None:
    whole = log.path.read_bytes()
    log.path.write_bytes(b"?" * (len(whole) - 1) + b"\n")  # whoever looks, sees it
    log.append(entry(20))
    assert log.head().number == 21
    with pytest.raises(StoreError, match="line 1 breaks the chain"):
        log.verify()


def test_a_line_is_plain_json_with_its_place_in_the_chain(log: SiteLog) -> None:
    first, second = (json.loads(line) for line in lines(log)[:2])
    assert (first["number"], first["before"]) == (1, "0" * 64)
    assert (second["number"], second["before"]) == (2, first["sha256"])


def test_a_greeting_tells_the_number_of_images() -> None:
    rows = table([{"outcome": "greeted", "step": "hello", "told": {"examples": 599}}])
    assert rows[0]["what left"] == "the number of images (599)"
