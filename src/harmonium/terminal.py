"""What all commands share: where they print, and the words that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. rounds=10")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

out = Console()
err = Console(stderr=True)


def show_table(rows: Sequence[Mapping[str, Any]], title: str = "", **how: Any) -> None:
    """Print rows as `report.tables.table` draws them; nothing where there are none."""
    from harmonium.report.tables import table

    if rows:
        out.print(table(rows, title=title, **how))


def say(text: str, console: Console = out) -> None:
    """Print a line exactly as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
