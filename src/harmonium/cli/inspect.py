"""The commands for images of one's own: inspect them, and train on them without a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.terminal import (
    Json,
    Out,
    err,
    out,
    result_tree,
    say,
    say_prose,
    show_result,
    watched,
)

if TYPE_CHECKING:
    from harmonium.studies.start import Started

Images = Annotated[
    Path, typer.Argument(metavar="PATH", help="A folder of images, a table (.csv) or an .npz.")
]
About = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="How to read it, e.g. data.client_column=site"),
]
HEADING = 9  # columns of a heading


def inspect(path: Images, words: About = None, as_json: Json = False) -> None:
    """Inspect images: what there is, what is broken or repeated, what would suit it.

    For example: harmonium inspect photos
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "inspecting"):
        from harmonium.data.inspection import inspect as inspect_path
        from harmonium.data.inspection.text import lines

        found = inspect_path(path, *(words or ()))
    if as_json:
        print(json.dumps(found.plain()))
        return
    for heading, text in lines(found):
        # Commands are never broken, so that they can be copied.
        show = say if heading in ("run", "or") else say_prose
        show(f"{heading:<{HEADING}} {text}")


def start(
    path: Images,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What is not to be chosen, e.g. clients=3"),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="Time that the run may take on this machine.")
    ] = 20.0,
    folder: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the choices and the recipe, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train an encoder on images without a recipe: everything is chosen, and the reasons shown.

    For example: harmonium start photos --minutes 10
    """
    with watched(as_json) as watcher:
        from harmonium.studies.start import start as start_path

        done = start_path(
            path, *(words or ()), minutes=minutes, out=folder, dry_run=dry_run, callbacks=watcher
        )
    if done.result is None:
        _show_choice(done, as_json)
        return
    if as_json:
        print(json.dumps({**done.plain(), "result": result_tree(done.result)}))
        return
    show_result(done.result, as_json)
    if not done.result.verdict:  # else it is shown with the figures
        say_prose(f"verdict  {done.verdict}")
    if done.file is not None:
        say(f"recipe   {done.file}")
    for command in done.next:
        say(f"next     {command}")


def _show_choice(done: Started, as_json: bool) -> None:
    """Print the recipe of a dry run, with its reasons as comments: a file for `harmonium run`."""
    if as_json:
        print(json.dumps(done.plain()))
    elif done.choice is not None:
        out.print(done.choice.text(), end="", markup=False, highlight=False, soft_wrap=True)
