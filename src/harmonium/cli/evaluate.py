"""The command that measures runs from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harmonium.cli.terminal import Formats, Json, err, say, say_plots, say_prose, show_table


def evaluate(
    words: Annotated[list[str], typer.Argument(metavar="RUN... MEASURE... [KEY=VALUE]...")],
    folder: Annotated[Path | None, typer.Option("--out", help="The folder for the files.")] = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Evaluate finished or stopped runs by probes and other measures.

    For example: harmonium eval runs/first knn linear on=own,mnist
    """
    from harmonium.report.display import long_work

    def note(text: str) -> None:
        if not as_json:
            say_prose(text, err)

    try:
        with long_work(err, as_json, "evaluating"):
            from harmonium.measures.evaluation import evaluate_run

            evaluation = evaluate_run(*words, out=folder, formats=formats, note=note)
    except KeyboardInterrupt:
        note("nothing is lost: the same command takes features and finished trainings from disk")
        raise
    if as_json:
        print(json.dumps(evaluation.plain()))
        return
    for title, rows, digits in (*evaluation.tables, *evaluation.over_seeds):
        show_table(rows, title, digits=digits, unbroken=["on", "set", "labels"])
    for text in evaluation.legends:
        say_prose(text)
    for text in evaluation.notes:
        say_prose(f"note     {text}")
    say(f"figures  {evaluation.folder / 'eval.json'}")
    say_plots(evaluation.plots)
