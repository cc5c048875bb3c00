"""`harmonium export` and `harmonium verify`: hand an encoder over, and check one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harmonium.cli.terminal import Json, err, say, say_prose
from harmonium.core.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", help="The bundle's folder, new or empty.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Sign with this private key; a federation's run has its own."),
    ] = None,
    whiten: Annotated[
        str | None,
        typer.Option("--whiten", metavar="all|N", help="Whiten features, or N directions of them."),
    ] = None,
    licence: Annotated[
        str, typer.Option("--licence", help="The terms of use, for the model card.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write a run's encoder as a bundle: weights, ONNX, program, model card, golden outputs.

    For example: harmonium export runs/first --out encoder
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "exporting"):
        from harmonium.handover.export import export

        bundle = export(run, out, key=key, whiten=_whitened(whiten), licence=licence)
    if as_json:
        print(json.dumps({**asdict(bundle), "folder": str(bundle.folder)}))
        return
    for name in sorted(bundle.files):
        say(f"file     {bundle.folder / name}")
    for name, why in bundle.left_out.items():
        say_prose(f"without  {name}: {why}")
    if bundle.signed_by:
        say(f"signed   by the key {bundle.signed_by}")
    else:
        say_prose(f"not signed: {bundle.unsigned}")
    say(f"bundle   {bundle.folder}; harmonium verify {bundle.folder} checks it")


def _whitened(text: str | None) -> bool | int:
    if text is None or text == "all":
        return text == "all"
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"--whiten is '{text}': give all, or how many directions, e.g. 64")
    return int(text)


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="The public key of whoever signed it, e.g. a kit's server.pub."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a bundle offline: digests, signature, and that every form gives the same features.

    For example: harmonium verify encoder --key server.pub
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.handover.verify import Check, verify

    def watch(check: Check) -> None:
        if not as_json:
            say(str(check))

    checks = verify(folder, key=key, watch=watch)
    if as_json:
        print(json.dumps({"folder": str(folder), "checks": [asdict(check) for check in checks]}))
