"""A site's policy: what the site accepts. No plan and no server can change it.

A plan is a recipe that a server sends. Its settings are checked before anything that they name is
imported or read, the plan's method is checked before a round, and the privacy loss of an answer is
counted before the answer leaves the site.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from harmonium.core.errors import ConfigError, HarmoniumError, PolicyRefusal, counted, suggest
from harmonium.core.files import digest_of
from harmonium.core.settings import check_fields
from harmonium.core.types import Kind
from harmonium.data.augment.pipeline import View
from harmonium.data.datasets import datasets
from harmonium.data.sets.styles import is_archive
from harmonium.federation.wire import LABELLED, MEASURING, STEPS, Exchange
from harmonium.methods import methods
from harmonium.privacy.budget import epsilon
from harmonium.recipe.presets import read_yaml
from harmonium.recipe.schema import Recipe
from harmonium.sites.received import allowed_start, is_file

if TYPE_CHECKING:
    from harmonium.federation.method import Method

MOST_VALUES = 5_000  # in a plan; a recipe has some hundred
MOST_DEPTH = 8  # of nested sections; a recipe has three
MOST_TEXT = 1_000  # characters of a key or a value
MOST_NUMBER = 2**63  # no setting is a larger whole number
FILES = ("path", "root")  # settings that name files
CHANCES = ("flip", "jitter", "gray", "blur", "solarise")  # augmentations with a probability
CHANGES = (*CHANCES, "crop", "rotate", "quarter_turn", "randaugment")
ANY = "any"  # at least one of these
LIKELY, STRONG = 0.1, 0.05  # least probability and strength with which an augmentation counts
CROPPED, PADDED = 0.5, 2  # a crop counts if it may keep this little area, or move these pixels
_DIGEST = re.compile(r"[0-9a-f]{64}")

TEMPLATE = """\
# What this site accepts. The server cannot change this file, and a plan that wants more is refused.
# A list is written [one, other]; none means no limit of this kind.

# Methods that may run here; none: any that comes with Harmonium.
methods: none
# Exchanges that may run here, e.g. [train, calibrate]; none: any of an allowed method.
exchanges: none
# Kinds of fields that may leave; per_example, rows of single images, is left out on purpose.
kinds: [weights, statistic, scalar, public]
# Kinds that may leave only with noise of this site's own, e.g. [weights]; []: none has to.
guarded: []
# Most passes over the images in a round, of any kind; most rounds of a plan, and most answers
# to each exchange in a run. none: no limit.
epochs: none
rounds: none
# Most answers in one run, and in all runs of this site's log; none: no limit.
answers: none
answers_in_all: none
# Fewest images with which this site takes part, and of a step of training.
pictures: 1
batch: 2
# Fewest steps behind trained weights, and the largest learning rate: what one step changes is a
# gradient, from which images can be computed. none: no limit.
steps: 2
lr: 1.0
# Random changes that every view of a plan must have, e.g. [crop, jitter]; any: at least one.
views: [crop]
# Weights that a plan may start from: digests, or files of this site by their full paths. The first
# model of any other plan must be the one that the plan's seed gives.
initial_weights: []
# true: a run's first model may reach this site after round 1, when it cannot be compared.
join_late: false
# Most that all noisy (guarded) releases of this site's log may reveal together: epsilon at delta,
# for one image in another's place.
# none: no limit; 0: no guarded release at all. delta must be at most 1 / number of images.
epsilon: 10.0
delta: 0.00001
# true: noise that follows from the run's seed is enough. Whoever knows the seed can subtract it.
simulated_noise: false
# true: methods that read labels may run here.
labels: false
# true: counts of right and wrong answers on this site's own labelled images may leave, for plans
# with evaluate.sites, of classes with at least so many images. Otherwise such asks are declined.
evaluation: false
evaluation_least: 10
# Code of your own that a plan may name, e.g. [mypackage.mymethod:MyMethod].
own_code: []
# Data sets that a plan may read here as public images, e.g. [digits].
public: []
# The only plans that are accepted, by their digests; none: any that the other keys allow.
plans: none
# true: only plans under which the server sees sums of sites and no single answer.
secure_aggregation: false
"""


class InvalidPolicy(HarmoniumError):
    """A site's policy file cannot be read, or has an invalid key or value."""


