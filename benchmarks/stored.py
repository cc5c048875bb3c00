"""What benchmarks of many runs share: words of the command, runs of before, and the page."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


def arguments(
    doc: str | None, seeds: Sequence[int] = (0, 1, 2), *, workers: bool = True
) -> argparse.ArgumentParser:
    """A parser with the words that all of them know; the first line of `doc` is its help."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(seeds), help="none: no runs")
    if workers:
        parser.add_argument("--workers", type=int, help="worker processes; 0: in this process")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="what --json has printed")
    parser.add_argument("--write", type=Path, help="where the page goes")
    parser.add_argument("--json", action="store_true", help="print runs, a line each, and no page")
    return parser


def studies(
    doc: str | None, names: Collection[str], usual: Sequence[str], seeds: int
) -> argparse.ArgumentParser:
    """The same for those whose runs stay in a folder, where they are found again."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--only", nargs="+", choices=names, default=list(usual))
    parser.add_argument("--workers", type=int, help="worker processes; 0: in this process")
    parser.add_argument("--out", type=Path, help="where the runs stay; else they go")
    parser.add_argument("--write", type=Path, help="where the page goes")
    return parser


def before(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that were printed before."""
    texts = [path.read_text(encoding="utf-8") for path in asked.runs]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def show(asked: argparse.Namespace, page: Callable[[Any], str], runs: Sequence[Any]) -> None:
    """Print the page of the runs, write it, or both; with `--json` alone none is made."""
    if not asked.json:
        print(page(runs))
    if asked.write:
        write_page(asked.write, page(runs))


def write_page(path: Path, text: str) -> None:
    """Write a page that says, below its title, of which commit its figures are."""
    here = Path(__file__).parent
    git = ("git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*")
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    title, _, rest = text.partition("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{title}\n\nFigures of commit `{commit}`.\n{rest}", encoding="utf-8")
