"""The runs of a comparison: every method and reference with every seed.

References put the figures into perspective: always predicting the commonest class, an encoder at
initialisation, raw and whitened pixels, each client alone, and centralised training without and
with labels. All before each client alone need no run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from harmonium.core.errors import ConfigError, UnknownSetting, counted
from harmonium.core.settings import make, plain, unknown
from harmonium.evaluation import references as without_training
from harmonium.recipe.overrides import Change, apply_changes, changes_of
from harmonium.recipe.schema import Recipe, known_keys
from harmonium.studies.comparison import fairness
from harmonium.studies.comparison.names import is_label, names_of, taken
from harmonium.studies.comparison.traffic import Device
from harmonium.studies.tuning.grid import split_values

UNTRAINED, SUPERVISED = "untrained", "supervised"
WITHOUT_RUN = (  # the first rows of every comparison
    without_training.COMMONEST,
    UNTRAINED,
    without_training.RAW,
    without_training.WHITENED,
    without_training.GIVEN,
)
WHITENED = ", whitened"  # after the label of a row: the same encoder with whitened features
BY_ITSELF = ("alone", "centralised")  # references that are in every comparison
OWN = ("compare", "seeds")  # settings of a comparison; all others are of its runs
Wanted = Literal["each", "first", "none"]


@dataclass(frozen=True)
class Settings(Device):
    """Settings of a comparison: `compare.*`."""

    references: Wanted = "each"  # of every objective, the first's, none
    supervised: bool = True  # whether references include training with labels in one place
    target: float | None = None  # kNN in percent for costs; none: nine tenths of the best gain

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and not 0 < self.target <= 100:
            raise ConfigError(f"compare.target is {self.target}; it must be above 0, at most 100")


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison."""

    methods: Mapping[str, Recipe]  # by label, with the first seed
    references: Mapping[str, Recipe]
    seeds: tuple[int, ...]
    settings: Settings
    unfair: tuple[str, ...]  # differences between budgets, where these were allowed
    remarks: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)  # display names of rows, by label
    words: Mapping[str, str] = field(default_factory=dict)  # that named the methods, by label

    @property
    def rows(self) -> dict[str, Recipe]:
        """Methods, with the references before and after them."""
        below = {k: v for k, v in self.references.items() if v.method.name == "alone"}
        above = {k: v for k, v in self.references.items() if k not in below}
        return {**below, **self.methods, **above}

    def name(self, label: str) -> str:
        """The display name of a row: set by `label.ROW`, or its own label."""
        return self.names.get(label, label)

    @property
    def headline(self) -> str:
        """One line on the runs: how many, of which rows, with which seeds."""
        recipe = next(iter(self.methods.values()))
        count = len(self.rows) * len(self.seeds)
        rows, seeds = ", ".join(map(self.name, self.rows)), ", ".join(map(str, self.seeds))
        each = f"{counted(count, 'run')} of {counted(recipe.rounds, 'round')} on {recipe.data.name}"
        return f"{each}: {rows}; seeds {seeds}"

    def cells(self) -> Iterator[tuple[str, int, Recipe]]:
        """Every run, seed after seed, so that partial results include all methods."""
        for seed in self.seeds:
            for label, recipe in self.rows.items():
                yield label, seed, recipe.changed(seed=seed)


def plan(
    words: Sequence[str], settings: Mapping[str, Any] = {}, *, allow_unfair: bool = False
) -> ComparisonPlan:
    """The runs that the words of a command ask for: names of methods or recipes, then settings.

    Settings of one method only follow its name after commas: `fedavg,transport.up=int8`. So do
    those of a reference: `centralised,local.lr=0.3`. From Python, settings of all may be given by
    name. `label.ROW=NAME` names a row for readers.
    """
    settings, label_words = taken(settings)
    label_words = [*filter(is_label, words), *label_words]
    words = [word for word in words if not is_label(word)]
    own_settings = reference_settings(words)
    method_words = [word for word in words if is_method(word)]
    if not method_words:
        raise ConfigError("name at least one method, e.g. `harmonium compare fedavg rounds=10`")
    changes = changes_of([word for word in words if not is_name(word)], settings)
    tree = apply_changes({}, [change for change in changes if change.section in OWN])
    shared = [change for change in changes if change.section not in OWN]
    _check_keys(shared)
    methods = _methods(method_words, shared)
    compare = make(Settings, tree.get("compare", {}), "compare")
    beside = references(methods, compare.references, supervised=compare.supervised)
    tuned = _with_own_settings(beside, own_settings, shared)
    names = names_of(label_words, [*WITHOUT_RUN, *methods, *beside])

    def named(rows: Mapping[str, Recipe]) -> dict[str, Recipe]:
        return {names.get(label, label): recipe for label, recipe in rows.items()}

    # Errors name methods as in the command; notes on the result use the names of the rows.
    unfair = fairness.check(named(methods) if allow_unfair else methods, allow=allow_unfair)
    for label, recipe in tuned.items():
        row = names.get(label, label)
        both = {row: beside[label], f"{row} with its own settings": recipe}
        unfair += fairness.check(both, allow=allow_unfair)
    beside |= tuned
    own_notes = [
        f"{names.get(label, label)} has {' '.join(given)} of its own"
        for label, given in own_settings.items()
    ]
    return ComparisonPlan(
        methods,
        beside,
        seeds_of(tree.get("seeds", 1), next(iter(methods.values())).seed),
        compare,
        tuple(unfair),
        (*fairness.remarks(named(methods)), *_more_seen(methods, named(beside)), *own_notes),
        names,
        dict(zip(methods, method_words, strict=True)),
    )