@dataclass(frozen=True)
class Policy:
    """What a site accepts; the defaults are safe for a site that does not know the plan.

    >>> Policy(epochs=5).epochs
    5
    """

    methods: tuple[str, ...] | None = None  # that may run; none: any that comes with Harmonium
    exchanges: tuple[str, ...] | None = None  # that may run; none: any of an allowed method
    kinds: tuple[Kind, ...] = ("weights", "statistic", "scalar", "public")  # that may leave
    guarded: tuple[Kind, ...] = ()  # that may leave only with noise of this site's own
    epochs: int | None = None  # most passes over the images in a round; none: no limit
    rounds: int | None = None  # most per plan, and answers per exchange and run; none: any
    answers: int | None = None  # most in one run; none: no limit
    answers_in_all: int | None = None  # most in all runs; none: no limit
    pictures: int = 1  # fewest with which this site takes part
    batch: int = 2  # fewest images of a step
    steps: int = 2  # fewest behind trained weights; 1: gradients may leave
    lr: float | None = 1.0  # largest learning rate; none: no limit
    views: tuple[str, ...] = ("crop",)  # random changes that every view must have
    initial_weights: tuple[str, ...] = ()  # digests or files that a plan may start from
    join_late: bool = False  # a run's first model may come after round 1, when it is not checked
    epsilon: float | None = 10.0  # most that all guarded releases may spend; none: no limit
    delta: float = 1e-5  # at which epsilon is counted; at most 1 / number of images
    simulated_noise: bool = False  # noise that follows from the run's seed is enough
    labels: bool = False  # methods that read labels may run
    evaluation: bool = False  # counts of answers on this site's labelled images may leave
    evaluation_least: int = 10  # fewest images of a class in such counts
    own_code: tuple[str, ...] = ()  # `module:Class` names that a plan may use
    public: tuple[str, ...] = ()  # data sets that a plan may read here as public images
    plans: tuple[str, ...] | None = None  # digests of the only plans accepted; none: any
    secure_aggregation: bool = False  # only plans whose answers the server sees as sums

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_digests()

    def _check_numbers(self) -> None:
        for name in ("epochs", "rounds", "answers", "answers_in_all"):
            self._require(
                name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1, or none"
            )
        self._require("pictures", self.pictures >= 1, "at least 1")
        self._require("evaluation_least", self.evaluation_least >= 1, "at least 1")
        self._require("batch", self.batch >= 2, "at least 2")
        self._require("steps", self.steps >= 1, "at least 1")
        self._require("lr", self.lr is None or self.lr > 0, "above 0, or none")
        self._require("epsilon", self.epsilon is None or self.epsilon >= 0, "0 or more, or none")
        self._require("delta", 0 < self.delta < 1, "above 0 and below 1, e.g. 0.00001")

    def _require(self, name: str, valid: bool, words: str) -> None:
        if not valid:
            raise ConfigError(f"policy.{name} is {getattr(self, name)}; it must be {words}")

    def _check_names(self) -> None:
        for name in self.own_code:
            if not re.fullmatch(r"[\w.]+:\w+", name):
                raise ConfigError(f"policy.own_code has '{name}'; write it as module:Class")
        _check_known("methods", self.methods or (), {*methods.table(), *self.own_code})
        _check_known("public", self.public, {*datasets.table(), *self.own_code})
        _check_known("views", self.views, {ANY, *CHANGES})

    def _check_digests(self) -> None:
        for name in self.initial_weights:
            if not (_DIGEST.fullmatch(name) or is_file(name)):
                raise ConfigError(
                    f"policy.initial_weights has '{name}'; write a digest of 64 digits of 0-9a-f, "
                    "or the full path of a file"
                )
        for digest in self.plans or ():
            if not _DIGEST.fullmatch(digest):
                raise ConfigError(f"policy.plans has '{digest}'; a digest is 64 digits of 0-9a-f")

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a YAML file; keys that are left out have their defaults."""
        return cls.read_with_digest(path)[0]

    @classmethod
    def read_with_digest(cls, path: Path) -> tuple[Policy, str]:
        """The policy in a file, and the SHA-256 of the file."""
        try:
            text = path.read_bytes()
            tree = read_yaml(text.decode("utf-8"), str(path), "policy")
        except OSError as error:
            raise ConfigError(f"cannot read policy {path}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(" ".join(str(error).split())) from None
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(f"policy {path} cannot be read: it is not plain YAML") from None
        if others := [key for key in tree if not isinstance(key, str)]:
            raise ConfigError(f"policy {path} has the key {others[0]!r}: {suggest('', _KEYS)}")
        try:
            return cls(**check_fields(cls, tree, "policy")), digest_of(text)
        except ConfigError as error:
            raise type(error)(f"invalid policy {path}: {error}") from None

    def yaml(self) -> str:
        """The policy as a file with its explanations; `read` reads it back."""
        lines = []
        for line in TEMPLATE.splitlines():
            key = line.partition(":")[0]
            if key in _KEYS:
                line = f"{key}: {_yaml(getattr(self, key))}"
            lines.append(line)
        return "\n".join(lines) + "\n"

    def open_plan(self, tree: Any) -> Recipe:
        """The recipe in a plan's tree, after `check_tree` has accepted it."""
        self.check_tree(tree)
        try:
            return Recipe.from_tree(tree)
        except HarmoniumError:
            raise
        except Exception as error:  # noqa: BLE001  (values from outside; the site must go on)
            _refuse("has settings that cannot be read", f"they raise {type(error).__name__}")

    def check_tree(self, tree: Any) -> None:
        """Check the plain values of a plan, before anything that it names is imported or read.

        Any text with a colon could be imported, whatever its key, so it must be in `own_code`. The
        plan's data and split are the server's and are not read here, so they may name files of the
        server; no other setting may name a file.
        """
        if type(tree) is not dict:
            _refuse(f"is a {type(tree).__name__}", "a plan is a recipe: settings by name")
        for where, text in _texts(tree):
            key = ".".join(where)
            servers_file = where[0] in ("data", "split") and len(where) == 2 and where[1] in FILES
            servers_file = servers_file or (where[:2] == ("data", "sets") and is_archive(text))
            if servers_file and not text.startswith("~"):
                continue
            if set(where) & set(FILES) or text.startswith("~") or set(text) & {"/", "\\"}:
                _refuse(f"names the file {_shown(text)} by {_shown(key)}", "no plan reads files")
            for name in text.split(","):  # terms may be a list in one text
                if ":" in name and name not in self.own_code:
                    _refuse(f"uses the code {_shown(name)}", _listed("own_code", self.own_code))
        self._check_public(tree.get("public"))

    def _check_public(self, public: Any) -> None:
        """Refuse public images of data sets that the site does not allow."""
        if public is None:
            return
        settings = {"name": public} if isinstance(public, str) else public
        if not isinstance(settings, dict) or not isinstance(settings.get("name"), str):
            _refuse("has public images without a name", _listed("public", self.public))
        members = settings.get("sets")  # the set `styles` combines others
        for name in [settings["name"], *(members if isinstance(members, list | tuple) else [])]:
            if name not in self.public:
                _refuse(f"reads the data set {_shown(name)}", _listed("public", self.public))

    def check_plan(self, recipe: Recipe, method: Method, images: int | None = None) -> None:
        """Refuse a plan that would do more at this site than the policy allows.

        Args:
            recipe: the plan.
            method: the recipe's.
            images: the number of images at this site; none: not known yet.
        """
        if images is not None and images < self.pictures:
            _refuse(f"runs on {counted(images, 'image')}", f"`pictures` asks for {self.pictures}")
        if self.methods is not None and recipe.method.name not in self.methods:
            _refuse(f"runs the method {recipe.method.name}", _listed("methods", self.methods))
        if self.plans is not None and recipe.digest not in self.plans:
            _refuse(f"has the digest {recipe.digest}", "`plans` does not list it")
        self._check_public(None if recipe.public is None else recipe.public.name)
        if method.reads_labels and not self.labels:
            _refuse("reads labels", "`labels` is false")
        self._at_most("rounds", "rounds", recipe.rounds)
        self._check_participation(recipe)
        self._check_training(recipe, method, images)
        self._check_start(recipe)
        if self.secure_aggregation and not getattr(recipe.privacy, "secure_aggregation", False):
            _refuse("lets the server see single answers", "`secure_aggregation` is true")
        exchanges = self._possible(recipe, method)
        self._check_exchanges(exchanges, images)
        if any(field.guarded for one in exchanges.values() for field in one.up.values()):
            self._check_guard(recipe.privacy.noise, images)

    def _possible(self, recipe: Recipe, method: Method) -> dict[str, Exchange]:
        """The exchanges of a plan that this site may answer.

        Those that evaluate on its labels are declined one by one where they are not allowed, so
        that the site can take part in the training all the same.
        """
        declined = LABELLED if self.evaluation_refusal(recipe) else ()
        return {name: one for name, one in method.exchanges().items() if name not in declined}

    def evaluation_refusal(self, recipe: Recipe) -> str:
        """Why counts on this site's labelled images may not leave under a plan; empty if they may.

        A plan that does not ask for them is never refused.
        """
        start = "the site's policy refuses this: the plan "
        if recipe.evaluate.sites is None:
            return ""
        if not self.evaluation:
            return f"{start}evaluates on its labelled images, but `evaluation` is false"
        if recipe.evaluate.sites_least < self.evaluation_least:
            return (
                f"{start}has evaluate.sites_least={recipe.evaluate.sites_least}, but "
                f"`evaluation_least` is {self.evaluation_least}"
            )
        return ""

    def check_evaluation(self, recipe: Recipe, step: str) -> None:
        """Refuse an ask for counts on labelled images that the policy does not allow."""
        if step in LABELLED and (why := self.evaluation_refusal(recipe)):
            raise PolicyRefusal(why)

    def _check_participation(self, recipe: Recipe) -> None:
        """Refuse rounds with only some of the sites, unless a first model may come late."""
        asked = recipe.participation.asked(recipe.training)
        if asked < recipe.training and not self.join_late:
            _refuse(
                f"asks only {asked} of {recipe.training} sites in a round, so that a site's first "
                "model may be a later one, which cannot be compared with the plan's",
                "`join_late` is false",
            )

    def _check_start(self, recipe: Recipe) -> None:
        """Refuse initial weights that `initial_weights` does not name."""
        if recipe.init is None:
            return
        if allowed_start(recipe.init.digest, self.initial_weights) is None:
            _refuse(
                f"starts from the weights {recipe.init.digest}",
                "`initial_weights` does not name them",
            )

    def _check_training(self, recipe: Recipe, method: Method, images: int | None) -> None:
        """Refuse too much training, or so little that an answer is close to a gradient."""
        self._check_work(recipe, method)
        self._check_views(method)
        self._check_steps(method, images)

    def _check_work(self, recipe: Recipe, method: Method) -> None:
        """Refuse more epochs, larger learning rates or more passes over the images than allowed."""
        self._at_most("epochs", "local.epochs", method.local.epochs)
        self._at_most("lr", "local.lr", method.local.lr)
        for key, value in recipe.method.options.items():
            for limit in ("epochs", "lr"):
                if isinstance(value, int | float) and key.endswith(limit):
                    self._at_most(limit, f"method.{key}", value)
        passes = {step: method.passes_of(step) for step in self._possible(recipe, method)}
        total = sum(passes.values())
        if self.epochs is not None and not total <= self.epochs:
            parts = " and ".join(f"{count:g} by {step}" for step, count in passes.items() if count)
            _refuse(
                f"passes over the images {total:g} times in a round ({parts})",
                f"`epochs` is {self.epochs}",
            )

    def _check_views(self, method: Method) -> None:
        """Refuse views without the random changes that `views` asks for."""
        for number, view in enumerate(method.views.pipelines, 1):
            changes = changes_of(view)
            fulfilled = changes | {ANY} if changes else set()
            missing = [name for name in self.views if name not in fulfilled]
            if missing:
                words = ", ".join(sorted(changes)) or "no change"
                _refuse(f"has {words} in view {number}", f"`views` asks for {missing[0]}")

    def _check_steps(self, method: Method, images: int | None) -> None:
        """Refuse trained weights of too few steps, or of too few images in a step."""
        training = [step for step, declared in method.exchanges().items() if trains(declared)]
        if not training:
            return
        if method.local.batch < self.batch:
            _refuse(f"has local.batch={method.local.batch}", f"`batch` is {self.batch}")
        if images is not None and images < self.batch:
            _refuse(f"takes steps of {counted(images, 'image')}", f"`batch` is {self.batch}")
        for step in training:
            steps = method.local.steps(images) if images is not None else self.steps
            steps = 1 if step in MEASURING else steps  # a gradient is one step
            if steps < self.steps:
                _refuse(
                    f"sends weights of {counted(steps, 'step')} by the exchange {step}",
                    f"`steps` is {self.steps}",
                )

    def _at_most(self, key: str, name: str, wanted: float) -> None:
        most = getattr(self, key)
        if most is not None and not wanted <= most:
            _refuse(f"has {name}={wanted}", f"`{key}` is {most}")

    def check_answer(
        self, past: Callable[[], Iterable[Mapping[str, Any]]], run: str, round: int, step: str
    ) -> float:
        """Refuse an answer beyond the limits; return the passes over images that it may take.

        Args:
            past: returns the entries of the site's log; it is called only where there are limits.
            run: that the answer belongs to.
            round: of the run.
            step: the exchange that is asked for.
        """
        if self.rounds is self.answers is self.answers_in_all is self.epochs is None:
            return math.inf
        entries = list(past())
        self._check_count(entries, run, round, step)
        if self.epochs is None:
            return math.inf
        same_round = (e for e in entries if e.get("run") == run and e.get("round") == round)
        return self.epochs - math.fsum(entry.get("passes", 0.0) for entry in same_round)

    def _check_count(
        self, entries: Sequence[Mapping[str, Any]], run: str, round: int, step: str
    ) -> None:
        """Refuse an answer beyond the most in this run and exchange, this run, or all runs."""
        sent = [e for e in entries if e.get("outcome") == "sent" and e.get("step") not in STEPS]
        in_run = [entry for entry in sent if entry.get("run") == run]
        alike = [e for e in in_run if e["step"] == step and bool(e["round"]) == bool(round)]
        for key, what, answers in (
            ("rounds", f"`{step}` of this run", alike),
            ("answers", "this run", in_run),
            ("answers_in_all", "all runs", sent),
        ):
            most = getattr(self, key)
            if most is not None and len(answers) >= most:
                had = counted(len(answers), "answer")
                _refuse(f"wants one more after {had} to {what}", f"`{key}` is {most}")

    def _check_exchanges(self, exchanges: Mapping[str, Exchange], images: int | None) -> None:
        for name, declared in exchanges.items():
            if self.exchanges is not None and name not in self.exchanges:
                _refuse(f"asks for the exchange {name}", _listed("exchanges", self.exchanges))
            for field, about in declared.up.items():
                alone = about.kind == "statistic" and images == 1  # of that one image
                kind = "per_example" if alone else about.kind
                wants = f"sends `{field}` of the kind {kind} by the exchange {name}"
                if kind not in self.kinds:
                    _refuse(wants, _listed("kinds", self.kinds))
                if kind in self.guarded and not about.guarded:
                    _refuse(
                        f"{wants} without noise", _listed("guarded", self.guarded, "asks it of")
                    )

    def _check_guard(self, noise: str, images: int | None) -> None:
        """Refuse guarded fields whose noise does not protect, or that could never be sent."""
        if self.epsilon == 0:
            _refuse("releases guarded fields", "`epsilon` is 0")
        if noise != "system" and not self.simulated_noise:
            _refuse(f"has privacy.noise={noise}", "`simulated_noise` is false: it must be system")
        if images is not None and self.delta > 1 / images:
            _refuse(
                f"guards {images} images",
                f"`delta` is {self.delta}, above 1 / {images}: set it to {0.5 / images:.1g}",
            )

    def check_release(
        self, past: Iterable[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse an answer whose guarded fields, with all earlier ones, would spend too much."""
        if not new:
            return
        sources = {release.get("noise") for release in new}
        if sources != {"system"} and not self.simulated_noise:
            _refuse("has an answer whose noise can be subtracted", "`simulated_noise` is false")
        if self.epsilon is None:
            return
        try:
            spent = epsilon([*past, *new], self.delta, neighbours="replace")
        except ConfigError as error:
            _refuse(f"has an answer that cannot be counted ({error})", "`epsilon` needs that")
        if spent > self.epsilon:
            _refuse(
                f"has an answer after which epsilon is {spent:.4g} at delta {self.delta:g}",
                f"`epsilon` is {self.epsilon:g} over all releases of this site",
            )


_KEYS = [field.name for field in fields(Policy)]


def _texts(tree: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text of a plan, keys included, with the keys that lead to it.

    Plans that are too large, too deeply nested, or have other than plain values are refused.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    count = 0
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, dict | list | tuple):
            count += len(value)
        if count > MOST_VALUES or len(where) > MOST_DEPTH:
            _refuse("is too large", f"{MOST_VALUES} values, {MOST_DEPTH} deep, are the most")
        if type(value) is dict:
            for key, item in value.items():
                _check_text(key)
                yield (*where, "a key"), key
                waiting.append(((*where, key), item))
        elif type(value) in (list, tuple):
            waiting += [((*where, str(number)), item) for number, item in enumerate(value)]
        elif type(value) is str:
            _check_text(value)
            yield where, value
        elif type(value) is int and abs(value) > MOST_NUMBER:
            _refuse(f"has a whole number of {value.bit_length()} bits", "64 are the most")
        elif value is not None and type(value) not in (bool, int, float):
            _refuse(f"holds a {type(value).__name__}", "settings are numbers and text")


def _check_text(text: Any) -> None:
    if type(text) is not str:
        _refuse(f"has a key that is a {type(text).__name__}", "keys are text")
    if len(text) > MOST_TEXT or not text.isprintable():
        _refuse(f"has the text {_shown(text)}", f"{MOST_TEXT} printable characters are the most")


def _check_known(key: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if ":" in name and name not in known:
            raise ConfigError(f"policy.{key} has '{name}', which policy.own_code does not name")
        if name not in known:
            raise ConfigError(f"policy.{key} has '{name}': {suggest(name, known)}")


def _refuse(wants: str, allowed: str) -> NoReturn:
    raise PolicyRefusal(f"the site's policy refuses this plan: it {wants}, but {allowed}")


def trains(declared: Exchange) -> bool:
    """Whether an exchange sends weights after training, or a gradient."""
    return any(
        one.kind == "weights" and one.fold == "parts" and one.of != "statistics"
        for one in declared.up.values()
    )


def changes_of(view: View) -> set[str]:
    """The names of a view's random changes that are likely and strong enough to count.

    >>> sorted(changes_of(View(flip=0.001, blur=0.5)))
    ['blur', 'crop', 'gray', 'jitter']
    """
    counting = {name for name in CHANCES if getattr(view, name) >= LIKELY}
    if max(view.brightness, view.contrast, view.saturation, view.hue) < STRONG:
        counting -= {"jitter"}
    crops = view.pad_crop >= PADDED if view.pad_crop else view.crop_min <= CROPPED
    others = {"crop": crops, "rotate": view.rotate >= 1, "quarter_turn": view.quarter_turn}
    others["randaugment"] = view.randaugment >= 1 and view.randaugment_magnitude >= 1
    return counting | {name for name, counts in others.items() if counts}


def _listed(key: str, allowed: Sequence[str], word: str = "allows only") -> str:
    return f"`{key}` {word} {', '.join(allowed)}" if allowed else f"`{key}` allows none"


def _shown(text: object) -> str:
    """Text from outside, shortened and without control characters."""
    if not isinstance(text, str):
        return f"a {type(text).__name__}"
    return ascii(text) if len(text) <= 80 else f"{ascii(text[:77])}..."


def _yaml(value: Any) -> str:
    if value is None:
        return "none"
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").rstrip("\n")
