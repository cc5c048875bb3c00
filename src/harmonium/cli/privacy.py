"""The command that says what noise is worth: of a run, or before one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.terminal import (
    Formats,
    Json,
    check_formats,
    err,
    say_plots,
    say_prose,
    show_table,
)
from harmonium.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from harmonium.privacy.planning import Plan


def privacy(
    words: Annotated[list[str], typer.Argument(metavar="RUN | plan KEY=VALUE...")],
    delta: Annotated[float | None, typer.Option("--delta", help="Tell epsilon at this.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The plot's file.")] = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Report the privacy that a run's noise gives and what it sent without; or plan noise.

    For example: harmonium privacy runs/first
    or: harmonium privacy plan epsilon=3 delta=1e-5 rounds=200 examples=5000 mu=4 dim=512
    """
    from harmonium.report.display import long_work

    if words[0] == "plan":
        if delta is not None:
            raise ConfigError(f"write delta={delta:g} behind plan, without dashes")
        with long_work(err, as_json, "planning"):
            from harmonium.privacy.planning import plan_from

            made = plan_from(words[1:])
            plain, lines = made.plain(), _plan_lines(made)
        if as_json:
            print(json.dumps(plain))
            return
        for line in lines:
            say_prose(line)
        return
    if len(words) > 1 and "=" in words[1] and not Path(words[0]).exists():
        raise ConfigError(f"'{words[0]}' is neither a run nor plan: {suggest(words[0], ['plan'])}")
    if len(words) > 1:
        raise ConfigError(f"name one run's folder; '{words[1]}' is one word too many")
    check_formats(formats)
    with long_work(err, as_json, "reading the ledger"):
        from harmonium.report import figure
        from harmonium.runs.privacy_report import WORST, picture, report

        found = report(words[0], delta)
        with figure.formats(formats if out else figure.study_formats(formats)):
            drawn = picture(found, out or found.folder / "privacy.png")
            plots = figure.plot_paths(drawn) if drawn else []
        rows, lines = found.table(), found.lines()
    if as_json:
        print(json.dumps({**found.plain(), "plots": [str(path) for path in plots]}))
        return
    many = f"the worst {WORST} of {len(found.clients)} clients"
    title = "Noisy releases" + (f", {many}" if len(found.clients) > WORST else "")
    show_table(rows, title, digits=3)
    for line in lines:
        say_prose(line)
    say_plots(plots)


def _plan_lines(made: Plan) -> list[str]:
    """What a plan comes to, a line each."""
    times = "once" if made.rounds == 1 else f"in {made.rounds} rounds"
    lines = [
        f"epsilon  {made.epsilon:.4g} at delta {made.delta:g} for a release {times}; exact",
        f"by RDP   {made.rdp:.4g}, as papers often report it",
        *([f"by PLD   {made.pld:.4g}, by dp-accounting"] if made.pld is not None else []),
        f"a round  {made.each:.4g}",
        f"between  {made.neighbours}",
        f"noise    {made.multiplier:.4g} standard deviations for each unit of sensitivity",
    ]
    if made.sensitivity is not None and made.sigma is not None:
        lines.append(
            f"matrix   a correlation matrix of {made.examples:,} examples moves by at most "
            f"{made.sensitivity:.4g}: sigma {made.sigma:.4g}"
        )
    if made.noise_norm is not None and made.kept_norm is not None:
        lines.append(
            f"size     noise of norm {made.noise_norm:.3g}, of which the symmetric half keeps "
            f"{made.kept_norm:.3g}, beside a matrix of norm {made.mu:g} at most"
        )
    return [*lines, *(f"note     {text}" for text in made.notes)]
