"""A table that takes the width of its terminal: no word is split, and what is left out is named."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harmonium.errors import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

EDGES, BETWEEN = 2, 3  # columns of a terminal that a table needs around and between its own
LONG = 40  # letters from which on a word, such as a path, may be split


@dataclass(frozen=True)
class Fitting:
    """Cells as text, and how they may be laid out; a `rich` console prints it."""

    headings: list[str]
    cells: list[list[str]]
    numeric: Sequence[bool]  # columns of numbers, which are set to the right
    whole: Sequence[bool]  # columns whose cells stay on one line; headings go on in the next
    title: str = ""

    @property
    def least(self) -> int:
        """The width at which every column is there and no word is split."""
        return _width([self._least(column) for column in range(len(self.headings))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table at the width that there is, and a line on what did not fit."""
        from rich.text import Text

        widths = self.widths(options.max_width)
        yield self._drawn(widths)
        if hidden := self.headings[len(widths) :]:
            columns = counted(options.max_width, "column")
            yield Text(f"not shown in {columns}: {', '.join(hidden)}", style="dim")

    def widths(self, width: int) -> list[int]:
        """The width of every column that is shown, from the left; the first one always is."""
        widths = [self._least(column) for column in range(len(self.headings))]
        while len(widths) > 1 and _width(widths) > width:
            widths.pop()
        if _width(widths) > width:
            return [max(1, width - EDGES)]
        lengths = [[_longest(cell) for cell in row] for row in (self.headings, *self.cells)]
        wanted = [max(column) for column in zip(*lengths, strict=True)]
        for _ in range(width - _width(widths)):  # each to the column that has most to put away
            load = [0.0] * len(widths)
            for row in lengths:
                lines = [length / held for length, held in zip(row, widths, strict=False)]
                load[lines.index(max(lines))] += max(lines)
            open_ = [i for i, held in enumerate(widths) if held < wanted[i]]
            if not open_:
                break
            widths[max(open_, key=lambda i: load[i])] += 1
        return widths

    def _least(self, column: int) -> int:
        """The longest of what is not split in a column."""
        cells = [row[column] for row in self.cells]
        texts = [self.headings[column], *([] if self.whole[column] else cells)]
        words = [min(len(word), LONG) for text in texts for word in text.split()]
        kept = [_longest(cell) for cell in cells] if self.whole[column] else []
        return max(1, *words, *kept, 1)

    def _drawn(self, widths: list[int]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        made = Table(
            title=self.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
        )
        # Text objects, because a plain string would be read as markup and "[x]" would vanish.
        for heading, width, right in zip(self.headings, widths, self.numeric, strict=False):
            made.add_column(
                Text(_wrapped(heading, width)),
                justify="right" if right else "left",
                width=width,
                no_wrap=True,
                overflow="crop",
            )
        for row in self.cells:
            made.add_row(*(Text(_wrapped(c, w)) for c, w in zip(row, widths, strict=False)))
        return made


def _width(widths: Sequence[int]) -> int:
    """Of a table with such columns."""
    return EDGES + sum(widths) + BETWEEN * (len(widths) - 1)


def _longest(text: str) -> int:
    """Of the lines of a text."""
    return max(map(len, text.splitlines() or [""]))


def _wrapped(text: str, width: int) -> str:
    r"""Text on as many lines as it needs, broken between words.

    >>> _wrapped("linear, 10 labels a class", 10)
    'linear, 10\nlabels a\nclass'
    """
    lines = [
        textwrap.wrap(line, width, break_on_hyphens=False) or [""] for line in text.split("\n")
    ]
    return "\n".join(part for line in lines for part in line)
