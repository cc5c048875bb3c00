"""`harmonium plan`: what a run will take and what would stop it; `run --dry-run` shows the same."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.terminal import Changes, Json, Out, err, out, say_prose
from harmonium.core.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from harmonium.recipe.schema import Recipe
    from harmonium.runs.plan import RunPlan


def plan(
    what: Annotated[str, typer.Argument(metavar="METHOD_OR_FILE")],
    changes: Changes = None,
    folder: Out = None,
    as_json: Json = False,
) -> None:
    """Say what a run will take (time, memory, bytes, disk, privacy), and what would stop it.

    For example: harmonium plan fedavg data=digits clients=20 rounds=100
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "planning"):
        from harmonium.recipe.schema import Recipe
        from harmonium.runs.plan import plan_of

        found = plan_of(Recipe.of(what, *(changes or [])), out=folder)
    if as_json:
        print(json.dumps(found.plain()))
    else:
        show_plan(found, out)
    end_if_stopped(found)


def show_dry_run(recipe: Recipe, as_json: bool) -> None:
    """Print a resolved recipe, and beside it what a run of it would take."""
    from harmonium.report.display import long_work
    from harmonium.runs.open_run import missing
    from harmonium.runs.plan import plan_of

    with long_work(err, as_json, "estimating"):
        recipe.check()
        found = plan_of(recipe, decode=False)
    if as_json:
        estimate = {"unknown": found.unknown} if found.time is None else found.time.plain()
        shown = {"recipe": recipe.tree(), "digest": recipe.digest, "missing": missing(recipe)}
        shown |= {"estimate": estimate, "notes": recipe.notes, "plan": found.plain()}
        print(json.dumps(shown))
    else:
        out.print(recipe.yaml(), end="", markup=False, highlight=False, soft_wrap=True)
        show_plan(found, err)
    end_if_stopped(found)


def show_plan(found: RunPlan, console: Console) -> None:
    """Print what a run takes, notes and warnings."""
    for text in found.lines():
        say_prose(text, console)
    for one in (*found.notes, *found.warnings):
        say_prose(f"{one.level:<8} {one.text}", console)


def end_if_stopped(found: RunPlan) -> None:
    """End with exit code 2 and a line for each reason, where a run cannot work."""
    for one in found.stops:
        text = f"harmonium: {one_line(one.text)}"
        err.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if found.stops:
        sys.exit(2)
