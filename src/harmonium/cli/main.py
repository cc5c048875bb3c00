"""The `harmonium` command. Each subcommand calls one function and shows what it returns.

Heavy libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from harmonium import __version__
from harmonium.cli.classify import classify
from harmonium.cli.compare import compare, demo, sweep
from harmonium.cli.data import data, datasets
from harmonium.cli.diagnosis import diagnose
from harmonium.cli.evaluate import evaluate
from harmonium.cli.federation import client, server
from harmonium.cli.handover import export, verify
from harmonium.cli.inspect import inspect, start
from harmonium.cli.plan import plan, show_dry_run
from harmonium.cli.privacy import privacy
from harmonium.cli.study import study
from harmonium.cli.terminal import (
    Changes,
    Formats,
    Json,
    Out,
    check_formats,
    err,
    out,
    say_prose,
    show_result,
    show_table,
    watched,
)
from harmonium.cli.tune import tune
from harmonium.cli.use import embed, search
from harmonium.core.errors import ConfigError, HarmoniumError
from harmonium.engines.workers import early_workers, shared_workers

if TYPE_CHECKING:
    from harmonium.recipe.paper_tables import TableRecipe

typer.core.HAS_RICH = False  # plain help; typer would escape its brackets for rich all the same

app = typer.Typer(
    name="harmonium",
    help="Learn one image encoder from unlabelled images that never leave their clients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=False,  # click does it
)
app.add_typer(data, name="data")
app.add_typer(server, name="server")
app.add_typer(client, name="client")
app.add_typer(classify, name="classify")


def main() -> None:
    """Run a command; a user's mistake is reported in one line, with exit code 2."""
    sys.path.append(os.getcwd())  # `harmonium run mymodule:MyMethod` finds what python -m would
    try:
        if code := app(standalone_mode=False):
            _fail("stopped", code)  # Ctrl-C
    except HarmoniumError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:  # before or after the command itself
        _fail("stopped", 130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:  # click's usage errors, whichever click typer brings
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if "\n" in message:  # no command at all: the message is the help
            err.print(message, markup=False, highlight=False)
            sys.exit(2)
        if "No such option" in message:
            message = f"{message} Settings are written key=value, without dashes."
        _fail(message, 2)


def _fail(message: str, code: int) -> NoReturn:
    err.print(
        f"harmonium: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit()


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="METHOD_OR_FILE")],
    changes: Changes = None,
    folder: Out = None,
    as_json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the resolved recipe, its time and bytes, and stop."),
    ] = False,
    formats: Formats = None,
) -> None:
    """Run a method or a recipe file.

    For example: harmonium run fedavg data=digits rounds=10
    """
    from harmonium.report.display import long_work

    early = 0 if dry_run else early_workers(changes or [])
    with shared_workers(early):  # they load torch while this process does
        with long_work(err, as_json, "loading"):
            from harmonium.recipe.schema import Recipe
            from harmonium.runs import start

            check_formats(formats)
            recipe = Recipe.of(what, *(changes or []))
        if dry_run:
            show_dry_run(recipe, as_json)
            return
        with watched(as_json) as watcher:
            result = start.run(recipe, out=folder, callbacks=watcher)
    show_result(result, as_json, formats)


@app.command()
def resume(
    folder: Path, changes: Changes = None, as_json: Json = False, formats: Formats = None
) -> None:
    """Continue a run that stopped, from its last committed round; rounds=N trains it further.

    For example: harmonium resume runs/first rounds=40
    """
    check_formats(formats)
    with watched(as_json) as watcher:
        from harmonium.runs import start

        result = start.resume(folder, *(changes or []), callbacks=watcher)
    show_result(result, as_json, formats)


app.command()(inspect)
app.command()(start)
app.command()(compare)
app.command()(demo)
app.command()(sweep)
app.command()(diagnose)
app.command()(embed)
app.command("eval")(evaluate)
app.command()(plan)
app.command()(privacy)
app.command()(search)
app.command()(study)
app.command()(tune)
app.command()(export)
app.command()(verify)


