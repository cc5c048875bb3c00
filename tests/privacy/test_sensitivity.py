"""How far one image moves what noise is added to: never further than is stated, for every release.

Every noisy release of every method is measured. A client answers several times from the same random
draws, each time with another image in one place, or without it; where noise protects whole clients,
with other images altogether. Where noise is added, the first answer gets its value back as it is,
and all others what the first one got. So all follow from the same outputs, as adding up releases
assumes, and what differs is the effect of that one image.

The received model is the same each time and may be any model: a stated sensitivity must hold for
all of them. What a client keeps from its earlier training is its own, and differs.
"""

import copy
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.data.images import Images
from harmonium.federation import dpsgd
from harmonium.federation.driver import handle
from harmonium.federation.method import Method
from harmonium.federation.spending import check_noise
from harmonium.learning.client import Client, Examples
from harmonium.learning.encoders import Encoder
from harmonium.learning.objectives import objectives
from harmonium.learning.symmetric import triangle
from harmonium.methods import methods
from harmonium.methods.fedsc import FedSC
from harmonium.privacy.mechanisms import Noise, Release
from harmonium.recipe.schema import Recipe

COUNT, SIDE, PLACE, DIM = 6, 8, 2, 8
TINY = ("encoder=cnn-small", "encoder.width=2", f"encoder.out={DIM}", "local.batch=4", "clients=2")
TINY += ("local.epochs=2", "rounds=2", "privacy.noise=simulated", "views=simclr")
DP = ("local.dp_clip=0.001", "local.dp_noise=1")


@dataclass(frozen=True)
class Case:
    """A method with noise, and the steps that a client answers one after the other."""

    method: str
    words: tuple[str, ...]
    steps: tuple[str, ...] = ("train",)


FEDSC = Case(
    "fedsc", ("method.sigma=0.1", f"objective.out={DIM}", "local.lr=1"), ("train", "correlate")
)
FEDCA = Case(
    "fedca",
    ("method.noise=1", "method.source=received", f"objective.out={DIM}", "local.lr=0.1"),
    ("align", "train", "train"),
)
ORCHESTRA = Case("orchestra", ("method.epsilon=1", "method.clusters=2"), ("cluster", "train"))
CASES = {
    "fedsc": FEDSC,
    "fedsc-control": replace(FEDSC, method="fedsc-control"),
    "fedsc by budget": replace(FEDSC, words=("method.epsilon=3", *FEDSC.words[1:])),
    "fedca": FEDCA,
    "fedca unaligned": replace(
        FEDCA, words=(*FEDCA.words, "method.strength=0", "method.momentum=0"), steps=("train",) * 2
    ),
    "orchestra": ORCHESTRA,
    "orchestra in few columns": replace(ORCHESTRA, words=(*ORCHESTRA.words, "method.dims=3")),
    "change of a model": Case(
        "fedavg",
        ("objective.norm=none", "privacy.update_clip=0.001", "privacy.update_noise=1"),
        ("train", "train"),
    ),
}
LOSSES = {  # that DP-SGD takes
    "rotation": (),
    "supervised": (),
    "autoencoder": ("objective.width=2",),
    "byol": ("objective.norm=none",),
    "simsiam": ("objective.norm=none", "objective.out_norm=false"),
}
CASES |= {
    f"dp-sgd of {name}": Case("fedavg", (f"objective={name}", *words, *DP))
    for name, words in LOSSES.items()
}


def own_way(cls: type[Method]) -> bool:
    return any(getattr(cls, name) is not getattr(Method, name) for name in dpsgd._OWN)


CASES |= {
    f"dp-sgd in {name}": Case(name, ("objective=rotation", *DP), ("train", "train"))
    for name, cls in methods.table().items()
    if not own_way(cls) and name != "fedavg"
}
STATISTICS = ("average", "recalibrate", "local", "fedbn")


def method_of(case: Case, *words: str) -> Method:
    """The method, for colour images of SIDE; a ConfigError where the recipe is refused."""
    public = ["public=shapes"] if case.method == "fedca" else []
    recipe = Recipe.of(case.method, *TINY, *case.words, *words, *public)
    return recipe.method_for((SIDE, SIDE, 3), classes=2)


# ---- images ----------------------------------------------------------------------------------


