"""`harmonium privacy`: the privacy report of a run, or a plan of noise before one."""

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
    delta: Annotated[
        float | None, typer.Option("--delta", help="Report epsilon at this delta.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The plot's file.")] = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Report the epsilon of a run's noise and what it sent without noise; or plan noise.

    For example: harmonium privacy runs/first
    or: harmonium privacy plan epsilon=3 delta=1e-5 rounds=200 examples=5000 mu=4 dim=512
    """
    if words[0] == "plan":
        if delta is not None:
            raise ConfigError(f"write delta={delta:g} after plan, without dashes")
        _show_plan(words[1:], as_json)
        return
    if len(words) > 1 and "=" in words[1] and not Path(words[0]).exists():
        raise ConfigError(f"'{words[0]}' is neither a run nor plan: {suggest(words[0], ['plan'])}")
    if len(words) > 1:
        raise ConfigError(f"give the folder of one run; '{words[1]}' is one word too many")
    check_formats(formats)
    _show_report(words[0], delta, out, formats, as_json)


def _show_plan(words: list[str], as_json: bool) -> None:
    """Print a plan of noise and its epsilon."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "planning"):
        from harmonium.privacy.planning import plan_from

        plan = plan_from(words)
        plain, lines = plan.plain(), _plan_lines(plan)
    if as_json:
        print(json.dumps(plain))
        return
    for line in lines:
        say_prose(line)


def _show_report(
    folder: str, delta: float | None, out: Path | None, formats: str | None, as_json: bool
) -> None:
    """Print and plot the privacy report of a run."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "reading the ledger"):
        from harmonium.report import figure
        from harmonium.runs.privacy_report import WORST, plot, report

        privacy_report = report(folder, delta)
        with figure.formats(formats if out else figure.study_formats(formats)):
            plot_path = plot(privacy_report, out or privacy_report.folder / "privacy.png")
            plots = figure.plot_paths(plot_path) if plot_path else []
        rows, lines = privacy_report.table(), privacy_report.lines()
    if as_json:
        print(json.dumps({**privacy_report.plain(), "plots": [str(path) for path in plots]}))
        return
    worst = f"the worst {WORST} of {len(privacy_report.clients)} clients"
    title = "Noisy releases" + (f", {worst}" if len(privacy_report.clients) > WORST else "")
    show_table(rows, title, digits=3)
    for line in lines:
        say_prose(line)
    say_plots(plots)


def _plan_lines(plan: Plan) -> list[str]:
    """The lines that describe a plan."""
    times = "once" if plan.rounds == 1 else f"in {plan.rounds} rounds"
    lines = [
        f"epsilon  {plan.epsilon:.4g} at delta {plan.delta:g} for a release {times}; exact",
        f"by RDP   {plan.rdp:.4g}, as papers often report it",
        *([f"by PLD   {plan.pld:.4g}, by dp-accounting"] if plan.pld is not None else []),
        f"a round  {plan.each:.4g}",
        f"between  {plan.neighbours}",
        f"noise    {plan.multiplier:.4g} standard deviations for each unit of sensitivity",
    ]
    if plan.sensitivity is not None and plan.sigma is not None:
        lines.append(
            f"matrix   a correlation matrix of {plan.examples:,} examples moves by at most "
            f"{plan.sensitivity:.4g}: sigma {plan.sigma:.4g}"
        )
    if plan.noise_norm is not None and plan.kept_norm is not None:
        lines.append(
            f"size     noise of norm {plan.noise_norm:.3g}, of which the symmetric half keeps "
            f"{plan.kept_norm:.3g}, beside a matrix of norm {plan.mu:g} at most"
        )
    return [*lines, *(f"note     {text}" for text in plan.notes)]
