"""What benchmarks share, as far as it can be tested without their runs."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

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