def _check_keys(changes: Sequence[Change]) -> None:
    """Refuse settings that no recipe has, with the nearest known key."""
    for change in changes:
        if change.section not in Recipe.model_fields:
            own_keys = ["seeds", "label", *(f"compare.{one.name}" for one in fields(Settings))]
            raise UnknownSetting(unknown(change.key, [*known_keys(), *own_keys]))


def _methods(words: Sequence[str], shared: Sequence[Change]) -> dict[str, Recipe]:
    """The recipe of every method by its label; two that are the same are refused."""
    recipes = {}
    for word in words:
        name, own = name_and_settings(word)
        recipes[word] = Recipe.of(name, *shared, *own)
    labels = [label_of(word, words) for word in words]
    if len(set(labels)) < len(words):
        raise ConfigError(f"two of these have the same name: {', '.join(words)}")
    methods = dict(zip(labels, recipes.values(), strict=True))
    for one, other in itertools.combinations(methods, 2):
        if methods[one].digest == methods[other].digest:
            raise ConfigError(f"{one} and {other} are the same recipe: leave one of them out")
    return methods


def is_name(word: str) -> bool:
    """Whether a word names a method or a recipe; others are settings.

    >>> is_name("fedavg"), is_name("fedavg,local.lr=0.1"), is_name("local.lr=0.1")
    (True, True, False)
    """
    return "=" not in word.partition(",")[0] and not is_label(word)


def is_method(word: str) -> bool:
    """Whether a word names a method or a recipe, and not a reference with its settings."""
    return is_name(word) and word.partition(",")[0] not in BY_ITSELF


def name_and_settings(word: str) -> tuple[str, list[str]]:
    """A name and the settings that follow it after commas.

    >>> name_and_settings("fedavg,local.lr=0.1,views.mode=fast")
    ('fedavg', ['local.lr=0.1', 'views.mode=fast'])
    """
    if not all(word.split(",")):
        raise ConfigError(f"'{word}' has a comma too many: write name,key=value,key=value")
    name, *its = split_values("", word, "")
    return name, its


def reference_settings(words: Sequence[str]) -> dict[str, list[str]]:
    """The settings given to single references, by their names.

    >>> reference_settings(["fedavg", "centralised,local.lr=0.3", "rounds=5"])
    {'centralised': ['local.lr=0.3']}
    """
    settings: dict[str, list[str]] = {}
    for word in words:
        if not is_name(word) or is_method(word):
            continue
        name, its = name_and_settings(word)
        if not its:
            raise ConfigError(
                f"{name} is in every comparison already: leave it out, or give it settings of its "
                f"own, e.g. {name},local.lr=0.3"
            )
        if name in settings:
            raise ConfigError(f"{name} is given settings twice: write {name},key=value,key=value")
        settings[name] = its
    return settings


def _with_own_settings(
    references: Mapping[str, Recipe], own: Mapping[str, Sequence[str]], common: Sequence[Change]
) -> dict[str, Recipe]:
    """The references that have settings of their own; no setting may be given twice."""
    tuned: dict[str, Recipe] = {}
    for name, its in own.items():
        changes_of([*common, *its])
        labels = [label for label in references if label.partition(" (")[0] == name]
        if not labels:
            raise ConfigError(
                f"{name} is given settings, but this comparison has no such reference: leave "
                f"'{name},{','.join(its)}' out, or set compare.references=each"
            )
        tuned |= {label: Recipe.of(references[label], *its) for label in labels}
    return tuned


