"""What a study found, for readers: JSON, a page in Markdown, CSV and plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.errors import counted
from harmonium.recipe.presets import entry
from harmonium.recipe.schema import Recipe
from harmonium.report.figure import formats, study_formats
from harmonium.report.metric_names import heading
from harmonium.report.plots import curves
from harmonium.report.study_plots import Place, cost_points, value_maps
from harmonium.report.tables import BEST, estimate
from harmonium.report.writer import ResultTable, markdown_page, write_plot, write_results
from harmonium.studies.comparison.published import gaps
from harmonium.studies.comparison.statistics import half_width, interval_words
from harmonium.studies.evidence.decision import Decision
from harmonium.studies.evidence.study import FREE, PERCENT, StudyResult
from harmonium.studies.evidence.study_file import GRADIENT, OBJECTIVE, RANK

MEGA = 1_000_000
FEWEST_ROWS = 4  # with which figures are drawn over their costs
FIGURES = {OBJECTIVE: "global objective", GRADIENT: "gradient norm", RANK: "effective rank"}


def write_study(found: StudyResult) -> StudyResult:
    """Write all files of a study into its folder; returns it with the paths of its plots."""
    found.plots = tuple(_draw(found))
    write_results(
        found.folder,
        "study",
        found.plain(),
        tables(found),
        sheets={"": list(_sheet(found))},
    )
    files.write_atomic(found.folder / "study.md", page(found).encode())
    return found


def page(found: StudyResult) -> str:
    """The study's page: the claim, published figures, its own, and all that was looked at."""
    study = found.study
    parts = [f"# {study.title}\n", f"**Claim.** {study.claim}\n"]
    parts += [f"*{study.paper}*\n"] if study.paper else []
    commits = ", ".join(f"`{one}`" for one in found.commits)
    parts.append(f"**Verdict: {found.verdict}.** Figures of commit {commits}.\n")
    groups = {table.title: table for table in tables(found)}
    order = [
        ("Decision", _rule_words(found)),
        ("Published figures", ""),
        ("Headroom", _headroom_words(found)),
        ("Test figures", _figures_words(found)),
    ]
    for title, text in order:
        shown = [table for name, table in groups.items() if name.startswith(title)]
        if shown:
            parts += [f"## {title}\n", *([f"{text}\n"] if text else []), section(shown, title)]
    parts += [f"![{path.stem}]({path.name})\n" for path in found.plots if path.suffix == ".png"]
    if tuning := [table for name, table in groups.items() if name.startswith("Tuning")]:
        parts += ["## Tuning\n", f"{_tuning_words(found)}\n"]
        parts.append(section(tuning, "Tuning"))
    parts += ["## The regime\n", f"```\n{_wrapped(study.regime)}\n```\n", _rows_words(found)]
    if apart := [*study.differs, *_gaps(found)]:
        parts += ["## What differs from the paper\n", _listed(apart)]
    parts += ["## Everything that was looked at\n", _listed([*_looked_at(found)])]
    parts.append(
        f"Made by `harmonium study {study.name}`; `study.json` has the figures of every run and "
        "the digest of its recipe.\n"
    )
    return "\n".join(parts).rstrip() + "\n"


def section(table_list: Sequence[ResultTable], name: str) -> str:
    """Tables of a section, each under what its title adds to the section's name."""
    parts = []
    for table in table_list:
        rest = table.title.removeprefix(name).strip(" :,")
        parts += [f"### {rest[:1].upper()}{rest[1:]}\n"] if rest else []
        parts.append(markdown_page([table._replace(title="")]))
    return "\n".join(parts)


def tables(found: StudyResult) -> list[ResultTable]:
    """Every table of a study."""
    has_objective = any(result.global_objective for result in found.results.values())
    digits = 2 if has_objective else 1
    made = [ResultTable("Decision", [_decision_row(one) for one in found.decisions], 2)]
    if published := list(_published_rows(found)):
        made.append(ResultTable("Published figures", published, 1))
    for condition, checks in found.checks.items():
        title = f"Headroom: {condition}" if condition else "Headroom"
        made.append(ResultTable(title, list(_figure_rows(found, "headroom", condition)), digits))
        rows = [
            {"requirement": one.what, "measured": one.value, "met": "yes" if one.met else "no"}
            for one in checks
        ]
        made.append(ResultTable(f"{title}, requirements", rows))
    made += list(_tuning_tables(found))
    for condition in found.study.conditions:
        title = f"Test figures: {condition}" if condition else "Test figures"
        made.append(ResultTable(title, list(_figure_rows(found, "deciding", condition)), digits))
    return [table for table in made if table.rows]


