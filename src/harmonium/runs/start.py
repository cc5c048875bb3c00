"""Runs on this machine: start one in its folder, resume it, run it to its end."""

from __future__ import annotations

import importlib
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harmonium.core import devices, files
from harmonium.core.callbacks import Callbacks, called
from harmonium.core.errors import BudgetSpent, ConfigError, DataError, WireError
from harmonium.core.progress import work
from harmonium.core.settings import plain
from harmonium.data.images import UNKNOWN, Dataset
from harmonium.data.partition import Split, make_split
from harmonium.data.shift import with_split_angles
from harmonium.engines import memory, trial
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime
from harmonium.engines.workers import shared_workers, waiting_workers
from harmonium.evaluation.evaluator import Evaluator, figures_of
from harmonium.evaluation.pixels import Pixels
from harmonium.evaluation.references import RAW, references, validation_levels
from harmonium.federation.card import card
from harmonium.federation.method import Method
from harmonium.learning.encoders.given import give_again
from harmonium.recipe.initial_weights import COPY
from harmonium.recipe.overrides import Change, changes_of
from harmonium.recipe.schema import Recipe
from harmonium.runs.extend import check_more_rounds, extend
from harmonium.runs.loop import Result, RunLoop
from harmonium.runs.open_run import (
    check_recipe,
    device_notes,
    load_public,
    make_runtime,
    opened,
    public_notes,
    read_about,
    read_recipe,
)
from harmonium.runs.rounds import RunEngine, RunInputs
from harmonium.storage.result_folder import LOCK, PARTIAL, FolderKind, locked_folder
from harmonium.storage.run_folder import ABOUT, RECIPE, RESULT, SPLIT, RunFolder

COMMAND = "command.txt"  # in a folder of several runs: the command that made them, without --out
RUN = FolderKind("run", "runs", RECIPE, frozenset({LOCK, SPLIT, ABOUT, COPY}))


