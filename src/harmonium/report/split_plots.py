"""Plots of data: how many images of each class the clients hold, and sheets of example images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harmonium.core.errors import ConfigError
from harmonium.report.figure import (
    INK,
    PALE,
    WIDTH,
    displayed,
    dress,
    headline,
    saved_figure,
    whole_numbers,
)

Counts = npt.NDArray[np.int64]

BAR = "#9db8c9"
NAMED = 100  # clients up to which they keep their order; more are sorted
NUMBERED = (20, 30)  # clients and classes up to which the cells show their counts
SHEET = (20, 10)  # rows of a contact sheet and images in each


def split_map(
    path: str | Path,
    counts: Counts,
    names: Sequence[str] | None = None,
    title: str = "Who holds what",
    what: str = "class",
) -> None:
    """A heat map of the images of each class at each client, with each client's total above.

    More than 100 clients are sorted by their commonest class.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        counts: images `(clients, classes)`.
        names: names of the classes; their numbers when left out.
        title: what the plot shows.
        what: what the rows are.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.size == 0:
        raise ConfigError(f"a split is a table (clients, classes) of counts, got {counts.shape}")
    clients, classes = counts.shape
    names = [_short(str(name)) for name in names or range(classes)]
    many = clients > NAMED
    if many:
        counts = counts[np.lexsort((-counts.max(1), counts.argmax(1)))]
    height = 1.9 + min(6.0, 0.26 * classes if classes <= 25 else max(5.0, 0.03 * classes))
    with saved_figure(path, WIDTH, height) as figure:
        above, axes = figure.subplots(
            2, 1, sharex=True, height_ratios=[0.75, height - 1.6], gridspec_kw={"hspace": 0.03}
        )
        headline(figure, title)
        _sizes(above, counts.sum(1))
        above.tick_params(axis="x", which="both", length=0, labelbottom=False)
        above.locator_params(axis="y", nbins=3)
        dress(axes, f"clients, ordered by their commonest {what}" if many else "client", what)
        axes.grid(visible=False)
        step = max(1, math.ceil(classes / 25))
        axes.set_yticks(range(0, classes, step), names[::step], fontsize=8.5)
        axes.tick_params(which="both", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        _heat(figure, [above, axes], counts)
        _client_axis(axes, clients)


def split_sizes(path: str | Path, sizes: Counts, title: str = "Who holds how many") -> None:
    """A bar chart of each client's number of images, for data without classes and styles.

    More than 100 clients are sorted from the largest to the smallest.
    """
    sizes = np.asarray(sizes)
    many = len(sizes) > NAMED
    with saved_figure(path, WIDTH, 3.0) as figure:
        axes = figure.add_subplot()
        headline(figure, title)
        _sizes(axes, np.sort(sizes)[::-1] if many else sizes)
        axes.set_xlabel("clients, ordered by size" if many else "client", fontsize=10, color=INK)
        _client_axis(axes, len(sizes))


def contact_sheet(
    path: str | Path,
    rows: Sequence[tuple[str, npt.NDArray[np.uint8]]],
    title: str,
    note: str = "",
) -> None:
    """A contact sheet: a few images in each row, with its name on the left.

    Args:
        path: the file, `.png`, `.pdf` or `.svg`.
        rows: names and images `(n, height, width, channels)`; rows may differ in length.
        title: what the plot shows.
        note: text below, e.g. what is left out.
    """
    across = max(len(images) for _, images in rows)
    tall, wide = rows[0][1].shape[1:3]
    gap = max(1, round(0.06 * max(tall, wide)))
    sheet = np.full((len(rows) * (tall + gap), across * (wide + gap), 3), 255, np.uint8)
    for down, (_, images) in enumerate(rows):
        for right, image in enumerate(images):
            top, left = down * (tall + gap), right * (wide + gap)
            # Grey spreads over three channels.
            sheet[top : top + tall, left : left + wide] = displayed(image)
    sheet = sheet[: -gap or None, : -gap or None]
    names = [_short(name) for name, _ in rows]
    beside = 0.2 + 0.085 * max(map(len, names))  # inches for the names
    inches = (WIDTH - beside) * sheet.shape[0] / sheet.shape[1]
    with saved_figure(path, WIDTH, 0.55 + (0.25 if note else 0) + inches) as figure:
        axes = figure.add_subplot()
        headline(figure, title)
        axes.imshow(sheet)
        axes.set_anchor("E")  # what room is left over goes to the names
        middles = np.arange(len(rows)) * (tall + gap) + (tall - 1) / 2
        axes.set_yticks(middles, names, fontsize=8.5, color=INK)
        axes.set_xticks([])
        axes.set_xlabel(note, fontsize=8.5, color=PALE)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _sizes(axes: Any, sizes: Counts) -> None:
    """A bar for each client, or one outline if there are too many for bars."""
    if len(sizes) > NAMED:
        axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=BAR)
    else:
        axes.bar(range(len(sizes)), sizes, 0.8, color=BAR)
    axes.set_ylim(bottom=0)
    dress(axes, "", "images")
    axes.grid(visible=False, axis="x")


def _client_axis(axes: Any, clients: int) -> None:
    axes.set_xlim(-0.5, clients - 0.5)
    if clients <= NUMBERED[0]:
        axes.set_xticks(range(clients))
    else:
        whole_numbers(axes)


def _heat(figure: Any, both: Sequence[Any], counts: Counts) -> None:
    """Counts as colours, white for 0, in square-root steps so that small counts are visible."""
    from matplotlib.colors import PowerNorm

    clients, classes = counts.shape
    most = max(1, int(counts.max()))
    axes = both[1]
    drawn = axes.imshow(
        counts.T,
        aspect="auto",
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0, vmax=most),
        interpolation="nearest",
    )
    if clients <= NAMED and classes <= NAMED:  # white lines between the cells
        for side, count in (("x", clients), ("y", classes)):
            getattr(axes, f"set_{side}ticks")(np.arange(count - 1) + 0.5, minor=True)
        axes.grid(visible=True, which="minor", color="white", linewidth=1)
    if clients <= NUMBERED[0] and classes <= NUMBERED[1]:
        for client, row in zip(*np.nonzero(counts), strict=True):
            count = counts[client, row]
            ink = "white" if count > 0.3 * most else INK
            axes.text(client, row, f"{count}", ha="center", va="center", fontsize=7.5, color=ink)
    bar = figure.colorbar(drawn, ax=both, pad=0.015, aspect=30)
    bar.set_label("images", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8.5, colors=PALE, labelcolor=INK)
    bar.outline.set_visible(False)
