"""What a plan finds in a recipe and its images: stops, warnings and notes, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import nn

from harmonium.core.errors import HarmoniumError, counted
from harmonium.core.types import ClientId
from harmonium.data.datasets import DataSpec
from harmonium.data.decoding.image_files import is_image_file
from harmonium.data.images import UNKNOWN, Dataset
from harmonium.data.partition import Split, SplitRule
from harmonium.data.sets.folder import Folder
from harmonium.data.splits.column import Column
from harmonium.evaluation.evaluator import Evaluator
from harmonium.evaluation.pixels import Pixels
from harmonium.federation import global_objective
from harmonium.federation.method import Method
from harmonium.federation.spending import notes_on_noise
from harmonium.privacy.account import Account
from harmonium.recipe.schema import Recipe
from harmonium.report.run_progress import size_of
from harmonium.runs.footprint import Memory
from harmonium.runs.replay import Replay, Spending

Level = Literal["stop", "warning", "note"]

NAMED = 5  # clients that a sentence names
HEADERS = 64  # image files whose size is read
SHRUNK, ENLARGED = 4.0, 1.5  # factors of the side from which resizing is mentioned
FULL = 0.9  # share of the free memory or disk from which a run is warned of


@dataclass(frozen=True)
class Finding:
    """Something that a run would meet."""

    level: Level  # stop: a run cannot work; warning: it will not do what is wanted; note: be aware
    about: str  # e.g. clients, memory, privacy
    text: str  # what is wrong, and what would be right


def stop(about: str, text: object) -> Finding:
    """A finding that stops a run."""
    return Finding("stop", about, str(text))


def warning(about: str, text: str) -> Finding:
    """A finding that a run would go on with."""
    return Finding("warning", about, text)


# ---- clients and participation -------------------------------------------------------------------


def of_clients(recipe: Recipe, method: Method, examples: Mapping[ClientId, int]) -> list[Finding]:
    """Clients with too few images for a step or for a batch."""
    local, found = method.local, list[Finding]()
    idle = [client for client, count in examples.items() if not local.steps(count)]
    able, batch = len(examples) - len(idle), local.batch
    quorum = recipe.participation.least(len(examples))
    fewer = "use fewer clients, or a split that gives each some images"
    if able < quorum:
        every = "no client has" if not able else f"only {counted(able, 'client')} have"
        needs = f", and a round needs {quorum} (participation.quorum)" if able else ""
        return [stop("clients", f"{every} the 2 images that a step takes{needs}: {fewer}")]
    if idle:
        found.append(
            warning(
                "clients",
                f"{_named(idle)} of {len(examples)} hold fewer than the 2 images that a step takes "
                f"and are left out of every round: {fewer}",
            )
        )
    small = [client for client in examples if client not in idle and examples[client] < batch]
    if small:
        least = min(examples[client] for client in small)
        found.append(
            warning(
                "clients",
                f"{_named(small)} of {len(examples)} hold fewer images than local.batch={batch} "
                f"(the smallest {least}), so their batches are smaller: set local.batch={least} "
                "or use fewer clients",
            )
        )
    cohort = recipe.participation.asked(recipe.training)
    if recipe.workers > cohort and recipe.engine.workers is not None:
        text = f"engine.workers={recipe.workers}, but a round asks {counted(cohort, 'client')}"
        found.append(Finding("note", "clients", text))
    return found


def _named(clients: Sequence[ClientId]) -> str:
    """The numbers of some clients."""
    names = ", ".join(map(str, clients[:NAMED]))
    more = f" and {len(clients) - NAMED} more" if len(clients) > NAMED else ""
    return f"client{'s' if len(clients) > 1 else ''} {names}{more}"


def of_lost_clients(rule: SplitRule, dataset: Dataset) -> list[Finding]:
    """Clients that a column of the data names, all of whose images were held out."""
    if not isinstance(rule, Column) or rule.column not in dataset.train.factors:
        return []
    trained = set(np.unique(dataset.train.factors[rule.column]).tolist())
    found = []
    for part in ("validation", "test"):
        values = getattr(dataset, part).factors.get(rule.column, np.zeros(0, np.int64))
        for value, count in zip(*np.unique(values, return_counts=True), strict=True):
            if value < 0 or int(value) in trained:
                continue
            trained.add(int(value))
            names = dataset.names.get(rule.column)
            name = names[int(value)] if names else str(value)
            text = (
                f"client '{name}' trains on no image: all that it has were held out ({count} of "
                f"them in the {part} part). Lower data.validation or data.test, or give it more"
            )
            found.append(warning("clients", text))
    return found


def of_participation(recipe: Recipe, replay: Replay) -> list[Finding]:
    """Rounds in which fewer clients answer than the quorum."""
    if not replay.failed:
        return []
    remedy = "lower participation.quorum or dropout, or ask more clients (fraction, number, over)"
    if replay.failed == replay.rounds:
        text = f"no round will have enough answers. {replay.failure} {remedy.capitalize()}"
        return [stop("participation", text)]
    share = f"{replay.failed} of {counted(replay.rounds, 'round')}"
    return [
        warning("participation", f"{share} will have too few answers and change nothing: {remedy}")
    ]


# ---- images and encoder --------------------------------------------------------------------------


def of_labels(recipe: Recipe, method: Method, dataset: Dataset) -> list[Finding]:
    """Evaluations that labels are missing for."""
    evaluator = Evaluator(recipe.evaluate, dataset, method.views, recipe.seed, Pixels())
    if not evaluator.has_labels:
        which = "image" if not dataset.train.labelled else "test image"
        many = "one class at most" if dataset.test.labelled else f"no {which} has a label"
        text = (
            f"{many}: there will be no accuracies, only label-free figures. Name data with labels, "
            "or use harmonium eval on=... afterwards"
        )
        return [warning("evaluation", text)]
    assert evaluator.bank is not None
    counts = np.bincount(evaluator.bank.labels[evaluator.bank.labels != UNKNOWN])
    least = int(counts[counts > 0].min())
    if few := [count for count in recipe.evaluate.labels_per_class if count > least]:
        text = (
            f"evaluate.labels_per_class has {few[-1]}, but the smallest class has {least} labelled "
            "images: a probe takes what there are"
        )
        return [warning("evaluation", text)]
    return []


def of_sizes(spec: DataSpec, side: int, shape: tuple[int, int, int] | None) -> list[Finding]:
    """Images that are scaled by much: their own side against the side that the encoder gets."""
    original = _original_side(spec) or (min(shape[:2]) if shape else None)
    if original is None:
        return []
    if original / side >= SHRUNK:
        text = (
            f"images of about {original} pixels are scaled to {side}, 1 / {original / side:.3g} of "
            f"their side, and fine structure is lost: data.size={2 * side} keeps more, at four "
            "times the cost"
        )
        return [warning("images", text)]
    if side / original >= ENLARGED:
        text = (
            f"images of about {original} pixels are enlarged to {side}, which adds no detail and "
            f"costs {(side / original) ** 2:.3g} times as much: leave out data.size and views.size"
        )
        return [warning("images", text)]
    return []


def _original_side(spec: DataSpec) -> int | None:
    """The side of the images before they are scaled, where it is known without decoding them."""
    if isinstance(spec, Folder):
        files = Path(spec.path).expanduser().rglob("*")
        sides = []
        for path in islice(filter(is_image_file, files), HEADERS):
            try:
                with Image.open(path) as image:  # the header alone is read
                    sides.append(min(image.size))
            except (OSError, ValueError, Image.DecompressionBombError):
                continue
        return int(median(sides)) if sides else None
    return min(spec.about.shape[:2]) if spec.about and spec.about.shape else None


def of_encoder(method: Method) -> list[Finding]:
    """Whether the encoder takes images of this side, and does not stride over all of it."""
    side, channels = method.world.side, method.world.channels
    name, inputs = method.encoder.name or "the encoder", list[int]()

    def note(layer: nn.Conv2d, given: tuple[torch.Tensor, ...]) -> None:
        if max(int(size) for size in layer.kernel_size) > 1:
            inputs.append(min(given[0].shape[2:]))

    remedy = "set a larger data.size (or views.size), or an encoder with fewer strides"
    try:
        encoder = method.blueprint.copy_from().eval()["encoder"]
        hooks = [
            layer.register_forward_pre_hook(note)
            for layer in encoder.modules()
            if isinstance(layer, nn.Conv2d)
        ]
        with torch.no_grad():
            encoder(torch.zeros(1, channels, side, side))
        for hook in hooks:
            hook.remove()
    except HarmoniumError:
        raise
    except Exception as error:  # noqa: BLE001  (an encoder may be the user's own)
        why = str(error).partition("\n")[0]
        text = f"{name} cannot take images of {side} pixels ({why}): {remedy}"
        return [stop("encoder", text)]
    blind = sum(size <= 1 for size in inputs)
    if not blind or side <= 1:
        return []
    layers = counted(blind, "layer")
    text = f"{name} reduces images of {side} pixels to a single one before its last {layers}"
    return [warning("encoder", f"{text}, which see no neighbours any more: {remedy}")]


# ---- resources -----------------------------------------------------------------------------------


def of_memory(recipe: Recipe, memory: Memory) -> list[Finding]:
    """A run that needs more memory than there is."""
    if memory.machine is None or memory.available is None:
        return []
    fitting = int(FULL * memory.available - memory.main) // max(1, memory.one_worker)
    ways = [f"engine.workers={max(0, fitting)}"] if fitting < memory.workers else []
    ways += ["a smaller local.batch", "a smaller encoder"]
    needs = f"a run takes about {size_of(memory.total)} of memory"
    remedy = f"set {' or '.join(ways)}"
    if memory.total > memory.machine:
        text = f"{needs}, and this machine has {size_of(memory.machine)}: {remedy}"
        return [stop("memory", text)]
    if memory.total > FULL * memory.available:
        text = f"{needs}, of which {size_of(memory.available)} are free: {remedy}"
        return [warning("memory", text)]
    return []


def of_disk(needed: int, free: int, where: Path) -> list[Finding]:
    """A run folder that does not fit on its disk."""
    text = f"a run writes about {size_of(needed)} to {where}, where {size_of(free)} are free"
    remedy = "name another folder with --out, or free some space"
    if needed > free:
        return [stop("disk", f"{text}: {remedy}")]
    return [warning("disk", f"{text}: {remedy}")] if needed > FULL * free else []


def of_spending(recipe: Recipe, spending: Spending, smallest: int) -> list[Finding]:
    """A privacy budget that ends before the run does, and a delta that means nothing."""
    found = []
    budget = f"privacy.epsilon={recipe.privacy.epsilon:g}" if recipe.privacy.epsilon else ""
    if spending.ends is not None:
        text = f"the run will end before round {spending.ends}, as {budget} is spent then"
        found.append(warning("privacy", f"{text}: add noise, or plan for fewer rounds"))
    for step, (clients, since) in spending.refused.items():
        text = f"{counted(clients, 'client')} can afford no further `{step}` from round {since} on"
        found.append(warning("privacy", f"{text}: {budget}. The run continues without it"))
    if spending.neighbours != "client" and smallest and spending.delta >= 1 / smallest:
        text = (
            f"delta {spending.delta:g} is not below 1 / {smallest} images of the smallest client, "
            f"so epsilon means little: choose at most {0.1 / smallest:.0e}"
        )
        found.append(warning("privacy", text))
    return found


# ---- notes ---------------------------------------------------------------------------------------


def notes_of(recipe: Recipe, method: Method, dataset: Dataset, split: Split) -> Iterator[Finding]:
    """What the run itself would remark on."""
    cohort = recipe.participation.asked(recipe.training)
    account = Account(None, recipe.privacy.delta)  # the budget has findings of its own
    evaluator = Evaluator(recipe.evaluate, dataset, method.views, recipe.seed, Pixels())
    remarks = [
        *split.notes,
        *evaluator.notes,
        *(note for term in method.terms if (note := term.note(method, cohort))),
        global_objective.note(method),
        *notes_on_noise(method, account, recipe.privacy.noise, split.examples),
    ]
    yield from (Finding("note", "run", text) for text in dict.fromkeys(remarks) if text)
