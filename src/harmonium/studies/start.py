"""From a path to a trained encoder without a recipe: `harmonium start PATH`.

The images are inspected, the clients diagnosed, and a few steps timed; written rules (`choices`)
turn that into a recipe. The recipe is written beside the run before it begins, so that `harmonium
run` repeats the run to the bit: what was measured can differ next time, what was chosen cannot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core import files
from harmonium.core.callbacks import Callbacks, called
from harmonium.core.errors import ConfigError, DataError, counted
from harmonium.data.inspection import Inspection, inspect
from harmonium.data.inspection.advice import command, word
from harmonium.data.inspection.kinds import CALLED
from harmonium.data.partition import make_split
from harmonium.evaluation.verdict import label_free
from harmonium.recipe.overrides import Change, changes_of
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import clock
from harmonium.runs.estimate import Estimate, estimated
from harmonium.runs.loop import Result
from harmonium.runs.open_run import read_recipe
from harmonium.runs.start import RUN, new_folder, resume, run
from harmonium.storage.run_folder import RESULT
from harmonium.studies import choices
from harmonium.studies.choices import Facts, chosen
from harmonium.studies.diagnosis import Finding, diagnose

MINUTES = 20.0
FEWEST = 5  # rounds, however little time there is
UNMEASURED = 20  # rounds where no step could be timed
HEAD = "# Chosen by harmonium start"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """A recipe, and why it is what it is."""

    recipe: Recipe
    reasons: tuple[tuple[str, str], ...]  # five subjects, a sentence each
    inspection: Inspection
    finding: Finding | None  # of the diagnosis; none where nothing says who holds what
    estimate: Estimate | None  # none where no step could be timed

    def text(self) -> str:
        """The recipe's file, with the reasons as comments."""
        lines = [f"{HEAD} {self.inspection.path}", *(f"# {a}: {b}" for a, b in self.reasons)]
        return "\n".join(lines) + "\n" + self.recipe.yaml()


@dataclass(frozen=True)
class Started:
    """What `start` did: its choices, and the result of the run unless it was a dry run."""

    recipe: Recipe
    reasons: tuple[tuple[str, str], ...]
    choice: Choice | None  # none where a run was continued
    file: Path | None = None  # the recipe that `harmonium run` takes
    result: Result | None = None

    def plain(self) -> dict[str, Any]:
        """The choices as plain values, for JSON."""
        about: dict[str, Any] = {"reasons": dict(self.reasons), "recipe": self.recipe.tree()}
        about |= {"digest": self.recipe.digest, "file": self.file and str(self.file)}
        if self.choice is not None:
            estimate, finding = self.choice.estimate, self.choice.finding
            about["estimate"] = estimate and estimate.plain()
            about["diagnosis"] = finding and finding.plain()
            about["inspection"] = self.choice.inspection.plain()
        return {**about, "verdict": self.verdict, "next": list(self.next)}

    @property
    def verdict(self) -> str:
        """How good the encoder is: against references, or by label-free figures without labels."""
        if self.result is None:
            return ""
        figures, before = self.result.figures, self.result.untrained
        own, untrained = figures.get("health", {}), before.get("health", {})
        return self.result.verdict or label_free(own, untrained)

    @property
    def next(self) -> tuple[str, ...]:
        """Commands that use the encoder."""
        if self.result is None:
            return ()
        folder, images = str(self.result.folder), str(getattr(self.recipe.data, "path", "IMAGES"))
        classify = ["harmonium", "classify", "fit", folder, images, "--labels", "labels.csv"]
        return (
            command(["harmonium", "embed", folder, images, "--out", "features.npz"]),
            command(classify),
            command(["harmonium", "export", folder, "--out", "encoder"]),
        )


