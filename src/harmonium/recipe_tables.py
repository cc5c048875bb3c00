"""Recipes of a paper's tables: every row in every setting, put together from one file a paper.

`fsimclr/c10-label/spectral+uv@cpu` is the row `spectral+uv` on CIFAR-10 under label skew, at a size
for a CPU. The files hold `key=value` words, so that a recipe of a table is what a user could have
typed, one layer over the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harmonium.errors import ConfigError, suggest

FULL, SMALL = "full", "cpu"


@dataclass(frozen=True)
class Entry:
    """One recipe of a table, at either size."""

    name: str
    what: str
    layers: Mapping[str, list[list[str]]]  # size -> words, layer by layer
    published: float | None  # test accuracy in percent; none where the paper has no figure


def entries(table: str, source: Mapping[str, Any]) -> Iterator[Entry]:
    """Every recipe of a table's file, setting by setting."""
    places = [(data, shift) for data in source["data"] for shift in source["shift"]]
    for number, (data, shift) in enumerate(places):
        for row, about in source["rows"].items():
            layers = {
                size: [
                    source["common"],
                    source["data"][data],
                    source["shift"][shift],
                    [word.format(hidden=changes["hidden"]) for word in about["words"]],
                    changes.get("words", []),
                ]
                for size, changes in source["sizes"].items()
            }
            name = f"{table}/{data}-{shift}/{row}"
            yield Entry(name, about["what"], layers, about["published"][number])


def layers(name: str, table: str, source: Mapping[str, Any]) -> list[list[str]]:
    """The words behind a name such as `fsimclr/c10-label@cpu`; without a row it is the first."""
    asked, _, size = name.partition("@")
    asked += f"/{next(iter(source['rows']))}" if asked.count("/") == 1 else ""
    found = {entry.name: entry for entry in entries(table, source)}
    if asked not in found or size not in ("", SMALL):
        near = suggest(asked, found) if asked not in found else f"end it with @{SMALL}, or not"
        raise ConfigError(f"unknown recipe '{name}': {near} (harmonium recipes {table} lists them)")
    return found[asked].layers[size or FULL]