def _decision_row(one: Decision) -> dict[str, Any]:
    if one.mean is None:
        lead = one.why
    elif one.low is None:
        lead = f"{one.mean:+.2f}"
    else:
        lead = f"{one.mean:+.2f} [{one.low:+.2f}, {one.high:+.2f}]"
    row: dict[str, Any] = {
        "the claim says": one.line.text,
        "condition": one.condition,
        "lead (95 %)": lead,
    }
    row |= {"p (Holm)": None if one.p is None else f"{one.p:.4f}", "verdict": one.verdict}
    return row if one.condition else {key: row[key] for key in row if key != "condition"}


def _published_rows(found: StudyResult) -> Iterator[dict[str, Any]]:
    for name in found.study.published:
        row = entry(name)
        if row is not None and row.published is not None:
            figure = (row.published, row.deviation) if row.deviation else row.published
            yield {"recipe": row.name, "what": row.what, "accuracy (%)": figure}


def _figure_rows(found: StudyResult, stage: str, condition: str) -> Iterator[dict[str, Any]]:
    """Mean and standard error of every figure; of trained rows, their traffic and CPU time, too."""
    rows = {row: found.figures(stage, condition, row) for row in (*FREE, *found.study.rows)}
    trained = [figures for row, figures in rows.items() if row not in FREE and figures]
    keys = dict.fromkeys(key for figures in trained for key in figures)
    failures = {row: found.failures(stage, condition, row) for row in found.study.rows}
    for row, figures in rows.items():
        if not figures and not failures.get(row):
            continue
        shown: dict[str, Any] = {"encoder": row}
        if any(failures.values()):
            shown["failed"] = str(failures.get(row) or "")
        for key in keys:
            values = list(figures.get(key, {}).values())
            shown[figure_heading(found, key)] = estimate(values) if values else None
        cells = found.cells_of(stage, condition, row)
        if row not in FREE and cells:
            plain = {one["path"]: one for one in found.plain_cells(cells)}
            mean = sum(one["bytes"] for one in plain.values()) / len(plain) / MEGA
            shown["MB"] = mean if found.study.rows.index(row) < len(found.study.arms) else None
            costs = [s for one in plain.values() if (s := one["cpu_seconds"]) is not None]
            shown["CPU s"] = sum(costs) / len(costs) if costs else None
        yield shown


def figure_heading(found: StudyResult, key: str) -> str:
    """What tables call a figure."""
    known = found.study.headlines.get(key)
    return known.heading if known else FIGURES.get(key) or heading(key)


def axis_of(found: StudyResult, key: str) -> str:
    """What the axis of a plot calls a figure."""
    known = found.study.headlines.get(key)
    percent = known.percent if known else key not in FIGURES
    name = figure_heading(found, key)
    return f"test {name} (%)" if percent else name


def _tuning_tables(found: StudyResult) -> Iterator[ResultTable]:
    shown = set[str]()
    for condition in dict.fromkeys(condition for condition, _ in found.scores):
        source = found.study.tuned_in or condition
        if source in shown:
            continue
        shown.add(source)
        rows: list[dict[str, Any]] = []
        marks: dict[tuple[int, str], str] = {}
        for row in found.study.rows:
            scores = found.scores.get((condition, row), {})
            cells = {" ".join(setting): score for setting, score in scores.items()}
            if cells:
                marks[len(rows), " ".join(found.chosen[condition, row])] = BEST
                rows.append({"encoder": row, **cells})
        title = f"Tuning: {source}" if source else "Tuning"
        yield ResultTable(
            title, rows, 3 if found.study.tuned_by in ("score", OBJECTIVE) else 1, marks
        )


def _rule_words(found: StudyResult) -> str:
    count = len(found.study.seeds["deciding"])
    return (
        f"A line holds where the lead over {count} fresh seeds, paired by seed, is above its "
        "margin with p below 0.05 in a two-sided t-test, corrected by Holm's rule for all lines; "
        "intervals are not corrected. `does not hold` means that the lead was not demonstrated, "
        "not that the opposite was. Leads are in points of test accuracy; those by other figures "
        "in their own unit. Of the global objective, its gradient norm and angles between clients, "
        "less is better."
    )


def _headroom_words(found: StudyResult) -> str:
    rule = found.study.headroom
    if rule is None:
        return ""
    seeds = counted(len(found.study.seeds.get("headroom", ())), "seed")
    return (
        f"Measured with {rule.below} and {rule.above} alone on {seeds} that are used for nothing "
        "else. Differences must exceed 3 standard errors. Means with standard errors."
    )