@app.command()
def explain(
    what: Annotated[str, typer.Argument(metavar="METHOD_OR_FILE")],
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Show what a method sends, keeps and reveals."""
    from harmonium.recipe.presets import about, baselines, row_note
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.core.settings import plain
        from harmonium.federation.card import card
        from harmonium.recipe.schema import Recipe

        recipe = Recipe.of(what, *(changes or []))
        asked = recipe.participation.asked(recipe.training)
        method_card = card(recipe.known_method(), recipe.privacy.masks, asked)
    if as_json:
        note = row_note(what)
        more = {"note": note} if note else {}
        print(json.dumps({**plain(method_card), "meaning": method_card.meaning(), **more}))
        return
    if note := row_note(what):
        say_prose(f"note: {note}")
    if what in baselines() and what != method_card.name:
        first, paper = about(baselines()[what])
        say_prose(f"{what}: {first} ({paper})")
    say_prose(method_card.text())


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods, and the names of the papers' baselines."""
    from harmonium.cli.listing import listed
    from harmonium.recipe.presets import about, baselines

    entries = {name: about(file) for name, file in baselines().items()}
    for name, one in listed("methods").items():
        entries.setdefault(name, (one.module.partition(": ")[2] or one.module, one.paper))
    _list(
        {name: {"what": what, "paper": paper} for name, (what, paper) in entries.items()}, as_json
    )


@app.command()
def objectives(as_json: Json = False) -> None:
    """List the objectives."""
    from harmonium.cli.listing import listed

    entries = listed("objectives")
    _list({name: {"what": one.what, "paper": one.paper} for name, one in entries.items()}, as_json)


def _lists(kind: str, what: str) -> None:
    """A command that lists a registry: `harmonium encoders` and its like."""

    @app.command(kind, help=f"List {what}.")
    def command(as_json: Json = False) -> None:
        from harmonium.cli.listing import listed

        _list({name: {"what": one.what} for name, one in listed(kind).items()}, as_json)


_lists("encoders", "the encoders")
_lists("measures", "what `harmonium eval` can measure of runs")
app.command()(datasets)
_lists("splits", "the ways to split images among clients")


@app.command()
def recipes(
    table: Annotated[
        str | None, typer.Argument(help="A paper's tables, or some: fsimclr, fsimclr/c10")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that come with Harmonium, or those of a paper's tables."""
    from harmonium.recipe import presets

    if table is None:
        shipped, tables = presets.shipped_recipes(), presets.tables()
        listed = {name: {"what": presets.about(file)[0]} for name, file in shipped.items()}
        for name, file in tables.items():
            what = f"{presets.about(file)[0]} (harmonium recipes {name})"
            listed[f"{name}/SETTING/ROW"] = {"what": what}
        _list(listed, as_json)
        return
    paper = table.partition("/")[0]
    rows = [row for row in presets.table(paper) if row.name.startswith(table)]
    if not rows:
        raise ConfigError(
            f"no recipe begins with '{table}': `harmonium recipes {paper}` lists them"
        )
    _show_rows(rows, table, as_json)


def _show_rows(rows: Sequence[TableRecipe], table: str, as_json: bool) -> None:
    """Print rows of a paper's tables with the published figures."""
    from harmonium.recipe.paper_tables import FIGURES

    shown = [key for key in FIGURES if any(getattr(row, key) is not None for row in rows)]
    shown = shown or ["published"]
    if as_json:
        more = ("deviation", "by_style", "note")
        keys = ["what", *shown, *(k for k in more if any(getattr(row, k) for row in rows))]
        print(json.dumps({row.name: {key: getattr(row, key) for key in keys} for row in rows}))
        return
    lines = list[dict[str, Any]]()
    for row in rows:
        figures = {key: getattr(row, key) for key in shown}
        if row.published is not None and row.deviation is not None:
            figures["published"] = (row.published, row.deviation)
        lines.append({"name": row.name, **figures, "what": row.what})
    exact = [row.published for row in rows if row.published is not None and not row.by_style]
    digits = 2 if any(figure != round(figure, 1) for figure in exact) else 1  # as papers print them
    show_table(lines, digits=digits, unbroken=["name"])
    _explain_rows(rows, table, has_personal="personal" in shown)


def _explain_rows(rows: Sequence[TableRecipe], table: str, *, has_personal: bool) -> None:
    """Print what the figures of a paper's tables mean, and how to run a row."""
    from harmonium.report.tables import MISSING

    say_prose(f"published: test accuracy in percent, of the full size; {MISSING}: no figure known")
    if any(row.deviation is not None for row in rows):
        say_prose("±: over seeds, as the paper reports it")
    for note in dict.fromkeys(row.note for row in rows if row.note):
        say_prose(f"note: {note}")
    if has_personal:
        say_prose("personal: the same for clients' own features; both are means over styles")
    if "/" not in table:
        some = rows[0].name.rpartition("/")[0]
        say_prose(f"the beginning of a name lists fewer: harmonium recipes {some}")
    say_prose(f"@cpu after a name makes the run small: harmonium run {rows[0].name}@cpu")


def _list(entries: Mapping[str, Mapping[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entries))
        return
    show_table([{"name": name, **facts} for name, facts in sorted(entries.items())])
