"""Shared by benchmarks of many runs: command-line options, earlier runs, and the page."""

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
    """A parser with the options that all of them have; the first line of `doc` is its help."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=list(seeds), help="none: no further runs"
    )
    if workers:
        parser.add_argument("--workers", type=int, help="worker processes; 0: in this process")
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], help="files of lines that --json printed"
    )
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument(
        "--json", action="store_true", help="print one line for each run, and no page"
    )
    return parser


def studies(
    doc: str | None, names: Collection[str], usual: Sequence[str], seeds: int
) -> argparse.ArgumentParser:
    """A parser for benchmarks whose runs stay in a folder and are not repeated."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--only", nargs="+", choices=names, default=list(usual))
    parser.add_argument("--workers", type=int, help="worker processes; 0: in this process")
    parser.add_argument("--out", type=Path, help="keep the runs here; otherwise they are deleted")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    return parser


def earlier_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs that earlier calls printed with --json."""
    texts = [path.read_text(encoding="utf-8") for path in options.runs]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def show(options: argparse.Namespace, page: Callable[[Any], str], runs: Sequence[Any]) -> None:
    """Print the page of the runs, write it, or both; with `--json` alone none is made."""
    if not options.json:
        print(page(runs))
    if options.write:
        write_page(options.write, page(runs))


def write_page(path: Path, text: str) -> None:
    """Write a page that names, below its title, the commit of its figures."""
    here = Path(__file__).parent
    git = ("git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*")
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    title, _, rest = text.partition("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{title}\n\nFigures of commit `{commit}`.\n{rest}", encoding="utf-8")