def start(
    path: str | Path,
    *words: str,
    minutes: float = MINUTES,
    out: str | Path | None = None,
    dry_run: bool = False,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Started:
    """Train an encoder on a folder, table or archive of images, with everything chosen by rules.

    Args:
        path: the images; see `harmonium.inspect`.
        words: settings that are not to be chosen, as on the command line, e.g. `"clients=3"`.
        minutes: time that the run may take on this machine.
        out: the run's folder; a new one under `HARMONIUM_HOME` if left out. The recipe is written
            beside it, with the ending `.yaml`. A run that is there is continued.
        dry_run: choose, and train nothing.
        callbacks: as for `run`.
        settings: settings by name.

    Returns:
        The recipe with its reasons, and the result of the run.
    """
    given = changes_of(words, settings)
    if not minutes > 0:
        raise ConfigError(f"minutes is {minutes:g}; it must be above 0")
    folder = Path(out) if out is not None else None
    if folder is not None and RUN.holds(folder):
        return _continued(folder, Path(path), given, callbacks)
    choice = choose(path, given, minutes)
    if dry_run:
        return Started(choice.recipe, choice.reasons, choice)
    folder = folder or new_folder(choice.recipe)
    file = beside(folder)
    if file.exists() and not file.read_text(encoding="utf-8").startswith(HEAD):
        raise ConfigError(f"{file} is there already: use another folder with --out")
    files.write_atomic(file, choice.text().encode())
    with called(callbacks) as callback:
        for subject, reason in choice.reasons:
            callback.note(f"{subject}: {reason}")
        result = run(str(file), out=folder, callbacks=callback)
    return Started(result.recipe, choice.reasons, choice, file, result)


def beside(folder: Path) -> Path:
    """The recipe's file of a run that `start` began.

    >>> beside(Path("runs/first")).as_posix()
    'runs/first.yaml'
    """
    return folder.with_name(f"{folder.name}.yaml")


def _continued(folder: Path, path: Path, given: Sequence[Change], callbacks: Callbacks) -> Started:
    """Continue the run in a folder, whose recipe was chosen before."""
    recipe, place = read_recipe(folder), str(path.expanduser().resolve())
    if (own := getattr(recipe.data, "path", "")) != place:
        raise ConfigError(f"{folder} holds a run on {own or 'other images'}: use another --out")
    if given:
        raise ConfigError(
            f"{folder} holds a run, whose recipe stays ({given[0].key}): continue it without "
            "settings, or use another --out"
        )
    reasons: list[tuple[str, str]] = []
    if (file := beside(folder)).exists():
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            heading, colon, text = line.removeprefix("# ").partition(": ")
            if not line.startswith("# ") or not colon:
                break
            reasons.append((heading, text))
    with called(callbacks) as callback:
        if (folder / RESULT).exists():
            further = command(["harmonium", "resume", str(folder), f"rounds={2 * recipe.rounds}"])
            callback.note(f"its rounds stay {recipe.rounds}; to train it further: {further}")
        result = resume(folder, callbacks=callback)
    return Started(recipe, tuple(reasons), None, file if file.exists() else None, result)


# ---- choosing ------------------------------------------------------------------------------------


def choose(path: str | Path, given: Sequence[Change], minutes: float = MINUTES) -> Choice:
    """The recipe for these images on this machine, by the rules of `choices`."""
    asked = {change.key: change.value for change in given}
    about = [word(key, value) for key, value in asked.items() if key.startswith("data.")]
    inspection = inspect(path, *about)
    if inspection.problems:
        raise DataError(inspection.problems[0])
    base = dict(inspection.suggestion.settings)
    facts = _facts(inspection, _recipe(base, asked))
    base |= chosen("size", facts).settings
    draft = _recipe(base, asked)
    dataset = draft.data.load()
    split = make_split(draft.split, dataset, None, draft.clients, draft.seed)
    facts = replace(
        facts, clients=draft.clients, typical=int(np.median(list(split.examples.values())))
    )
    finding = None
    if facts.named and draft.training > 1:
        finding = diagnose(draft)
        facts = replace(facts, verdict=finding.verdict)
    recipe, estimate, method = _timed(base, asked, facts, minutes)
    reasons = _reasons(inspection, facts, finding, recipe, method)
    time = _time(recipe, estimate, minutes, "rounds" in asked)
    return Choice(recipe, (*reasons, time), inspection, finding, estimate)


def _facts(inspection: Inspection, draft: Recipe) -> Facts:
    """The facts that are known before the images are decoded."""
    device = draft.engine.devices[0]
    return Facts(
        clients=draft.clients,
        named=draft.split.name == "column",
        typical=max(1, inspection.parts.get("train", 0) // draft.clients),
        kind=inspection.kind,
        side=inspection.suggestion.size,
        device="cpu" if device.type == "cpu" else str(device),
        cores=os.cpu_count() or 1,
        memory=_memory(),
    )


def _memory() -> float:
    """GiB of this machine; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _recipe(settings: Mapping[str, Any], asked: Mapping[str, Any]) -> Recipe:
    """The recipe of chosen settings, in which those that were asked for take precedence.

    A choice that was asked for, such as `encoder`, also drops the chosen settings of that section.
    """
    replaced = {key for key in asked if "." not in key}
    kept = {k: v for k, v in settings.items() if k.partition(".")[0] not in replaced - {k}}
    changes = {**kept, **asked}
    method = changes.pop("method", "fedavg")
    return Recipe.of(
        method, *(Change(tuple(k.split(".")), v, word=False) for k, v in changes.items())
    )


def _timed(
    base: Settings, asked: Mapping[str, Any], facts: Facts, minutes: float
) -> tuple[Recipe, Estimate | None, choices.Rule]:
    """The recipe with as many rounds as fit, its estimate, and the rule that chose its method."""
    rule = chosen("method", facts)
    common = {**base, "local.batch": facts.batch, "stop.patience": choices.PATIENCE}
    common |= {**chosen("encoder", facts).settings, **chosen("workers", facts).settings}
    training = {**chosen("passes", facts).settings, **rule.settings}
    recipe, estimate = _fitted({**common, **training}, asked, facts, minutes)
    if rule.settings is choices.VERIFICATION and recipe.rounds < choices.ROUNDS:
        rule = choices.TABLE["method"][-1]
        training = {**chosen("passes", facts).settings, **rule.settings}
        recipe, estimate = _fitted({**common, **training}, asked, facts, minutes)
    return recipe, estimate, rule


def _fitted(
    settings: Settings, asked: Mapping[str, Any], facts: Facts, minutes: float
) -> tuple[Recipe, Estimate | None]:
    """The first of ever cheaper recipes of which enough rounds fit into the time."""
    cheaper = iter(rule for rule in choices.CHEAPER if rule.holds(facts))
    while True:
        most = int(asked.get("rounds", choices.MOST))
        recipe = _with_rounds(settings, asked, most)
        recipe.data.load()  # decoded before steps are timed
        estimate = estimated(recipe)
        if isinstance(estimate, str):
            return _with_rounds(settings, asked, min(most, UNMEASURED)), None
        rounds = most if "rounds" in asked else _rounds(estimate, minutes)
        if rounds >= choices.ENOUGH or "rounds" in asked or (rule := next(cheaper, None)) is None:
            fitted = _with_rounds(settings, asked, rounds)
            share = rounds / estimate.rounds
            return fitted, replace(estimate, training=estimate.training * share, rounds=rounds)
        settings = {**settings, **rule.settings}


def _with_rounds(settings: Settings, asked: Mapping[str, Any], rounds: int) -> Recipe:
    every = max(1, rounds // choices.EVALUATIONS)
    return _recipe({**settings, "rounds": rounds, "evaluate.every": every}, asked)


def _rounds(estimate: Estimate, minutes: float) -> int:
    """How many rounds fit beside setup and evaluations."""
    left = 60 * minutes - estimate.setup - estimate.evaluation
    return int(
        max(FEWEST, min(choices.MOST, left * estimate.rounds / max(1e-9, estimate.training)))
    )


# ---- reasons -------------------------------------------------------------------------------------


def _reasons(
    inspection: Inspection,
    facts: Facts,
    finding: Finding | None,
    recipe: Recipe,
    method: choices.Rule,
) -> Iterator[tuple[str, str]]:
    """Why images, method, encoder and views are what they are."""
    clients = inspection.clients
    who = f"by {clients.column}" if clients.column else "equal shares, as nothing names them"
    what = f"{inspection.images:,} images, kind: {CALLED[inspection.kind]}"
    yield "images", f"{what}; {counted(recipe.clients, 'client')} ({who})"
    yield "method", f"{method.then}: {_why_method(facts, finding, method)}"
    network, side = recipe.encoder, recipe.data.size or inspection.suggestion.size
    width = f" of width {network.width}" if hasattr(network, "width") else ""
    where = facts.device if facts.device != "cpu" else f"a CPU with {counted(facts.cores, 'core')}"
    channels = inspection.suggestion.channels
    yield "encoder", f"{network.name}{width} at {side}x{side}x{channels} pixels, on {where}"
    *first, last = [removal.augmentation for removal in inspection.removals] or [""]
    left_out = f"{', '.join(first)} and {last}" if first else last
    without = f"without {left_out}" if left_out else "nothing that was measured speaks against them"
    yield "views", f"{recipe.views.name}, {without}"


_WITHOUT = {
    "alike": "clients look alike, so user verification would gain nothing",
    "style": "clients differ in style, where user verification costs accuracy",
    "unclear": "whether clients differ in content is unclear, so no user verification",
}


def _why_method(facts: Facts, finding: Finding | None, method: choices.Rule) -> str:
    """What the diagnosis and the length of a pass say about user verification."""
    if finding is None:
        return "clients are shares of one set, so user verification would gain nothing"
    if facts.verdict != "content":
        return _WITHOUT[finding.verdict]
    passes = f"a pass has {facts.typical} images of at most {choices.STEPS * choices.BATCH}"
    if method.settings is choices.VERIFICATION:
        return f"clients differ in content, and {passes}: training is nearly synchronous"
    few = f"fewer than {choices.ROUNDS} rounds fit" if facts.is_synchronous else passes
    return f"clients differ in content, but {few}, and verification is not shown to lead then"


def _time(
    recipe: Recipe, estimate: Estimate | None, minutes: float, asked: bool
) -> tuple[str, str]:
    """Why there are so many rounds."""
    passes = "one pass" if recipe.local.epochs == 1 else f"{recipe.local.epochs} passes"
    much = f"{recipe.rounds} of {passes} in batches of {recipe.local.batch}"
    if estimate is None:
        fits = "as no step could be timed"
    else:
        pace = f"{estimate.training / recipe.rounds:.2g} s a round"
        of = "as given" if asked else f"of {minutes:g} min"
        fits = f"about {clock(estimate.seconds)} {of} at {pace}"
    if recipe.stop.patience is None:
        return "rounds", f"{much}, {fits}"
    ends = f"{counted(recipe.stop.patience, 'evaluation')} without a better label-free score"
    return "rounds", f"{much}, {fits}; ends early after {ends}"
