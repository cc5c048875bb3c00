"""A table that takes the width of its terminal: no word is split, and no column is left out."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

EDGES, BETWEEN = 2, 3  # columns of a terminal that a table needs around and between its own
CLOSER = 2  # between its own, where the whole table fits in that way
_FEW = re.compile(r"(\d+) labels? a class")  # is told in one word where it would take many lines
MANY = 100  # rows that decide on widths
LONG = 40  # letters from which on a word, such as a path, may be split
_LABEL = re.compile(  # of a line of prose; what goes on in the next line begins below the text
    r"(?:[A-Za-z]+(?: [A-Za-z]+)? {2,}|(?:whitened|probably|objective|transport|[bB]atch[nN]orm) "
    r"|note: | {10})(?=\S)"
)
_COMMAND = re.compile(r"`[^`]+`|\bharmonium [^;,()`]+")  # stays on one line, to be copied
_GLUE = "\0"  # a space at which no line ends


@dataclass(frozen=True)
class Fitting:
    """Cells as text, and how they may be laid out; a `rich` console prints it."""

    headings: list[str]
    cells: list[list[str]]
    numeric: Sequence[bool]  # columns of numbers, which are set to the right
    whole: Sequence[bool]  # columns whose cells stay on one line; headings go on in the next
    title: str = ""
    between: int = BETWEEN

    @property
    def least(self) -> int:
        """The width at which every column is there and no word is split."""
        return self._width([self._least(column) for column in range(len(self.headings))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table at the width that there is; columns that do not fit follow in further ones."""
        from rich.segment import Segment
        from rich.style import Style
        from rich.text import Text

        shortened = dict[str, str]()
        for number, made in enumerate(self.pieces(options.max_width)):
            widths = made.widths(options.max_width)
            blank, is_heading = " " * made._width(widths), True
            title = [self.title] if self.title and not number else []
            for line in [*title, blank, *made._lines(widths, shortened), blank]:
                is_heading = is_heading and "─" not in line
                yield Segment(line, Style(bold=True) if is_heading else None)
                yield Segment.line()
        for brief, full in shortened.items():
            yield Text(f"{brief}: {full}", style="dim")

    def pieces(self, width: int) -> Iterator[Fitting]:
        """The table, or several with fewer columns; what names a row stands in each of them."""
        closer = replace(self, between=CLOSER)
        if self.least > width >= closer.least:
            yield closer
            return
        lead, rest = list[int](), list(range(len(self.headings)))
        while rest:
            columns = [*lead, *rest]
            shown = len(self._of(columns).widths(width))
            if lead and shown <= len(lead):  # no room for a further one beside these
                lead.pop()
                continue
            yield self._of(columns[:shown])
            rest = columns[shown:]
            lead = [column for column in range(self._naming) if column not in rest]

    @property
    def _naming(self) -> int:
        """How many columns, from the left, tell rows apart."""
        for count in range(1, len(self.headings)):
            if len({tuple(row[:count]) for row in self.cells}) == len(self.cells):
                return count
        return 1

    def _of(self, columns: Sequence[int]) -> Fitting:
        """The same table with some of its columns."""
        return replace(
            self,
            headings=[self.headings[n] for n in columns],
            cells=[[row[n] for n in columns] for row in self.cells],
            numeric=[self.numeric[n] for n in columns],
            whole=[self.whole[n] for n in columns],
        )

    def widths(self, width: int) -> list[int]:
        """The width of every column that is shown, from the left; the first one always is."""
        widths = [self._least(column) for column in range(len(self.headings))]
        while len(widths) > 1 and self._width(widths) > width:
            widths.pop()
        if self._width(widths) > width:
            return [max(1, width - EDGES)]
        rows = Counter(tuple(map(_longest, row)) for row in (self.headings, *self.cells))
        lengths = list(rows)[:MANY]  # of many rows the first ones say enough
        wanted = [max(column) for column in zip(*rows, strict=True)]
        for _ in range(width - self._width(widths)):  # each to the column that has most to put away
            load = [0.0] * len(widths)
            for row in lengths:
                lines = [length / held for length, held in zip(row, widths, strict=False)]
                load[lines.index(max(lines))] += max(lines) * rows[row]
            open_ = [i for i, held in enumerate(widths) if held < wanted[i]]
            if not open_:
                break
            widths[max(open_, key=lambda i: load[i])] += 1
        return widths

    def _least(self, column: int) -> int:
        """The longest of what is not split in a column."""
        cells = [row[column] for row in self.cells]
        texts = [self.headings[column], *([] if self.whole[column] else cells)]
        briefly = (_FEW.sub(r"\1/class", text) for text in texts)
        words = [min(len(word), LONG) for text in briefly for word in text.split()]
        kept = [_longest(cell) for cell in cells] if self.whole[column] else []
        return max(1, *words, *kept, 1)

    def _lines(self, widths: list[int], shortened: dict[str, str]) -> Iterator[str]:
        """The lines of the table, the heading and its rule before all others."""
        for number, row in enumerate([self.headings, *self.cells]):
            cells = [
                _brief(text, width, shortened) for text, width in zip(row, widths, strict=False)
            ]
            for parts in zip_longest(*cells, fillvalue=""):
                placed = zip(parts, widths, self.numeric, strict=False)
                between = " " * self.between
                yield f" {between.join(_padded(*one) for one in placed)} "
            if number == 0:
                yield f" {'─' * (self._width(widths) - EDGES)} "

    def _width(self, widths: Sequence[int]) -> int:
        """Of a table with such columns."""
        return EDGES + sum(widths) + self.between * (len(widths) - 1)


def _longest(text: str) -> int:
    """Of the lines of a text."""
    return max(map(len, text.splitlines() or [""]))


def _padded(text: str, width: int, right: bool) -> str:
    """Text as wide as its column; some letters take two columns of a terminal."""
    from rich.cells import cell_len

    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def prose(text: str, width: int) -> str:
    """Sentences broken between words, below each other behind their label; commands stay whole.

    >>> print(prose("verdict  No better than raw pixels: harmonium eval runs/first", 30))
    verdict  No better than raw
             pixels:
             harmonium eval runs/first
    """
    lines = []
    for line in text.split("\n"):
        found = _LABEL.match(line)
        label = found.group() if found else ""
        whole = _glued(label) + _COMMAND.sub(lambda one: _glued(one.group()), line[len(label) :])
        lines += textwrap.wrap(
            whole,
            width,
            subsequent_indent=" " * len(label) if width > 2 * len(label) else "",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace(_GLUE, " ")


def _glued(text: str) -> str:
    return text.replace(" ", _GLUE)


def _brief(text: str, width: int, shortened: dict[str, str]) -> list[str]:
    """The lines of a text; where they are more than two, numbers of labels are told in one word.

    >>> told = {}
    >>> _brief("linear, 10 labels a class", 10, told), told
    (['linear,', '10/class'], {'10/class': '10 labels a class'})
    """
    lines = _wrapped(text, width)
    if len(lines) <= 2 or not (found := _FEW.search(text)):
        return lines
    brief = f"{found[1]}/class"
    shortened[brief] = found[0]
    return _wrapped(text.replace(found[0], brief), width)


def _wrapped(text: str, width: int) -> list[str]:
    """Text on as many lines as it needs, broken between words.

    >>> _wrapped("linear, 10 labels a class", 10)
    ['linear, 10', 'labels a', 'class']
    """
    if len(text) <= width and "\n" not in text:
        return [text]
    lines = [
        textwrap.wrap(line, width, break_on_hyphens=False) or [""] for line in text.split("\n")
    ]
    return [part for line in lines for part in line]
