"""Runs measured side by side: what `harmonium eval` does, as one function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harmonium.core import files
from harmonium.core.errors import ConfigError, DataError, suggest
from harmonium.core.paths import home, make_folder
from harmonium.core.progress import each, work
from harmonium.core.settings import check_fields, plain, unknown
from harmonium.evaluation.feature_cache import Kept
from harmonium.measures import Figures, Measure, Shown, measures
from harmonium.measures.eval_data import OWN, Sets, sets_of
from harmonium.measures.result_cache import Finished
from harmonium.measures.run_reader import Run, open_run
from harmonium.measures.seed_means import over_seeds, repeats
from harmonium.recipe.overrides import Change, apply_changes, changes_of
from harmonium.report import figure
from harmonium.report.tables import Tabular, markdown
from harmonium.runs.start import changed_recipe
from harmonium.storage.result_folder import FolderKind, refuse_run

EVALUATION = FolderKind("evaluation", "evaluations")


@dataclass(frozen=True, repr=False)
class Evaluation(Tabular):
    """What was measured, where it was written, and how to show it."""

    folder: Path  # of eval.json and the images
    runs: Mapping[str, Mapping[str, Any]]  # by label: where it is, what it is, how far it went
    figures: Mapping[str, Mapping[str, Any]]  # by measure, then by run's label
    pictures: Mapping[str, Path]  # by measure
    tables: Sequence[Shown]
    notes: Sequence[str] = ()
    features: Mapping[str, int] = field(default_factory=dict)  # images: found on disk, computed
    draws: Mapping[str, int] = field(default_factory=dict)  # trainings: found on disk, computed
    over_seeds: Sequence[Shown] = ()  # tables of runs that differ in their seed only
    legends: Sequence[str] = ()  # what words of the tables mean
    plots: Sequence[Path] = ()  # every file of the plots

    def panels(self) -> Sequence[Shown]:
        """The tables of all measures."""
        return self.tables

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "folder": str(self.folder),
            "runs": {label: dict(about) for label, about in self.runs.items()},
            "measures": {name: dict(found) for name, found in self.figures.items()},
            "pictures": {name: str(path) for name, path in self.pictures.items()},
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
) -> Evaluation:
    """Measure runs from their folders, which stay as they are.

    Args:
        words: as on the command line: folders of runs, or of comparisons, the first of them first;
            names of measures; settings of these measures, or of the engine; `on=[own,mnist]` and
            `on.mnist.key=value` for other images than the runs' own.
        out: where figures and plots go; beside the first run if left out.
        formats: of the plots, as for `compare`.
        note: is told what takes time.
        settings: settings by name, e.g. `**{"knn.k": 5}`.

    Returns:
        The figures of every measure and run, their plots and tables.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", **small)
    >>> found = harmonium.evaluate_run(result.folder, "knn", **{"knn.k": 5})
    >>> list(found.figures)
    ['knn']
    """
    formats = figure.study_formats(formats)
    paths, names, chosen, unfinished = _sorted(words)
    sets, changes = sets_of(changes_of(chosen, settings))
    asked, engine = _asked(names, changes)
    needed = _needed(sets, asked)
    recipes = {label: changed_recipe(path, engine) for label, path in paths.items()}
    first = next(Path(word) for word in words if "=" not in str(word))
    folder = _folder(out, first, paths, list(asked))
    kept, finished = Kept(note=note), Finished(home() / "draws")
    more: dict[str, Any] = {"sets": sets, "kept": kept, "finished": finished}
    runs = {
        label: open_run(paths[label], label, recipes[label], note, **more)
        for label in each("opening", list(paths), "runs")
    }
    for run in runs.values():  # what cannot be read is refused before anything is measured
        for name in needed:
            run.ground(name)
    if out is not None:  # what cannot be written, too
        make_folder(folder)
    found = dict[str, dict[str, Figures]]()
    lost = [
        *unfinished,
        *(f"{label}: {early}" for label, run in runs.items() if (early := run.early)),
    ]
    broken: dict[str, ConfigError | DataError] = {}
    for name in each("evaluation", list(asked), "measures"):
        found[name], broken = {}, {}
        for label, run in runs.items():
            try:
                found[name][label] = asked[name].look(run)
            except (ConfigError, DataError) as error:  # of one among several; others are measured
                broken[label] = error
        why = next(iter(broken.values()), None)
        if why and not found[name] and (len(asked) == 1 or isinstance(why, ConfigError)):
            raise why  # a slip of the caller's, or nothing else was asked for
        for label, fault in broken.items():
            lost.append(f"{label}: {name} is left out: {fault}")
            note(lost[-1])
    asked = {name: measure for name, measure in asked.items() if found[name]}
    if not asked:
        raise next(iter(broken.values()))
    spared = {
        "features": {"found": kept.found, "computed": kept.computed},
        "draws": {"found": finished.found, "computed": finished.computed},
    }
    with work("tables and plots"), figure.formats(formats):
        return _written(make_folder(folder), runs, asked, found, spared, lost)


def _sorted(
    words: Sequence[str | Path],
) -> tuple[dict[str, Path], list[str], list[str], list[str]]:
    """Folders by label, names of measures, settings, and what is left out of folders of runs."""
    if wrong := [word for word in words if not isinstance(word, str | Path)]:
        raise ConfigError(
            f"{wrong[0]!r} is no word: name folders, measures and settings one by one"
        )
    changes = [word for word in words if isinstance(word, str) and "=" in word]
    rest = [word for word in words if word not in changes]
    if not rest or (rest[0] in measures.table() and not Path(rest[0]).is_dir()):
        raise ConfigError("name a run's folder first, e.g. `harmonium eval runs/a angles`")
    if not Path(rest[0]).is_dir():
        raise ConfigError(f"there is no folder {rest[0]}: name a run's folder first")
    folders, names, unfinished = list[Path](), list[str](), list[str]()

    def take(folder: Path) -> None:
        done, begun = _runs_in(folder)
        folders.extend(done)
        unfinished.extend(f"{path} is left out: it did not come to its end" for path in begun)

    take(Path(rest[0]))
    for word in rest[1:]:
        if isinstance(word, str) and (word in measures.table() or ":" in word):
            names.append(word)
        elif Path(word).is_dir():
            take(Path(word))
        else:
            near = suggest(str(word), measures.table())
            raise ConfigError(f"'{word}' is neither a run's folder nor a measure: {near}")
    if not names:
        known = ", ".join(measures.table())
        raise ConfigError(f"name what to measure of {folders[0]}: {known}")
    given = [*map(str, (folder.resolve() for folder in folders)), *names]
    if twice := [one for one in given if given.count(one) > 1]:
        raise ConfigError(f"{twice[0]} is named twice")
    return dict(zip(_labels(folders), folders, strict=True)), names, changes, unfinished


def _runs_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folder of a run; or, of one that holds runs, those that are complete and those not."""
    if (folder / "recipe.yaml").exists():
        return [folder], []
    inside = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    done = [path for path in inside if (path / "result.json").exists()]
    if inside and not done:
        raise ConfigError(f"{folder} holds no complete run: let its command go on first")
    return done or [folder], [path for path in inside if path not in done]  # else refused as no run


