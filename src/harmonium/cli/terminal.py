"""What all commands share: consoles, common options, and the output of results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleDimensions

from harmonium.core.errors import BudgetSpent, ConfigError, Diverged, HarmoniumError, counted

if TYPE_CHECKING:
    from harmonium.core.callbacks import Callback
    from harmonium.runs.loop import Result

Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. rounds=10")
]
Out = Annotated[Path | None, typer.Option("--out", help="The run's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Formats = Annotated[
    str | None, typer.Option("--formats", help="Formats of plots: png,pdf,svg or some of them.")
]

WIDE = 160  # columns of output to a file or a program


def is_bounded(console: Console) -> bool:
    """Whether output must fit a width: that of a terminal, or `COLUMNS`."""
    return console.is_terminal or "COLUMNS" in os.environ


class _Console(Console):
    """A console that is wide where its output does not go to a terminal."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        """The size of the terminal; elsewhere it is `WIDE` columns wide."""
        size = super().size
        return size if is_bounded(self) else ConsoleDimensions(WIDE, size.height)


out = _Console(emoji=False)
err = _Console(stderr=True, emoji=False)


def show_table(rows: Sequence[Mapping[str, Any]], title: str = "", **how: Any) -> None:
    """Print rows as `report.tables.table` draws them; nothing where there are none.

    In a terminal they fit its width. Elsewhere all columns are printed side by side.
    """
    from rich.text import Text

    from harmonium.report.tables import table

    if rows:
        if title:  # above the table: inside, it would be wrapped at the table's width
            out.print(Text(f"\n{title}", style="italic"))
        fitting = table(rows, **how)
        wide = out if is_bounded(out) else Console(file=out.file, width=max(WIDE, fitting.least))
        wide.print(fitting)


def say(text: str, console: Console = out) -> None:
    """Print a line unchanged: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_prose(text: str, console: Console = out) -> None:
    """Print sentences: broken between words at the width of a terminal, on one line elsewhere."""
    if console.is_terminal:
        from harmonium.report.terminal_table import prose

        text = prose(text, console.width)
    say(text, console)


def check_formats(formats: str | None) -> None:
    """Refuse formats that plots cannot have before anything runs."""
    if formats is not None:
        from harmonium.report.figure import known_formats

        known_formats(formats)


def _plotted(result: Result, formats: str | None) -> list[Path]:
    """The files of a run's plot; it is redrawn if formats are named."""
    place = result.folder / "run.png"
    if formats is None:
        return [place]
    from harmonium.report import figure

    with figure.formats(formats):
        result.plot()
        return figure.plot_paths(place)


def say_plots(paths: Sequence[Path]) -> None:
    """Print where plots are, a line each, however many formats they have."""
    endings: dict[Path, list[str]] = {}
    for path in paths:
        endings.setdefault(path.with_suffix(""), []).append(path.suffix)
    for path, (first, *others) in endings.items():
        say(f"plot     {path}{first}{''.join(f', {one}' for one in others)}")


@contextmanager
def watched(
    as_json: bool, again: str = "harmonium resume", log: Callback | None = None
) -> Iterator[Callback]:
    """A watcher for a run; if the run fails, a note tells how to continue.

    With a `log` that follows the run, nothing else is shown.
    """
    as_json = as_json or log is not None
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.core.callbacks import Callback
        from harmonium.report.run_progress import watcher_for

    watcher = log or (Callback() if as_json else watcher_for(err))
    try:
        with long_work(err, as_json, "starting"):
            yield watcher
    except (HarmoniumError, KeyboardInterrupt) as error:
        where = getattr(watcher, "folder", None)
        curable = not isinstance(error, (ConfigError, BudgetSpent, Diverged))
        if where is not None and (where / "recipe.yaml").exists() and curable:
            watcher.note(f"nothing is lost; continue with: {again} {where}")
        raise
    finally:
        watcher.close()


def show_result(result: Result, as_json: bool, formats: str | None = None) -> None:
    """Show the results of a run: its figures, if it could be evaluated, and where its files are."""
    from harmonium.report.display import long_work
    from harmonium.runs.privacy_report import summary

    with long_work(err, as_json, "drawing"):
        private = summary(result.folder)
        plots = _plotted(result, formats)
    if as_json:
        print(json.dumps(result_tree(result)))
        return
    if result.figures:
        _show_figures(result)
    if result.sites:
        show_sites(result.sites)
    if result.bounds:
        _show_bounds(result.bounds)
    if result.global_objective:
        _show_objective(result.global_objective)
    for text in _remarks(result, private):
        say_prose(text)
    if result.recipe.method.name == "diagnosis":
        say(f"finding  harmonium diagnose {result.folder}")
    encoder = result.folder / "encoder.safetensors"
    say(f"run      {result.folder}")
    say_plots(plots)
    if encoder.exists():
        say(f"encoder  {encoder}")


def result_tree(result: Result) -> dict[str, Any]:
    """A result as `--json` prints it."""
    from harmonium.runs.privacy_report import summary

    return {
        "folder": str(result.folder),
        "recipe": result.recipe.digest,
        "figures": dict(result.figures),
        "untrained": dict(result.untrained),
        "references": {name: dict(one) for name, one in result.references.items()},
        "verdict": result.verdict,
        "against": dict(result.against),
        "whitened": dict(result.whitened),
        "sites": dict(result.sites),
        "notes": list(result.notes),
        "batch_norm": result.batch_norm,
        "stopped": result.stopped,
        "privacy": summary(result.folder),
        "rounds": list(result.rounds),
    }


