"""What a comparison shows: tables for people and machines, and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harmonium.core import files
from harmonium.evaluation.evaluator import probes_of
from harmonium.evaluation.verdict import CONFIDENCE, Difference, sentence
from harmonium.report.metric_names import heading, times
from harmonium.report.tables import BEST, NEAR, Marks, Tabular, csv_text, latex, markdown
from harmonium.studies.comparison import statistics
from harmonium.studies.comparison.cells import UNTRAINED, WHITENED, WITHOUT_RUN
from harmonium.studies.comparison.losses import measured_losses
from harmonium.studies.comparison.traffic import (
    MEGA,
    WAYS,
    Point,
    by_component,
    mean_components,
    mean_course,
    reached,
)

if TYPE_CHECKING:
    from harmonium.studies.comparison.study import Found

LABEL_FREE = ("spread", "uniformity", "effective_rank")
BESIDE = {"balanced": "Balanced test accuracy in percent", "auroc": "AUROC in percent"}
OBJECTIVE = {  # figures of a global objective, as a table has them
    "value": "over all clients",
    "local": "mean of clients",
    "gradient_norm": "gradient norm",
}
ENOUGH = 0.9  # of the best method's gain in kNN is to be reached, where no target is given

Rows = list[dict[str, Any]]


class Table(NamedTuple):
    """One table of a comparison, for every form."""

    key: str  # of its LaTeX label: tab:compare-KEY
    title: str
    rows: Rows
    digits: int
    marks: Marks = {}
    rules: tuple[int, ...] = ()  # rows that begin a group
    more: str = ""  # what a caption says beside the title


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Rows of figures over seeds; accuracies are shares between 0 and 1."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]  # `encoder`, and the mean of each figure
    details: Mapping[str, Any]  # of every row: each seed, intervals, differences, cost
    picture: Path | None  # the first of the plots
    warnings: Mapping[str, str]  # label -> what is wrong with the encoder; healthy ones have none
    notes: tuple[str, ...] = ()  # what a reader should know: unfair, left out, public images
    plots: tuple[Path, ...] = ()  # every file of them

    def panels(self) -> list[tuple[str, Rows, int | None]]:
        """The one table of a notebook."""
        return [(self.title, self.shown(), 1 if self.has_accuracy else 2)]

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Runs that did not come to their end."""
        return list(self.details["failed"])

    def name(self, label: str) -> str:
        """What readers see of a row: its name by `label.ROW`, or its own label."""
        return str(self.details.get("names", {}).get(label, label))

    @property
    def has_accuracy(self) -> bool:
        """Whether anything could be judged by labels."""
        return any("knn" in row for row in self.rows)

    @property
    def title(self) -> str:
        """What the figures are."""
        if self.has_accuracy:
            return "Test accuracy in percent; encoders frozen"
        return "Label-free figures; encoders frozen"

    @property
    def headline(self) -> str:
        """The title of a table that has no caption beside it: it says what follows a mean."""
        seeds = len(self.details["seeds"])
        return (
            f"{self.title}; mean ± standard error over {seeds} seeds" if seeds > 1 else self.title
        )

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "folder": str(self.folder),
            "rows": [dict(row) for row in self.rows],
            "details": dict(self.details),
            "warnings": dict(self.warnings),
            "notes": list(self.notes),
            "plots": [str(path) for path in self.plots],
        }

    def shown(self) -> Rows:
        """The rows under the names that people read, accuracies in percent; (!) is a warning."""
        scale = 100 if self.has_accuracy else 1
        shown = []
        for row in self.rows:
            label = str(row["encoder"])
            said = f"{self.name(label)} (!)" if label in self.warnings else self.name(label)
            figures = {
                heading(key): self._estimate(label, key, value, scale)
                for key, value in row.items()
                if key != "encoder"
            }
            shown.append({"encoder": said, **figures})
        return shown

    def _estimate(self, label: str, key: str, mean: float | None, scale: float) -> Any:
        stderr = self.details["rows"].get(label, {}).get("figures", {}).get(key, {}).get("stderr")
        value = times(scale, mean)
        return value if value is None or stderr is None else (value, scale * stderr)

    @property
    def verdicts(self) -> dict[str, str]:
        """Whether each method beats the references that need no run, in a sentence."""
        rows = self.details["rows"].items()
        return {label: its["verdict"] for label, its in rows if "verdict" in its}

    def shown_beside(self, kind: str) -> Rows:
        """Balanced accuracies, or AUROC, of the same probes; empty where there are none."""
        rows: Rows = []
        for row in self.rows:
            label = str(row["encoder"])
            held = self.details["rows"].get(label, {}).get("figures", {})
            keys = [key for key in row if f"{kind}_{key}" in held]
            values = {
                heading(key): self._estimate(label, f"{kind}_{key}", its["mean"], 100)
                for key in keys
                for its in [held[f"{kind}_{key}"]]
            }
            rows += [{"encoder": self.name(label), **values}] if values else []
        return rows

    def marks(self, kind: str = "") -> Marks:
        """The best method of every column of `shown`, or of `shown_beside(kind)`, and its equals.

        Empty where there is one method, or nothing by which one is better than another.
        """
        found: dict[tuple[int, str], str] = {}
        before = f"{kind}_" if kind else ""
        held = self.details["rows"]
        labels = [str(row["encoder"]) for row in self.rows]
        if kind:  # rows without such figures are left out of that table
            labels = [k for k in labels if any(f.startswith(before) for f in held[k]["figures"])]
        for key in (key for key in self.rows[0] if key != "encoder"):
            stands = self.details.get("tests", {}).get(f"{before}{key}", {})
            for mark in (BEST, NEAR):
                for label in stands.get(mark, ()):
                    found[labels.index(label), heading(key)] = mark
        return found

    def rules(self) -> tuple[int, ...]:
        """Where methods begin among the rows, and where they end."""
        tested = self.details.get("methods", ())
        places = [n for n, row in enumerate(self.rows) if row["encoder"] in tested]
        return (places[0], places[-1] + 1) if places else ()

    def tested(self) -> Rows:
        """Methods against the first, by every probe; empty for a single seed."""
        probes = [key for key in self.rows[0] if key != "encoder"]
        return [{"figure": heading(key), **row} for key in probes for row in self.beside(key)]

    def beside(self, probe: str | None = None) -> Rows:
        """Methods against the first, by kNN or another probe; empty for a single seed."""
        tests = self.details["tests"].get(probe or self.details["probe"], {}).get("rows", {})
        scale = 100 if self.has_accuracy else 1
        each = [its.get("difference", {}) for its in tests.values()]
        fewer = any(one.get("seeds", math.inf) < len(self.details["seeds"]) for one in each)
        shown: Rows = []
        for label, its in tests.items():
            row: dict[str, Any] = {"method": self.name(label), "mean rank": its.get("rank")}
            apart = its.get("difference", {})
            if apart.get("seeds", 0) > 1:
                row |= {"difference": scale * apart["mean"], "95 % interval": "the same each time"}
                if apart["p"] is not None:
                    low, high = scale * apart["low"], scale * apart["high"]
                    digits = 1 if self.has_accuracy else 3
                    row["95 % interval"] = f"{low:.{digits}f} to {high:.{digits}f}"
                    row["p (Holm)"] = f"{apart['p']:.3f}" if apart["p"] >= 0.001 else "< 0.001"
                row |= {"seeds": apart["seeds"]} if fewer else {}
            shown.append(row)
        return shown if any("difference" in row for row in shown) else []

    def costs(self) -> Rows:
        """What methods send, and what they take to be good enough."""
        shown: Rows = []
        for label, its in self.details["rows"].items():
            if "traffic" not in its:
                continue
            row: dict[str, Any] = {"method": self.name(label)}
            for way in WAYS:
                row[f"MB {way}"] = sum(its["traffic"][way].values()) / MEGA
            if self.details["target"] is not None:
                point = its["reached"]
                row["rounds"] = point and point["round"]
                row["MB, all"] = point and point["bytes"] / MEGA
                row["minutes"] = point and point["seconds"] / 60
            shown.append(row)
        return shown

    def sent(self) -> Rows:
        """Megabytes per client and round by component, down / up."""
        rows = self.details["rows"].items()
        return by_component(
            {self.name(label): its["traffic"] for label, its in rows if "traffic" in its}
        )

    def objectives(self) -> Rows:
        """Global objectives at the end; only rows with the same loss can be compared."""
        shown: Rows = []
        for label, its in self.details["rows"].items():
            if found := its.get("global_objective"):
                row: dict[str, Any] = {"method": self.name(label), "loss": found["loss"]}
                for key, name in OBJECTIVE.items():
                    if key in found:
                        one = found[key]
                        error = one["stderr"]
                        row[name] = one["mean"] if error is None else (one["mean"], error)
                shown.append(row)
        return shown

    def papers(self) -> Rows:
        """Published figures beside those here, and why they differ."""
        found = {k: its for k, its in self.details["rows"].items() if "published" in its}
        return [
            {
                "method": self.name(label),
                "published": _with_deviation(its["published"]),
                "here": times(100, its["figures"].get(its["published"]["probe"], {}).get("mean")),
                "by": heading(its["published"]["probe"]),
                "because": "; ".join(its["published"]["gap"]),
            }
            for label, its in found.items()
        ]


