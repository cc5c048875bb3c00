"""The commands that use a trained encoder: features of images, and search among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.terminal import Json, err, say, say_prose, show_table
from harmonium.core.errors import ConfigError
from harmonium.core.paths import make_folder

if TYPE_CHECKING:
    from harmonium.use.embedding import Corrupt, Note

EncoderPath = Annotated[
    Path,
    typer.Argument(
        metavar="ENCODER", help="A run's folder, a bundle's folder or an encoder.safetensors."
    ),
]
Images = Annotated[
    list[Path],
    typer.Argument(metavar="IMAGES...", help="A folder, files, a .csv table or an .npz archive."),
]
Whiten = Annotated[
    str | None,
    typer.Option(
        "--whiten", metavar="all|N", help="Whitened features: all directions, or the leading N."
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="Where to compute: auto, cpu, cuda, cuda:1 or mps.")
]
CorruptFiles = Annotated[
    str, typer.Option("--corrupt", metavar="skip|refuse", help="Images that cannot be read.")
]
Batch = Annotated[int | None, typer.Option("--batch", help="Images of a batch.")]
PathColumn = Annotated[
    str, typer.Option("--path-column", help="Of a table: the column that names the files.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module first: the one that defines an encoder of your own.",
    ),
]


def embed(
    encoder: EncoderPath,
    images: Images,
    out: Annotated[Path, typer.Option("--out", help="The file: .parquet, .npz or .csv.")],
    whiten: Whiten = None,
    corrupt: CorruptFiles = "skip",
    device: Device = "auto",
    batch: Batch = None,
    column: PathColumn = "path",
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Write the features of many images; a stopped command continues when it is started again.

    For example: harmonium embed runs/first images --out features.parquet
    """
    from harmonium.report.display import long_work

    note = noting(as_json)
    with long_work(err, as_json, "loading"):
        from harmonium.use.embedding import embed

        import_modules(imports)
        try:
            features = embed(
                *(encoder, *images),
                out=out,
                whiten=whitened(whiten),
                batch=batch,
                device=device,
                corrupt=checked_corrupt(corrupt),
                column=column,
                note=note,
            )
        except KeyboardInterrupt:
            note("nothing is lost: the same command continues where it was")
            raise
    about = features.about
    if as_json:
        print(json.dumps({"features": str(out), **about}))
        return
    white = ", whitened" if about["whitening"] else ""
    say(f"images   {len(features):,}")
    say(f"width    {features.dimension} features an image{white}")
    say(f"encoder  {about['encoder']}")
    say(f"features {out}")


def search(
    where: Annotated[
        Path,
        typer.Argument(
            metavar="FEATURES_OR_IMAGES", help="What `harmonium embed` wrote, or images."
        ),
    ],
    queries: Annotated[
        list[str],
        typer.Argument(metavar="QUERY...", help="Image files, or names in the features."),
    ],
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", help="For images, and for queries that are files."),
    ] = None,
    count: Annotated[int, typer.Option("-k", help="Images to find for each query.")] = 10,
    sheet: Annotated[
        Path | None, typer.Option("--sheet", help="Draw a contact sheet: .png, .pdf or .svg.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page with thumbnails in one file.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option("--images", help="Where the images of the features are, for thumbnails."),
    ] = None,
    whiten: Whiten = None,
    device: Device = "auto",
    column: PathColumn = "path",
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Find the images that are nearest to query images, by the cosine of their features.

    For example: harmonium search features.parquet north/0001.png --images images --html found.html
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.report.figure import plot_format
        from harmonium.use.search import search

        if sheet is not None:
            plot_format(sheet)
        if page is not None and page.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--html {page}: name a file that ends in .html")
        import_modules(imports)
        found = search(
            where,
            *queries,
            encoder=encoder,
            k=count,
            images=images,
            whiten=whitened(whiten),
            device=device,
            column=column,
            note=noting(as_json),
        )
        for path, write in ((sheet, found.plot), (page, found.write_page)):
            if path is not None:
                make_folder(path.absolute().parent)
                write(path)
    files = {"sheet": sheet, "page": page}
    if as_json:
        written = {name: str(path) for name, path in files.items() if path}
        print(json.dumps({**found.plain(), **written}))
        return
    for query, names, cosines in zip(found.queries, found.names, found.cosines, strict=True):
        rows = [
            {"": place, "cosine": cosine, "image": name}
            for place, (name, cosine) in enumerate(zip(names, cosines, strict=True), 1)
        ]
        show_table(rows, f"Nearest to {query}, of {found.searched:,} images", digits=3)
    for name, path in files.items():
        if path is not None:
            say(f"{name:<8} {path}")


# ---- what the commands share ---------------------------------------------------------------------


def noting(as_json: bool) -> Note:
    """What prints notes beside the results; with `--json`, nothing."""

    def note(text: str) -> None:
        if not as_json:
            say_prose(f"note: {text}", err)

    return note


def whitened(text: str | None) -> bool | int:
    """The value of `--whiten` as `load_encoder` has it.

    >>> whitened(None), whitened("all"), whitened("32")
    (False, True, 32)
    """
    if text is None or text == "all":
        return text is not None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--whiten {text}: use all, or a number of directions")
    return int(text)


def checked_corrupt(text: str) -> Corrupt:
    """The value of `--corrupt`."""
    if text not in ("skip", "refuse"):
        raise ConfigError(f"--corrupt {text}: use skip or refuse")
    return "skip" if text == "skip" else "refuse"


def import_modules(names: list[str] | None) -> None:
    """Import the modules that define a user's encoder, as the user asks for."""
    import importlib

    for name in names or []:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (someone else's code may raise anything)
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--import {name}: it cannot be imported ({why})") from None
