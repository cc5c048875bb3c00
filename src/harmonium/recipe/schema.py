"""The recipe: a validated tree of all settings of a run, from YAML and `key=value`.

Sections such as `data`, `split` or `encoder` choose a registered thing by name and set its
fields: `data=cifar10 data.limit=5000`, or in YAML `data: {name: cifar10, limit: 5000}`. The fields
are those of the chosen dataclass, so a new method's settings are recipe keys without more code.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic import Field as Setting

from harmonium.core import devices
from harmonium.core.errors import ConfigError, DataError, Key, UnknownSetting, counted, suggest
from harmonium.core.registry import Registry, recipe_name
from harmonium.core.settings import check_fields, choose, coerce, make, named, plain, unknown
from harmonium.data.augment.views import PRESETS, View, Views, preset
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.images import Dataset
from harmonium.data.partition import SplitRule, splits
from harmonium.data.sets.digits import Digits
from harmonium.data.sets.sites import Sites
from harmonium.data.sets.styles import StyledImages, is_archive
from harmonium.data.splits.iid import IID
from harmonium.engines.settings import EngineSettings
from harmonium.evaluation.evaluator import Evaluation
from harmonium.evaluation.stopping import Stop
from harmonium.federation import dpsgd, site_evaluation, whitening
from harmonium.federation.aggregation import Aggregation, Mean, aggregations
from harmonium.federation.contract import check_class
from harmonium.federation.filters.rounding import Transport
from harmonium.federation.global_objective import GlobalObjective, obstacle
from harmonium.federation.label_free_score import Appraisal
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.federation.server_optimisers import Average, ServerOptimiser, optimisers
from harmonium.federation.site_evaluation import SiteEvaluation
from harmonium.federation.spending import check_budget, check_noise
from harmonium.learning.contract import called
from harmonium.learning.encoders import Encoder, encoders
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives import Objective, objectives
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import BatchNorms
from harmonium.learning.terms import Term, terms
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods import methods
from harmonium.methods.centralised import Centralised
from harmonium.methods.fedavg import FedAvg
from harmonium.recipe.initial_weights import Init
from harmonium.recipe.overrides import Change, apply_changes, changes_of
from harmonium.recipe.presets import changed_tree
from harmonium.recipe.privacy import Privacy

_PLAIN = ("batch_norm", "clients", "rounds", "seed")  # single settings, not sections
SUPPLIED = tuple(field.name for field in fields(Method))  # set by other sections

# Settings added after version 0.2.0, with defaults under which a run has the same bits as before
# there were such settings. With its default a setting is no part of the digest, so that runs and
# studies of earlier versions keep theirs and can go on.
_ADDED_TO_DATA = {
    "fit": "cut",
    "window": None,
    "percentiles": None,
    "frames": "all",
    "group": None,
    "group_column": "group",
}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "local": {"max_steps": None, "precision": "fp32", "compile": False},
    "aggregation": {"weighted": False},
    "data": _ADDED_TO_DATA,
    "public": _ADDED_TO_DATA,
    "stop": plain(Stop()),
    "evaluate": {
        "sites": None,
        "sites_held_out": 0.3,
        "sites_least": 10,
        "sites_bins": 32,
        "sites_classes": [],
    },
}


@dataclass(frozen=True)
class MethodChoice:
    """A method's name and its own settings."""

    name: str  # registered, or `package.module:Class` of the user's own
    options: Mapping[str, Any]
    cls: type[Method]


@dataclass(frozen=True)
class ViewsChoice:
    """A preset of views and the changes to it."""

    name: str
    changes: Mapping[str, Any]

    def build(self) -> Views:
        """The views themselves."""
        return preset(self.name, **self.changes)


def _method(value: Any) -> MethodChoice:
    if isinstance(value, MethodChoice):
        return value
    cls, options = named("method", methods, value)
    return _choice(cls, check_fields(cls, options, "method", SUPPLIED))


def _choice(cls: type[Method], given: Mapping[str, Any]) -> MethodChoice:
    """A method with all of its settings: the given ones, and defaults for the others."""
    check_class(cls)
    own = [field for field in fields(cls) if field.init and field.name not in SUPPLIED]
    defaults = {field.name: field.default for field in own if field.default is not MISSING}
    return MethodChoice(str(recipe_name(cls)), {**defaults, **given}, cls)


