"""The commands that compare methods: compare, sweep and demo."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harmonium.cli.terminal import Formats, Json, Out, err, say, say_plots, say_prose, show_table
from harmonium.core.errors import ConfigError, HarmoniumError
from harmonium.engines.workers import early_workers, shared_workers

if TYPE_CHECKING:
    from harmonium.core.callbacks import Callback
    from harmonium.studies.comparison.forecast import Forecast
    from harmonium.studies.comparison.table import Comparison
    from harmonium.studies.tuning.forecast import StudyForecast

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the runs and their progress, and stop.")
]
Unfair = Annotated[
    bool, typer.Option("--allow-unfair", help="Compare although budgets differ; a note lists how.")
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
    comparison = _compared(words, folder, as_json, allow_unfair=allow_unfair, formats=formats)
    if as_json:
        print(json.dumps(comparison.plain()))
    else:
        from harmonium.studies.comparison.table import tables

        show_table(
            comparison.shown(), comparison.headline, digits=1 if comparison.has_accuracy else 2
        )
        for table in tables(comparison)[1:]:
            show_table(
                table.rows, table.title, digits=table.digits,
                unbroken=["95 % interval", "p (Holm)"],
            )  # fmt: skip
        _say_remarks(comparison)
        say(f"runs     {comparison.folder}")
        say_plots(comparison.plots)
    _complain(comparison.failed, comparison.folder)


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

            forecast = forecast_sweep(words, folder, allow_unfair=allow_unfair, measure=True)
        foretell(forecast, folder, as_json)
        return
    with long_work(err, as_json, "loading"):
        from harmonium.studies.comparison.sweep import new_folder, read
        from harmonium.studies.comparison.sweep import sweep as sweep_methods

        asked = read(words)
        folder = folder or new_folder(words)
        first = asked.at_value(asked.values[0], allow_unfair=allow_unfair)
    if not as_json:
        say_prose(f"{asked.key} is {', '.join(asked.values)}; at each {first.headline}", err)
    with _going_on(folder, as_json), long_work(err, as_json, "sweeping"):
        result = sweep_methods(
            *words,
            out=folder,
            allow_unfair=allow_unfair,
            formats=formats,
            callbacks=_teller(as_json),
        )
    if as_json:
        print(json.dumps(result.plain()))
    else:
        digits = 1 if result.has_accuracy else 3
        for probe in result.tabled:
            rows = result.shown(probe)
            show_table(rows, result.title_of(probe), digits=digits, unbroken=["encoder"])
        for note in result.notes:
            say_prose(f"note     {note}")
        say(f"runs     {result.folder}")
        say_plots(result.plots)
    _complain(result.failed, folder)


def demo(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    folder: Out = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Show the gain of federated training, in about two minutes and without a download.

    Settings are those of a comparison, for example: harmonium demo seeds=5
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.report import figure
        from harmonium.studies.comparison import demonstration

    comparison = _compared(demonstration.words(settings or []), folder, as_json, formats=formats)
    if as_json:
        print(json.dumps(comparison.plain()))
    else:
        show_table(
            comparison.shown(), comparison.headline, digits=1 if comparison.has_accuracy else 2
        )
        for sentence in demonstration.sentences(comparison):
            say_prose(f"{sentence}\n")
        _say_remarks(comparison)
        say(f"runs     {comparison.folder}")
        with figure.formats(figure.study_formats(formats)):
            path = demonstration.plot(comparison)
            say_plots(figure.plot_paths(path) if path else [])
    _complain(comparison.failed, comparison.folder)


def _say_remarks(comparison: Comparison) -> None:
    """Print warnings of collapse, whether methods beat the references, and notes."""
    for label, warning in comparison.warnings.items():
        say_prose(f"warning  {comparison.name(label)}: {warning}")
    for label, text in comparison.verdicts.items():
        say_prose(f"verdict  {comparison.name(label)}: {text}")
    for note in comparison.notes:
        say_prose(f"note     {note}")


def _compared(
    words: list[str],
    folder: Path | None,
    as_json: bool,
    *,
    allow_unfair: bool = False,
    formats: str | None = None,
) -> Comparison:
    """Run a comparison and show its progress."""
    from harmonium.report.display import long_work

    with shared_workers(early_workers(words)):  # they load torch while this process does
        with long_work(err, as_json, "loading"):
            from harmonium.studies.comparison.cells import plan
            from harmonium.studies.comparison.study import compare as compare_methods
            from harmonium.studies.comparison.study import new_folder

            comparison_plan = plan(words, allow_unfair=allow_unfair)
            folder = folder or new_folder(list(comparison_plan.methods))
        if not as_json:
            say_prose(comparison_plan.headline, err)
        with _going_on(folder, as_json), long_work(err, as_json, "comparing"):
            return compare_methods(
                *words,
                out=folder,
                allow_unfair=allow_unfair,
                formats=formats,
                callbacks=_teller(as_json),
            )


def foretell(forecast: Forecast | StudyForecast, folder: Path | None, as_json: bool) -> None:
    """Print a forecast."""
    if as_json:
        print(json.dumps(forecast.plain()))
        return
    for line in forecast.lines():
        say_prose(line)
    say(f"runs     {folder or 'a new folder; --out names one'}")


def _teller(as_json: bool) -> Callable[[str], Callback]:
    from harmonium.core.callbacks import Callback
    from harmonium.report.run_progress import watcher_for

    return lambda label: Callback() if as_json else watcher_for(err, label)


@contextmanager
def _going_on(folder: Path, as_json: bool) -> Iterator[None]:
    """If a comparison is stopped, print how to continue it."""
    try:
        yield
    except (HarmoniumError, KeyboardInterrupt) as error:
        curable = not isinstance(error, ConfigError)  # which a second try would repeat
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
