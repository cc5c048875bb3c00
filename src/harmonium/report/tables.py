"""The same rows as a table for the terminal, as Markdown, LaTeX and CSV.

A row is a mapping from column to value. A value is text, a number, nothing, or a pair
`(mean, standard error)`. All but CSV round each column to one number of decimals so
that the points line up; CSV keeps every digit and gives a standard error its own column.
"""

from __future__ import annotations

import csv
import html as markup
import io
import math
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path

from harmonium.report.terminal_table import Fitting

Row = Mapping[str, object]
Columns = Sequence[str] | Mapping[str, str]
MISSING = "–"
NAMED = 6  # rows that one line names; the others it counts
BEST, NEAR = "best", "near"
"""Marks of cells: the best of a column, and those that may be as good."""
Marks = Mapping[tuple[int, str], str]
WORDY = 36  # letters of a cell: longer ones are set as paragraphs in LaTeX
PARAGRAPH = r"p{0.3\linewidth}"
NARROW = 16  # letters of a heading that stay on one line in LaTeX


def estimate(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of repeated measurements; no error for a single one.

    >>> estimate([1.0, 3.0])
    (2.0, 1.0)
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def plus_minus(mean: float, stderr: float | None = None, *, digits: int = 2) -> str:
    """A mean with its standard error, or alone where there is none.

    >>> plus_minus(0.8314, 0.0042, digits=3), plus_minus(83.14, digits=1)
    ('0.831 ± 0.004', '83.1')
    """
    text = f"{mean:.{digits}f}"
    return text if stderr is None or math.isnan(stderr) else f"{text} ± {stderr:.{digits}f}"


def table(
    rows: Sequence[Row],
    columns: Columns | None = None,
    title: str = "",
    *,
    digits: int | None = None,
    by_row: bool = False,
    unbroken: Collection[str] = (),
) -> Fitting:
    """A table for the terminal; print it with a `rich` console, which respects NO_COLOR.

    It takes the width of the console: long texts go on in the next line at the ends of words, and
    where that does not suffice, the columns at the right follow in a further table below.

    Args:
        rows: the rows.
        columns: which columns, in which order; a mapping also gives their headings. All of them
            in the order of first appearance when left out.
        title: a line above the table.
        digits: decimals of every number; chosen for each column when left out.
        by_row: choose them for each row instead, where each row is a quantity of its own.
        unbroken: columns of text that never go over into the next line; those of numbers do not.
    """
    names = _headings(rows, columns)
    numeric = [_numeric(rows, key) for key in names]
    whole = [right or key in unbroken for right, key in zip(numeric, names, strict=True)]
    return Fitting(list(names.values()), _cells(rows, names, digits, by_row), numeric, whole, title)


def markdown(
    rows: Sequence[Row],
    columns: Columns | None = None,
    *,
    digits: int | None = None,
    marks: Marks | None = None,
) -> str:
    """A Markdown table, aligned in its source as well; arguments as in `table` and `latex`.

    Of marked cells, `BEST` is bold and `NEAR` in italics.
    """
    names = _headings(rows, columns)
    if not names:
        return ""
    right = [_numeric(rows, key) for key in names]
    cells = _cells(rows, names, digits)
    for (number, key), mark in (marks or {}).items():
        sign, place = {BEST: "**", NEAR: "*"}[mark], list(names).index(key)
        cells[number][place] = f"{sign}{cells[number][place]}{sign}"
    lines = [list(names.values()), *cells]
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(names))]

    def draw(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        "-" * (width - 1) + (":" if to_right else "-")
        for width, to_right in zip(widths, right, strict=True)
    )
    return "\n".join([draw(lines[0]), f"| {' | '.join(rule)} |", *map(draw, lines[1:])]) + "\n"