def _with_deviation(published: Mapping[str, Any]) -> Any:
    """A paper's figure, beside its deviation over seeds where it has one."""
    figure, deviation = published["figure"], published.get("deviation")
    return figure if deviation is None else (figure, deviation)


def written(folder: Path, found: Found) -> Comparison:
    """Put everything into a comparison, and write it down in every form."""
    figures = {key: flat(its) for key, its in found.figures.items()}
    trained = [row for label in found.plan.rows for row in (label, f"{label}{WHITENED}")]
    order = [*WITHOUT_RUN, *trained]
    labels = [label for label in order if any(label == one for one, _ in figures)]
    by_seed = {label: _by_seed(figures, label) for label in labels}
    kinds = list(dict.fromkeys(key for its in found.figures.values() for key in probes(its)))
    kinds = [key for key in kinds if key in by_seed[UNTRAINED]] or kinds
    probe = "knn" if "knn" in kinds else kinds[0]
    target, base = _target(found), next(iter(found.plan.methods))
    details: dict[str, Any] = {
        "seeds": list(found.plan.seeds),
        "base": base,
        "probe": probe,
        "target": target,
        "unfair": found.unfair,
        "failed": [{"encoder": k, "seed": s, "why": why} for (k, s), why in found.failed.items()],
        "names": dict(found.plan.names),
        "methods": list(found.plan.methods),
        "rows": {label: _detail(found, label, by_seed[label], target) for label in labels},
        "tests": _tests(found, by_seed, ranked="knn" in kinds),
    }
    for label, its in details["tests"].get(probe, {}).get("rows", {}).items():
        details["rows"][label] |= its
    for label, told in _verdicts(found, by_seed, kinds).items():
        details["rows"][label]["verdict"] = told
    rows = [
        {"encoder": label, **{key: _mean(by_seed[label].get(key)) for key in kinds}}
        for label in labels
    ]
    warnings = {label: text for label in labels if (text := _warnings(found, label))}
    notes = (
        *_notes(found),
        *_lacking(found, {label: by_seed[label].get(probe) for label in labels}),
    )
    lines = tuple(" ".join(note.split()) for note in notes)  # an error may have several
    made = Comparison(folder, tuple(rows), details, None, warnings, lines)
    plots: list[Path] = []
    if probe == "knn":
        from harmonium.studies.comparison.plots import draw

        plots += draw(made, found)
    if found.objectives:
        from harmonium.studies.comparison.plots import draw_objectives

        plots += draw_objectives(made, found)
    if plots:
        made = replace(made, picture=plots[0] if probe == "knn" else None, plots=tuple(plots))
    _write(made, list(_flat(found, by_seed, target)))
    return made


