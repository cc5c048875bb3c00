"""A plan: the recipe of a federation, with everything that server and sites must agree on.

The images are at the sites. A plan's `data` names the images that the server evaluates with, or
states that it has none (`data=sites`); either way it sets the shape to which all sites resize.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from harmonium.core.errors import ConfigError, Key
from harmonium.core.settings import plain
from harmonium.data.images import Dataset, Images
from harmonium.data.sets.sites import Sites
from harmonium.federation.method import Method
from harmonium.recipe.presets import changed_tree
from harmonium.recipe.schema import Recipe


def federated(what: str, changes: Iterable[str]) -> Recipe:
    """The recipe of a federation as typed, with the defaults for real sites.

    Unless set otherwise, the images are at the sites and a round needs the answers of a majority.
    Model updates longer than the round's median are shortened to it, and those that point against
    the median of all are left out, so that a few sites have limited influence. Under masks single
    updates cannot be seen, and noise that the server adds is calibrated for the plain mean: both
    keep the mean.
    """
    tree = changed_tree(what, changes, defaults={"data": "sites"})
    if isinstance(section := tree.get("participation") or {}, dict):
        tree["participation"] = {"quorum": "majority", **section}
    recipe = Recipe.from_tree(tree)
    noise = recipe.privacy.updates
    sees_updates = recipe.privacy.masks is None and (noise is None or noise.place == "client")
    if "aggregation" in tree or not sees_updates:
        return recipe
    return recipe.changed(aggregation={"name": "norm-bound", "agreement": 0.0})


def planned(recipe: Recipe, clients: int) -> tuple[Recipe, Dataset | None]:
    """The plan for this many sites, and the images that the server evaluates with, if any."""
    if recipe.split.newcomers:
        raise ConfigError(
            "split.newcomers is for runs on one machine: in a federation, a newcomer is a site "
            "that has not joined yet"
        )
    dataset = None if isinstance(recipe.data, Sites) else recipe.data.load()
    fixed: dict[str, Any] = {"clients": clients}
    if dataset is not None:
        height, width, channels = dataset.train.shape
        if height != width:
            raise ConfigError(
                f"{dataset.name} has images of {height} x {width}: set the side to which all sites "
                "resize theirs, e.g. data.size=64"
            )
        fixed["data"] = {**plain(recipe.data), "size": height, "channels": channels}
    evaluate = plain(recipe.evaluate)
    if recipe.evaluate.objective is None:  # sites send it only if the recipe asks for it explicitly
        evaluate["objective"] = False
    if recipe.evaluate.sites is not None:
        evaluate["sites_classes"] = _agreed_classes(recipe, dataset)
    fixed["evaluate"] = evaluate
    plan = recipe.changed(**fixed)
    if plan.clients != clients:
        raise ConfigError(
            f"{plan.method.name} puts all images in one place, which is not possible with sites"
        )
    if plan.init is not None:
        plan.init.weights()
    method = method_of(plan)
    if method.initial is not None and (unsent := _kept_at_sites(method)):
        raise ConfigError(
            Key("init"), f": {unsent} is not sent, so sites would never get its given values"
        )
    if method.reads_labels and not classes_of(plan):
        raise ConfigError(
            f"{method.name} reads labels at the sites, so all must use the same class numbers: set "
            "data=sites data.classes=[one,other]"
        )
    return plan, dataset


def _agreed_classes(recipe: Recipe, dataset: Dataset | None) -> tuple[str, ...]:
    """The names and the order of the classes that sites count by."""
    named = recipe.evaluate.sites_classes or classes_of(recipe)
    classes = named or (() if dataset is None else dataset.classes)
    if len(classes) < 2:
        raise ConfigError(
            f"evaluate.sites={recipe.evaluate.sites} counts by class, so all sites must use the "
            "same names: set evaluate.sites_classes=[one,other]"
        )
    return classes


def _kept_at_sites(method: Method) -> str:
    """The part of the encoder that stays at sites, except recalibrated statistics; empty: none."""
    model = method.blueprint
    if model.rules["encoder"] != "mean":
        return f"the encoder of {method.name}"
    stays = (key for key, rule, _ in model.tensors() if rule == "local" and key[:8] == "encoder.")
    key = next(stays, "")
    return f"`{key}` with batch_norm={method.batch_norm}" if key else ""


def method_of(plan: Recipe) -> Method:
    """The method of a plan: the same at the server and at every site.

    Given weights are the server's; at a site, tensors that are not sent start at initialisation.
    """
    size, channels = plan.data.size, plan.data.channels
    if size is None or channels is None:
        raise ConfigError(
            "the plan does not set the shape of images: set data.size and data.channels"
        )
    return plan.method_for((size, size, channels), len(classes_of(plan)), start=plan.init)


def frame_of(plan: Recipe) -> bytes:
    """A plan as it is sent: without the engine, which changes no result and no answer.

    Of given weights a site gets only the digest, because the file is on the server: the weights
    come with the first model.
    """
    tree = {key: value for key, value in plan.tree().items() if key != "engine"}
    if plan.init is not None:
        tree["init"] = {"digest": plan.init.digest}
    return json.dumps(tree).encode()


def classes_of(plan: Recipe) -> tuple[str, ...]:
    """All classes in the order of their numbers, if the plan names any."""
    return plan.data.classes if isinstance(plan.data, Sites) else ()


def public_digest(images: Images | None) -> str:
    """SHA-256 of the public images, which must be the same everywhere; empty without any."""
    if images is None:
        return ""
    pixels: Any = np.ascontiguousarray(images.pixels)
    return hashlib.sha256(memoryview(pixels).cast("B")).hexdigest()
