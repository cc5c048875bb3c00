"""Write the table of all published studies, docs/results/evidence.md, from their JSON files.

`harmonium study NAME --publish docs/results/studies` puts a study there; then run
`python docs/evidence_table.py`. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from harmonium.studies.evidence.published import evidence_page

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "evidence.md"


def made() -> str:
    """The page as the published studies give it; empty where there is none."""
    return evidence_page(RESULTS / "studies")


if __name__ == "__main__" and (text := made()):
    PAGE.write_text(text, encoding="utf-8")
