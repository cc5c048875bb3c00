"""Runs measured side by side: what `harmonium eval` does, as one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harmonium.core import devices
from harmonium.core.errors import ConfigError, DataError, suggest
from harmonium.core.paths import home, make_folder
from harmonium.core.progress import each, work
from harmonium.core.settings import check_fields, plain, unknown
from harmonium.evaluation.feature_cache import FeatureCache
from harmonium.evaluation.references import COMMONEST, RAW, WHITENED
from harmonium.measures import Figures, Measure, Shown, measures
from harmonium.measures.eval_data import OWN, EvalSets, sets_of
from harmonium.measures.result_cache import ResultCache
from harmonium.measures.run_reader import Run, open_run
from harmonium.measures.seed_means import over_seeds, repeats
from harmonium.recipe.overrides import Change, apply_changes, changes_of
from harmonium.report import figure
from harmonium.report.tables import Tabular
from harmonium.report.writer import ResultTable, write_plot, write_results
from harmonium.runs.start import changed_recipe
from harmonium.storage.result_folder import FolderKind, refuse_run

UNTRAINED = "untrained"
EVALUATION = FolderKind("evaluation", "evaluations")


@dataclass(frozen=True, repr=False)
class EvaluationResult(Tabular):
    """The figures of all measures and runs, the files written, and their tables."""

    folder: Path  # of eval.json and the plots
    runs: Mapping[str, Mapping[str, Any]]  # by label: folder, recipe, committed round
    figures: Mapping[str, Mapping[str, Any]]  # by measure, then by run's label
    main_plots: Mapping[str, Path]  # the first plot of each measure
    tables: Sequence[Shown]
    notes: Sequence[str] = ()
    features: Mapping[str, int] = field(default_factory=dict)  # images: found on disk, computed
    draws: Mapping[str, int] = field(default_factory=dict)  # trainings: found on disk, computed
    over_seeds: Sequence[Shown] = ()  # tables of runs that differ in their seed only
    legends: Sequence[str] = ()  # explanations of the tables' words
    plots: Sequence[Path] = ()  # every file of the plots

    def panels(self) -> Sequence[Shown]:
        """The tables of all measures."""
        return self.tables

    def plain(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        return {
            "folder": str(self.folder),
            "runs": {label: dict(about) for label, about in self.runs.items()},
            "measures": {name: dict(results) for name, results in self.figures.items()},
            "pictures": {name: str(path) for name, path in self.main_plots.items()},
            "plots": [str(path) for path in self.plots],
            "notes": list(self.notes),
            "features": dict(self.features),
            "draws": dict(self.draws),
            "over_seeds": [
                {"title": one.title, "rows": [dict(row) for row in one.rows]}
                for one in self.over_seeds
            ],
        }


def evaluate_run(
    *words: str | Path,
    out: str | Path | None = None,
    formats: str | Sequence[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> EvaluationResult:
    """Measure runs from their folders, which stay as they are.

    Args:
        words: as on the command line: folders of runs, or of comparisons, the first of them first;
            names of measures; settings of these measures, or of the engine; `on=[own,mnist]` and
            `on.mnist.key=value` for other images than the runs' own.
        out: where figures and plots go; beside the first run if left out.
        formats: of the plots, as for `compare`.
        note: called with a line for each step that takes time.
        settings: settings by name, e.g. `**{"knn.k": 5}`.

    Returns:
        The figures of every measure and run, their plots and tables.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", **small)
    >>> evaluation = harmonium.evaluate_run(result.folder, "knn", **{"knn.k": 5})
    >>> list(evaluation.figures)
    ['knn']
    """
    formats = figure.study_formats(formats)
    asked = _read_words(words, settings)
    first = next(Path(word) for word in words if "=" not in str(word))
    folder = _folder(out, first, asked)
    features, trainings = FeatureCache(note=note), ResultCache(home() / "draws")
    runs = _opened(asked, features, trainings, note)
    if out is not None:  # and what cannot be written
        make_folder(folder)
    early = [f"{label}: {run.early}" for label, run in runs.items() if run.early]
    with _device_of(runs):
        measured = _measure(runs, asked.measures, note)
    spared = {
        "features": {"found": features.found, "computed": features.computed},
        "draws": {"found": trainings.found, "computed": trainings.computed},
    }
    notes = [*asked.unfinished, *early, *measured.notes]
    with work("tables and plots"), figure.formats(formats):
        return _write(make_folder(folder), runs, measured, spared, notes)


def _device_of(runs: Mapping[str, Run]) -> AbstractContextManager[object]:
    """Measure on the device that the recipe of the first run, or the command, names."""
    return devices.use_device(next(iter(runs.values())).recipe.engine.devices[0])


def measures_of(words: Sequence[str]) -> dict[str, Measure]:
    """The measures that words name, with their settings; slips are refused without a run."""
    names = [word for word in words if "=" not in word]
    for name in names:
        if name not in measures.table() and ":" not in name:
            raise ConfigError(f"no measure is called '{name}': {suggest(name, measures.table())}")
    sets, others = sets_of(changes_of([word for word in words if "=" in word], {}))
    chosen, _ = _with_settings(names, others)
    _needed(sets, chosen)
    return chosen


def headline_values(folder: Path, words: Sequence[str]) -> dict[str, dict[str, float]]:
    """The figures that sum a run up, by the measures that words name; nothing is written.

    Returns:
        By reference without training, such as `untrained`, or `""` for the run itself: figures by
        name. See `Measure.headlines`.
    """
    asked = _read_words([folder, *words], {})
    runs = _opened(asked, FeatureCache(), ResultCache(home() / "draws"), lambda text: None)
    values: dict[str, dict[str, float]] = {}
    for run in runs.values():
        for measure in asked.measures.values():
            with _device_of(runs):
                plain = measure.compute(run).plain
            for reference in ("", UNTRAINED, RAW, WHITENED, COMMONEST):
                found = measure.headline_values(plain, reference)
                if found:
                    values.setdefault(reference, {}).update(found)
    return values


def _opened(
    asked: _Request, features: FeatureCache, trainings: ResultCache, note: Callable[[str], None]
) -> dict[str, Run]:
    """The runs by label; those whose images cannot be read are refused before any is measured."""
    recipes = {label: changed_recipe(path, asked.engine) for label, path in asked.paths.items()}
    shared: dict[str, Any] = {"sets": asked.sets, "feature_cache": features, "finished": trainings}
    runs = {
        label: open_run(asked.paths[label], label, recipes[label], note, **shared)
        for label in each("opening", list(asked.paths), "runs")
    }
    for run in runs.values():
        for name in asked.needed:
            run.eval_data(name)
    return runs


@dataclass(frozen=True)
class _Request:
    """What the words and settings of a call ask for."""

    paths: Mapping[str, Path]  # folders of runs, by label
    measures: Mapping[str, Measure]
    sets: EvalSets
    needed: Sequence[str]  # names of the sets that the measures use
    engine: Sequence[Change]
    unfinished: Sequence[str]  # notes on runs that are left out


@dataclass(frozen=True)
class _Measured:
    """The figures of the measures that could be computed."""

    measures: Mapping[str, Measure]
    figures: Mapping[str, Mapping[str, Figures]]  # by measure, then by run's label
    notes: Sequence[str]  # on runs that a measure had to leave out


def _read_words(words: Sequence[str | Path], settings: Mapping[str, Any]) -> _Request:
    """Sort the words of a call into runs, measures and settings, and check them."""
    if wrong := [word for word in words if not isinstance(word, str | Path)]:
        raise ConfigError(
            f"{wrong[0]!r} is neither text nor a path: name folders, measures and settings one by "
            "one"
        )
    changes = [word for word in words if isinstance(word, str) and "=" in word]
    rest = [word for word in words if word not in changes]
    folders, names = _folders_and_measures(rest)
    runs, unfinished = list[Path](), list[str]()
    for folder in folders:
        done, begun = _runs_in(folder)
        runs += done
        unfinished += [f"{path} is left out: it is not complete" for path in begun]
    if not names:
        known = ", ".join(measures.table())
        raise ConfigError(f"name what to measure of {runs[0]}: {known}")
    given = [*map(str, (run.resolve() for run in runs)), *names]
    if twice := [one for one in given if given.count(one) > 1]:
        raise ConfigError(f"{twice[0]} is named twice")
    sets, others = sets_of(changes_of(changes, settings))
    chosen, engine = _with_settings(names, others)
    paths = dict(zip(_labels(runs), runs, strict=True))
    return _Request(paths, chosen, sets, _needed(sets, chosen), engine, unfinished)


def _folders_and_measures(words: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The folders among words, which come first, and the names of measures."""
    first = words[0] if words else None
    if first is None or (first in measures.table() and not Path(first).is_dir()):
        raise ConfigError("name a run's folder first, e.g. `harmonium eval runs/a angles`")
    if not Path(first).is_dir():
        raise ConfigError(f"there is no folder {first}: name a run's folder first")
    folders, names = [Path(first)], list[str]()
    for word in words[1:]:
        if isinstance(word, str) and (word in measures.table() or ":" in word):
            names.append(word)
        elif Path(word).is_dir():
            folders.append(Path(word))
        else:
            near = suggest(str(word), measures.table())
            raise ConfigError(f"'{word}' is neither a run's folder nor a measure: {near}")
    return folders, names