def _views(value: Any) -> ViewsChoice:
    if isinstance(value, ViewsChoice):
        return value
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"views is {value!r}; give one of these names: {', '.join(PRESETS)}")
    name = str(value.get("name", "simclr"))
    if name not in PRESETS:
        raise UnknownSetting(f"unknown views '{name}': {suggest(name, PRESETS)}")
    changes = {key: setting for key, setting in value.items() if key != "name"}
    choice = ViewsChoice(name, check_fields(View, changes, "views"))
    choice.build()  # wrong values are refused here and not in the middle of a run
    return choice


def _terms(value: Any) -> tuple[Term, ...]:
    if isinstance(value, str):
        value = [name for name in value.split(",") if name and value != "none"]
    if isinstance(value, Mapping):
        chosen = tuple(make(terms[k], v or {}, f"terms.{k}") for k, v in value.items())
    elif isinstance(value, list | tuple | None):
        chosen = tuple(choose("terms", terms, item) for item in value or ())
    else:
        raise ConfigError(f"terms is {value!r}; give one of these: {', '.join(terms.table())}")
    if len({type(term) for term in chosen}) < len(chosen):
        raise ConfigError("terms name one term twice; give it once, with the settings you want")
    return chosen


def _one_of(section: str, registry: Registry[Any]) -> PlainValidator:
    return PlainValidator(lambda value: choose(section, registry, value))


def _fixed(section: str, cls: type[Any]) -> PlainValidator:
    return PlainValidator(lambda v: v if type(v) is cls else make(cls, v, section))


def _engine(value: Any) -> EngineSettings:
    if isinstance(value, Mapping) and not isinstance(value.get("device", ""), str):
        devices.check(value["device"])  # a number has a message that names the choices
    return (
        make(EngineSettings, {"kind": value}, "engine")
        if isinstance(value, str)
        else (value if isinstance(value, EngineSettings) else make(EngineSettings, value, "engine"))
    )


