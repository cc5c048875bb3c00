"""A finished run in words: one line, a summary, and a table for notebooks."""

from __future__ import annotations

import html as markup
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from harmonium.report.figures import heading
from harmonium.report.tables import MISSING

if TYPE_CHECKING:
    from harmonium.life import Result

_HEALTH = ("spread", "effective_rank", "uniformity", "alignment")


def line(result: Result) -> str:
    """A run in one line: what was trained on what, its figures, and where it lies."""
    probes = _probes(result.figures)
    figures = ", ".join(f"{heading(key)} {_percent(value)}" for key, value in probes.items())
    if figures:
        before = ", ".join(_percent(result.untrained.get(key)) for key in probes)
        figures = f": {figures} % (at initialisation {before} %)"
    return f"<Result {_title(result)}{figures}; {result.folder}>"


def summary(result: Result) -> str:
    """A run in a few lines of plain text."""
    columns = _columns(result)
    probes = _probes(result.figures)
    lines = [_title(result)]
    if probes:
        lines += ["", "test accuracy in percent, encoder frozen", *_aligned(columns, probes)]
    if health := result.figures.get("health"):
        said = (f"{k.replace('_', ' ')} {health[k]:.2f}" for k in _HEALTH if _is_number(health, k))
        lines += ["", f"label-free: {', '.join(said)}"]
        lines += [f"warning: {text}" for text in health.get("warnings", ())]
    lines += [""] if probes or health else []
    lines += _remarks(result)
    return "\n".join(lines)


def html(result: Result) -> str:
    """A run as a compact table for notebooks; whatever comes from outside is escaped."""
    columns, probes = _columns(result), _probes(result.figures)
    rows = [f"<b>{markup.escape(_title(result))}</b>"]
    if probes:
        heads = "".join(f"<th>{markup.escape(name)}</th>" for name in columns)
        body = "".join(
            f"<tr><th style='text-align:left'>{markup.escape(heading(key))}</th>"
            + "".join(f"<td>{_percent(held.get(key))}</td>" for held in columns.values())
            + "</tr>"
            for key in probes
        )
        rows.append(f"<table><tr><th>test accuracy, %</th>{heads}</tr>{body}</table>")
    warnings = result.figures.get("health", {}).get("warnings", ())
    rows += [markup.escape(text) for text in (*warnings, *_remarks(result))]
    return "<div>" + "<br>".join(rows) + "</div>"


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


def _columns(result: Result) -> dict[str, Mapping[str, Any]]:
    """What is shown side by side: the encoder, at initialisation, and references if there are."""
    columns: dict[str, Mapping[str, Any]] = {"trained": result.figures}
    if result.untrained:
        columns["at initialisation"] = result.untrained
    references = getattr(result, "references", None) or {}
    for name, figures in references.items():
        if isinstance(figures, Mapping):
            columns[str(name).replace("_", " ")] = figures
    return columns


def _aligned(columns: Mapping[str, Mapping[str, Any]], probes: Mapping[str, Any]) -> list[str]:
    left = max(len(heading(key)) for key in probes)
    widths = [max(5, len(name)) for name in columns]
    names = "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))
    lines = [f"{'':{left}}  {names}"]
    for key in probes:
        cells = [_percent(figures.get(key)) for figures in columns.values()]
        said = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{heading(key):{left}}  {said}")
    return lines


def _remarks(result: Result) -> list[str]:
    verdict = getattr(result, "verdict", "")
    said = {"verdict": verdict, "stopped": result.stopped, "BatchNorm": result.batch_norm}
    if overall := result.global_objective:
        numbers = {"over all clients": "value", "mean of clients": "local"}
        numbers |= {"gradient norm": "gradient_norm"}
        told = [f"{n} {overall[k]:.3f}" for n, k in numbers.items() if _is_number(overall, k)]
        said = {f"global objective ({overall['objective']})": ", ".join(told), **said}
    lines = [f"{key}: {text}" for key, text in said.items() if text]
    lines += [f"note: {note}" for note in result.notes]
    return [*lines, f"run: {result.folder}"]


def _is_number(figures: Mapping[str, Any], key: str) -> bool:
    value = figures.get(key)
    return isinstance(value, Real) and not isinstance(value, bool)


def _percent(value: Any) -> str:
    return f"{100 * value:.1f}" if isinstance(value, Real) else MISSING