def _tests(
    found: Found, by_seed: Mapping[str, Mapping[str, Mapping[int, float]]], *, ranked: bool
) -> dict[str, Any]:
    """Every figure's methods against the first: differences, ranks, and which are the best.

    Where there is no accuracy, no value is better than another, so none is the best.
    """
    base = next(iter(found.plan.methods))
    keys = dict.fromkeys(key for k in found.plan.methods for key in by_seed.get(k, {}))
    tests: dict[str, Any] = {}
    for key in keys:
        methods = {k: by_seed[k][key] for k in found.plan.methods if by_seed.get(k, {}).get(key)}
        rows: dict[str, dict[str, Any]] = {label: {} for label in methods}
        if base in methods and len(found.plan.seeds) > 1:
            for label, apart in statistics.differences(methods, base).items():
                rows[label]["difference"] = asdict(apart)
        if len(methods) > 1:
            for label, rank in statistics.mean_ranks(methods).items():
                rows[label]["rank"] = rank
        tests[key] = {
            "base": base,
            "test": statistics.TEST,
            "correction": f"{statistics.CORRECTION}, of the methods of this figure",
            "rows": {label: its for label, its in rows.items() if its},
        }
        if ranked and len(methods) > 1:
            tests[key] |= asdict(statistics.standing(methods))
    return tests