def run(
    recipe: Recipe | str | type[Method],
    *words: str,
    out: str | Path | None = None,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Result:
    """Run a recipe to its end and return its result.

    Args:
        recipe: a method's name or class, a recipe's name or file, or a `Recipe`.
        words: settings as on the command line, e.g. `"rounds=5"`.
        out: the run's folder; a new one under `HARMONIUM_HOME` if left out. If it already holds
            this run, the run is continued, or its result returned if it is complete.
        callbacks: one or several `Callback` objects, which follow the run;
            `harmonium.progress` shows it as the commands do.
        settings: settings by name: `rounds=5`, `evaluate={"every": 1}`, `**{"encoder.width": 8}`.
            `data` may be arrays, `encoder` an `nn.Module` or a function that makes one, `init` a
            state dict or an `nn.Module`.

    Returns:
        The figures of the encoder, the metrics of all rounds, and the run's folder.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", "local.lr=0.002", **small)
    >>> [row["round"] for row in result.metrics], "knn" in result.figures
    ([0, 1], True)
    """
    recipe = Recipe.of(recipe, *words, **settings)
    _ = recipe.engine.devices  # a device that is not here is refused before anything is written
    folder = Path(out) if out is not None else new_folder(recipe)
    with called(callbacks) as callback, locked(folder), _workers(folder, recipe):
        _begin(folder, recipe)
        return _complete(RunLoop(folder, recipe, callback))


def resume(
    folder: str | Path,
    *words: str,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Result:
    """Continue a run that stopped, or train it further: `resume("runs/first", rounds=40)`.

    Args:
        folder: the run's folder.
        words: settings as on the command line.
        callbacks: as for `run`.
        settings: settings by name. Those that cannot change the result, `engine.*`, may change.
            More `rounds` train the run further; `harmonium.runs.extend` describes the effect on
            schedules. A run whose encoder was given as an `nn.Module` needs it again in another
            process, as `encoder=module`: only its layers are used, the weights are those of the
            run. Arrays can be given again as `data=images`.

    Returns:
        The result of the run; that of a complete run is unchanged.

    >>> import harmonium
    >>> small = {"data.limit": 60, "clients": 2, "rounds": 1, "encoder.width": 4}
    >>> small |= {"evaluate.labels_per_class": [], "engine.workers": 0}
    >>> result = harmonium.run("digits", **small)
    >>> harmonium.resume(result.folder, rounds=2).metrics[-1]["round"]
    2
    """
    folder = Path(folder)
    if why := of_many(folder):
        raise ConfigError(why)
    if isinstance(network := settings.get("encoder"), nn.Module):
        give_again(read_recipe(folder).encoder, network)
        settings = {key: value for key, value in settings.items() if key != "encoder"}
    changed = changed_recipe(folder, changes_of(words, settings), further=True)
    if read_about(folder)["federation"]:
        raise ConfigError(
            f"{folder} is a run of a federation: continue it with harmonium server resume {folder}"
        )
    with called(callbacks) as callback, locked(folder):
        add_rounds(folder, changed)
        with _workers(folder, changed):
            return _complete(RunLoop(folder, changed, callback))


def add_rounds(folder: Path, changed: Recipe) -> None:
    """Give a run the rounds that its changed recipe has, if those are more."""
    current = read_recipe(folder)
    if changed.rounds != current.rounds:
        check_recipe(folder)
        extend(folder, current, changed.changed(engine=current.engine))


def of_many(folder: Path) -> str:
    """How to continue a folder of several runs; empty where it holds one, or none."""
    if (folder / "recipe.yaml").exists():
        return ""
    if (folder / COMMAND).exists():
        command = (folder / COMMAND).read_text(encoding="utf-8").strip()
        if "=<" in command:  # an object from Python, which no word can name
            return f"{folder} holds several runs: continue with the same call and out='{folder}'"
        return f"{folder} holds several runs: continue with {command} --out {folder}"
    inside = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    if not inside:
        return ""
    return (
        f"{folder} holds several runs: give the command that made them again with --out {folder}, "
        f"or resume one of them, e.g. harmonium resume {inside[0]}"
    )


def changed_recipe(
    folder: Path, changes: Sequence[str | Change], *, further: bool = False
) -> Recipe:
    """The recipe of a resumed run, with changes that cannot change its result.

    With `further`, its rounds may grow.
    """
    recipe, given = read_recipe(folder), changes_of(changes)
    changed = Recipe.of(recipe, *given)
    longer = further and any(change.key == "rounds" for change in given)
    same = recipe.changed(rounds=changed.rounds) if longer else recipe
    if changed.digest != same.digest:
        apart = ", ".join(_apart(same.tree(), changed.tree()))
        raise ConfigError(
            f"a resumed run keeps its recipe ({apart}): only "
            f"engine.*{' and rounds' if further else ''} may change. For other settings start a "
            "new run"
        )
    if longer:
        check_more_rounds(folder, recipe, changed)
    return changed


def _complete(loop: RunLoop) -> Result:
    """Complete a run whose images are on this machine."""
    if loop.is_complete():
        return loop.result()
    recipe, path = loop.recipe, loop.path
    device = recipe.engine.devices[0]
    devices.select(device)
    for note in device_notes(recipe):
        loop.watcher.note(note)
    dataset, public, split = opened(recipe, path)
    runtime = make_runtime(recipe, dataset, split, path, public)
    inputs = RunInputs(
        runtime.method,
        split.examples,
        evaluation_data(dataset, split),
        runtime.public,
        (*split.notes, *public_notes(recipe, public)),
    )
    with devices.use_device(device), _engine(loop, runtime) as engine:
        return loop.run(inputs, engine)


def evaluation_data(dataset: Dataset, split: Split) -> Dataset:
    """The data for evaluation: images as clients hold them, and those with visible labels."""
    data = with_split_angles(dataset, split)
    if split.labelled is None or data.labelled is not None:
        return data
    seen = split.seen(data.train)
    return replace(data, labelled=seen.subset(np.flatnonzero(seen.labels != UNKNOWN)))


def reference_figures(recipe: Recipe, folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of references that need no run, on the test part of a run's data.

    Data without labels have the label-free figures of raw pixels alone.
    """
    evaluator = _evaluator_of(recipe, folder)
    with work("references"):
        if not evaluator.has_labels:
            return {RAW: evaluator.test(Pixels()).figures}
        return {name: figures_of(one) for name, one in references(evaluator).items()}


def reference_levels(recipe: Recipe, folder: Path) -> dict[str, float]:
    """The validation kNN of references that need no run, on a run's data."""
    return validation_levels(_evaluator_of(recipe, folder))


def _evaluator_of(recipe: Recipe, folder: Path) -> Evaluator:
    dataset, _, split = opened(recipe, folder)
    judged, views = evaluation_data(dataset, split), recipe.views.build()
    return Evaluator(recipe.evaluate, judged, views, recipe.seed, Pixels())


def _workers(folder: Path, recipe: Recipe) -> AbstractContextManager[object]:
    """Start the workers of a run that has something left to do, while it is being prepared."""
    if recipe.engine.kind != "local" or not recipe.workers:
        if (started := waiting_workers()) is not None:  # before the recipe was read
            started.dismiss()
        return nullcontext()
    if (folder / RESULT).exists():
        return nullcontext()
    return shared_workers(min(recipe.workers, recipe.participation.asked(recipe.training)))


def _engine(loop: RunLoop, runtime: ClientRuntime) -> AbstractContextManager[RunEngine]:
    settings = loop.recipe.engine
    workers = loop.recipe.workers
    memory.check(runtime.method, settings.devices, workers)
    if runtime.method.local.compile:
        loop.watcher.note(str(trial.gain_of_compiling(runtime.method, settings.devices[0])))
    if settings.kind == "local":
        return LocalEngine(runtime, loop.path, workers, settings.devices)
    # A rehearsal runs a whole federation on this machine. It is a higher layer, imported by name.
    rehearsal = importlib.import_module("harmonium.sites.rehearsal").rehearsal
    engine: AbstractContextManager[RunEngine] = rehearsal(
        loop.path, loop.recipe, runtime, workers, loop.watcher.note
    )
    return engine


def _begin(folder: Path, recipe: Recipe) -> None:
    """Read the images, split them, and write the files that a run begins with."""
    if holds(folder, recipe):
        return
    if recipe.init is not None:
        recipe.init.weights()  # missing weights are refused before any image is read
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    public = load_public(recipe, dataset.train.shape)
    method = recipe.build_method(dataset)
    first = torch.from_numpy(np.array(dataset.train.batch(np.arange(min(2, len(dataset.train))))))
    method.views(first, torch.Generator())  # settings that do not fit the images are refused here
    split.save(folder / SPLIT)
    register(
        folder,
        recipe,
        method,
        data=dataset.digest,
        public=public.digest if public else None,
        split=split.digest,
        cache={"data": dataset.key, "public": public.key if public else None},
        clients=list(split.names),
        notes=[*recipe.notes, *dataset.notes, *split.notes, *public_notes(recipe, public)],
    )


def new_folder(recipe: Recipe) -> Path:
    """The folder of a run that was started without `out`."""
    losses = (recipe.objective.name, *(term.name for term in recipe.terms))
    choices = (recipe.method.name, *losses, recipe.data.name, recipe.digest[:8])
    name = "-".join(choice.rpartition(":")[2] for choice in choices if choice)
    return RUN.new(name)


def holds(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder already holds this run; refuse one that holds anything else."""

    def difference() -> str:
        stored = read_recipe(folder)
        if stored.digest == recipe.digest:
            return ""
        apart = [*_apart(stored.tree(), recipe.tree())]
        return ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else "")

    present = RUN.holds(folder, difference)
    if present:
        check_recipe(folder)
    return present


def _apart(stored: Mapping[str, Any], asked: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The settings in which two recipes differ.

    >>> list(_apart({"rounds": 5, "data": {"name": "a"}}, {"rounds": 5, "data": {"name": "b"}}))
    ['data=a, not b']
    """
    for key in {**stored, **asked}:
        one, two = stored.get(key), asked.get(key)
        if f"{above}{key}" in ("engine", "init.file") or one == two:  # neither changes a result
            continue
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _apart(one, two, f"{above}{key}.")
        else:
            yield f"{f'{above}{key}'.removesuffix('.name')}={one}, not {two}"


def register(folder: Path, recipe: Recipe, method: Method, **facts: Any) -> None:
    """Write the files from which a run can be resumed; the recipe last, which creates the run."""
    explained = card(method, recipe.privacy.masks, recipe.participation.asked(recipe.training))
    for partial in folder.glob(f"*{PARTIAL}"):
        files.remove(partial)
    if recipe.init is not None:
        recipe.init.keep(folder)
    text = recipe.yaml().encode()
    begun = [folder / name for name in (SPLIT, COPY) if (folder / name).exists()]
    about = {
        "run": secrets.token_hex(16),
        "files": {
            RECIPE: files.digest_of(text),
            **{path.name: files.digest_of(path.read_bytes()) for path in begun},
        },
        "recipe": recipe.digest,
        "versions": {name: version(name) for name in ("harmonium", "torch", "numpy")},
        "python": platform.python_version(),
        "card": explained.text().splitlines(),
        "batch_norm": explained.batch_norm,
        **({"init": plain(recipe.init)} if recipe.init is not None else {}),
        **facts,
    }
    RunFolder(folder).write_about(about)
    files.write_atomic(folder / RECIPE, text)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create and lock the folder of a run: one process at a time may write to it.

    A run that begins here and is refused before a round was trained leaves nothing behind, so that
    the corrected command can have the same folder.
    """
    new, begins = not folder.exists(), not (folder / RECIPE).exists()
    with ExitStack() as after, locked_folder(folder):
        if new:
            after.callback(_remove_unless_begun, folder)  # once the lock is released
        try:
            yield
        except (BudgetSpent, ConfigError, DataError, WireError):
            if begins and (folder / RECIPE).exists() and not RunFolder(folder).has_trained:
                _empty(folder)
            raise


def _empty(folder: Path) -> None:
    """Remove everything in a folder but its lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _remove_unless_begun(folder: Path) -> None:
    """Remove a folder whose run was refused before it began."""
    if not (folder / RECIPE).exists():
        shutil.rmtree(folder, ignore_errors=True)
