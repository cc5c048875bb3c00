"""A finished run in words: one line, a summary, and a table for notebooks."""

from __future__ import annotations

import html as markup
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from harmonium.report import sites
from harmonium.report.metric_names import heading
from harmonium.report.tables import MISSING

if TYPE_CHECKING:
    from harmonium.runs.loop import Result

_HEALTH = ("spread", "effective_rank", "uniformity", "alignment")


def line(result: Result) -> str:
    """A run in one line: what was trained on what, its figures, and where it lies."""
    probes = _probes(result.figures)
    names = {key: heading(key).replace(", ", " with ") for key in probes}
    figures = ", ".join(f"{names[key]} {_percent(value)}" for key, value in probes.items())
    if figures:
        before = ", ".join(_percent(result.untrained.get(key)) for key in probes)
        figures = f": {figures} % (untrained {before} %)"
    return f"<Result {_title(result)}{figures}; {result.folder}>"


def summary(result: Result) -> str:
    """A run in a few lines of plain text."""
    names, rows = probe_table(result)
    lines = [_title(result)]
    if rows:
        lines += ["", "test accuracy in percent, encoder frozen", *_aligned(names, rows)]
    if health := result.figures.get("health"):
        values = (
            f"{k.replace('_', ' ')} {health[k]:.2f}" for k in _HEALTH if _is_number(health, k)
        )
        lines += ["", f"label-free: {', '.join(values)}"]
        lines += [f"warning: {text}" for text in health.get("warnings", ())]
    lines += [""] if rows or health else []
    return "\n".join([*lines, *_remarks(result)])


def html(result: Result) -> str:
    """A run as a compact table for notebooks; whatever comes from outside is escaped."""
    names, rows = probe_table(result)
    lines = [f"<b>{markup.escape(_title(result))}</b>"]
    if rows:
        heads = "".join(f"<th>{markup.escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr><th style='text-align:left'>{markup.escape(label)}</th>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
            for label, cells in rows
        )
        lines.append(f"<table><tr><th>test accuracy, %</th>{heads}</tr>{body}</table>")
    warnings = result.figures.get("health", {}).get("warnings", ())
    lines += [markup.escape(text) for text in (*warnings, *_remarks(result))]
    return "<div>" + "<br>".join(lines) + "</div>"


def tidy(row: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """One line of metrics with single values alone; those of nested tables by dotted names.

    >>> tidy({"round": 1, "health": {"spread": 0.5, "warnings": []}, "loss": None})
    {'round': 1, 'health.spread': 0.5, 'loss': None}
    """
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= tidy(value, f"{above}{key}.")
        elif not isinstance(value, list | tuple):
            flat[f"{above}{key}"] = value
    return flat


def _title(result: Result) -> str:
    recipe = result.recipe
    rounds = result.rounds[-1]["round"] if result.rounds else 0
    word = "round" if rounds == 1 else "rounds"
    return f"{recipe.method.name} on {recipe.data.name}, {rounds} {word}, seed {recipe.seed}"


def _probes(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracies among figures."""
    return {k: v for k, v in figures.items() if v is None or _is_number(figures, k)}


def probe_table(result: Result) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """What is shown side by side, and a row for every probe, with what else is known of it."""
    columns: dict[str, Mapping[str, Any]] = {"trained": result.figures}
    if result.whitened:
        columns["trained, whitened"] = result.whitened["figures"]
    if result.untrained:
        columns["untrained"] = result.untrained
    columns |= result.references
    rows = []
    for probe in _probes(result.figures):
        rows.append((heading(probe), [_percent(one.get(probe)) for one in columns.values()]))
        for kind, called in (("balanced", "balanced"), ("auroc", "AUROC")):
            if probe in result.figures.get(kind, {}):
                cells = [_percent(one.get(kind, {}).get(probe)) for one in columns.values()]
                rows.append((f"  {called}", cells))
    return list(columns), rows


def _aligned(names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    left = max(len(label) for label, _ in rows)
    widths = [max(5, len(name)) for name in names]
    return [
        f"{label:{left}}  "
        + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, cells in [("", list(names)), *rows]
    ]


def _remarks(result: Result) -> list[str]:
    remarks = {"verdict": result.verdict, "stopped": result.stopped, "BatchNorm": result.batch_norm}
    if overall := result.global_objective:
        numbers = {"over all clients": "value", "mean of clients": "local"}
        numbers |= {"gradient norm": "gradient_norm"}
        before = result.rounds[0].get("global_objective", {})
        values = [
            f"{n} {overall[k]:.3f}"
            + (f" (at initialisation {before[k]:.3f})" if _is_number(before, k) else "")
            for n, k in numbers.items()
            if _is_number(overall, k)
        ]
        remarks = {f"global objective ({overall['objective']})": ", ".join(values), **remarks}
    remarks |= {"at the sites": sites.sentence(result.sites)}
    lines = [f"{key}: {text}" for key, text in remarks.items() if text]
    lines += [f"probably {reason}" for reason in result.reasons]
    lines += [f"note: {note}" for note in result.notes]
    return [*lines, f"run: {result.folder}"]


def _is_number(figures: Mapping[str, Any], key: str) -> bool:
    value = figures.get(key)
    return isinstance(value, Real) and not isinstance(value, bool)


def _percent(value: Any) -> str:
    return f"{100 * value:.1f}" if isinstance(value, Real) else MISSING
