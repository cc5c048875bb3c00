"""The commands about data: list, fetch and show data sets, and split them among clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from harmonium.cli.terminal import (
    Changes,
    Formats,
    Json,
    check_formats,
    err,
    out,
    say,
    say_plots,
    say_prose,
    show_table,
)
from harmonium.core.errors import ConfigError

if TYPE_CHECKING:
    from harmonium.data.heterogeneity import Heterogeneity
    from harmonium.data.images import Dataset, Integers
    from harmonium.data.partition import Split
    from harmonium.recipe.schema import Recipe

FLAT = 130  # width of a terminal from which each data set fits on a line or two
ENDS = 6  # rows shown at either end of a long table


class SplitContents(NamedTuple):
    """The number of images of each class or style at each client."""

    counts: Integers  # (clients, values)
    names: list[str]  # of the values; empty if there are neither classes nor styles
    what: str  # what the values are, e.g. class


data = typer.Typer(
    suggest_commands=False, no_args_is_help=True, help="Fetch data sets, and show them."
)

Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it here: .png, .pdf or .svg.")]


def datasets(as_json: Json = False) -> None:
    """List the data sets."""
    from harmonium.data.catalogue import catalogue

    known = catalogue()
    if as_json:
        print(json.dumps(known))
        return
    rows = [{"name": name, **_facts(about)} for name, about in known.items()]
    if out.width < FLAT:
        rows = [_stacked(row) for row in rows]
    show_table(rows, unbroken=("name", "shape", "images", "here"))


@data.command("fetch")
def fetch(
    name: str,
    source: Annotated[
        Path | None, typer.Option("--from", help="Use this archive or folder instead.")
    ] = None,
) -> None:
    """Download a data set and check it.

    For example: harmonium data fetch cifar10
    """
    from harmonium.data.sources.fetch import fetch
    from harmonium.report.run_progress import transfer

    with transfer(err) as report:
        where = fetch(name, from_path=source, progress=report)
    say(f"{name} is in {where}")


@data.command("show")
def show(
    name: str,
    changes: Changes = None,
    plot: Plot = None,
    formats: Formats = None,
    as_json: Json = False,
) -> None:
    """Show what a data set holds.

    For example: harmonium data show digits --plot digits.png
    """
    from harmonium.report.display import long_work

    _check_ending(plot)
    check_formats(formats)
    if formats is not None and plot is None:
        raise ConfigError(f"--formats is for a plot: name its file, e.g. --plot {name}.png")
    with long_work(err, as_json, "reading the data"):
        from harmonium.data.catalogue import examples, overview

        dataset = _recipe(name, changes).data.load()
        about = overview(dataset)
        if plot is not None:
            from harmonium.core.paths import make_folder
            from harmonium.report import figure
            from harmonium.report.split_plots import SHEET, contact_sheet

            make_folder(plot.absolute().parent)
            rows, left_out = examples(dataset, *SHEET)
            with figure.formats(formats):
                contact_sheet(plot, rows, about["name"], left_out)
                about["plots"] = [str(path) for path in figure.plot_paths(plot)]
    if as_json:
        print(json.dumps(about))
        return
    _notes(dataset.notes)
    _show_overview(about)


@data.command("split")
def split(
    name: str,
    changes: Changes = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The folder for the files.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Split a data set among clients, show the split and save it.

    For example: harmonium data split digits split=dirichlet split.alpha=0.1 clients=5
    """
    from harmonium.report.display import long_work

    _check_ending(plot)
    with long_work(err, as_json, "splitting the data"):
        from harmonium.data.heterogeneity import heterogeneity
        from harmonium.data.partition import make_split
        from harmonium.report.figure import FORMATS

        recipe = _recipe(name, changes)
        dataset = recipe.data.load()
        new_split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
        measured = heterogeneity(new_split, dataset)
        tree = recipe.tree()
        about = {
            "recipe": {key: tree[key] for key in ("data", "split", "clients", "seed")},
            "digest": new_split.digest,
            "notes": [*dataset.notes, *new_split.notes],
            "figures": measured.figures,
            "clients": [
                {
                    "client": number,
                    **({"name": new_split.names[number]} if new_split.names else {}),
                    **({"newcomer": True} if number in new_split.newcomers else {}),
                    **row,
                }
                for number, row in enumerate(measured.rows())
            ],
        }
        title = f"{tree['data']['name']}, split by {tree['split']['name']}"
        contents = _contents(measured, dataset)
        files = _write(folder or _folder(tree, new_split), plot, new_split, about)
        _draw([files[kind] for kind in (*FORMATS, "plot") if kind in files], contents, title)
    if as_json:
        print(json.dumps({**about, "files": {kind: str(path) for kind, path in files.items()}}))
        return
    _notes(about["notes"])
    say(f"{title}; digest {new_split.digest[:12]}")
    _show_split(about, contents)
    say("\n".join(["", *(f"{kind:<8} {path}" for kind, path in files.items())]))


