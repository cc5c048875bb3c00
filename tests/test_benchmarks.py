"""What benchmarks share, as far as it can be tested without their runs."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import rivals
from stored import arguments, earlier_runs, show


def test_earlier_runs_are_read_and_the_page_is_made_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, path in enumerate(files):
        rows = [{"label": "x", "seed": 2 * number + k} for k in range(2)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parser = arguments("What it is.\n\nMore.", workers=False)
    assert parser.description == "What it is."
    asked = parser.parse_args(["--runs", *map(str, files), "--seeds"])
    assert asked.seeds == [] and not hasattr(asked, "workers")
    assert [one["seed"] for one in earlier_runs(asked)] == [0, 1, 2, 3]
    assert arguments(None, [7]).parse_args([]).seeds == [7]

    made: list[int] = []

    def page(runs: list[int]) -> str:
        made.append(len(runs))
        return "# The page\n\nAll of it.\n"

    show(arguments("").parse_args(["--json"]), page, [1, 2])
    assert not made and capsys.readouterr().out == ""
    place = tmp_path / "docs" / "page.md"
    show(arguments("").parse_args(["--write", str(place)]), page, [1, 2])
    title, commit, *rest = place.read_text().split("\n\n")
    assert title == "# The page" and rest == ["All of it.\n"]
    assert re.fullmatch(r"Figures of commit `[0-9a-f]{7,}(-dirty)?`.", commit)
    assert capsys.readouterr().out == "# The page\n\nAll of it.\n\n"


def test_rivals_count_what_daemons_spend_and_end_them() -> None:
    """A grandchild that outlives its parent stays in the family."""
    daemon = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {daemon!r}])"
    root = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {parent!r}]); "
    with rivals.adopting([sys.executable, "-c", root + "time.sleep(60)"]) as process:
        process.stdout.readline()  # the daemon has worked
        relatives = rivals.Family(process.pid)
        spent, pids = relatives.seconds(), rivals.family(process.pid)
        relatives.end()
    assert len(pids) == 2 and spent > 0.4
    until = time.monotonic() + 20
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < until, "a process outlived its end"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_rivals_are_judged_by_rounds_of_the_same_turn() -> None:
    def figures(cpu: list[float], startup: float = 1.5) -> dict[str, Any]:
        return {
            "rounds_an_hour": 1000.0,
            "cpu_seconds": cpu[0],
            "startup_seconds": startup,
            "startup_cpu_seconds": 1.0,
            "first_round_seconds": 2.0,
            "megabytes": 300.0,
            "each_cpu": cpu,
        }

    contenders = {
        "harmonium": figures([1.0, 10.0]),
        rivals.COMMAND: figures([1.0, 10.0], startup=2.5),
        "flower": figures([5.0, 50.0]),
        "lean loop": figures([0.9, 9.0]),
    }
    result = {"load": [0.5, 0.7], "turns": 2, "contenders": contenders}
    verdicts = {row[""]: row["verdict"] for row in rivals.goals({"tiny": result})}
    assert verdicts["harmonium, tiny: faster than flower"] == "met"
    assert verdicts["harmonium, tiny: not behind the lean loop"] == "MISSED"
    assert verdicts["harmonium, tiny: start-up"] == "met"
    assert verdicts[f"{rivals.COMMAND}, tiny: start-up"] == "MISSED"
    del contenders["flower"]
    about = {"workers": 1, "cores": 2, "python": "3.11", "versions": {"torch": "2"}}
    text = rivals.page(
        {"about": {**about, "missing": {"flower": "how"}}, "settings": {"tiny": result}}
    )
    assert "flower: how" in text and "not measured" in text and "MISSED" in text