def _with_files(section: str, registry: Registry[Any], value: Any) -> Any:
    """A choice with absolute paths, because a run may be resumed from another directory."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str) and name not in registry.table() and Path(name).expanduser().is_dir():
        raise ConfigError(
            f"{section}={name} is a folder: set {section}=folder {section}.path={name}"
        )
    spec = choose(section, registry, value)
    named = {name: getattr(spec, name, None) for name in ("path", "root")}
    absolute: dict[str, Any] = {k: _absolute(v) for k, v in named.items() if v}
    if isinstance(spec, StyledImages):
        absolute["sets"] = tuple(_absolute(s) if is_archive(s) else s for s in spec.sets)
    return replace(spec, **absolute) if absolute else spec


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _data(value: Any) -> Any:
    return _with_files("data", datasets, value)


def _public(value: Any) -> Any:
    return None if value in (None, "none") else _with_files("public", datasets, value)


def _init(value: Any) -> Init | None:
    if value is None or value == "none":
        return None
    if isinstance(value, str | Path):
        value = {"file": str(value)}
    return (value if isinstance(value, Init) else make(Init, value, "init")).resolved()


def _split(value: Any) -> Any:
    return _with_files("split", splits, value)


class Recipe(BaseModel):
    """All settings of a run. The same `digest` and the same files give the same bits.

    The exception is `privacy.noise=system`, whose noise cannot be reproduced.

    >>> Recipe.of("fedavg", "clients=3", "local.lr=0.1").local.lr
    0.1
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    method: Annotated[MethodChoice, PlainValidator(_method)] = MethodChoice(FedAvg.name, {}, FedAvg)
    objective: Annotated[Objective, _one_of("objective", objectives)] = SimCLR()
    terms: Annotated[tuple[Term, ...], PlainValidator(_terms)] = ()
    encoder: Annotated[Encoder, _one_of("encoder", encoders)] = CnnSmall()
    data: Annotated[DataSpec, PlainValidator(_data)] = Digits()
    public: Annotated[DataSpec | None, PlainValidator(_public)] = None
    split: Annotated[SplitRule, PlainValidator(_split)] = IID()
    views: Annotated[ViewsChoice, PlainValidator(_views)] = ViewsChoice("simclr", {})
    local: Annotated[Local, _fixed("local", Local)] = Local()
    server: Annotated[ServerOptimiser, _one_of("server", optimisers)] = Average()
    aggregation: Annotated[Aggregation, _one_of("aggregation", aggregations)] = Mean()
    participation: Annotated[Participation, _fixed("participation", Participation)] = (
        Participation()
    )
    privacy: Annotated[Privacy, _fixed("privacy", Privacy)] = Privacy()
    transport: Annotated[Transport, _fixed("transport", Transport)] = Transport()
    evaluate: Annotated[Evaluation, _fixed("evaluate", Evaluation)] = Evaluation()
    stop: Annotated[Stop, _fixed("stop", Stop)] = Stop()
    engine: Annotated[EngineSettings, PlainValidator(_engine)] = EngineSettings()
    init: Annotated[Init | None, PlainValidator(_init)] = None
    batch_norm: BatchNorms = "average"
    clients: int = Setting(10, ge=1)
    rounds: int = Setting(20, ge=1)
    seed: int = Setting(0, ge=0)

    @classmethod
    def of(cls, base: Recipe | str | type[Method], *words: str | Change, **settings: Any) -> Recipe:
        """A recipe with changes. Every command and function resolves its settings with it.

        Args:
            base: a recipe, a method's name or class, a shipped recipe's name, or a YAML file.
            words: `key=value`, as on the command line.
            settings: the same by name. `split="dirichlet"` makes a choice, `evaluate={"every": 1}`
                changes the keys of the mapping, `**{"split.alpha": 0.5}` changes one key. A choice
                may also be a settings object or a class: `objective=SimCLR(temperature=0.2)`.

        A key that is given twice, with different values, is refused. The name or class of a method
        counts: `Recipe.of("fedavg", method="fedprox")` gives `method` twice.
        """
        if isinstance(base, Recipe):
            return base.with_changes(changes_of(words, settings))
        return cls.from_tree(changed_tree(base, words, settings))

    def with_changes(self, changes: Sequence[Change]) -> Recipe:
        """This recipe with changes; sections without a change stay the same objects."""
        if not changes:
            return self
        touched, plainly = {change.section for change in changes}, self.given()
        tree = {
            key: plainly[key] if key in touched else getattr(self, key)
            for key in type(self).model_fields
        }
        return type(self).from_tree(apply_changes(tree, changes))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values."""
        checked: dict[str, Any] = {}
        for key, value in tree.items():
            if key not in cls.model_fields:
                raise UnknownSetting(unknown(key, known_keys()))
            kind = cls.model_fields[key].annotation
            checked[key] = coerce(key, kind, value) if key in _PLAIN else value
        try:
            recipe = cls(**checked)
        except ValidationError as error:  # only numbers below their minimum remain
            first = error.errors()[0]
            key, least = str(first["loc"][0]), first["ctx"]["ge"]
            text = f" is {tree.get(key)}; it must be at least {least}"
            raise ConfigError(Key(key), text) from None
        recipe.aggregation.check(recipe.participation.check(recipe.training))
        recipe = recipe._merged() if recipe.method.cls is Centralised else recipe
        method = recipe.any_method()  # refuses incompatible settings
        recipe._check_method(method)
        recipe._check_privacy(method)
        recipe._check_stop()
        if recipe.encoder.in_process:
            recipe.engine.check_in_process()
        return recipe

    def _check_method(self, method: Method) -> None:
        """Refuse sections that are incompatible with the method."""
        method.suits(self.participation.size(self.training))
        if self.public is None and method.needs_public:
            raise ConfigError(
                f"{called(method)} needs public images: name some, e.g. public=shapes"
            )
        if self.evaluate.objective and (reason := obstacle(method)):
            raise ConfigError(f"evaluate.objective=true cannot be measured: {reason}")
        if method.whitening and (reason := whitening.obstacle(method)):
            raise ConfigError(Key("evaluate.whiten"), f" cannot be fitted: {reason}")
        site_evaluation.check(method)

    def _check_privacy(self, method: Method) -> None:
        """Refuse privacy settings that the method's messages do not support."""
        privacy = self.privacy
        if privacy.masks is not None:
            privacy.masks.check(method, self.participation.size(self.training))
        check_noise(method)
        if self.local.dp_clip is not None:
            dpsgd.check(method)
        if privacy.updates is not None:
            privacy.updates.check(method)
        if privacy.epsilon is not None:
            check_budget(method)
        self.transport.check(privacy)

    def _check_stop(self) -> None:
        """Refuse early stopping where nothing would be measured."""
        blind = isinstance(self.data, Sites) and self.evaluate.tuning is None
        if self.stop.patience is not None and blind:
            raise ConfigError(
                Key("stop", "patience"),
                f"={self.stop.patience}: the server has no images to measure. Have the sites "
                "score the encoder, e.g. evaluate.tuning=simclr",
            )

    @property
    def workers(self) -> int:
        """How many worker processes run clients; 0: they run in this one."""
        return 0 if self.encoder.in_process else self.engine.processes

    def _merged(self) -> Recipe:
        """The images of all clients in one place."""
        if self.clients == 1:
            return self
        if self.split.newcomers and self.split.merge > 1:
            raise ConfigError(
                "split.newcomers and split.merge exclude each other here: leave one out"
            )
        split = {**plain(self.split), "merge": self.split.merge * self.clients}
        local = plain(self.scaled_local())
        alone = {"clients": 1, "participation": {}, "aggregation": "mean"}  # there is one client
        return self.changed(split=split, local=local, **alone)

    def _appraisal(self) -> Appraisal | None:
        """How clients score the encoder without labels, if they are asked to."""
        asked = self.evaluate
        if asked.tuning is None:
            return None
        return Appraisal(preset(asked.tuning), asked.tuning_centre, asked.tuning_over)

    def _global_objective(self) -> GlobalObjective | None:
        """How the global objective is measured, unless it is turned off."""
        if self.evaluate.objective is False:
            return None
        return GlobalObjective(by_client=self.privacy.masks is None)

    def _site_evaluation(self, classes: int) -> SiteEvaluation | None:
        """How clients evaluate the encoder on their own labelled images, if they are asked to."""
        asked = self.evaluate
        if asked.sites is None:
            return None
        return SiteEvaluation(
            asked.sites,
            asked.sites_held_out,
            asked.sites_least,
            asked.sites_bins,
            len(asked.sites_classes) or classes,
            by_site=self.privacy.masks is None,
        )

    def scaled_local(self) -> Local:
        """Local training, with epochs scaled to the number of clients by Orchestra's rule."""
        fraction = self.participation.size(self.training) / self.training
        return self.local.scaled(self.clients, fraction)

    @property
    def notes(self) -> list[str]:
        """Notes on settings that are scaled or have no effect."""
        notes = []
        epochs, given = self.scaled_local().epochs, self.local
        if epochs != given.epochs:
            notes.append(
                f"local.epochs={given.epochs} is for {counted(given.for_clients or 1, 'client')} "
                f"(local.for_clients): {counted(epochs, 'epoch')} with "
                f"{counted(self.clients, 'client')}"
            )
        sends_nothing = self.method.cls.share.get("*") == "local"
        if sends_nothing and not (isinstance(self.server, Average) and self.transport.is_plain):
            notes.append(f"{self.method.name} sends no model: server and transport have no effect")
        return notes

    @property
    def joint_views(self) -> bool:
        """Whether views share a BatchNorm pass: as set, else as in the authors' code."""
        given = self.local.joint_views
        return self.method.cls.joins_views(self.objective) if given is None else given

    def check(self) -> None:
        """Refuse invalid settings of data, and missing files, without reading the images.

        Given weights are read, and must fit where the shape of the images is known.
        """
        self.data.check()
        if self.init is not None:
            self.init.weights()
            if (shape := self._known_shape()) is not None:
                _ = self.method_for(shape, classes=2, start=self.init).blueprint
        if self.public is not None:
            try:
                self.public.check()
            except (ConfigError, DataError) as error:  # the same settings, of another section
                raise error.within("public") from None

    def tree(self) -> dict[str, Any]:
        """The resolved recipe as plain values; `Recipe.from_tree` reads it back."""
        tree = self.given()
        tree["local"]["joint_views"] = self.joint_views
        return tree

    def given(self) -> dict[str, Any]:
        """The same, but defaults of the method or objective are left out unless they were set."""
        tree = {key: plain(getattr(self, key)) for key in type(self).model_fields}
        tree["method"] = {"name": self.method.name, **plain(dict(self.method.options))}
        tree["views"] = {"name": self.views.name, **plain(dict(self.views.changes))}
        tree["terms"] = {t.pop("name"): t for t in (plain(term) for term in self.terms)}
        return tree

    def yaml(self) -> str:
        """The resolved recipe as YAML, with the augmentations of the views in comments."""
        lines = [yaml.safe_dump(self.tree(), sort_keys=False)]
        for number, view in enumerate(self.views.build().pipelines, 1):
            words = " ".join(f"{k}={v}" for k, v in plain(view).items())
            lines += textwrap.wrap(
                f"view {number}: {words}", 96, initial_indent="# ", subsequent_indent="#   "
            )
        return "\n".join(lines) + "\n"

    @property
    def training(self) -> int:
        """How many clients train: all but newcomers."""
        return self.split.training(self.clients)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that can change a result: all but the engine."""
        tree = {key: value for key, value in self.tree().items() if key not in ("engine", "init")}
        if self.init is not None:  # the digest of the weights, not their path
            tree["init"] = self.init.digest
        tree["views"] = plain(self.views.build().pipelines)  # a preset only names pipelines
        for section, defaults in ADDED.items():
            if given := tree[section]:
                same = {key for key in defaults if key in given and given[key] == defaults[key]}
                tree[section] = {key: given[key] for key in given.keys() - same}
                if not tree[section]:  # a section that was added
                    del tree[section]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def changed(self, **sections: Any) -> Recipe:
        """The same recipe with some top-level sections replaced."""
        current = {key: getattr(self, key) for key in type(self).model_fields}
        return type(self).from_tree({**current, **sections})

    def build_method(self, dataset: Dataset) -> Method:
        """The method, with the settings of all other sections."""
        named = self.evaluate.sites_classes
        local = not isinstance(self.data, Sites)
        if local and named and named != dataset.classes:
            raise ConfigError(
                "evaluate.sites_classes is for a federation of real sites: leave it out, because "
                f"the images of {dataset.name} have classes of their own"
            )
        return self.method_for(dataset.train.shape, len(dataset.classes), start=self.init)

    def known_method(self) -> Method:
        """The same for images of known shape and classes, without reading them."""
        about, shape = self.data.about, self._known_shape()
        if about is None or shape is None or about.classes is None:
            return self.build_method(self.data.load())
        return self.method_for(shape, about.classes, start=self.init)

    def any_method(self) -> Method:
        """The method for checks that do not depend on the shape of the images."""
        shape = (32, 32, 3)
        if not self.encoder.any_shape:
            shape = self._known_shape() or self.data.load().train.shape
        return self.method_for(shape, classes=2)

    def _known_shape(self) -> tuple[int, int, int] | None:
        """The shape of the images, where it is known without reading them."""
        about, size, channels = self.data.about, self.data.size, self.data.channels
        shape = about.shape if about else None
        if shape is None and size:  # images are resized to one size; in colour by default
            shape = (size, size, 3)
        if shape is None:
            return None
        height, width, depth = shape
        return size or height, size or width, channels or depth

    def method_for(
        self, shape: tuple[int, int, int], classes: int, *, start: Init | None = None
    ) -> Method:
        """The method for images of this shape; without `start` at a random initialisation.

        Given weights fit one shape only, so they are left out for any other.
        """
        height, _, channels = shape
        views = self.views.build()
        for term in self.terms:
            term.check(self.objective)
        world = World(
            clients=self.clients,
            rounds=self.rounds,
            channels=channels,
            side=views.pipelines[0].size or height,
            classes=classes,
            seed=self.seed,
            epsilon=self.privacy.epsilon,
            delta=self.privacy.delta,
        )
        method = self.method.cls(
            world=world,
            encoder=self.encoder,
            objective=self.objective,
            terms=self.terms,
            local=replace(self.scaled_local(), joint_views=self.joint_views),
            aggregation=self.aggregation,
            server_optimiser=self.server,
            views=views,
            batch_norm=self.batch_norm,
            updates=self.privacy.updates,
            transport=self.transport,
            appraisal=self._appraisal(),
            initial=start if start is not None and start.file is not None else None,
            global_objective=self._global_objective(),
            whitening=bool(self.evaluate.whiten),
            site_evaluation=self._site_evaluation(classes),
            **self.method.options,
        )
        self.objective.check_views(views)  # a method that needs another objective says so first
        self.objective.check_context(method.context)
        return method


def known_keys() -> list[str]:
    """Every key that some choice allows, to suggest the nearest one in errors."""
    keys = list(Recipe.model_fields)
    sections: dict[str, list[type[Any]]] = {
        "local": [Local],
        "participation": [Participation],
        "privacy": [Privacy],
        "transport": [Transport],
        "evaluate": [Evaluation],
        "stop": [Stop],
        "engine": [EngineSettings],
        "views": [View],
        "init": [Init],
    }
    for section, registry in _TABLES.items():
        sections[section] = list(registry.table().values())
    for section, classes in sections.items():
        names = {field.name for cls in classes for field in fields(cls) if field.init}
        names -= set(SUPPLIED) if section == "method" else set()
        keys += [f"{section}.{name}" for name in sorted(names)]
    return keys


_TABLES: dict[str, Registry[Any]] = {
    "method": methods,
    "objective": objectives,
    "encoder": encoders,
    "data": datasets,
    "split": splits,
    "aggregation": aggregations,
    "server": optimisers,
}
