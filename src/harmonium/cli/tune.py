"""The command that chooses settings without labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harmonium.cli.compare import DryRun, foretell
from harmonium.cli.terminal import Formats, Json, err, say, say_plots, say_prose, show_table
from harmonium.core.errors import ConfigError, HarmoniumError

if TYPE_CHECKING:
    from harmonium.studies.tuning.study import Study


def tune(
    words: Annotated[
        list[str], typer.Argument(metavar="METHOD_OR_FILE grid.KEY=V1,V2... [KEY=VALUE]...")
    ],
    folder: Annotated[Path | None, typer.Option("--out", help="The study's folder.")] = None,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Run every setting to its end.")
    ] = False,
    keep: Annotated[
        float, typer.Option("--keep", help="Share of the settings that continues at a check.")
    ] = 0.5,
    margin: Annotated[
        float,
        typer.Option("--margin", help="Settings so close below continue, too (best - worst: 1)."),
    ] = 0.1,
    check: Annotated[
        str, typer.Option("--check", help="Rounds after which settings may stop, e.g. 5,10.")
    ] = "",
    dry_run: DryRun = False,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Choose settings by short runs that are scored without labels.

    For example: harmonium tune fedbyol grid.local.lr=0.03,0.01 grid.objective.momentum=0.9,0.99
    """
    from harmonium.report.display import long_work

    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(
            "name one method or recipe, e.g. `harmonium tune fedsimclr grid.local.lr=0.03,0.01`"
        )
    how: dict[str, Any] = {"keep_all": keep_all, "keep": keep, "margin": margin}
    how["check"] = _rounds(check)
    if dry_run:
        with long_work(err, as_json, "estimating"):
            from harmonium.studies.tuning.forecast import forecast_study

            given = [word for word in words if "=" in word]
            expected = forecast_study(names[0], given, folder, **how)
        foretell(expected, folder, as_json)
        return
    study = _tuned(names[0], words, folder, as_json, {**how, "formats": formats})
    if as_json:
        print(json.dumps(study.plain()))
    else:
        _show(study)
    if study.best is None:
        raise ConfigError(f"no setting is complete: {study.rows[0]['why']}")


def _tuned(
    name: str, words: list[str], folder: Path | None, as_json: bool, how: dict[str, Any]
) -> Study:
    """Run the study and show its progress."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.core.callbacks import Callback
        from harmonium.report.run_progress import watcher_for
        from harmonium.studies.tuning.study import new_folder
        from harmonium.studies.tuning.study import tune as run_study

    folder = folder or new_folder(name)

    def watcher(label: str) -> Callback:
        return Callback() if as_json else watcher_for(err, label)

    def note(text: str) -> None:
        if not as_json:
            say_prose(f"note: {text}", err)

    settings = [word for word in words if "=" in word]
    try:
        with long_work(err, as_json, "tuning"):
            return run_study(name, *settings, out=folder, **how, callbacks=watcher, note=note)
    except (HarmoniumError, KeyboardInterrupt) as error:
        if not isinstance(error, ConfigError) and any(folder.glob("runs/*/recipe.yaml")):
            note(f"nothing is lost; give the same command with --out {folder}")
        raise


def _rounds(text: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(word) for word in text.split(",")) if text else None
    except ValueError:
        raise ConfigError(f"--check={text}: write rounds, e.g. --check 5,10") from None


def _show(study: Study) -> None:
    labelled = "; labels had no part in it" if any(r["knn"] is not None for r in study.rows) else ""
    title = f"Align + 0.2 Unif, the best first{labelled}"
    show_table(study.shown(), title, unbroken=["state"])
    if study.ranked:
        count = study.ranked["settings"]
        say_prose(
            f"ranked   score and kNN: rank correlation {study.ranked['rho']:.2f}, {count} settings"
        )
    for text in study.notes:
        say_prose(f"note     {text}")
    say(f"study    {study.folder}")
    say_plots(study.plots)
    if study.command:
        say(f"best     {study.command}")