# ---- what `split` writes -------------------------------------------------------------------------


def _folder(tree: dict[str, Any], split: Split) -> Path:
    """The default folder of a split; of a name `module:Class` only the class is used."""
    from harmonium.core.paths import home

    words = [tree[section]["name"].rpartition(":")[2] for section in ("data", "split")]
    return home() / "splits" / "-".join([*words, split.digest[:8]])


def _write(folder: Path, plot: Path | None, split: Split, about: dict[str, Any]) -> dict[str, Path]:
    """Save the split and its figures; returns all files, plots to be drawn later included.

    Other files in the folder are left alone.
    """
    from harmonium.core.files import write_atomic
    from harmonium.core.paths import make_folder
    from harmonium.report.figure import FORMATS

    if (make_folder(folder) / "recipe.yaml").exists():
        raise ConfigError(f"{folder} holds a run, whose split must not change: use another --out")
    files = {kind: folder / f"split.{kind}" for kind in ("npz", "json", *FORMATS)}
    if plot is not None:
        make_folder(plot.absolute().parent)
        files["plot"] = plot
    split.save(files["npz"])
    write_atomic(files["json"], (json.dumps(about, indent=1) + "\n").encode())
    return files


def _draw(paths: list[Path], contents: SplitContents, title: str) -> None:
    from harmonium.report.split_plots import split_map, split_sizes

    for path in paths:
        if contents.names:
            split_map(path, contents.counts, contents.names, title, contents.what)
        else:
            split_sizes(path, contents.counts[:, 0], title)


def _contents(measured: Heterogeneity, dataset: Dataset) -> SplitContents:
    """Counts by class if any is known, else by style, else of all images."""
    import numpy as np

    from harmonium.data.catalogue import name_of
    from harmonium.data.heterogeneity import style_factor

    sizes = measured.columns["size"].data
    if measured.classes is not None:
        counts, names, what = measured.classes, dataset.classes, "class"
    elif measured.styles is not None:
        what = style_factor(dataset.train) or ""
        counts, names = measured.styles, dataset.names.get(what, ())
    else:
        return SplitContents(sizes[:, None], [], "")
    called = [name_of(names, value) for value in range(counts.shape[1])]
    unknown = sizes - counts.sum(1)
    if unknown.any():
        counts, called = np.column_stack([counts, unknown]), [*called, "unknown"]
    return SplitContents(counts, called, what)


# ---- what is shown -------------------------------------------------------------------------------


def _recipe(name: str, changes: list[str] | None) -> Recipe:
    from harmonium.recipe.overrides import apply_changes
    from harmonium.recipe.schema import Recipe

    for change in changes or []:
        if change.startswith("data="):
            raise ConfigError(f"the data set is given twice, as {name} and by {change}")
    return Recipe.from_tree(apply_changes({"data": name}, changes or []))


def _check_ending(plot: Path | None) -> None:
    """Raise an error for an unknown plot format before anything is read."""
    if plot is not None:
        from harmonium.report.figure import plot_format

        plot_format(plot)


def _notes(notes: Any) -> None:
    for note in notes:
        say_prose(f"note: {note}", err)


def _facts(about: dict[str, Any]) -> dict[str, str]:
    """The row of a data set in the list, as text."""
    train, test = about["train"], about["test"]
    return {
        "what": about["what"],
        "shape": "x".join(map(str, about["shape"] or ())) or "any",
        "classes": str(about["classes"] or ""),
        "images": (f"{train:,}" if train else "") + (f" + {test:,}" if test else ""),
        "licence": about["licence"] or "",
        "here": about["here"],
    }