def _measure(
    runs: Mapping[str, Run], asked: Mapping[str, Measure], note: Callable[[str], None]
) -> _Measured:
    """Compute every measure of every run; runs for which one is not possible are left out of it."""
    results, notes = dict[str, dict[str, Figures]](), list[str]()
    errors: dict[str, ConfigError | DataError] = {}
    for name in each("evaluation", list(asked), "measures"):
        figures, errors = dict[str, Figures](), {}
        for label, run in runs.items():
            try:
                figures[label] = asked[name].compute(run)
            except (ConfigError, DataError) as error:
                errors[label] = error
        first = next(iter(errors.values()), None)
        if first and not figures and (len(asked) == 1 or isinstance(first, ConfigError)):
            raise first  # a mistake of the caller, or nothing else was requested
        for label, why in errors.items():
            notes.append(f"{label}: {name} is left out: {why}")
            note(notes[-1])
        if figures:
            results[name] = figures
    if not results:
        raise next(iter(errors.values()))
    return _Measured({name: asked[name] for name in results}, results, notes)


def _runs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folder of a run; or, of one that holds runs, those that are complete and those not."""
    if (folder / "recipe.yaml").exists():
        return [folder], []
    inside = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    done = [path for path in inside if (path / "result.json").exists()]
    if inside and not done:
        raise ConfigError(f"{folder} holds no complete run: finish its command first")
    return done or [folder], [path for path in inside if path not in done]  # else refused as no run


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are unique.

    >>> _labels([Path("/runs/a/fedca"), Path("/runs/b/fedca")])
    ['a/fedca', 'b/fedca']
    """
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts))):
        ends = ["/".join(some[-length:]) for some in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(folder) for folder in folders]


