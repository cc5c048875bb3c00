"""Recipes of a paper's tables: every row in every setting, put together from one file a paper.

`fsimclr/c10-label/spectral+uv@cpu` is the row `spectral+uv` on CIFAR-10 under label skew, at a size
for a CPU; where a paper has several encoders, theirs is the third part of a setting's name, as in
`fedca/c10-iid-r50/fedae`, and numbers of clients and objectives have parts likewise, as in
`fedstyle/digit-10-ho-simsiam/ditto`. The files hold `key=value` words, so that a recipe of a table
is what a user could have typed, one layer over the other. A layer is a list of words, or a mapping
with `words` and values for names in braces in words of any layer, which may have such names too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harmonium.core.errors import ConfigError, suggest

FULL, SMALL = "full", "cpu"
FIGURES = ("published", "personal")  # what a paper may say of a row
AXES = ("data", "clients", "shift", "encoders", "objectives")  # of settings; no file has all


@dataclass(frozen=True)
class TableRecipe:
    """One recipe of a table, at either size."""

    name: str
    what: str
    parts: Mapping[str, list[Any]]  # size -> layers as the file has them
    published: float | None  # test accuracy in percent; none where the paper has no figure
    personal: float | None  # the same of clients' own features
    deviation: float | None  # of `published` over seeds, as the paper has it
    note: str  # how the paper's own code of this row differs from what is run here; often empty
    by_style: Mapping[str, Sequence[float]]  # either of every style, where the paper has them

    def layers(self, size: str) -> list[list[str]]:
        """The words of each layer, with the values that names in braces stand for."""
        parts = self.parts[size]
        whole = [part if isinstance(part, Mapping) else {"words": part} for part in parts]
        values = {key: value for part in whole for key, value in part.items() if key != "words"}
        values = {key: str(value).format(**values) for key, value in values.items()}
        return [[word.format(**values) for word in part.get("words", [])] for part in whole]


def entries(table: str, source: Mapping[str, Any]) -> Iterator[TableRecipe]:
    """Every recipe of a table's file, setting by setting."""
    axes = [source[axis] for axis in AXES if axis in source]
    for number, place in enumerate(itertools.product(*axes)):
        chosen = [axis[name] for axis, name in zip(axes, place, strict=True)]
        for row, about in source["rows"].items():
            parts = {
                size: [source["common"], *chosen, about["words"], changes]
                for size, changes in source["sizes"].items()
            }
            setting = "-".join(place)
            figures = {
                key: _figure(about.get(key, {}), number, setting) for key in (*FIGURES, "deviation")
            }
            styles = {key: figure for key, figure in figures.items() if isinstance(figure, list)}
            means = {key: sum(listed) / len(listed) for key, listed in styles.items()}
            name = f"{table}/{setting}/{row}"
            more = {"by_style": styles, "note": about.get("note", "")}
            yield TableRecipe(name, about["what"], parts, **{**figures, **means}, **more)


def _figure(figures: Any, number: int, setting: str) -> Any:
    """A figure among those of every setting in order, or by name; a list of them is by style."""
    listed = dict(enumerate(figures)) if isinstance(figures, list) else figures
    return listed.get(number, listed.get(setting))


def layers(name: str, table: str, by_name: Mapping[str, TableRecipe]) -> list[list[str]]:
    """The words behind a name such as `fsimclr/c10-label@cpu`; without a row it is the first."""
    asked, _, size = name.partition("@")
    asked += f"/{next(iter(by_name)).rpartition('/')[2]}" if asked.count("/") == 1 else ""
    if asked not in by_name or size not in ("", SMALL):
        sized = [f"{one}@{SMALL}" for one in by_name] if size == SMALL else by_name
        near = f"the only size by name is @{SMALL}"
        if asked not in by_name:
            near = suggest(f"{asked}@{SMALL}" if size == SMALL else asked, sized)
        raise ConfigError(f"unknown recipe '{name}': {near} (harmonium recipes {table} lists them)")
    return by_name[asked].layers(size or FULL)