def pixels(seed: int) -> np.ndarray:
    """Images nearly alike, so that one that is not moves whatever is measured over all of them."""
    return np.random.default_rng(seed).integers(120, 136, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)


def extremes() -> list[np.ndarray]:
    """Images as unlike each other, or as like another of the client's, as can be."""
    board = np.indices((SIDE, SIDE)).sum(0)[..., None] % 2 * np.full(3, 255)
    red = np.zeros((SIDE, SIDE, 3)) + (255, 0, 0)
    found = [np.zeros((SIDE, SIDE, 3)), np.full((SIDE, SIDE, 3), 255), board, red]
    return [*(one.astype(np.uint8) for one in found), pixels(0)[0]]


def worlds(whole: bool) -> list[np.ndarray]:
    """A client's images with each extreme in one place; or other images altogether."""
    if whole:
        return [np.stack([one] * COUNT) for one in extremes()] + [pixels(0), pixels(1)]
    found = []
    for one in extremes():
        found.append(pixels(0))
        found[-1][PLACE] = one
    return found


# ---- measuring -------------------------------------------------------------------------------


@dataclass
class Answer:
    """What noise was to be added to in one step, by mechanism and scale, and what was told."""

    values: list[tuple[str, float, Tensor]]
    told: list[Release]


@contextmanager
def caught(values: list[tuple[str, float, Tensor]], outputs: list[Tensor]) -> Iterator[None]:
    """Noise is not added: each value is noted, and the output that is known of it returned."""

    def note(mechanism: str, value: Tensor, scale: float) -> Tensor:
        values.append((mechanism, scale, value.detach().clone()))
        if len(outputs) < len(values):
            outputs.append(value.clone())
        return outputs[len(values) - 1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noise, "gaussian", lambda _, value, sigma: note("gaussian", value, sigma))
        patch.setattr(
            Noise,
            "discrete_laplace",
            lambda _, value, scale: note("discrete-laplace", value, scale),
        )
        yield


def message(method: Method, step: str, model: Mapping[str, Tensor]) -> dict[str, Any]:
    """Some message that the server could send, the same to all."""
    rng = torch.Generator().manual_seed(3)
    known: dict[str, Any] = {
        "model": model,
        "others": torch.zeros(triangle(DIM)),
        "alpha": 1.0,
        "correction": torch.zeros(triangle(DIM)),
        "weight": 1.0,
        "h": torch.randn(4, DIM, generator=rng),
        "z": torch.randn(4, DIM, generator=rng),
        "dictionary": functional.normalize(torch.randn(4, DIM, generator=rng)),
        "count": COUNT - 1,
        "rate": 0.5,
    }
    if "centroids" in (down := method.exchanges()[step].down):
        width: Any = method.blueprint["rotation"].in_features
        known["centroids"] = functional.normalize(torch.randn(2, width, generator=rng))
    return {name: known[name] for name in down}


def telling(method: Method, own: bool) -> dict[str, Tensor]:
    """A model that makes much of what images differ in: of FedCA opposite rows, of others long.

    `own`: behind BatchNorm with statistics of the images at hand.
    """
    parts = method.blueprint.copy_from().train(own)
    with torch.no_grad():
        for key, value in parts.named_parameters():
            value *= 0 if key.endswith("bias") else 5
        if method.name == "fedca":
            plain = method.views.plain(torch.from_numpy(np.stack(extremes())))
            mean = parts["projector"](parts["encoder"](plain)).mean(0)
            list(parts["projector"].modules())[-1].bias -= mean
    return parts.shared()


def played(
    method: Method,
    steps: tuple[str, ...],
    images: np.ndarray,
    outputs: list[list[Tensor]],
    own: bool,
) -> list[Answer]:
    """A client's answers to the steps, with what it keeps from one to the next."""
    model = telling(method, own)
    labels = np.arange(len(images)) % 2
    examples = Examples(
        Images(images, labels), np.arange(len(images)), uses_labels=method.reads_labels
    )
    public = Images(pixels(5)[:4], np.full(4, -1))
    state: dict[str, Any] = {}
    answers = []
    for number, step in enumerate(steps):
        rng = seeds.torch_rng(0, "test", number)
        noise = Noise("simulated", seeds.torch_rng(0, "noise", number))
        client = Client(0, 1, 2, examples, method.views, rng, noise, public, state)
        values: list[tuple[str, float, Tensor]] = []
        while len(outputs) <= number:
            outputs.append([])
        with caught(values, outputs[number]):
            handle(method, step, client, message(method, step, model), seed=number)
        answers.append(Answer(values, client.releases))
    return answers