def html(rows: Sequence[Row], columns: Columns | None = None, *, digits: int | None = None) -> str:
    """A table for notebooks; arguments as in `table`. Whatever comes from outside is escaped.

    >>> html([{"method": "a<b", "kNN": 91.25}], digits=1)
    '<table><tr><th>method</th><th>kNN</th></tr><tr><td>a&lt;b</td><td>91.2</td></tr></table>'
    """
    names = _headings(rows, columns)
    lines = [(list(names.values()), "th"), *((line, "td") for line in _cells(rows, names, digits))]
    markup_rows = (
        "".join(f"<{tag}>{markup.escape(cell)}</{tag}>" for cell in cells) for cells, tag in lines
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in markup_rows)}</table>" if names else ""


class Tabular:
    """What finds out about several runs: it prints as a line and is a table in a notebook."""

    folder: Path

    def panels(self) -> Iterable[tuple[str, Sequence[Row], int | None]]:
        """Its tables: title, rows and decimals."""
        raise TypeError(f"{type(self).__name__} must define `panels`")

    def __repr__(self) -> str:
        rows = next((rows for _, rows, _ in self.panels()), ())
        names = [str(next(iter(row.values()), "")) for row in rows]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return f"<{type(self).__name__}: {', '.join(names[:NAMED])}{more}; {self.folder}>"

    def _repr_html_(self) -> str:
        panels = (f"<b>{markup.escape(t)}</b>{html(r, digits=d)}" for t, r, d in self.panels())
        return f"<div>{''.join(panels)}{markup.escape(str(self.folder))}</div>"


