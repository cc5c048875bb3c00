"""Heat maps and bar charts of a split in a terminal, in colour or in plain characters."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

Counts = npt.NDArray[np.int64]

ROWS = 30  # clients shown at most
CELL = 8  # columns of the terminal for one class at most
SHADES = ("#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#fde725")  # few to many
MARKS = ".:=*#@"  # the same without colour
LEVELS = len(SHADES)


def heat_map(
    console: Console, counts: Counts, names: Sequence[str], what: str = "classes"
) -> Group:
    """A heat map with a row for each client and a column for each class.

    Of many clients some are shown, evenly spaced; many classes share columns, so that the map fits
    the console. The last line is the legend. Shades are in square-root steps, so that small counts
    are visible.

    Args:
        console: where it will be printed: its width, and whether it has colour.
        counts: images `(clients, classes)`.
        names: names of the classes.
        what: what the columns are.
    """
    from rich.console import Group
    from rich.text import Text

    shown = sampled(len(counts))
    first = max(len("client"), len(str(len(counts))))
    totals = counts.sum(1)
    last = max(len("all"), len(str(totals.max()))) + 1
    room = max(1, console.width - first - last - 1)
    together = math.ceil(counts.shape[1] / room)
    cells = np.add.reduceat(counts, np.arange(0, counts.shape[1], together), axis=1)[shown]
    wide = max(1, min(CELL, room // cells.shape[1]))
    most = max(1, int(cells.max()))
    header = f"{'client':>{first}} {_header(names, wide, together)}{'all':>{last}}"
    lines = [Text(header, "bold", no_wrap=True)]
    for client, row in zip(shown, cells, strict=True):
        line = Text(f"{client:>{first}} ", no_wrap=True)
        for count in row:
            line.append_text(_cell(int(count), most, wide, colour(console)))
        lines.append(line.append(f"{totals[client]:>{last}}"))
    lines.append(_scale(console, most))
    return Group(*lines, *_left_out(len(counts), len(shown), together, what))


def size_bars(console: Console, sizes: Counts) -> Group:
    """A bar for each client's number of images; of many clients some, evenly spaced."""
    from rich.console import Group
    from rich.text import Text

    shown = sampled(len(sizes))
    first = max(len("client"), len(str(len(sizes))))
    last = len(str(sizes.max())) + 1
    room = max(1, console.width - first - last - 1)
    mark, style = ("█", SHADES[1]) if colour(console) else ("#", "")
    lines = [Text(f"{'client':>{first}} images", "bold", no_wrap=True)]
    for client in shown:
        length = math.ceil(room * sizes[client] / max(1, sizes.max()))
        bar = Text.assemble(f"{client:>{first}} ", (mark * length, style), f" {sizes[client]}")
        lines.append(bar)
    return Group(*lines, *_left_out(len(sizes), len(shown), 1, ""))


def sampled(clients: int) -> list[int]:
    """The clients to show: all, or `ROWS` of them, evenly spaced.

    >>> sampled(3), sampled(1000)[:3], sampled(1000)[-1]
    ([0, 1, 2], [0, 34, 68], 999)
    """
    return [int(place) for place in np.linspace(0, clients - 1, min(ROWS, clients))]


def colour(console: Console) -> bool:
    """Whether the console shows colours: the terminal can, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def _cell(count: int, most: int, wide: int, coloured: bool) -> Text:
    """One cell: the number on its shade or after its mark if it fits, else a block or marks."""
    from rich.text import Text

    if count == 0:
        return Text(" " * wide)
    level = math.ceil(LEVELS * math.sqrt(count / most)) - 1
    if not coloured and wide > len(str(most)) + 1:
        return Text(f"{MARKS[level]}{count:>{wide - 2}} ")
    if not coloured:
        gap = 1 if wide > 1 else 0
        return Text(MARKS[level] * (wide - gap) + " " * gap)
    if wide <= len(str(most)):
        return Text("█" * wide, SHADES[level])
    ink = "white" if level < LEVELS / 2 else "black"
    return Text(f"{count:^{wide - 1}} ", f"{ink} on {SHADES[level]}")


def _header(names: Sequence[str], wide: int, together: int) -> str:
    """The names of the columns, cut to the cells, or numbers if the cells are too narrow."""
    from rich.cells import set_cell_size

    columns = range(0, len(names), together)
    if len({name[: wide - 1] for name in names}) < len(set(names)):  # scanner A, scanner B
        common = len(os.path.commonprefix(list(names)))
        names = [name[common:] or name for name in names]
    if wide >= 4 or (wide > 1 and max(map(len, names)) < wide):
        return "".join(set_cell_size(_centred(names[place], wide - 1), wide) for place in columns)
    every = math.ceil((len(str(len(names))) + 1) / wide)
    line, end = "", len(columns) * wide
    for place in columns[::every]:
        if len(line) + len(str(place)) <= end:  # a number cut short would be another number
            line += f"{place:<{every * wide}}"
    return line[:end].ljust(end)


def _centred(name: str, wide: int) -> str:
    """A name cut to a width or centred in it."""
    from rich.cells import cell_len, set_cell_size

    short = max(0, wide - cell_len(name))
    return set_cell_size(" " * (short // 2) + name, wide)


def _scale(console: Console, most: int) -> Text:
    """The legend: the counts of each shade."""
    from rich.text import Text

    line = Text("images")
    above = 0
    for level in range(LEVELS):
        upto = most * (level + 1) ** 2 // LEVELS**2
        if upto == above:  # no whole number has this shade
            continue
        mark = ("██", SHADES[level]) if colour(console) else (MARKS[level], "")
        line.append("  ").append(*mark)
        line.append(f" {above + 1}" if upto == above + 1 else f" {above + 1}-{upto}")
        above = upto
    return line


def _left_out(clients: int, shown: int, together: int, what: str) -> list[Text]:
    """A line that says what is not shown, if anything."""
    from rich.text import Text

    remarks = []
    if shown < clients:
        remarks.append(f"{shown} of {clients:,} clients, evenly spaced")
    if together > 1:
        remarks.append(f"each column is {together} neighbouring {what}")
    return [Text("; ".join(remarks), "dim")] if remarks else []
