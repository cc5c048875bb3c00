"""Finished studies as pages of the documentation."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harmonium.cli.main import app
from harmonium.core.errors import ConfigError
from harmonium.studies.evidence.published import evidence_page, publish
from harmonium.studies.evidence.study_file import read_study

ROOT = Path(__file__).parents[3]
TEXT = """\
claim: Labels help.
regime: data=shapes clients=2 rounds=1
arms: {FedAvg: fedavg}
seeds: {deciding: [4]}
"""


def finished(folder: Path, **changes: Any) -> str:
    """A study with results that nothing has run; returns its file."""
    folder.mkdir()
    path = folder / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    line = {"better": "FedSC", "than": "FedAvg", "by": "linear"}
    decision = {"line": line, "condition": "", "verdict": "holds", "text": "FedSC leads", "why": ""}
    plain = {
        "study": "mine", "title": "Mine", "system": "FedSC", "claim": "Labels help.", "paper": "",
        "commits": ["1234567"], "regime": "shapes, 2 clients", "verdict": "holds",
        "digest": read_study(str(path)).digest, "folder": str(folder),
        "headroom": {"": [{"what": "x", "value": "1", "met": True}]},
        "decisions": [{**decision, "mean": 2.5, "low": 1.0, "high": 4.0, "p": 0.01}],
        "failed": [{"path": "cells/a", "why": f"{folder}/cells/a holds another run"}],
        "plots": [str(folder / "knn.png")],
    } | changes  # fmt: skip
    (folder / "study.json").write_text(json.dumps(plain))
    (folder / "study.md").write_text(f"# Mine\n\n![knn](knn.png)\n`study.json`, {folder}/cells\n")
    (folder / "knn.png").write_bytes(b"plot")
    return str(path)


def test_a_published_study_has_its_links_and_no_path_of_the_machine(tmp_path: Path) -> None:
    what, into = finished(tmp_path / "study"), tmp_path / "docs"
    arguments = ["study", what, "--out", str(tmp_path / "study"), "--publish", str(into)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert {path.name for path in into.iterdir()} == {"mine.md", "mine.json", "mine-knn.png"}
    page, figures = (into / "mine.md").read_text(), json.loads((into / "mine.json").read_text())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert sorted(links) == ["mine-knn.png", "mine.json"]
    assert figures["plots"] == ["mine-knn.png"] and figures["failed"][0]["why"].startswith("a ")
    assert not any(str(tmp_path) in path.read_text() for path in into.iterdir())


@pytest.mark.parametrize(
    ("changes", "names"), [({"verdict": "not finished"}, "not finished"), ({"digest": "1"}, "file")]
)
def test_only_a_finished_study_is_published(
    tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    what = finished(tmp_path / "study", **changes)
    with pytest.raises(ConfigError, match=f"mine.*{names}"):
        publish(what, tmp_path / "docs", out=tmp_path / "study")
    with pytest.raises(ConfigError, match="mine"):
        publish(what, tmp_path / "docs", out=tmp_path / "elsewhere")
    assert not (tmp_path / "docs").exists()


def test_publishing_again_replaces_plots_of_this_study_only(tmp_path: Path) -> None:
    what, into = finished(tmp_path / "study"), tmp_path / "docs"
    publish(what, into, out=tmp_path / "study")
    (into / "mine-too-knn.png").write_bytes(b"of a study that is called mine-too")
    plain = json.loads((tmp_path / "study" / "study.json").read_text())
    (tmp_path / "study" / "study.json").write_text(json.dumps({**plain, "plots": []}))
    publish(what, into, out=tmp_path / "study")
    assert {path.name for path in into.glob("*.png")} == {"mine-too-knn.png"}


def test_the_table_has_every_published_study(tmp_path: Path) -> None:
    assert evidence_page(tmp_path) == ""
    publish(finished(tmp_path / "study"), tmp_path / "docs", out=tmp_path / "study")
    page = evidence_page(tmp_path / "docs")
    assert page == evidence_page(tmp_path / "docs")
    row = next(line for line in page.splitlines() if "(studies/mine.md)" in line)
    for shown in (
        "Labels help.",
        "shapes, 2 clients",
        "reached",
        "holds",
        "+2.50 [+1.00, +4.00], p = 0.0100",
    ):
        assert shown in row
    assert "\n## FedSC\n" in page and "\nFigures of commit `1234567`" in page


def test_the_page_of_evidence_is_that_of_the_published_studies() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("not a checkout")
    script = runpy.run_path(str(ROOT / "docs" / "evidence_table.py"))
    page = script["PAGE"]
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    assert text == script["made"](), "run `python docs/evidence_table.py`"