def _labels(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths, as long as it takes to tell them apart.

    >>> _labels([Path("/runs/a/fedca"), Path("/runs/b/fedca")])
    ['a/fedca', 'b/fedca']
    """
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts))):
        ends = ["/".join(some[-length:]) for some in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(folder) for folder in folders]


def _asked(
    names: Sequence[str], changes: Sequence[Change]
) -> tuple[dict[str, Measure], list[Change]]:
    """The measures with their settings, and what is set of the engine."""
    engine = [change for change in changes if change.section == "engine"]
    tree = apply_changes({}, [change for change in changes if change not in engine])
    chosen = {name.rpartition(":")[2]: measures[name] for name in names}
    keys = [f"{name}.{one.name}" for name, cls in chosen.items() for one in fields(cls)]
    for section in tree:
        if section in measures.table() and section not in chosen:
            raise ConfigError(f"{section} is set but not asked for: name it, or leave its settings")
        if section not in chosen or not isinstance(tree[section], dict):
            raise ConfigError(unknown(section, [*keys, "engine.workers", "on"]))
    made = {
        name: cls(**check_fields(cls, tree.get(name, {}), name)) for name, cls in chosen.items()
    }
    return made, engine


def _needed(sets: Sets, asked: Mapping[str, Measure]) -> list[str]:
    """The data sets that the measures look at; a call names no others."""
    each = [name for measure in asked.values() for name in measure.needs(sets.names)]
    named = [name for name in sets.names if name != OWN] + list(sets.settings)
    if unused := [name for name in named if name not in each]:
        raise ConfigError(f"on: nothing that is asked for looks at {unused[0]}: leave it out")
    return list(dict.fromkeys(each))


def _folder(
    out: str | Path | None, first: Path, paths: Mapping[str, Path], names: Sequence[str]
) -> Path:
    """Where to write, which is never inside a run."""
    if out is None:
        return EVALUATION.new("-".join([first.resolve().name, *names]))
    refuse_run(Path(out), paths.values())
    return Path(out)


def _written(
    folder: Path,
    runs: Mapping[str, Run],
    asked: Mapping[str, Measure],
    found: Mapping[str, Mapping[str, Figures]],
    spared: Mapping[str, Mapping[str, int]],
    lost: Sequence[str] = (),
) -> Evaluation:
    """Draw and write what was found."""
    pictures, plots, tables, notes = dict[str, Path](), list[Path](), list[Shown](), list(lost)
    if len({run.dataset.digest for run in runs.values()}) > 1:
        notes.append("these runs are on different images: their figures cannot be compared")
    for name, measure in asked.items():
        path = folder / f"{name}.png"
        if measure.draw(path, found[name]):
            plots += figure.plot_paths(path)
            pictures[name] = figure.plot_paths(path)[0]
        tables += measure.tables(found[name])
        notes += _shared(found[name])
    about = {
        label: {
            "folder": str(run.path),
            "recipe": run.recipe.digest,
            "method": run.recipe.method.name,
            "data": run.dataset.name,
            "round": run.commit.round,
        }
        for label, run in runs.items()
    }
    figures = {
        name: {label: dict(one.plain) for label, one in each.items()}
        for name, each in found.items()
        if each
    }
    told = tuple(dict.fromkeys(notes))
    groups = repeats({label: (run.recipe, run.commit.round) for label, run in runs.items()})
    means = [one for shown in tables if groups and (one := over_seeds(shown, groups))]
    legends = list(dict.fromkeys(one.legend for one in asked.values() if one.legend))
    more: dict[str, Any] = {**spared, "over_seeds": means, "legends": legends}
    more["plots"] = tuple(plots)
    made = Evaluation(folder, about, figures, pictures, tables, told, **more)
    settings = {name: plain(measure) for name, measure in asked.items()}
    text = json.dumps({**made.plain(), "settings": settings}, indent=1)
    files.write_atomic(folder / "eval.json", f"{text}\n".encode())
    parts = [
        f"## {one.title}\n\n{markdown(one.rows, digits=one.digits)}" for one in (*tables, *means)
    ]
    said = "".join(f"- {line}\n" for line in (*legends, *told))
    files.write_atomic(folder / "eval.md", "\n".join([*parts, said]).encode())
    return made


def _shared(found: Mapping[str, Figures]) -> Iterator[str]:
    """The notes of a measure, each once, with the runs that it is of."""
    whose: dict[str, list[str]] = {}
    for label, one in found.items():
        for note in one.notes:
            whose.setdefault(note, []).append(label)
    for note, labels in whose.items():
        yield note if len(labels) == len(found) > 1 else f"{', '.join(labels)}: {note}"