def _with_settings(
    names: Sequence[str], changes: Sequence[Change]
) -> tuple[dict[str, Measure], list[Change]]:
    """The measures with their settings, and the changes of the engine."""
    engine = [change for change in changes if change.section == "engine"]
    tree = apply_changes({}, [change for change in changes if change not in engine])
    chosen = {name.rpartition(":")[2]: measures[name] for name in names}
    keys = [f"{name}.{one.name}" for name, cls in chosen.items() for one in fields(cls)]
    for section in tree:
        if section in measures.table() and section not in chosen:
            raise ConfigError(
                f"{section} is set but not computed: name it, or leave out its settings"
            )
        if section not in chosen or not isinstance(tree[section], dict):
            raise ConfigError(unknown(section, [*keys, "engine.workers", "engine.device", "on"]))
    asked = {
        name: cls(**check_fields(cls, tree.get(name, {}), name)) for name, cls in chosen.items()
    }
    return asked, engine


def _needed(sets: EvalSets, asked: Mapping[str, Measure]) -> list[str]:
    """The data sets that the measures use; others may not be named."""
    needed = [name for measure in asked.values() for name in measure.needs(sets.names)]
    named = [name for name in sets.names if name != OWN] + list(sets.settings)
    if unused := [name for name in named if name not in needed]:
        raise ConfigError(f"on: none of the measures uses {unused[0]}: leave it out")
    return list(dict.fromkeys(needed))


def _folder(out: str | Path | None, first: Path, asked: _Request) -> Path:
    """Where to write, which is never inside a run."""
    if out is None:
        return EVALUATION.new("-".join([first.resolve().name, *asked.measures]))
    refuse_run(Path(out), asked.paths.values())
    return Path(out)


def _write(
    folder: Path,
    runs: Mapping[str, Run],
    measured: _Measured,
    spared: Mapping[str, Mapping[str, int]],
    notes: Sequence[str],
) -> EvaluationResult:
    """Draw and write the figures; `spared` counts results that were found on disk."""
    files = {
        name: write_plot(folder / f"{name}.png", measure.draw, measured.figures[name])
        for name, measure in measured.measures.items()
    }
    tables = [
        table
        for name, measure in measured.measures.items()
        for table in measure.tables(measured.figures[name])
    ]
    groups = repeats({label: (run.recipe, run.commit.round) for label, run in runs.items()})
    result = EvaluationResult(
        folder,
        {label: _about(run) for label, run in runs.items()},
        {
            name: {label: dict(one.plain) for label, one in figures.items()}
            for name, figures in measured.figures.items()
        },
        {name: paths[0] for name, paths in files.items() if paths},
        tables,
        tuple(dict.fromkeys([*notes, *_notes(runs, measured)])),
        over_seeds=[mean for shown in tables if groups and (mean := over_seeds(shown, groups))],
        legends=list(dict.fromkeys(m.legend for m in measured.measures.values() if m.legend)),
        plots=tuple(path for paths in files.values() for path in paths),
        **spared,
    )
    write_results(
        folder,
        "eval",
        {**result.plain(), "settings": {n: plain(m) for n, m in measured.measures.items()}},
        [ResultTable(*shown) for shown in (*result.tables, *result.over_seeds)],
        notes=(*result.legends, *result.notes),
    )
    return result


def _about(run: Run) -> dict[str, Any]:
    """A run's folder and settings, and its last committed round."""
    return {
        "folder": str(run.path),
        "recipe": run.recipe.digest,
        "method": run.recipe.method.name,
        "data": run.dataset.name,
        "round": run.commit.round,
    }


def _notes(runs: Mapping[str, Run], measured: _Measured) -> Iterator[str]:
    """Notes for readers of the figures."""
    if len({run.dataset.digest for run in runs.values()}) > 1:
        yield "these runs are on different images: their figures cannot be compared"
    for figures in measured.figures.values():
        labels_of: dict[str, list[str]] = {}
        for label, one in figures.items():
            for note in one.notes:
                labels_of.setdefault(note, []).append(label)
        for note, labels in labels_of.items():
            of_all = len(labels) == len(figures) > 1
            yield note if of_all else f"{', '.join(labels)}: {note}"
