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

EDGES, BETWEEN = 2, 3  # spaces around a table, and between its columns
CLOSER = 2  # spaces between columns, if the whole table fits only with so few
_FEW = re.compile(r"(\d+) labels? a class")  # abbreviated where it would take more than two lines
MANY = 100  # different rows that column widths are computed from
LONG = 40  # letters; longer words, such as paths, may be split
_LABEL = re.compile(  # the label of a line of prose; further lines are indented by its width
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
    whole: Sequence[bool]  # columns whose cells stay on one line; headings may wrap
    title: str = ""
    between: int = BETWEEN

    @property
    def least(self) -> int:
        """The smallest width that shows every column without splitting a word."""
        return self._width([self._least(column) for column in range(len(self.headings))])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table at the console's width; columns that do not fit follow in further tables."""
        from rich.segment import Segment
        from rich.style import Style
        from rich.text import Text

        shortened = dict[str, str]()
        for number, piece in enumerate(self.pieces(options.max_width)):
            widths = piece.widths(options.max_width)
            blank, is_heading = " " * piece._width(widths), True
            title = [self.title] if self.title and not number else []
            for line in [*title, blank, *piece._lines(widths, shortened), blank]:
                is_heading = is_heading and "─" not in line
                yield Segment(line, Style(bold=True) if is_heading else None)
                yield Segment.line()
        for brief, full in shortened.items():
            yield Text(f"{brief}: {full}", style="dim")

    def pieces(self, width: int) -> Iterator[Fitting]:
        """The table, or several with fewer columns; each has the columns that identify a row."""
        closer = replace(self, between=CLOSER)
        if self.least > width >= closer.least:
            yield closer
            return
        lead, rest = list[int](), list(range(len(self.headings)))
        while rest:
            columns = [*lead, *rest]
            shown = len(self._of(columns).widths(width))
            if lead and shown <= len(lead):  # no room for another column beside these
                lead.pop()
                continue
            yield self._of(columns[:shown])
            rest = columns[shown:]
            lead = [column for column in range(self._key_columns) if column not in rest]

    @property
    def _key_columns(self) -> int:
        """How many columns, from the left, identify a row."""
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
        lengths = list(rows)[:MANY]  # the first ones are enough
        wanted = [max(column) for column in zip(*rows, strict=True)]
        for _ in range(width - self._width(widths)):  # each to the column that needs most lines
            load = [0.0] * len(widths)
            for row in lengths:
                lines = [length / shown for length, shown in zip(row, widths, strict=False)]
                load[lines.index(max(lines))] += max(lines) * rows[row]
            open_ = [i for i, shown in enumerate(widths) if shown < wanted[i]]
            if not open_:
                break
            widths[max(open_, key=lambda i: load[i])] += 1
        return widths

    def _least(self, column: int) -> int:
        """The smallest width of a column: its longest word, or cell if cells stay whole."""
        cells = [row[column] for row in self.cells]
        texts = [self.headings[column], *([] if self.whole[column] else cells)]
        briefly = (_FEW.sub(r"\1/class", text) for text in texts)
        words = [min(len(word), LONG) for text in briefly for word in text.split()]
        widths = [_longest(cell) for cell in cells] if self.whole[column] else []
        return max(1, *words, *widths, 1)

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
        """The width of a table with columns of these widths."""
        return EDGES + sum(widths) + self.between * (len(widths) - 1)


def _longest(text: str) -> int:
    """The length of the longest line of a text."""
    return max(map(len, text.splitlines() or [""]))


def _padded(text: str, width: int, right: bool) -> str:
    """Text as wide as its column; some letters take two columns of a terminal."""
    from rich.cells import cell_len

    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def prose(text: str, width: int) -> str:
    """Wrap sentences between words, indented by their label; commands stay on one line.

    >>> print(prose("verdict  No better than raw pixels: harmonium eval runs/first", 30))
    verdict  No better than raw
             pixels:
             harmonium eval runs/first
    """
    lines = []
    for line in text.split("\n"):
        match = _LABEL.match(line)
        label = match.group() if match else ""
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
    """The lines of a text; beyond two lines, `10 labels a class` is abbreviated.

    >>> shortened = {}
    >>> _brief("linear, 10 labels a class", 10, shortened), shortened
    (['linear,', '10/class'], {'10/class': '10 labels a class'})
    """
    lines = _wrapped(text, width)
    if len(lines) <= 2 or not (match := _FEW.search(text)):
        return lines
    brief = f"{match[1]}/class"
    shortened[brief] = match[0]
    return _wrapped(text.replace(match[0], brief), width)


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
