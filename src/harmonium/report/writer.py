"""Writes the results of studies and evaluations: JSON, CSV, Markdown, LaTeX and plots.

All files of one result share a stem, e.g. `compare.json`, `compare.csv`, `compare.md` and
`compare.tex`. Files are replaced atomically, so a command that is killed leaves whole files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec

from harmonium.core import files
from harmonium.report.figure import plot_paths
from harmonium.report.tables import Marks, Row, csv_text, latex, markdown

LATEX_HEADER = "% Tables need \\usepackage{booktabs}.\n"

P = ParamSpec("P")


class ResultTable(NamedTuple):
    """One table of a result, as Markdown and LaTeX show it."""

    title: str
    rows: Sequence[Row]
    digits: int | None = None
    marks: Marks = {}
    rules: tuple[int, ...] = ()  # rows that begin a group
    legend: str = ""  # explains the table: below it in Markdown, in its caption in LaTeX
    warning: str = ""  # ends the caption in LaTeX, where a table stands by itself
    label: str = ""  # for LaTeX, e.g. tab:compare


def write_results(
    folder: Path,
    stem: str,
    plain: Mapping[str, Any],
    tables: Sequence[ResultTable],
    *,
    sheets: Mapping[str, Sequence[Row]] | None = None,
    preface: str = "",
    notes: Sequence[str] = (),
    with_latex: bool = False,
) -> None:
    """Write a result in every form.

    Args:
        folder: where the files go.
        stem: the name of the files without their ending.
        plain: everything, for `STEM.json`.
        tables: for `STEM.md` and `STEM.tex`.
        sheets: rows with every digit, by what follows the stem: `""` is `STEM.csv`, `"-tests"` is
            `STEM-tests.csv`.
        preface: a line above the tables in Markdown.
        notes: what a reader should know: a list below the tables in Markdown, comments in LaTeX.
        with_latex: whether to write `STEM.tex`.
    """
    texts = {f"{stem}.json": json.dumps(plain, indent=1) + "\n"}
    for suffix, rows in (sheets or {}).items():
        texts[f"{stem}{suffix}.csv"] = csv_text(rows)
    texts[f"{stem}.md"] = markdown_page(tables, preface, notes)
    if with_latex:
        texts[f"{stem}.tex"] = latex_page(tables, notes)
    for name, text in texts.items():
        files.write_atomic(folder / name, text.encode())


def markdown_page(
    tables: Sequence[ResultTable], preface: str = "", notes: Sequence[str] = ()
) -> str:
    """Tables under their titles, and notes as a list at the end.

    >>> print(markdown_page([ResultTable("Accuracy", [{"kNN": 91.25}], 1)], notes=["one seed"]))
    ## Accuracy
    <BLANKLINE>
    |  kNN |
    | ---: |
    | 91.2 |
    <BLANKLINE>
    - one seed
    <BLANKLINE>
    """
    parts = [f"{preface}\n"] if preface else []
    for table in tables:
        parts += [f"## {table.title}\n"] if table.title else []
        parts.append(markdown(table.rows, digits=table.digits, marks=table.marks))
        # LaTeX underlines the cells that Markdown, which has no underline, sets in italics.
        parts += [f"{table.legend.replace('underlined', 'in italics')}\n"] if table.legend else []
    listed = "".join(f"- {note}\n" for note in notes)
    return "\n".join([*parts, listed]).rstrip() + "\n"


def latex_page(tables: Sequence[ResultTable], notes: Sequence[str] = ()) -> str:
    """Tables with captions and labels, below the notes as comments."""
    parts = [*(f"% {note}" for note in notes), LATEX_HEADER]
    for table in tables:
        caption = [table.title, table.legend.rstrip("."), table.warning]
        parts.append(
            latex(
                table.rows,
                ". ".join(filter(None, caption)),
                digits=table.digits,
                label=table.label,
                marks=table.marks,
                rules=table.rules,
            )
        )
    return "\n".join(parts)


def write_plot(
    path: Path,
    draw: Callable[Concatenate[Path, P], bool | None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[Path]:
    """Draw a plot in the formats of the moment; returns its files.

    There are none where `draw` returns False: it had nothing to draw.
    """
    return [] if draw(path, *args, **kwargs) is False else plot_paths(path)
