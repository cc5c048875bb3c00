"""The command that inspects images before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harmonium.cli.terminal import Json, err, say, say_prose

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
