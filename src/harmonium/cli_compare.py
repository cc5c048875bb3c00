"""The commands that put methods side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harmonium.errors import ConfigError, HarmoniumError
from harmonium.terminal import Json, Out, err, say, show_table


def compare(
    words: Annotated[
        list[str], typer.Argument(metavar="METHOD... [seeds=N] [compare.KEY=VALUE] [KEY=VALUE]...")
    ],
    folder: Out = None,
    allow_unfair: Annotated[
        bool, typer.Option("--allow-unfair", help="Compare although budgets differ, and say so.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run methods under one budget, beside the references.

    For example: harmonium compare fedsimclr fedprox seeds=5 data=digits views=digits rounds=10
    """
    show(words, folder, as_json, allow_unfair=allow_unfair)


def demo(folder: Out = None, as_json: Json = False) -> None:
    """Show what federation is worth, in about two minutes."""
    show(["demo"], folder, as_json)


def show(
    words: list[str], folder: Path | None, as_json: bool, *, allow_unfair: bool = False
) -> None:
    """Compare and print what came of it."""
    from harmonium.comparing.cells import plan
    from harmonium.comparing.study import compare as compare_methods
    from harmonium.comparing.study import new_folder
    from harmonium.comparing.table import more_tables
    from harmonium.life import Watcher
    from harmonium.report.progress import decoding, watcher_for

    folder = folder or new_folder(list(plan(words, allow_unfair=allow_unfair).methods))

    def watcher(label: str) -> Watcher:
        return Watcher() if as_json else watcher_for(err, label)

    try:
        with decoding(err, silent=as_json):
            found = compare_methods(*words, out=folder, allow_unfair=allow_unfair, watcher=watcher)
    except (HarmoniumError, KeyboardInterrupt) as error:
        curable = not isinstance(error, ConfigError)  # no going on cures that
        if curable and not as_json and any(folder.glob("*/*/recipe.yaml")):
            say(f"nothing is lost; give the same command with --out {folder}", err)
        raise
    if as_json:
        print(json.dumps(found.plain()))
    else:
        show_table(found.shown(), found.title, digits=1 if found.has_accuracy else 2)
        for title, rows, digits in more_tables(found):
            show_table(rows, title, digits=digits, unbroken=["method"])
        for label, warning in found.warnings.items():
            say(f"warning  {label}: {warning}")
        for note in found.notes:
            say(f"note     {note}")
        say(f"runs     {found.folder}")
        if found.picture:
            say(f"picture  {found.picture}")
    if failed := found.details["failed"]:
        names = ", ".join(f"{one['encoder']} (seed {one['seed']})" for one in failed)
        raise HarmoniumError(
            f"{len(failed)} of the runs failed: {names}. The same command with --out {folder} "
            "tries them again"
        )