def latex(
    rows: Sequence[Row],
    title: str = "",
    columns: Columns | None = None,
    *,
    digits: int | None = None,
    label: str = "",
    marks: Marks | None = None,
    rules: Collection[int] = (),
) -> str:
    r"""A LaTeX table with rules of `booktabs`, its caption above, and a label to refer to.

    Args:
        rows: the rows.
        title: the caption.
        columns: which columns, as in `table`.
        digits: decimals of every number, as in `table`.
        label: for `\ref`, e.g. `tab:compare`.
        marks: cells to set apart, by the number of their row and their column: `BEST` is bold,
            `NEAR` underlined.
        rules: numbers of rows that begin a group: a thin rule stands above them.

    >>> print(latex([{"method": "a_b", "kNN": (91.234, 0.5)}], "A & B", digits=1, label="tab:a",
    ...     marks={(0, "kNN"): BEST}))
    \begin{table}[t]
    \centering
    \caption{A \& B}
    \label{tab:a}
    \begin{tabular}{lr}
    \toprule
    method & kNN \\
    \midrule
    a\_b & $\mathbf{91.2} \pm 0.5$ \\
    \bottomrule
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    names = _headings(rows, columns)
    if not names:
        return ""
    cells = _cells(rows, names, digits)
    numeric = {key: _numeric(rows, key) for key in names}
    places = "".join(
        "r" if numeric[key] else "l" if max(len(line[n]) for line in cells) <= WORDY else PARAGRAPH
        for n, key in enumerate(names)
    )
    body: list[str] = []
    for number, line in enumerate(cells):
        body += [r"\midrule"] if number in rules and number else []
        tex_cells = [
            _tex_cell(cell, (marks or {}).get((number, key)))
            for cell, key in zip(line, names, strict=True)
        ]
        body.append(" & ".join(tex_cells) + r" \\")
    head = " & ".join(_tex_heading(names[key], numeric[key]) for key in names) + r" \\"
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            *([rf"\caption{{{tex_text(title)}}}"] if title else []),
            *([rf"\label{{{label}}}"] if label else []),
            rf"\begin{{tabular}}{{{places}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


_TEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"${sign}$" for sign in "<>|"},
    MISSING: "--",
    "—": "---",
    "…": r"\ldots{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "−": "$-$",
    "→": r"$\rightarrow$",
}


def tex_text(text: str) -> str:
    r"""Text as LaTeX has it: what would be read as a command is escaped.

    >>> tex_text("100 % of a_b, ε < 2")
    '100 \\% of a\\_b, $\\epsilon$ $<$ 2'
    """
    return "".join(_TEX.get(sign) or _greek(sign) or sign for sign in " ".join(text.split()))


def _greek(sign: str) -> str:
    """The command of a small Greek letter; empty for all that is none."""
    name = unicodedata.name(sign, "").lower().partition("greek small letter ")[2]
    return f"$\\{name.replace('lamda', 'lambda')}$" if name.isalpha() else ""


def _tex_cell(cell: str, mark: str | None) -> str:
    """A cell as LaTeX has it; a mean with its error as a formula, of which the mean is marked."""
    mean, sign, error = cell.partition(" ± ")
    if sign:
        command = {BEST: r"\mathbf", NEAR: r"\underline"}.get(mark or "")
        mean = f"{command}{{{mean}}}" if command else mean
        return rf"${mean} \pm {error}$"
    command = {BEST: r"\textbf", NEAR: r"\underline"}.get(mark or "")
    return f"{command}{{{tex_text(cell)}}}" if command else tex_text(cell)


def _tex_heading(heading: str, numeric: bool) -> str:
    """A heading, on several lines where it is wider than its numbers."""
    lines = [tex_text(line) for line in textwrap.wrap(heading, NARROW)] or [""]
    if len(lines) == 1:
        return lines[0]
    side = "r" if numeric else "l"
    return rf"\shortstack[{side}]{{" + r" \\ ".join(lines) + "}"


def csv_text(rows: Sequence[Row], columns: Columns | None = None) -> str:
    """The rows as CSV with full precision; missing values are empty; arguments as in `table`."""
    names = _headings(rows, columns)
    paired = {key for key in names if any(_pair(row.get(key)) for row in rows)}
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    header: list[str] = []
    for key, heading in names.items():
        header += [heading, f"{heading} stderr"] if key in paired else [heading]
    writer.writerow(header)
    for row in rows:
        line: list[object] = []
        for key in names:
            value = row.get(key)
            mean, stderr = _pair(value) or (value, None)
            line += [mean, stderr] if key in paired else [mean]
        writer.writerow(["" if value is None else value for value in line])
    return sheet.getvalue()


def _headings(rows: Sequence[Row], columns: Columns | None) -> dict[str, str]:
    """Column keys and what stands above them."""
    if isinstance(columns, Mapping):
        return dict(columns)
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    return {key: key for key in columns}


def _pair(value: object) -> tuple[float, float | None] | None:
    """The value as (mean, standard error) if it is such a pair."""
    if not (isinstance(value, tuple) and len(value) == 2 and _number(value[0])):
        return None
    mean, stderr = value
    if stderr is None:
        return float(mean), None
    return (float(mean), float(stderr)) if _number(stderr) else None


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _numeric(rows: Sequence[Row], key: str) -> bool:
    """Whether a column holds numbers or pairs only, and at least one."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return bool(values) and all(_number(value) or _pair(value) for value in values)


def _cells(
    rows: Sequence[Row], names: Mapping[str, str], digits: int | None, by_row: bool = False
) -> list[list[str]]:
    """All cells as text, each column (or row) with its own fixed number of decimals."""
    if by_row and digits is None:
        return [line for row in rows for line in _cells([row], names, _digits(row.values()))]
    decimals = {
        key: _digits(row.get(key) for row in rows) if digits is None else digits for key in names
    }
    return [[_text(row.get(key), decimals[key]) for key in names] for row in rows]


def _digits(values: Iterable[object]) -> int:
    """Decimals that show about four figures of the largest of these numbers."""
    sizes = [0.0]
    for value in values:
        pair = _pair(value)
        mean = pair[0] if pair else value
        if isinstance(mean, Real) and not isinstance(mean, Integral) and math.isfinite(mean):
            sizes.append(abs(float(mean)))
    largest = max(sizes)
    if largest == 0.0:
        return 3
    return min(8, max(0, 2 - math.floor(math.log10(largest)))) if largest < 1e4 else 0


def _text(value: object, digits: int) -> str:
    pair = _pair(value)
    if pair:
        return plus_minus(*pair, digits=digits)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value)}"
    if isinstance(value, Real):
        return f"{float(value):.{digits}f}"
    return str(value)
