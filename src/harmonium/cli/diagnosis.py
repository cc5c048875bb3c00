"""The command that diagnoses how clients differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harmonium.cli.terminal import Json, err, say_prose, show_table
from harmonium.core.errors import ConfigError

if TYPE_CHECKING:
    from harmonium.studies.diagnosis import Finding


def diagnose(
    words: Annotated[list[str], typer.Argument(metavar="[METHOD_OR_FILE_OR_RUN] KEY=VALUE...")],
    as_json: Json = False,
) -> None:
    """Diagnose whether clients differ in content or in style, without labels.

    For example: harmonium diagnose data=digits split=rotation clients=5
    """
    from harmonium.report.display import long_work

    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]}: name one method or recipe, or none at all")
    changes = [word for word in words if "=" in word]
    with long_work(err, as_json, "diagnosing"):
        from harmonium.studies.diagnosis import diagnose as diagnose_recipe
        from harmonium.studies.diagnosis import diagnose_run

        is_run = not changes and Path(names[0]).is_dir()
        finding = diagnose_run(names[0]) if is_run else diagnose_recipe(*names, *changes)
    if as_json:
        print(json.dumps(finding.plain()))
    else:
        _show(finding)


def _show(finding: Finding) -> None:
    compared = {"images as they are": finding.whole, "content alone": finding.content}
    rows = [
        {
            "compared": name,
            "squared distance": (one.distance, one.error),
            "beyond chance": one.score,
            "directions": one.directions,
            "width": one.width if finding.share is not None else None,
        }
        for name, one in compared.items()
    ]
    title = f"{finding.clients} clients, {finding.images:,} images"
    show_table(rows, title)
    say_prose("beyond chance: at least 4 counts; width: at least 1 of content speaks for classes")
    for sentence in finding.sentences():
        say_prose(sentence)
    say_prose(f"advice   {finding.advice}")
    sizes = sorted(set(finding.sent.values()))
    much = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    say_prose(f"sent     {much} bytes by each client: sums over its images, in one answer")
    for why, clients in _clients_by_reason(finding.silent).items():
        named = ", ".join(map(str, clients[:5])) + (", …" if len(clients) > 5 else "")
        say_prose(f"missing  {len(clients)} of all clients ({named}): {why}")
    for note in finding.notes:
        say_prose(f"note     {note}")


def _clients_by_reason(silent: Mapping[int, str]) -> dict[str, list[int]]:
    """The clients that gave each reason."""
    by_reason: dict[str, list[int]] = {}
    for client, why in silent.items():
        by_reason.setdefault(why, []).append(client)
    return by_reason
