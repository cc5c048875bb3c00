"""Open a run's folder: its recipe, images, split and client runtime.

Every process that performs tasks of a run begins here. It gets the images that the run began with,
or an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harmonium.core import devices, files
from harmonium.core.errors import ConfigError, DataError, HarmoniumError, StoreError
from harmonium.core.types import ClientId
from harmonium.data.datasets import read_alike
from harmonium.data.images import GROUP, Dataset
from harmonium.data.partition import Split
from harmonium.data.shift import with_split_angles
from harmonium.engines.runtime import ClientRuntime, Labels
from harmonium.recipe.initial_weights import COPY
from harmonium.recipe.presets import read_yaml
from harmonium.recipe.schema import Recipe
from harmonium.storage.run_folder import ABOUT, RECIPE, SPLIT, RunFolder


def read_recipe(folder: Path) -> Recipe:
    """The recipe that a run began with; initial weights come from the copy in its folder.

    A recipe that was edited since then is refused.
    """
    path, run_folder = folder / RECIPE, RunFolder(folder)
    if not path.exists():
        raise StoreError(f"{folder} holds no run: {path} is missing")
    about = run_folder.about()
    command = "server start" if about.get("federation") else "run"
    remedy = (
        "restore the run's own recipe, or start a new run with this one: "
        f"harmonium {command} {path}"
    )
    run_folder.check(RECIPE, remedy)
    known = "files" in about
    with files.reading(path, remedy):
        try:
            recipe = Recipe.from_tree(_tree(path))
        except HarmoniumError as error:
            if known:  # the file is unchanged, so something that it refers to has changed
                raise
            raise StoreError(f"{path}: {error}") from None
    if recipe.init is None:
        return recipe
    if COPY in about.get("files", ()) and not (folder / COPY).is_file():
        raise StoreError(f"{folder / COPY} is missing: {files.RESTORE}")
    return recipe.changed(init=recipe.init.kept_in(folder))


def _tree(path: Path) -> dict[str, Any]:
    return read_yaml(path.read_text(encoding="utf-8"), str(path))


def check_recipe(folder: Path, remedy: str = "") -> None:
    """Refuse a run whose recipe no longer means what it meant when the run began.

    Its digest was recorded then. A recipe of an earlier version may lack settings that were added
    since, and their defaults need not match that version's behaviour. `remedy` says what to do
    instead of continuing the run.
    """
    recipe, about = read_recipe(folder), read_about(folder)
    earlier = [part["recipe"][0] for part in about["history"][-1:]]  # if killed during an extension
    if recipe.digest in (about["recipe"], *earlier):
        return
    path = folder / RECIPE
    if new := [*_lacking(_tree(path), recipe.tree())]:
        more = ", ..." if len(new) > 3 else ""
        raise StoreError(
            f"{folder} was begun by an earlier version of Harmonium, which had no "
            f"{', '.join(new[:3])}{more}: {remedy or 'finish it with that version'}, or start a "
            "new run"
        )
    raise StoreError(
        f"{path} is not the recipe that the run began with: {remedy or 'restore it'}, or "
        "start a new run"
    )


def _lacking(tree: Mapping[str, Any], whole: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The settings of `whole` that a recipe's file lacks.

    >>> list(_lacking({"rounds": 5, "local": {"lr": 1}}, {"rounds": 5, "local": {"lr": 1, "b": 2}}))
    ['local.b']
    """
    for key, value in whole.items():
        if key not in tree:
            yield f"{above}{key}"
        elif isinstance(value, Mapping) and isinstance(inner := tree[key], Mapping):
            yield from _lacking(inner, value, f"{above}{key}.")


def open_runtime(folder: Path) -> ClientRuntime:
    """The client runtime of a run, built from its folder alone."""
    recipe = read_recipe(folder)
    dataset, public, split = opened(recipe, folder)
    return make_runtime(recipe, dataset, split, folder, public)


