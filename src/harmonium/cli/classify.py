"""The commands that train a classifier on an encoder's features, and apply it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harmonium.cli.terminal import Json, err, say, say_prose, show_table
from harmonium.cli.use import (
    Batch,
    CorruptFiles,
    Device,
    EncoderPath,
    Images,
    Imports,
    PathColumn,
    Whiten,
    checked_corrupt,
    import_modules,
    noting,
    whitened,
)
from harmonium.core.errors import ConfigError, counted

if TYPE_CHECKING:
    from harmonium.use.probe import Predictions, Probe

SHOWN = 12  # classes whose confusions are printed

classify = typer.Typer(
    suggest_commands=False,
    no_args_is_help=True,
    help="Train a classifier on an encoder's features from labels, and apply it.",
)


@classify.command("fit")
def fit(
    encoder: EncoderPath,
    images: Images,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels",
            help="A .csv table: image, label and, where they are known, groups such as patients.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder or .safetensors file of the probe; beside the encoder if left out.",
        ),
    ] = None,
    folds: Annotated[int, typer.Option("--folds", help="Parts that are predicted in turn.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of the division into these parts.")] = 0,
    column: PathColumn = "path",
    label: Annotated[str, typer.Option("--label-column", help="The column of labels.")] = "label",
    group: Annotated[
        str, typer.Option("--group-column", help="The column of what must stay together.")
    ] = "group",
    whiten: Whiten = None,
    corrupt: CorruptFiles = "skip",
    device: Device = "auto",
    batch: Batch = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Train a probe from labels, with validation, and keep it beside the encoder.

    For example: harmonium classify fit runs/first images --labels labels.csv
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.use.labels import Columns
        from harmonium.use.probe import fit_probe

        import_modules(imports)
        probe = fit_probe(
            *(encoder, *images),
            labels=labels,
            out=out or _beside(encoder, labels, images[0]),
            columns=Columns(column, label, group),
            folds=folds,
            seed=seed,
            whiten=whitened(whiten),
            batch=batch,
            device=device,
            corrupt=checked_corrupt(corrupt),
            note=noting(as_json),
        )
    if as_json:
        print(json.dumps({"probe": str(probe.path), **probe.about}))
        return
    _show(probe)


@classify.command("apply")
def apply(
    probe: Annotated[Path, typer.Argument(metavar="PROBE", help="Its folder or its file.")],
    images: Images,
    out: Annotated[Path, typer.Option("--out", help="The table of predictions, a .csv file.")],
    encoder: Annotated[
        Path | None, typer.Option("--encoder", help="Its encoder, if that is not beside it.")
    ] = None,
    column: PathColumn = "path",
    corrupt: CorruptFiles = "skip",
    device: Device = "auto",
    batch: Batch = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Classify images; a stopped command continues when it is started again.

    For example: harmonium classify apply runs/first/probes/labels images --out predictions.csv
    """
    from harmonium.report.display import long_work

    note = noting(as_json)
    with long_work(err, as_json, "loading"):
        from harmonium.use.probe import apply_probe

        import_modules(imports)
        try:
            predictions = apply_probe(
                *(probe, *images),
                out=out,
                encoder=encoder,
                batch=batch,
                device=device,
                corrupt=checked_corrupt(corrupt),
                column=column,
                note=note,
            )
        except KeyboardInterrupt:
            note("nothing is lost: the same command continues where it was")
            raise
    counts = _counts(predictions)
    if as_json:
        print(json.dumps({"predictions": str(out), "predicted": counts, **predictions.about}))
        return
    show_table(
        [
            {"class": name, "images": len(sure), "mean probability": sum(sure) / len(sure)}
            for name, sure in counts.items()
            if sure
        ],
        digits=2,
    )
    say(f"images      {len(predictions.names):,}")
    say(f"predictions {out}")


def _beside(encoder: Path, labels: Path | None, images: Path) -> Path:
    """The usual folder of a probe, named after its labels."""
    folder = encoder if encoder.is_dir() else encoder.parent
    name = (labels or images.absolute()).stem
    if not name:
        raise ConfigError("name the probe's folder with --out")
    return folder / "probes" / name


def _counts(predictions: Predictions) -> dict[str, Any]:
    """The probabilities of the predicted class of all images, by class."""
    sure: dict[str, list[float]] = {name: [] for name in predictions.about["classes"]}
    best = predictions.probabilities.max(axis=1).tolist()
    for name, probability in zip(predictions.predicted, best, strict=True):
        sure[name].append(probability)
    return sure


def _show(probe: Probe) -> None:
    """Print what a probe is worth, beside what needs no encoder."""
    from harmonium.use.probe import too_few

    about, figures = probe.about, probe.figures
    columns: dict[str, Mapping[str, Any]] = {"encoder": figures, **about["references"]}
    rows = [
        {
            "features": name,
            "accuracy": (100 * one["accuracy"], 100 * figures["error"])
            if one is figures
            else 100 * one["accuracy"],
            "balanced": 100 * one["balanced"],
            "AUROC": None if one["auroc"] is None else 100 * one["auroc"],
        }
        for name, one in columns.items()
    ]
    groups = f" of {counted(figures['groups'], 'group')}" if figures["groups"] else ""
    images = f"{counted(figures['images'], 'labelled image')}{groups} in {figures['folds']} parts"
    title = f"{images}, each part predicted from the others; percent"
    show_table(rows, title, digits=1)
    say_prose(
        "balanced: mean recall over classes; AUROC: mean over classes, each against the others; "
        "commonest class: always predicting the most frequent label"
    )
    if len(probe.classes) <= SHOWN:
        _show_confusion(probe)
    say_prose(f"verdict  {_verdict(about)}")
    if not too_few(about["labels"]):
        sure, right = 100 * figures["confidence"], 100 * figures["accuracy"]
        say_prose(
            f"certain  mean probability of the predicted class {sure:.1f} %, right {right:.1f} %"
        )
    say(f"penalty  {about['strength']:g}; temperature {about['temperature']:.2f}")
    say(f"encoder  {about['encoder']}")
    say(f"probe    {probe.path}")


def _show_confusion(probe: Probe) -> None:
    """Print how many images of each class are taken for which."""
    matrix = probe.figures["confusion"]
    rows = [
        {"class": name, **dict(zip(probe.classes, row, strict=True))}
        for name, row in zip(probe.classes, matrix, strict=True)
    ]
    show_table(rows, "Images of each class (rows) by predicted class (columns)", digits=0)


def _verdict(about: Mapping[str, Any]) -> str:
    """One sentence: whether the encoder helps, over the same images."""
    from harmonium.use.probe import too_few

    if too_few(about["labels"]):
        return "Too few labels to tell."
    behind = about["references"]["raw pixels"]["behind"]
    lead, error = 100 * behind["by"], 100 * behind["error"]
    if abs(lead) <= 2 * error:
        return f"No clear difference from raw pixels ({lead:+.1f} ± {error:.1f} points)."
    word = "Better" if lead > 0 else "Worse"
    return f"{word} than raw pixels by {abs(lead):.1f} ± {error:.1f} points."