def _remarks(result: Result, private: str) -> Iterator[str]:
    """Lines on anonymity, BatchNorm, privacy and why a run stopped, where they apply."""
    reported = [row["reported"].get("anonymity") for row in result.rounds if "reported" in row]
    if least := [k for k in reported if k]:
        yield f"k        every centroid that left a client is of at least {min(least)} images"
    if result.batch_norm:
        yield f"BatchNorm {result.batch_norm}"
    if private:
        yield f"privacy  {private}"
    if result.stopped:
        yield f"stopped  {result.stopped}"


def _show_bounds(bounds: Mapping[str, Any]) -> None:
    """Lower bounds of mutual information of a run with user verification, none of them clipped."""
    meaning = {
        "total": ("two views, over all clients", None),
        "local": ("two views, within a client", None),
        "client": ("a view and its client", bounds["entropy"]),
        "labels": ("both views and the label, where clients differ by labels alone", None),
    }
    rows = [
        {"at least": bounds[key], "of at most": most, "information of": what}
        for key, (what, most) in meaning.items()
        if key in bounds
    ]
    age = f"oldest {counted(bounds['oldest'], 'round')} ago"
    age = f"{bounds['clients']} of {bounds['of']} clients, {age}"
    show_table(rows, f"Bounds in nats; logit scale {bounds['scale']:g}; {age}", digits=2)
    if any(row["at least"] < 0 for row in rows):
        say_prose("note     information is never below 0: a negative bound says nothing yet")


def show_sites(figures: Mapping[str, Any]) -> None:
    """The figures of an evaluation at the sites."""
    from harmonium.report.sites import LEGEND, remarks, rows, title

    show_table(rows(figures), title(figures), digits=1, unbroken=["site"])
    if "all" in figures:
        say_prose(LEGEND)
    for text in remarks(figures):
        say_prose(f"sites    {text}")


def _show_objective(objective: Mapping[str, Any]) -> None:
    """The loss over all clients' images, beside the losses over each client's own."""
    locals_ = list(objective.get("by_client", {}).values())
    rows = [
        {"loss": "over the images of all clients", "value": objective["value"]},
        {"loss": "over each client's own images, mean", "value": objective["local"]},
    ]
    if len(locals_) > 1:
        rows += [
            {"loss": "the lowest of a client", "value": min(locals_)},
            {"loss": "the highest of a client", "value": max(locals_)},
        ]
    if "gradient_norm" in objective:
        rows.append({"loss": "gradient norm over all clients", "value": objective["gradient_norm"]})
    of = f"{objective['clients']} of {objective['of']} clients"
    show_table(rows, f"Global objective ({objective['objective']}); {of}", digits=3)


def _show_figures(result: Result) -> None:
    """Probes beside their references, label-free figures, and the comparison in a sentence."""
    after, before = result.figures, result.untrained
    title = "Test accuracy in percent; encoder frozen"
    columns = {"trained": after}
    if result.whitened:
        columns["trained,\nwhitened"] = result.whitened["figures"]
    columns |= {"untrained": before}
    columns |= {_BRIEF.get(name, name): one for name, one in result.references.items()}
    show_table(probe_rows(columns), title, digits=1)
    if result.references:
        say_prose(REFERENCE_LEGEND)
    health = after["health"]
    names = ("spread", "effective_rank", "uniformity", "alignment")
    show_table(
        [
            {"health": k.replace("_", " "), "trained": health[k], "untrained": before["health"][k]}
            for k in names
        ],
        "Label-free figures of the features",
        digits=2,
    )
    say_prose(HEALTH_LEGEND)
    warnings = list(health["warnings"])
    for warning in warnings:
        say_prose(f"warning  {warning}")
    if result.verdict:
        say_prose(f"verdict  {result.verdict}")
    if text := _whitening_words(result.whitened.get("changes", {})):
        say_prose(f"whitened {text}")
    for reason in result.reasons:
        if reason not in warnings:
            say_prose(f"probably {reason}")


def probe_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy, balanced accuracy and AUROC of every probe; the first column is the encoder's."""
    from harmonium.evaluation.evaluator import probes_of
    from harmonium.report.metric_names import heading, times

    after = next(iter(columns.values()))
    rows = []
    for probe in probes_of(after):
        rows.append(
            {
                "probe": heading(probe).removeprefix("linear, "),
                **{name: times(100, one.get(probe)) for name, one in columns.items()},
            }
        )
        for kind, called in (("balanced", "balanced"), ("auroc", "AUROC")):
            if kind in after:
                values = {
                    name: times(100, one.get(kind, {}).get(probe)) for name, one in columns.items()
                }
                rows.append({"probe": f"  {called}", **values})
    return rows


def _whitening_words(changes: Mapping[str, Mapping[str, Any]]) -> str:
    """What whitening changes, by probe, beyond the noise of the test part."""
    from harmonium.evaluation.verdict import by

    words = {"better": "better", "worse": "worse", "tie": "no clear difference"}
    texts = [
        f"{words[one['outcome']]} {by(probe)} "
        f"({100 * one['whitened']:.1f} against {100 * one['plain']:.1f} %)"
        for probe, one in changes.items()
    ]
    return f"Against plain features: {'; '.join(texts)}." if texts else ""


REFERENCE_LEGEND = (
    "balanced: mean recall over classes; commonest class: always predicting the most frequent "
    "training label; whitened pixels: decorrelated along their leading principal directions, "
    "without labels"
)
HEALTH_LEGEND = (
    "spread: distance between images, 1 for random directions, near 0 if collapsed; effective "
    "rank: directions in use; uniformity, alignment (distance between views of an image): lower is "
    "better"
)
_BRIEF = {  # for narrow terminals
    "raw pixels": "raw\npixels",
    "whitened pixels": "whitened\npixels",
    "commonest class": "commonest\nclass",
}