def _stacked(row: dict[str, str]) -> dict[str, str]:
    """The row with its short cells stacked, for narrow terminals."""
    classes = f"{row['classes']} classes" if row["classes"] else ""
    return {
        "name": f"{row['name']}\n{row['here']}",
        "what": row["what"],
        "images": "\n".join(filter(None, (row["shape"], classes, row["images"]))),
        "licence": row["licence"],
    }


def _show_overview(about: dict[str, Any]) -> None:
    shape = "x".join(map(str, about["shape"]))
    say(f"{about['name']}: images of {shape}; digest {about['digest'][:12]}")
    columns = {part: part for part in about["parts"]}
    classes = list(about["classes"])
    if any(about["unlabelled"].values()):
        classes.append({"name": "unknown", **about["unlabelled"]})
    for what, rows in (("class", classes), ("style", about["styles"]), *about["columns"].items()):
        shown = _ends(rows)
        if rows:
            every = {"name": "all", **about["parts"]}
            show_table([*shown, every], columns={"name": what, **columns})
        if len(shown) < len(rows):
            say(f"{len(rows) - len(shown)} in between are not shown; --json has them all\n")
    say("Levels from 0 to 1, over all images but the test part")
    known = {1: ("grey",), 3: ("red", "green", "blue")}
    count = about["shape"][2]
    names = known.get(count) or tuple(str(number) for number in range(1, count + 1))
    show_table(
        [{"channel": c, **f} for c, f in zip(names, about["channels"], strict=True)], digits=4
    )
    say_plots([Path(path) for path in about.get("plots", ())])


def _show_split(about: dict[str, Any], contents: SplitContents) -> None:
    from harmonium.report.heatmap import heat_map, size_bars

    figures, rows = about["figures"], about["clients"]
    show_table([{_WORDS[key]: figures[key] for key in figures if key in _WORDS}])
    show_table(_figure_rows(figures), by_row=True)
    shown = _ends(rows)
    show_table(shown, columns={k: _SHORT[k] for k in rows[0] if k in _SHORT}, digits=2)
    if len(shown) < len(rows):
        say(f"clients {ENDS} to {len(rows) - ENDS - 1} are not shown; split.json has them all\n")
    if contents.names:
        plural = "classes" if contents.what == "class" else f"{contents.what}s"
        out.print(heat_map(out, contents.counts, contents.names, plural))
    else:
        out.print(size_bars(out, contents.counts[:, 0]))


_WORDS = {  # figures of all clients together
    "clients": "clients",
    "pictures": "images",
    "dropped": "dropped",
    "repeated": "repeated",
    "unlabelled": "unlabelled",
    "size_gini": "Gini of sizes",
}
_QUANTITIES = {  # figures over the clients
    "size": "images of a client",
    "classes": "classes",
    "classes_1_percent": "classes of 1 % or more",
    "dominant_share": "share of the commonest class",
    "label_entropy_bits": "label entropy (bits)",
    "label_js": "label JS distance",
    "label_emd": "label EMD",
    "styles": "styles",
    "style_js": "style JS distance",
    "angle_bins": "angle bins",
    "style_distance": "style distance beyond chance",
    "style_chance": "style distance by chance",
}
_SHORT = {  # the columns of the table of clients
    "client": "client",
    "name": "name",
    "size": "size",
    "classes": "classes",
    "label_entropy_bits": "bits",
    "label_js": "JS",
    "label_emd": "EMD",
    "styles": "styles",
    "angle_bins": "angles",
    "style_distance": "style",
}


def _ends(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, or the first and the last few if there are many."""
    return rows if len(rows) <= 3 * ENDS else rows[:ENDS] + rows[-ENDS:]


def _figure_rows(figures: dict[str, float | int]) -> list[dict[str, Any]]:
    """A row for each quantity with its minimum, mean and maximum over the clients."""
    rows = []
    for name, words in _QUANTITIES.items():
        values = {way: figures.get(f"{name}_{way}") for way in ("min", "mean", "max")}
        values["mean"] = figures.get(name, values["mean"])
        if values["mean"] is not None:
            rows.append({"over clients": words, **values})
    return rows