def _figures_words(found: StudyResult) -> str:
    count = len(found.study.seeds["deciding"])
    return (
        f"Means with standard errors over {counted(count, 'seed')}, in percent, of frozen encoders "
        "on the test images. MB: what all clients sent and received in training. CPU s: of a whole "
        "run on one core, evaluation included."
    )


def _tuning_words(found: StudyResult) -> str:
    study = found.study
    named = {
        "knn": "validation kNN",
        "score": "the label-free score",
        OBJECTIVE: "global objective of the training images",
    }
    by = named.get(study.tuned_by) or f"{figure_heading(found, study.tuned_by)} (validation images)"
    seeds = counted(len(found.study.seeds.get("tuning", ())), "seed")
    text = f"Mean {by} over {seeds} for every point of the grid; the best of each row was taken."
    if edges := list(dict.fromkeys(_at_the_edge(found))):
        text += f" At an edge of the grid, beyond which a better value may lie: {', '.join(edges)}."
    return text


def _at_the_edge(found: StudyResult) -> Iterator[str]:
    """Rows whose chosen setting is the first or last value of an axis of the grid."""
    for (_, row), chosen in found.chosen.items():
        for word, (key, values) in zip(chosen, found.study.grid.items(), strict=True):
            if len(values) > 1 and word in (f"{key}={values[0]}", f"{key}={values[-1]}"):
                yield f"{row} ({word})"


def _rows_words(found: StudyResult) -> str:
    study = found.study
    lines = [f"{row}: `{' '.join(words)}`" for row, words in study.arms.items()]
    lines += [
        f"{row}: the regime of {next(iter(study.arms))}, "
        + ("all images in one place" if row != "alone" else "each client by itself")
        + (", with labels" if row == "supervised" else "")
        + (f"; `{' '.join(words)}`" if words else "")
        for row, words in study.references.items()
    ]
    lines += [
        f"condition {name}: `{' '.join(words)}`" for name, words in study.conditions.items() if name
    ]
    lines += [
        f"{row} is measured by `{' '.join(words)}`"
        for row, words in study.measures.items()
        if words
    ]
    lines += [f"grid: `{key}` of {', '.join(values)}" for key, values in study.grid.items()]
    lines += [f"seeds for {k}: {', '.join(map(str, seeds))}" for k, seeds in study.seeds.items()]
    return _listed(lines)


def _gaps(found: StudyResult) -> Iterator[str]:
    """In what the runs here are smaller than the first published row."""
    if not found.study.published:
        return
    full = found.study.published[0]
    arm, condition = next(iter(found.study.arms)), next(iter(found.study.conditions))
    here = found.study.recipe(condition, arm, found.study.settings[0], 0)
    yield f"against `{full}`: {'; '.join(gaps(here, Recipe.of(full)))}"


def _looked_at(found: StudyResult) -> Iterator[str]:
    count = len(found.results)
    yield f"{counted(count, 'run')} of this study, all in the tables above and in `study.json`"
    for cell, why in found.failed.items():
        yield f"failed: {cell.label}: {why}"
    for cell, why in found.unmeasured.items():
        yield f"not measured: {cell.label}: {why}"
    yield from found.changed
    yield from found.study.looked_at


def _sheet(found: StudyResult) -> Iterator[dict[str, Any]]:
    """A line for every run."""
    for cell, one in zip(found.results, found.plain_cells(list(found.results)), strict=True):
        measured = found.measured(cell)
        setting = " ".join(cell.setting)
        line = {key: one[key] for key in ("stage", "condition", "row")}
        yield {**line, "setting": setting, "seed": cell.seed, **measured, "bytes": one["bytes"]}


def _draw(found: StudyResult) -> Iterator[Path]:
    """Curves of the deciding runs in every condition, and figures over conditions."""
    seeds = len(found.study.seeds["deciding"])
    words = interval_words({seeds})
    interval = f"mean and {words}" if words else ""
    kinds = {
        "knn": ("validation kNN (%)", PERCENT),
        OBJECTIVE: ("global objective", 1.0),
        GRADIENT: ("gradient norm of the global objective", 1.0),
    }
    with formats(study_formats(["png"])):
        for condition in found.study.conditions:
            for kind, (axis, scale) in kinds.items():
                series = {
                    row: _curve(found, condition, row, kind, scale) for row in found.study.rows
                }
                if any(len(points) > 1 for points in series.values()):
                    name = "-".join(filter(None, [kind, _file_name(condition)]))
                    title = ": ".join(filter(None, [found.study.title, condition]))
                    path = found.folder / f"{name}.png"
                    yield from write_plot(
                        path, curves, series, "round", axis, title, interval=interval
                    )
        yield from _over_conditions(found, interval)
        yield from _maps(found)
        yield from _over_costs(found)


