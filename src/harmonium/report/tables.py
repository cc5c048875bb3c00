"""The same rows as a table for the terminal, as Markdown, LaTeX and CSV.

A row is a mapping from column to value. A value is text, a number, nothing, or a pair
`(mean, standard error)`. All but CSV round each column to one number of decimals so
that the points line up; CSV keeps every digit and gives a standard error its own column.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real

from harmonium.report.fitting import Fitting

Row = Mapping[str, object]
Columns = Sequence[str] | Mapping[str, str]
MISSING = "–"


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
    where that does not suffice columns are left out from the right, which a line below says.

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
    rows: Sequence[Row], columns: Columns | None = None, *, digits: int | None = None
) -> str:
    """A Markdown table, aligned in its source as well; arguments as in `table`."""
    names = _headings(rows, columns)
    if not names:
        return ""
    right = [_numeric(rows, key) for key in names]
    lines = [list(names.values()), *_cells(rows, names, digits)]
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


def latex(
    rows: Sequence[Row],
    title: str = "",
    columns: Columns | None = None,
    *,
    digits: int | None = None,
) -> str:
    r"""A LaTeX table with its caption, in `tabular` and nothing that needs a package.

    >>> print(latex([{"method": "a_b", "kNN": (91.234, 0.5)}], digits=1))
    \begin{table}
    \centering
    \begin{tabular}{lr}
    \hline
    method & kNN \\
    \hline
    a\_b & $91.2 \pm 0.5$ \\
    \hline
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    names = _headings(rows, columns)
    if not names:
        return ""
    places = "".join("r" if _numeric(rows, key) else "l" for key in names)
    lines = [[_escaped(cell) for cell in line] for line in _cells(rows, names, digits)]
    body = [" & ".join(line) + r" \\" for line in lines]
    head = " & ".join(_escaped(heading) for heading in names.values()) + r" \\"
    caption = [rf"\caption{{{_escaped(title)}}}"] if title else []
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{places}}}",
            r"\hline",
            head,
            r"\hline",
            *body,
            r"\hline",
            r"\end{tabular}",
            *caption,
            r"\end{table}",
            "",
        ]
    )


def _escaped(cell: str) -> str:
    """Text as LaTeX has it; a mean with its error as a formula."""
    text = "".join(f"\\{c}" if c in "&%$#_{}" else c for c in cell.replace("\\", "/"))
    mean, sign, error = text.partition(" ± ")
    return rf"${mean} \pm {error}$" if sign else text.replace(MISSING, "--")


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
