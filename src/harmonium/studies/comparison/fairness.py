"""Fairness of comparisons: whether recipes have the same budget.

A comparison is fair if methods have the same images, split among the same clients, the same views,
encoder, rounds, batches and participation, and the same evaluation. Everything else belongs to the
method: its loss, optimiser and learning rates, server and privacy. Further inputs of a method
(public images, labels) are not part of the budget; notes on the table mention them. They also
mention differences in batches that follow from the authors' code: whether views share a BatchNorm
pass, and whether an epoch's last short batch is left out. A recipe whose `joint_views` departs from
its code is refused beside recipes that follow theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harmonium.core.errors import ConfigError, shown
from harmonium.core.settings import plain
from harmonium.methods.centralised import Centralised
from harmonium.recipe.schema import Recipe

WHOLE = ("data", "split", "encoder", "participation", "evaluate", "stop")  # sections with settings
PLAIN = ("clients", "rounds", "batch_norm")
LOCAL = ("epochs", "max_steps", "batch")
MERGED = ("split", "participation", "clients")  # centralised has its own, from the same images


def budget(recipe: Recipe) -> dict[str, Any]:
    """The budget of a recipe: key to value."""
    settings: dict[str, Any] = {}
    for section in WHOLE:
        tree = plain(getattr(recipe, section))
        name = tree.pop("name", None)
        settings |= {section: name} if name is not None else {}
        settings |= {f"{section}.{key}": value for key, value in tree.items()}
    settings |= {key: getattr(recipe, key) for key in PLAIN}
    settings["init"] = recipe.init and recipe.init.digest  # their path does not matter
    local = recipe.scaled_local()  # epochs may be scaled to the number of clients
    settings |= {f"local.{key}": getattr(local, key) for key in LOCAL}
    pipelines = plain(recipe.views.build().pipelines)
    return {**settings, "views": {"name": recipe.views.name, "pipelines": pipelines}}


def obstacles(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two budgets differ, with both values.

    >>> obstacles(Recipe.of("fedavg"), Recipe.of("fedprox", "rounds=7"))
    {'rounds': (20, 7)}
    """
    mine, theirs = budget(first), budget(second)
    if first.joint_views != second.joint_views and _departs_from_code(first, second):
        mine["local.joint_views"] = first.joint_views
        theirs["local.joint_views"] = second.joint_views
    views = [settings.pop("views") for settings in (mine, theirs)]
    either = Centralised in (first.method.cls, second.method.cls)
    apart: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*mine, *theirs)):
        if either and key.partition(".")[0] in MERGED:
            continue
        if (one := mine.get(key)) != (other := theirs.get(key)):
            apart[key] = (one, other)
    if views[0]["pipelines"] != views[1]["pipelines"]:  # a preset only names pipelines
        apart["views"] = (views[0]["name"], views[1]["name"])
    return apart


def check(recipes: Mapping[str, Recipe], *, allow: bool = False) -> list[str]:
    """Refuse recipes with different budgets; with `allow`, return the differences instead."""
    base, *others = recipes
    faults, keys = list[str](), dict[str, None]()
    for label in others:
        if apart := obstacles(recipes[base], recipes[label]):
            words = (f"{key} ({shown(one)}; {shown(two)})" for key, (one, two) in apart.items())
            faults.append(f"{base} and {label} differ in {', '.join(words)}")
            keys |= dict.fromkeys(apart)
    if faults and not allow:
        settings = budget(recipes[base]) | {"local.joint_views": recipes[base].joint_views}
        right = [
            _word(recipes[base], key) for key in keys if key in settings
        ]  # its split may lack one
        if "local.epochs" in keys and any(one.local.for_clients for one in recipes.values()):
            right.append("local.for_clients=none")  # else epochs are scaled to the clients
        common = " ".join(right)
        raise ConfigError(
            f"{'; '.join(faults)}: their figures cannot be compared. Give all of them the same, "
            f"e.g. {common}, or compare them anyway with --allow-unfair"
        )
    return faults


def remarks(recipes: Mapping[str, Recipe]) -> list[str]:
    """Notes on methods with further inputs, more training or a privacy budget."""
    notes = [*_differing(recipes)]
    for label, recipe in recipes.items():
        method = recipe.any_method()
        if method.needs_public and recipe.public is not None:
            notes.append(f"{label} also has public images ({recipe.public.name})")
        if method.reads_labels:
            share = recipe.split.labels
            some = "all labels" if share == 1 else f"labels (split.labels={share:g})"
            notes.append(f"{label} is trained with {some} of its clients' images")
        if method.workload != 1:
            notes.append(f"{label} trains for {method.workload:g} passes where others have one")
        if recipe.privacy.epsilon is not None:
            notes.append(f"{label} keeps to a budget of epsilon {recipe.privacy.epsilon:g}")
    return notes


def _differing(recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Notes on methods that make batches differently."""
    if len({one.joint_views for one in recipes.values()}) > 1:
        normed = {label: one for label, one in recipes.items() if _has_batch_norm(one)}
        joint = [label for label, one in normed.items() if one.joint_views]
        single = [label for label, one in normed.items() if not one.joint_views]
        if joint and single:  # without BatchNorm it makes no difference
            yield (
                f"all views of a batch share a BatchNorm pass in {', '.join(joint)}, each has its "
                f"own in {', '.join(single)}, as in the authors' code; local.joint_views=false "
                "makes them alike"
            )
    dropping = [label for label, one in recipes.items() if one.local.drop_last]
    if 0 < len(dropping) < len(recipes):
        yield (
            f"an epoch's last short batch is left out in {', '.join(dropping)} and trained on in "
            "the others; local.drop_last=false makes them alike"
        )


def _departs_from_code(first: Recipe, second: Recipe) -> bool:
    """Whether one of two departs from its code's `joint_views`, where there is BatchNorm.

    A difference between the methods' own code is allowed, and mentioned by `remarks`.
    """
    both = (first, second)
    unlike = any(one.joint_views != one.method.cls.joins_views(one.objective) for one in both)
    return unlike and all(_has_batch_norm(one) for one in both)


def _has_batch_norm(recipe: Recipe) -> bool:
    keys = recipe.any_method().blueprint.state_dict()
    return any(key.endswith("running_mean") for key in keys)


def _word(recipe: Recipe, key: str) -> str:
    settings = budget(recipe) | {
        "views": recipe.views.name,
        "local.joint_views": recipe.joint_views,
    }
    value = settings.get(key)
    return f"{key}={shown(value)}"