def _over_conditions(found: StudyResult, interval: str) -> Iterator[Path]:
    """The headroom's figure, or kNN, of every row over the conditions."""
    conditions = list(found.study.conditions)
    if len(conditions) < 3:
        return
    key = _main_figure(found)
    series: dict[str, list[tuple[float, float, float]]] = {}
    for place, condition in enumerate(conditions):
        for row in found.study.rows:
            values = list(found.figures("deciding", condition, row).get(key, {}).values())
            if values:
                mean, error = estimate(values)
                half = half_width(error, len(values)) or 0.0
                series.setdefault(row, []).append((float(place), mean, half))
    axis = axis_of(found, key)
    if series:
        yield from write_plot(
            found.folder / "conditions.png", curves, series, "condition", axis, found.study.title,
            ticks=conditions, interval=interval,
        )  # fmt: skip


def _main_figure(found: StudyResult) -> str:
    """The figure that plots show: the headroom's, else the rule's, else kNN."""
    study = found.study
    return study.headroom.by if study.headroom else study.rule[0].by if study.rule else "knn"


def _maps(found: StudyResult) -> Iterator[Path]:
    """A map of every row over two or three keys that vary; what failed is shown as failed."""
    study, key = found.study, _main_figure(found)
    if len(study.vary) not in (2, 3):
        return
    for row in study.rows:
        cells: dict[Place, float | str] = {}
        for condition, words in study.conditions.items():
            first, second, *third = (word.partition("=")[2] for word in words)
            values = list(found.figures("deciding", condition, row).get(key, {}).values())
            state = found.state(condition, row)
            shown = estimate(values)[0] if values and not state else state or "no figure"
            cells[first, second, third[0] if third else ""] = shown
        path = found.folder / f"map-{_file_name(row)}.png"
        title = f"{study.title}: {row}"
        yield from write_plot(path, value_maps, cells, study.vary, axis_of(found, key), title)


def _over_costs(found: StudyResult) -> Iterator[Path]:
    """The main figure over megabytes and over CPU seconds, in every condition."""
    study, key = found.study, _main_figure(found)
    kinds = {"bytes": "MB sent and received, all clients", "cpu": "CPU seconds of a run"}
    for condition in study.conditions if len(study.rows) >= FEWEST_ROWS else ():
        for kind, axis in kinds.items():
            points, levels = dict[str, tuple[float, float, float]](), dict[str, float]()
            for row in study.rows:
                values = list(found.figures("deciding", condition, row).get(key, {}).values())
                if not values:
                    continue
                mean, error = estimate(values)
                if cost := _cost(found, condition, row, kind):
                    points[row] = (cost, mean, half_width(error, len(values)) or 0.0)
                else:
                    levels[row] = mean
            if points:
                name = "-".join(filter(None, [f"cost-{kind}", _file_name(condition)]))
                title = ": ".join(filter(None, [study.title, condition]))
                yield from write_plot(
                    found.folder / f"{name}.png", cost_points, points, axis, axis_of(found, key),
                    title, levels,
                )  # fmt: skip


def _cost(found: StudyResult, condition: str, row: str, kind: str) -> float | None:
    """The mean of what a run of a row sent or took; references send nothing."""
    if kind == "bytes" and row not in found.study.arms:
        return None
    cells = found.plain_cells(found.cells_of("deciding", condition, row))
    values = [one["bytes"] / MEGA if kind == "bytes" else one["cpu_seconds"] for one in cells]
    known = [value for value in values if value]
    return sum(known) / len(known) if known else None


def _curve(
    found: StudyResult, condition: str, row: str, kind: str, scale: float
) -> list[tuple[float, float, float]]:
    """Means over seeds of a figure of every round that all seeds have."""
    by_round: dict[int, list[float]] = {}
    cells = found.cells_of("deciding", condition, row)
    for cell in cells:
        for line in found.results[cell].rounds:
            value = _of_round(line, kind)
            if value is not None:
                by_round.setdefault(line["round"], []).append(scale * value)
    points = []
    for number, values in sorted(by_round.items()):
        if len(values) == len(cells):
            mean, error = estimate(values)
            points.append((float(number), mean, half_width(error, len(values)) or 0.0))
    return points


def _of_round(line: Mapping[str, Any], kind: str) -> float | None:
    if kind == "knn":
        return line.get("knn")
    measured = line.get("global_objective") or {}
    return measured.get("value" if kind == OBJECTIVE else "gradient_norm")


def _file_name(condition: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "=.-" else "-" for sign in condition)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _wrapped(words: Sequence[str], width: int = 96) -> str:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
