"""Contact sheets: rows of a query image and others, framed by whether the classes agree.

`plot_neighbours` draws what a search found, where classes are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harmonium.report.figure import COLOURS, INK, displayed, headline, saved_figure

FRAME = 0.07  # width of a frame, as a fraction of an image's side
ACROSS = 2  # sheets side by side
SIDE = 0.5  # side of an image, in inches


class ContactSheet(NamedTuple):
    """Rows of images, a query and those compared with it."""

    pixels: np.ndarray  # uint8 (rows, columns, height, width, channels); queries first
    same_class: np.ndarray  # bool (rows, columns), as the row's query


class Neighbour(NamedTuple):
    """An image that was found for a query."""

    name: str
    cosine: float
    pixels: np.ndarray | None  # uint8 (side, side, 3); None: it cannot be shown


class FoundRow(NamedTuple):
    """A query image and those that are nearest to it."""

    query: str
    pixels: np.ndarray | None
    neighbours: Sequence[Neighbour]


def plot_neighbours(path: str | Path, rows: Sequence[FoundRow], title: str) -> None:
    """Plot a row for each query, the query at the left, with the cosine below every other image.

    Args:
        path: the file to write, `.png`, `.pdf` or `.svg`.
        rows: queries with their neighbours; all images are square and of one size.
        title: what the plot shows.
    """
    columns = 1 + max(len(row.neighbours) for row in rows)
    wide, high = max(5.6, 1.0 * columns + 0.9), 1.25 * len(rows) + 0.7
    with saved_figure(path, wide, high) as figure:
        headline(figure, title)
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_aspect("equal")
        for down, row in enumerate(rows):
            images = [
                (row.pixels, row.query),
                *((n.pixels, f"{n.cosine:.3f}") for n in row.neighbours),
            ]
            for across, (pixels, words) in enumerate(images):
                left, top = across + (0.3 if across else 0.0), 1.25 * down
                box = (left + 0.03, left + 0.97, top + 0.97, top + 0.03)
                shown = _BLANK if pixels is None else pixels
                axes.imshow(shown, extent=box, interpolation="nearest")
                axes.text(
                    left + 0.5,
                    top + 1.0,
                    shortened(words),
                    ha="center",
                    va="top",
                    fontsize=7,
                    color=INK,
                )
        axes.set_xlim(0, columns + 0.3)
        axes.set_ylim(1.25 * len(rows), 0)


_BLANK = np.full((2, 2, 3), 230, np.uint8)


def shortened(words: str, most: int = 18) -> str:
    """The end of a long name, which tells images apart.

    >>> shortened("a/very/long/name/of/0001.png"), shortened("0.912")
    ('…/name/of/0001.png', '0.912')
    """
    return words if len(words) <= most else f"…{words[1 - most :]}"


def plot_contact_sheets(path: str | Path, panels: Mapping[str, ContactSheet], title: str) -> None:
    """Plot sheets side by side; a frame is blue if an image is of its query's class, else orange.

    Args:
        path: the file to write, `.png`, `.pdf` or `.svg`.
        panels: sheets by name.
        title: what the plot shows.
    """
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    rows = max(len(one.pixels) for one in panels.values())
    columns = max(one.pixels.shape[1] for one in panels.values()) + 0.5
    wide, high = max(5.6, SIDE * columns * across + 0.4), (SIDE * rows + 0.4) * down + 0.9
    with saved_figure(path, wide, high) as figure:
        headline(figure, title)
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for axes in grid:
            axes.set_axis_off()
        for axes, (name, one) in zip(grid, panels.items(), strict=False):
            axes.imshow(mosaic(one), interpolation="nearest")
            axes.set_title(name, loc="left", fontsize=9.5, color=INK)
        marks = [
            grid[0].plot([], [], "s", color="none", markeredgecolor=colour, label=words)[0]
            for colour, words in ((COLOURS[0], "of the same class"), (COLOURS[1], "of another"))
        ]
        figure.legend(handles=marks, loc="outside lower left", ncols=2, frameon=False, fontsize=8.5)


def mosaic(sheet: ContactSheet) -> np.ndarray:
    """All images of a sheet in one, `(height, width, 3)`, uint8, framed but for the queries.

    >>> mosaic(ContactSheet(np.zeros((2, 3, 8, 8, 1), np.uint8), np.ones((2, 3), bool))).shape
    (24, 38, 3)
    """
    rows, columns, height, width, _ = sheet.pixels.shape
    frame = max(1, round(FRAME * max(height, width)))
    gap = max(2, width // 2)
    tall, broad = height + 2 * frame, width + 2 * frame
    step = frame  # between images
    canvas = np.full(
        (rows * (tall + step) + step * 2, columns * (broad + step) + gap + step, 3), 255, np.uint8
    )
    for row in range(rows):
        for column in range(columns):
            top = row * (tall + step) + step
            left = column * (broad + step) + step + (gap if column else 0)
            if column:
                colour = _colour(bool(sheet.same_class[row, column]))
                canvas[top : top + tall, left : left + broad] = colour
            inner = canvas[top + frame : top + frame + height, left + frame : left + frame + width]
            inner[:] = displayed(sheet.pixels[row, column])  # one channel fills all three
    return canvas


def _colour(same_class: bool) -> list[int]:
    text = COLOURS[0 if same_class else 1]
    return [int(text[place : place + 2], 16) for place in (1, 3, 5)]
