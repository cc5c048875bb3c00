"""The command that tests a paper's claim."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.compare import DryRun
from harmonium.cli.terminal import Json, err, say, say_plots, say_prose, show_table
from harmonium.core.errors import HarmoniumError

if TYPE_CHECKING:
    from harmonium.core.callbacks import Callback
    from harmonium.studies.evidence.study import StudyResult


def study(
    what: Annotated[str | None, typer.Argument(metavar="[STUDY_OR_FILE]")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The study's folder.")] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", help="Runs at once, each in a process of its own.")
    ] = 1,
    into: Annotated[
        Path | None,
        typer.Option("--publish", help="Copy the page of a finished study there, and stop."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Test a paper's claim: headroom first, then tuning, then the decision. Lists the studies.

    For example: harmonium study smoke
    """
    from harmonium.report.display import long_work

    if what is None:
        _list_studies(as_json)
        return
    if into is not None:
        _publish(what, folder, into, as_json)
        return
    with long_work(err, as_json, "loading"):
        from harmonium.studies.evidence.study import study as run_study
    if dry_run:
        _forecast(what, folder, as_json)
        return

    def watcher(label: str) -> Callback:
        from harmonium.core.callbacks import Callback
        from harmonium.report.run_progress import watcher_for

        return Callback() if as_json or jobs > 1 else watcher_for(err, label)

    def note(text: str) -> None:
        if not as_json:
            say_prose(text, err)

    try:
        with long_work(err, as_json, "studying"):
            found = run_study(what, out=folder, jobs=jobs, callbacks=watcher, note=note)
    except KeyboardInterrupt:
        note("nothing is lost; the same command goes on")
        raise
    if as_json:
        print(json.dumps(found.plain()))
    else:
        _show(found)
    if found.failed:
        raise HarmoniumError(
            f"{len(found.failed)} of the runs failed; the same command tries them again"
        )


def _forecast(what: str, folder: Path | None, as_json: bool) -> None:
    from dataclasses import asdict

    from harmonium.studies.evidence.study import forecast

    stages = [asdict(one) for one in forecast(what, out=folder)]
    if as_json:
        print(json.dumps(stages))
        return
    for one in stages:
        seconds = one.pop("cpu_seconds")
        minutes = None if seconds is None else math.ceil(seconds / 60)
        one["CPU minutes left"] = minutes
    show_table(stages, digits=0)


def _publish(what: str, folder: Path | None, into: Path, as_json: bool) -> None:
    from harmonium.studies.evidence.published import publish

    paths = publish(what, into, out=folder)
    if as_json:
        print(json.dumps([str(path) for path in paths]))
        return
    for path in paths:
        say(f"wrote    {path}")


def _list_studies(as_json: bool) -> None:
    from harmonium.recipe.presets import about, studies

    listed = {name: about(file) for name, file in studies().items()}
    if as_json:
        print(
            json.dumps({name: {"what": one, "paper": two} for name, (one, two) in listed.items()})
        )
        return
    show_table([{"name": name, "what": one, "paper": two} for name, (one, two) in listed.items()])


def _show(found: StudyResult) -> None:
    from harmonium.studies.evidence.page import tables

    say_prose(f"claim    {found.study.claim}")
    for table in tables(found):
        show_table(table.rows, table.title, digits=table.digits)
    say_prose(f"verdict  {found.verdict}")
    for text in found.changed:
        say_prose(f"note     {text}")
    say(f"page     {found.folder / 'study.md'}")
    say_plots(found.plots)
