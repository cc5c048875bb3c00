"""The commands that put methods side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harmonium.cli.terminal import Formats, Json, Out, err, say, say_plots, say_prose, show_table
from harmonium.core.errors import ConfigError, HarmoniumError

if TYPE_CHECKING:
    from harmonium.core.callbacks import Callback
    from harmonium.studies.comparison.forecast import Forecast
    from harmonium.studies.comparison.table import Comparison
    from harmonium.studies.tuning.forecast import StudyForecast

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would run and what is done, and stop.")
]
Unfair = Annotated[
    bool, typer.Option("--allow-unfair", help="Compare although budgets differ, and say so.")
]


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [seeds=N] [compare.KEY=VALUE] [label.METHOD=NAME] [KEY=VALUE]..."
        ),
    ],
    folder: Out = None,
    allow_unfair: Unfair = False,
    dry_run: DryRun = False,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Compare methods under one budget, beside references such as raw pixels.

    For example: harmonium compare fedsimclr fedprox seeds=5 data=digits views=digits rounds=10
    """
    if dry_run:
        from harmonium.report.display import long_work

        with long_work(err, as_json, "estimating"):
            from harmonium.studies.comparison.forecast import forecast

            expected = forecast(words, folder, allow_unfair=allow_unfair, measure=True)
        foretell(expected, folder, as_json)
        return
    found = _compared(words, folder, as_json, allow_unfair=allow_unfair, formats=formats)
    if as_json:
        print(json.dumps(found.plain()))
    else:
        from harmonium.studies.comparison.table import tables

        show_table(found.shown(), found.headline, digits=1 if found.has_accuracy else 2)
        for table in tables(found)[1:]:
            show_table(
                table.rows, table.title, digits=table.digits,
                unbroken=["95 % interval", "p (Holm)"],
            )  # fmt: skip
        _say_remarks(found)
        say(f"runs     {found.folder}")
        say_plots(found.plots)
    _complain(found.failed, found.folder)


def sweep(
    words: Annotated[
        list[str], typer.Argument(metavar="SWEEP | METHOD... sweep.KEY=V1,V2... [KEY=VALUE]...")
    ],
    folder: Out = None,
    allow_unfair: Unfair = False,
    dry_run: DryRun = False,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Compare methods at every value of one setting.

    For example: harmonium sweep fedavg fedprox sweep.local.epochs=1,5 data=digits rounds=5
    """
    from harmonium.report.display import long_work

    if dry_run:
        with long_work(err, as_json, "estimating"):
            from harmonium.studies.comparison.forecast import forecast_sweep

            said = forecast_sweep(words, folder, allow_unfair=allow_unfair, measure=True)
        foretell(said, folder, as_json)
        return
    with long_work(err, as_json, "loading"):
        from harmonium.studies.comparison.sweep import new_folder, read
        from harmonium.studies.comparison.sweep import sweep as sweep_methods

        asked = read(words)
        folder = folder or new_folder(words)
        made = asked.at_value(asked.values[0], allow_unfair=allow_unfair)
    if not as_json:
        say_prose(f"{asked.key} is {', '.join(asked.values)}; at each {made.said}", err)
    with _going_on(folder, as_json), long_work(err, as_json, "sweeping"):
        found = sweep_methods(
            *words,
            out=folder,
            allow_unfair=allow_unfair,
            formats=formats,
            callbacks=_teller(as_json),
        )
    if as_json:
        print(json.dumps(found.plain()))
    else:
        digits = 1 if found.has_accuracy else 3
        for probe in found.tabled:
            rows = found.shown(probe)
            show_table(rows, found.title_of(probe), digits=digits, unbroken=["encoder"])
        for note in found.notes:
            say_prose(f"note     {note}")
        say(f"runs     {found.folder}")
        say_plots(found.plots)
    _complain(found.failed, folder)


def demo(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    folder: Out = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Show what federated training gains, in about two minutes and without a download.

    Settings are those of a comparison, for example: harmonium demo seeds=5
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.report import figure
        from harmonium.studies.comparison import demonstration

    found = _compared(demonstration.words(settings or []), folder, as_json, formats=formats)
    if as_json:
        print(json.dumps(found.plain()))
    else:
        show_table(found.shown(), found.headline, digits=1 if found.has_accuracy else 2)
        for sentence in demonstration.sentences(found):
            say_prose(f"{sentence}\n")
        _say_remarks(found)
        say(f"runs     {found.folder}")
        with figure.formats(figure.study_formats(formats)):
            path = demonstration.plot(found)
            say_plots(figure.plot_paths(path) if path else [])
    _complain(found.failed, found.folder)


def _say_remarks(found: Comparison) -> None:
    """Print warnings of collapse, whether methods beat the references, and notes."""
    for label, warning in found.warnings.items():
        say_prose(f"warning  {found.name(label)}: {warning}")
    for label, text in found.verdicts.items():
        say_prose(f"verdict  {found.name(label)}: {text}")
    for note in found.notes:
        say_prose(f"note     {note}")


def _compared(
    words: list[str],
    folder: Path | None,
    as_json: bool,
    *,
    allow_unfair: bool = False,
    formats: str | None = None,
) -> Comparison:
    """Compare, and say what runs while it does."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.studies.comparison.cells import plan
        from harmonium.studies.comparison.study import compare as compare_methods
        from harmonium.studies.comparison.study import new_folder

        made = plan(words, allow_unfair=allow_unfair)
        folder = folder or new_folder(list(made.methods))
    if not as_json:
        say_prose(made.said, err)
    with _going_on(folder, as_json), long_work(err, as_json, "comparing"):
        return compare_methods(
            *words,
            out=folder,
            allow_unfair=allow_unfair,
            formats=formats,
            callbacks=_teller(as_json),
        )


def foretell(found: Forecast | StudyForecast, folder: Path | None, as_json: bool) -> None:
    """Say what would run."""
    if as_json:
        print(json.dumps(found.plain()))
        return
    for line in found.lines():
        say_prose(line)
    say(f"runs     {folder or 'a new folder; --out names one'}")


def _teller(as_json: bool) -> Callable[[str], Callback]:
    from harmonium.core.callbacks import Callback
    from harmonium.report.run_progress import watcher_for

    return lambda label: Callback() if as_json else watcher_for(err, label)


@contextmanager
def _going_on(folder: Path, as_json: bool) -> Iterator[None]:
    """When a comparison is stopped, say how to go on with it."""
    try:
        yield
    except (HarmoniumError, KeyboardInterrupt) as error:
        curable = not isinstance(error, ConfigError)  # no going on cures that
        if curable and not as_json and any(folder.rglob("recipe.yaml")):
            say(f"nothing is lost; give the same command with --out {folder}", err)
        raise


def _complain(failed: Sequence[Mapping[str, Any]], folder: Path) -> None:
    if failed:
        own = ("encoder", "seed", "why")  # beside these, the value of a sweep
        at = ["".join(f"{k}={v}, " for k, v in one.items() if k not in own) for one in failed]
        names = ", ".join(
            f"{one['encoder']} ({value}seed {one['seed']})"
            for one, value in zip(failed, at, strict=True)
        )
        raise HarmoniumError(
            f"{len(failed)} of the runs failed: {names}. The same command with --out {folder} "
            "tries them again"
        )