def make_runtime(
    recipe: Recipe, dataset: Dataset, split: Split, folder: Path, public: Dataset | None = None
) -> ClientRuntime:
    """The client runtime for a recipe and its data.

    Labels that a task may not see are removed here, so that no task can read them.
    """
    split.check(dataset)
    method = recipe.build_method(dataset)
    if method.initial is not None:
        _ = method.blueprint  # refuse changed weights before any task
    images, shared = with_split_angles(dataset, split).train, public.train if public else None
    labels = None
    if method.site_evaluation is not None:  # those that clients may see
        labels = Labels(split.seen(images).labels, images.factors.get(GROUP))
    if method.reads_labels:
        images, shared = split.seen(images), shared and shared.relabelled(shared.labels)
    else:
        images, shared = images.without_labels(), shared and shared.without_labels()
    devices.allow_tf32(recipe.engine.tf32)
    return ClientRuntime(
        method=method,
        images=images,
        indices=split.indices,
        folder=folder / "clients",
        noise=recipe.privacy.noise,
        public=shared,
        masks=recipe.privacy.masks,
        labels=labels,
    )


def load_public(
    recipe: Recipe, shape: tuple[int, int, int], key: str | None = None
) -> Dataset | None:
    """The public images, resized to the shape of the clients' images."""
    if recipe.public is None:
        return None
    height, width, channels = shape
    spec = replace(read_alike(recipe.public, recipe.data), channels=channels)
    try:
        return (replace(spec, size=height) if height == width else spec).load(key)
    except (ConfigError, DataError) as error:  # the settings of `data`, in another section
        raise error.within("public") from None


def device_notes(recipe: Recipe) -> list[str]:
    """Notes on where a run computes, and on settings that have no effect there."""
    engine = recipe.engine
    kinds = {device.type for device in engine.devices}
    notes = []
    if engine.devices[0].type != "cpu":
        notes.append(f"computing on {', '.join(map(devices.device_name, engine.devices))}")
    elif recipe.local.precision != "fp32":
        notes.append(f"local.precision={recipe.local.precision} is slow on most CPUs")
    if engine.tf32 and "cuda" not in kinds:
        where = engine.devices[0].type
        notes.append(f"engine.tf32=true has no effect on {where}: it is for CUDA devices")
    return notes


def missing(recipe: Recipe) -> list[str]:
    """Data sets to fetch before a recipe can run, each with the command that fetches it."""
    sets = [recipe.data, *([] if recipe.public is None else [recipe.public])]
    return list(dict.fromkeys(text for one in sets for text in one.missing()))


def opened(recipe: Recipe, folder: Path) -> tuple[Dataset, Dataset | None, Split]:
    """The images and the split that a run began with, or an error if they are not the same."""
    about = read_about(folder)
    dataset = recipe.data.load(about["cache"]["data"])
    public = load_public(recipe, dataset.train.shape, about["cache"]["public"])
    split = read_split(folder)
    digests = {"data": dataset.digest, "public": public and public.digest, "split": split.digest}
    words = {"data": "images", "public": "public images", "split": "shares of the clients"}
    for what, digest in digests.items():
        if about[what] != digest:
            raise DataError(
                f"the {words[what]} of {folder} have changed since the run began: restore them, "
                "or start a new run"
            )
    split.validate(len(dataset.train))
    return dataset, public, split


def read_split(folder: Path) -> Split:
    """The split that a run began with."""
    RunFolder(folder).check(SPLIT)
    return Split.load(folder / SPLIT)


def read_about(folder: Path) -> dict[str, Any]:
    """Digests and cache keys of a run's data at its start, and notes on it."""
    about = RunFolder(folder).about()
    with files.reading(folder / ABOUT):
        keys = ("recipe", "data", "public", "split", "cache", "notes", "batch_norm")
        more = {"federation": about.get("federation"), "history": about.get("history", [])}
        return {key: about[key] for key in keys} | more


def client_names(folder: Path) -> dict[ClientId, str]:
    """The names of a run's clients, where its data or its federation give them any."""
    about = RunFolder(folder).about()
    if federation := about.get("federation"):
        return {int(one["client"]): str(one["name"]) for one in federation["roll"]}
    return dict(enumerate(map(str, about.get("clients", ()))))


def public_notes(recipe: Recipe, public: Dataset | None) -> list[str]:
    """Notes on the public images."""
    if public is None:
        return []
    notes = [f"public: {note}" for note in public.notes]
    if public.name == recipe.data.name:
        notes.append("the public images come from the same set: some may be in its test part")
    return notes