def excess(one: Answer, other: Answer) -> dict[str, float]:
    """How far two answers are apart over what is stated, by mechanism; joint over all its calls.

    Gaussian noise of one deviation adds up by squares, Laplace noise by absolute values, and then
    each call by itself.
    """
    found: dict[str, float] = {}
    for by in one.told:
        scale = by.scale
        pairs = [
            (a.double(), b.double())
            for (mechanism, size, a), (_, _, b) in zip(one.values, other.values, strict=True)
            if mechanism == by.mechanism and math.isclose(size, scale)
        ]
        assert pairs, f"{by} is told of, but no such noise was added"
        if by.mechanism == "gaussian":
            squares = sum(float((a - b).square().sum()) for a, b in pairs)
            found[by.mechanism] = math.sqrt(squares / by.count) / by.sensitivity
        else:
            assert len(pairs) <= by.count
            found[by.mechanism] = max(float((a - b).abs().sum()) for a, b in pairs)
            found[by.mechanism] /= by.sensitivity
    counted = sum(
        any(m == by.mechanism and math.isclose(size, by.scale) for by in one.told)
        for m, size, _ in one.values
    )
    assert counted == len(one.values), "noise was added that nobody tells of"
    return found


def greatest(method: Method, steps: tuple[str, ...], own: bool = False) -> dict[str, float]:
    """The greatest such excess over all pairs of worlds and all steps, by field and mechanism."""
    outputs: list[list[Tensor]] = []
    first = played(method, steps, worlds(whole=False)[0], outputs, own)
    kinds = {by.neighbours for answer in first for by in answer.told}
    assert len(kinds) == 1, "no noise, or for neighbours of several kinds"
    others = worlds(whole=kinds == {"client"})
    answers = [played(method, steps, images, outputs, own) for images in others]
    pairs = list(itertools.combinations(answers, 2))
    if kinds == {"add-remove"}:
        removed = played(method, steps, np.delete(others[0], PLACE, axis=0), outputs, own)
        pairs = [(with_it, removed) for with_it in answers]
    found: dict[str, float] = {}
    for left, right in pairs:
        for step, one, other in zip(steps, left, right, strict=True):
            for mechanism, far in excess(one, other).items():
                key = f"{step} {mechanism}"
                assert math.isfinite(far)
                found[key] = max(found.get(key, 0.0), far)
    return found


# ---- every release ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch_norm", STATISTICS)
@pytest.mark.parametrize("name", CASES)
def test_one_image_moves_a_noisy_value_by_no_more_than_is_stated(
    name: str, batch_norm: str
) -> None:
    """Or the recipe is refused; without BatchNorm none is."""
    case = CASES[name]
    try:
        method = method_of(case, f"batch_norm={batch_norm}", "encoder.norm=batch")
    except ConfigError as refusal:
        assert re.search("every row|needs? a target that the server|BatchNorm", str(refusal))
        if batch_norm != "average":
            return
        method = method_of(case)
    found = greatest(method, case.steps)
    assert found
    assert max(found.values()) <= 1 + 1e-6, found
    assert min(found.values()) >= 0.5, found


# ---- that the measurement can fail -----------------------------------------------------------


def unchecked(method: Method, **settings: Any) -> Method:
    """A method with settings that its recipe would refuse."""
    made = copy.copy(method)
    for name, value in settings.items():
        object.__setattr__(made, name, value)
    vars(made).pop("blueprint", None)
    return made


UNALIGNED = CASES["fedca unaligned"]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (FEDSC, {"batch_norm": "local"}),
        (replace(UNALIGNED, steps=("train",) * 4), {"batch_norm": "local"}),
        (FEDCA, {"batch_norm": "recalibrate"}),
        (UNALIGNED, {"source": "trained"}),
    ],
    ids=["fedsc local", "fedca local", "fedca recalibrate", "fedca trained"],
)
def test_what_is_refused_would_move_further_than_is_stated(
    case: Case, settings: dict[str, Any]
) -> None:
    method = method_of(case, "encoder.norm=batch")
    found = greatest(unchecked(method, **settings), case.steps, own=True)
    assert max(found.values()) > 1.1