def probes(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The probes of a verdict; data without labels have label-free figures instead."""
    return probes_of(figures) or {key: figures["health"][key] for key in LABEL_FREE if figures}


def flat(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """The probes, and beside each its balanced accuracy and AUROC as `balanced_knn`, `auroc_knn`.

    >>> flat({"knn": 0.5, "balanced": {"knn": 0.4}, "health": {}})
    {'knn': 0.5, 'balanced_knn': 0.4}
    """
    more = {
        f"{kind}_{key}": value for kind in BESIDE for key, value in figures.get(kind, {}).items()
    }
    return {**probes(figures), **more}


def _by_seed(
    figures: Mapping[tuple[str, int], Mapping[str, float | None]], label: str
) -> dict[str, dict[int, float]]:
    """Figure -> seed -> value; what diverged is left out."""
    found: dict[str, dict[int, float]] = {}
    for (row, seed), its in figures.items():
        for key, value in its.items() if row == label else ():
            held = found.setdefault(key, {})
            if value is not None and math.isfinite(value):
                held[seed] = value
    return found


def _mean(values: Mapping[int, float] | None) -> float | None:
    return statistics.summary(values).mean if values else None


def _detail(
    found: Found, label: str, by_seed: Mapping[str, Mapping[int, float]], target: float | None
) -> dict[str, Any]:
    """Everything of one row."""
    made: dict[str, Any] = {
        "figures": {
            key: {**asdict(statistics.summary(values)), "by_seed": dict(values)}
            for key, values in by_seed.items()
            if values
        }
    }
    if overall := _objective(found, label):
        made["global_objective"] = overall
    if label in found.published:
        made["published"] = found.published[label]._asdict()
    courses = [some for (row, _), some in found.courses.items() if row == label]
    if courses:
        mean = mean_course(courses)
        point = None if target is None else reached(mean, target)
        made |= {
            "traffic": mean_components([t for (k, _), t in found.traffic.items() if k == label]),
            "course": [asdict(one) for one in mean],
            "reached": point and asdict(point),
        }
    return made


def _objective(found: Found, label: str) -> dict[str, Any]:
    """The global objective at the end of a row's runs, over seeds; empty where not measured."""
    last = {seed: rows[-1] for (row, seed), rows in found.objectives.items() if row == label}
    ends = {seed: row["global_objective"] for seed, row in last.items()}
    made: dict[str, Any] = {}
    for key in OBJECTIVE:
        values = {seed: end[key] for seed, end in ends.items() if end.get(key) is not None}
        if values:
            made[key] = {**asdict(statistics.summary(values)), "by_seed": values}
    if not made:
        return {}
    loss = measured_losses(found)[label]
    return {"objective": next(iter(ends.values()))["objective"], "loss": loss, **made}


def _target(found: Found) -> float | None:
    """The kNN to be reached, on validation images."""
    if found.plan.settings.target is not None:
        return found.plan.settings.target / 100
    courses = [some for label in found.plan.methods if (some := _course(found, label))]
    first, last = ([some[place].knn for some in courses] for place in (0, -1))
    before, after = ([knn for knn in some if knn is not None] for some in (first, last))
    if not before or not after:
        return None
    begun = sum(before) / len(before)
    return begun + ENOUGH * (max(after) - begun)


def _course(found: Found, label: str) -> list[Point] | None:
    courses = [some for (row, _), some in found.courses.items() if row == label]
    return mean_course(courses) if courses else None


def _warnings(found: Found, label: str) -> str:
    texts = [
        text
        for (row, _), its in found.figures.items()
        if row == label and row not in WITHOUT_RUN
        for text in its.get("health", {}).get("warnings", ())
    ]
    return " ".join(dict.fromkeys(texts))


def _verdicts(
    found: Found, by_seed: Mapping[str, Mapping[str, Mapping[int, float]]], kinds: list[str]
) -> dict[str, str]:
    """A sentence for each method: that of its run, or of the means over seeds, paired by seed."""
    told = {}
    for label in found.plan.methods:
        runs = {seed: its for (row, seed), its in found.against.items() if row == label}
        if len(runs) == 1 and len(found.plan.seeds) == 1:
            if text := next(iter(runs.values())).get("text"):
                told[label] = text
            continue
        apart: dict[str, dict[str, Difference]] = {}
        for key in kinds if "knn" in kinds else ():
            mine = by_seed.get(label, {}).get(key, {})
            for beside in WITHOUT_RUN:
                theirs = by_seed.get(beside, {}).get(key, {})
                if len(shared := sorted(set(mine) & set(theirs))) > 1:
                    gap = statistics.summary({seed: mine[seed] - theirs[seed] for seed in shared})
                    own, other = (sum(one[s] for s in shared) for one in (mine, theirs))
                    margin = 0.0 if gap.high is None else gap.high - gap.mean
                    held = [its.get("probes", {}).get(key, {}).get(beside) for its in runs.values()]
                    known = [one["margin"] for one in held if one]
                    noise = sum(known) / len(known) if known else CONFIDENCE * (gap.stderr or 0.0)
                    count = len(shared)
                    apart.setdefault(key, {})[beside] = Difference(
                        own / count, other / count, margin, count, noise
                    )
        if apart:
            told[label] = sentence(apart)
    return told


def _notes(found: Found) -> Iterator[str]:
    for text in found.unfair:
        yield f"unfair: {text}"
    for (label, seed), why in found.failed.items():
        yield f"left out: {found.plan.name(label)}, seed {seed}: {why}"
    for (label, seed), why in found.stopped.items():
        yield f"ended early: {found.plan.name(label)}, seed {seed}: {why}"
    yield from found.plan.remarks
    alone = [k for k, one in found.plan.methods.items() if not one.objective.any_method]
    for label in alone:
        row = found.plan.name(label)
        yield f"only {row} can train its objective: it has no references of its own"
    target = _target(found)
    courses = [some for label in found.plan.methods if (some := _course(found, label))]
    points = [reached(some, target) for some in courses] if target is not None else []
    if points and all(point is not None and point.round == 0 for point in points):
        yield (f"the untrained encoder reaches {100 * (target or 0):.1f} % already, so costs are 0")
    if 1 < len(found.plan.seeds) < 5 and len(found.plan.methods) > 1:
        yield (
            f"{len(found.plan.seeds)} seeds: intervals are wide and p values say little; "
            "five or more tell more"
        )


def _lacking(found: Found, figures: Mapping[str, Mapping[int, float] | None]) -> Iterator[str]:
    """Rows whose means are not of all seeds: what failed or diverged is not in them."""
    seeds = found.plan.seeds
    for label, values in figures.items():
        lost = [seed for seed in seeds if seed not in (values or {})]
        if not lost:
            continue
        broken = [seed for seed in lost if (label, seed) in found.figures]
        row = found.plan.name(label)
        if broken:
            yield f"diverged: {row}, seed {', '.join(map(str, broken))}: left out of its mean"
        if values:
            yield (
                f"{row}: means are of {len(values)} of {len(seeds)} seeds, those of other rows "
                "may be of others; differences and ranks are of seeds that both or all have"
            )


def _write(made: Comparison, runs: Rows) -> None:
    """JSON with everything, CSV with a line for each run and each test, and tables for papers."""
    unfair = "; ".join(made.details["unfair"])
    names = made.details["names"]
    lines = []
    for line in runs:
        called = {"name": made.name(line["encoder"])} if names else {}
        first = {"encoder": line["encoder"], **called, **line}
        lines.append({**first, **({"unfair": unfair} if unfair else {})})
    texts = {
        "compare.json": json.dumps(made.plain(), indent=1) + "\n",
        "compare.csv": csv_text(lines),
        "compare-tests.csv": csv_text(list(_test_lines(made))),
    }
    parts = [f"`label.ROW=NAME` named rows here: {_said(names)}.\n"] if names else []
    tex = [TEX]
    for number, one in enumerate(tables(made)):
        parts += [f"## {one.title}\n", markdown(one.rows, digits=one.digits, marks=one.marks)]
        parts += [f"{as_markdown(one.more)}\n"] if one.more else []
        said = [f"Unfair: {unfair}"] if unfair and not number else []
        caption = ". ".join(filter(None, [one.title, one.more.rstrip("."), *said]))
        label = f"tab:compare{f'-{one.key}' if one.key else ''}"
        tex.append(
            latex(
                one.rows, caption, digits=one.digits, label=label, marks=one.marks, rules=one.rules
            )
        )
    warned = [f"(!) {made.name(label)}: {text}" for label, text in made.warnings.items()]
    warned += [f"{made.name(label)}: {text}" for label, text in made.verdicts.items()]
    notes = "".join(f"- {note}\n" for note in (*warned, *made.notes))
    texts["compare.md"] = "\n".join([*parts, notes]).rstrip() + "\n"
    texts["compare.tex"] = "\n".join([*(f"% {note}" for note in (*warned, *made.notes)), *tex])
    for name, text in texts.items():
        files.write_atomic(made.folder / name, text.encode())


TEX = "% Tables need \\usepackage{booktabs}.\n"


def _said(names: Mapping[str, str]) -> str:
    return ", ".join(f"{label} is {name}" for label, name in names.items())


def as_markdown(caption: str) -> str:
    """What a caption says of marks, as Markdown shows them."""
    return caption.replace("underlined", "in italics")


def _test_lines(made: Comparison) -> Iterator[dict[str, Any]]:
    """A line for each figure and method, with every digit."""
    for figure, its in made.details["tests"].items():
        for label in made.details["methods"]:
            tested = its["rows"].get(label, {})
            apart = tested.get("difference", {})
            called = {"name": made.name(label)} if made.details["names"] else {}
            yield {
                "figure": figure,
                "encoder": label,
                **called,
                "against": its["base"],
                "mean_rank": tested.get("rank"),
                **{key: apart.get(key) for key in ("mean", "low", "high", "p", "seeds")},
                "best": label in its.get("best", ()),
                "near": label in its.get("near", ()),
                "test": its["test"],
                "correction": its["correction"],
            }


def tables(made: Comparison) -> list[Table]:
    """Every table that has something in it, the one of the probes first."""
    details = made.details
    first = Table(
        "", made.title, made.shown(), 1 if made.has_accuracy else 2, made.marks(), made.rules(),
        marks_words(details),
    )  # fmt: skip
    cost = "Megabytes per client and round"
    if (target := details["target"]) is not None:
        reached = f"{100 * target:.1f} % validation kNN"
        cost += f"; rounds, megabytes of all clients and modelled minutes to {reached}"
    against = (
        f"Against {made.name(details['base'])}: paired t-tests over seeds, p by Holm's rule for "
        "the methods of each figure"
    )
    more = [
        *(
            Table(kind, title, made.shown_beside(kind), 1, made.marks(kind), made.rules())
            for kind, title in BESIDE.items()
        ),
        Table(
            "tests", against, made.tested(), 1 if made.has_accuracy else 3,
            more=TEST_WORDS,
        ),
        Table("objectives", objectives_title(made), made.objectives(), 3),
        Table("cost", cost, made.costs(), 2),
        Table(
            "sent", "Megabytes per client and round by component, down / up", made.sent(), 2
        ),
        Table("published", "Published, and why it is another figure here", made.papers(), 1),
    ]  # fmt: skip
    return [first, *(one for one in more if one.rows)]


def objectives_title(made: Comparison) -> str:
    """What the table of global objectives shows, and what it does not where losses differ."""
    several = len({row["loss"] for row in made.objectives()}) > 1
    return "Global objective of the final model" + (
        "; only values of the same loss can be compared" if several else ""
    )


TEST_WORDS = (
    "Differences with their 95 % intervals, p values of two-sided paired t-tests over seeds, "
    "corrected by Holm's rule for the methods of each figure, and mean ranks (1 is the best)"
)


def marks_words(details: Mapping[str, Any]) -> str:
    """What a caption says of the marks and of the numbers behind the means."""
    count = len(details["seeds"])
    said = f"Mean and standard error over {count} seeds" if count > 1 else "A single seed"
    tests = details["tests"].values()
    if any(one.get("best") for one in tests):
        said += "; bold: the best mean of the methods in each column"
        if count > 1:
            said += (
                "; underlined: methods that a paired t-test over seeds with Holm's correction "
                f"does not tell from it (p > {statistics.ALPHA:g})"
            )
    return f"{said}."


def more_tables(made: Comparison) -> list[tuple[str, Rows, int]]:
    """The tables after the first one: title, rows, digits."""
    return [(one.title, one.rows, one.digits) for one in tables(made)[1:]]


def _flat(
    found: Found, by_seed: Mapping[str, Mapping[str, Mapping[int, float]]], target: float | None
) -> Iterator[dict[str, Any]]:
    """A line a run: its figures, and what a method cost; references cost nothing on the way."""
    for label, figures in by_seed.items():
        for seed in sorted(seed for one, seed in found.figures if one == label):
            row: dict[str, Any] = {
                "encoder": label,
                "seed": seed,
                **{key: values.get(seed) for key, values in figures.items()},
            }
            if course := found.courses.get((label, seed)):
                sent = found.traffic[label, seed]
                row["rounds"] = course[-1].round
                row |= {f"bytes_{way}": round(sum(sent[way].values())) for way in WAYS}
                if target is not None:
                    point = reached(course, target)
                    row["target_knn"] = target
                    row["target_rounds"] = point and point.round
                    row["target_megabytes"] = point and point.bytes / MEGA
                    row["target_minutes"] = point and point.seconds / 60
            yield row
