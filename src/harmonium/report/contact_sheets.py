"""Contact sheets: rows of a query image and others, framed by whether the classes agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