def test_an_understated_sensitivity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = FedSC.costs
    half = lambda *of: [replace(one, sensitivity=one.sensitivity / 2) for one in stated(*of)]  # noqa: E731
    monkeypatch.setattr(FedSC, "costs", half)
    assert max(greatest(method_of(FEDSC), FEDSC.steps).values()) > 1.1


# ---- nothing is left out ---------------------------------------------------------------------


def test_every_method_with_noise_of_its_own_is_measured() -> None:
    """A new method that releases something belongs into CASES."""
    measured = {case.method for case in CASES.values()}
    for name, cls in methods.table().items():
        source = inspect.getsource(sys.modules[cls.__module__])
        noisy = cls.costs is not Method.costs or re.search(r"\breleased?\(|guarded", source)
        assert not noisy or name in measured, f"{name} releases values with noise: add it to CASES"


def test_every_loss_that_dp_sgd_takes_is_measured() -> None:
    """Orchestra's inherits from rotation, but its projector always has BatchNorm."""
    alone = {name for name, cls in objectives.table().items() if cls().alone()}
    assert alone == {*LOSSES, "assignments"}
    turns_alone = ("objective=assignments", "objective.cluster_weight=0", *DP)
    with pytest.raises(ConfigError, match="BatchNorm"):
        method_of(Case("fedavg", turns_alone))


# ---- FedSC with and without an image ---------------------------------------------------------


def test_an_image_adds_no_more_to_a_matrix_than_is_stated() -> None:
    """Of a client with one image the matrix is all that this image adds."""
    method = method_of(FEDSC, "method.neighbours=add-remove")
    for one in extremes():
        (answer,) = played(method, ("correlate",), one[None], [], own=False)
        ((_, _, matrix),), (told,) = answer.values, answer.told
        assert told.neighbours == "add-remove"
        assert 0.5 * told.sensitivity <= matrix.norm() <= told.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("case", [FEDSC, UNALIGNED], ids=["fedsc", "fedca"])
def test_a_model_that_breaks_down_at_one_image_moves_no_more(case: Case) -> None:
    """A value that is not finite would tell of the image, whatever the noise."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            odd = (x > 0.99).all(3).all(2).all(1).float()  # a white image
            features: Tensor = x.flatten(1)[:, :DIM]
            return features / (1 - odd)[:, None]

    method = method_of(case, "views.crop_min=1", "views.jitter=0", "views.gray=0", "views.flip=0")
    parts = method.blueprint
    parts["encoder"] = Odd()  # the blueprint is kept once it is made
    found = greatest(method, case.steps[-1:])
    assert found and max(found.values()) <= 1 + 1e-6


# ---- refusals --------------------------------------------------------------------------------


def refused(method: Method) -> str:
    with pytest.raises(ConfigError) as error:
        check_noise(method)
    return str(error.value)


def test_a_refusal_says_why_and_what_would_be_right() -> None:
    words = ("batch_norm=local", "encoder.norm=batch")
    with pytest.raises(ConfigError, match=r"batch_norm=local keeps encoder.*Set batch_norm=averag"):
        method_of(FEDSC, *words)
    with pytest.raises(ConfigError, match=r"method\.source=received"):
        method_of(Case("fedca", ("method.noise=1",)))
    with pytest.raises(ConfigError, match=r"set batch_norm=average or method\.strength=0"):
        method_of(FEDCA, "batch_norm=recalibrate")
    method_of(Case("fedsc", ()), *words)  # without noise nothing is claimed
    method_of(Case("fedca", ("method.noise=1", "method.size=0")))


def test_a_part_that_stays_at_a_client_and_batches_at_hand_are_refused() -> None:
    class Personal(FedSC):
        share = {"projector": "local"}

    class AtHand(Encoder):
        def build(self, channels: int, side: int) -> nn.Module:
            norm = nn.BatchNorm2d(channels, track_running_stats=False)
            return nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())

        def features_for(self, channels: int, side: int) -> int:
            return channels

    method = method_of(FEDSC)
    settings = {one.name: getattr(method, one.name) for one in fields(method)}
    assert "part 'projector' stays at a client" in refused(Personal(**settings))
    said = refused(FedSC(**{**settings, "encoder": AtHand()}))
    assert "encoder.0 normalises by the batch at hand" in said