def seeds_of(asked: Any, first: int) -> tuple[int, ...]:
    """A number of consecutive seeds from `first` on, or the listed seeds.

    >>> seeds_of(3, 10), seeds_of([4, 7], 0), seeds_of("4,7", 0)
    ((10, 11, 12), (4, 7), (4, 7))
    """
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1:
        return tuple(range(first, first + asked))
    if isinstance(asked, str):
        asked = [int(one) if one.isdigit() else one for one in asked.split(",")]
    listed = asked if isinstance(asked, list) else []
    if twice := [one for one in listed if listed.count(one) > 1]:
        raise ConfigError(f"seeds names {twice[0]} twice")
    if listed and all(type(one) is int and one >= 0 for one in listed):
        return tuple(listed)
    raise ConfigError(f"seeds is {asked}; give a number, e.g. seeds=5, or a list, e.g. seeds=0,7")


def label_of(name: str, names: Sequence[str]) -> str:
    """The label of a row, which is also its folder's name.

    A row of a paper's table is labelled by its last part if all rows are of one setting.

    >>> label_of("fedca/c10-iid-r50/fedae@cpu", ["fedca/c10-iid-r50/fedae@cpu"])
    'fedae'
    >>> label_of("runs/mine.yaml", ["runs/mine.yaml"]), label_of("package:Mine,local.lr=1", [])
    ('mine', 'Mine local.lr=1')
    """
    name, comma, own = name.partition(",")
    if comma:
        bare = [one.partition(",")[0] for one in names]
        return f"{label_of(name, bare)} {own.replace(',', ' ')}"
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem
    if "/" in name:
        places = {one.rpartition("/")[0] for one in names if "/" in one}
        row = name.partition("@")[0]
        return row.rpartition("/")[2] if len(places) == 1 else row.replace("/", " ")
    return name.rpartition(":")[2]


def references(
    methods: Mapping[str, Recipe], wanted: Wanted = "each", *, supervised: bool = True
) -> dict[str, Recipe]:
    """Each client alone and centralised training for every objective, and supervised training.

    An objective that only its own method can train has no references. None of them needs privacy
    mechanisms, because nothing leaves a client.
    """
    if wanted == "none":
        return {}
    first: dict[str, str] = {}
    for label, recipe in methods.items():
        if recipe.objective.any_method and not recipe.objective.uses_labels:
            first.setdefault(repr(recipe.objective), label)
    whose = list(first.values()) if wanted == "each" else list(first.values())[:1]
    recipes: dict[str, Recipe] = {}
    for name in BY_ITSELF:
        for label in whose:
            called = name if len(whose) == 1 else f"{name} ({label})"
            recipes[called] = reference(methods[label], name)
    if not supervised:
        return recipes
    base = next(iter(methods.values()))
    called = f"{SUPERVISED}, centralised" if SUPERVISED in methods else SUPERVISED
    labelled = {**plain(base.split), "labels": 1.0}
    taught = {"objective": "supervised", "terms": {}, "split": labelled}
    recipes[called] = reference(base, "centralised", **taught)
    return recipes


def _more_seen(methods: Mapping[str, Recipe], references: Mapping[str, Recipe]) -> Iterator[str]:
    """A note if centralised references see more batches because methods sample clients."""
    recipe = next(iter(methods.values()))
    asked, everyone = recipe.participation.size(recipe.training), recipe.training
    whole = [label for label, one in references.items() if one.clients == 1]
    if whole and asked < everyone:
        yield (
            f"{', '.join(whole)}: trained on all images in every round, the methods on those of "
            f"{asked} of {everyone} clients"
        )


def reference(recipe: Recipe, method: str, **changes: Any) -> Recipe:
    """A reference with the budget of `recipe`, without server optimiser, privacy and rounding.

    Noise in training steps is part of privacy. `centralised` sends its model to itself, so the
    model must not be rounded.
    """
    local = {**plain(recipe.local), "dp_clip": None, "dp_noise": 0.0}
    evaluate = plain(recipe.evaluate)
    if evaluate["objective"]:  # only if it can be measured: a reference may have none
        evaluate["objective"] = None
    if method == "alone":  # each client has its own encoder, so there are no moments to sum
        evaluate["whiten"] = False
    evaluate["sites"] = None  # no table of references shows it
    bare = {"server": "average", "privacy": {}, "transport": {}, "local": local}
    bare["evaluate"] = evaluate
    return recipe.changed(method=method, **bare, **changes)
