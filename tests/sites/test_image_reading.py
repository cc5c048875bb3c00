"""A hostile server reads a site's images from one answer, unless the site prevents it.

After Fowl et al., Robbing the Fed, 2022. The crafted encoder hands every pixel of an image through
to its features. The projector's first layer has one row, again and again, with rising thresholds: a
unit is active for images whose product with the row is above its own. All units have the same
weights after them, so what one step changes in two neighbours differs by the gradients of those
images alone that lie between their thresholds. Where that is one image, the change of the weights
over the change of the bias is its features: the image.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from harmonium.core import codec, files
from harmonium.core.types import Weights
from harmonium.data.images import Images
from harmonium.engines.runtime import ClientRuntime
from harmonium.engines.seal import nonce, seal
from harmonium.recipe.schema import Recipe
from harmonium.sites.plan import method_of
from harmonium.sites.policy import Policy
from harmonium.sites.site import Identity, Site

SIDE, UNITS = 8, 768
SCALE = 1e-3  # small weights lose less of what a step adds to them
PLAN: dict[str, Any] = {  # nothing but what comes with the package
    "data": {"name": "sites", "size": SIDE, "channels": 1},
    "method": "fedavg",
    "encoder": {"name": "cnn-small", "width": 8, "out": SIDE * SIDE, "norm": "none"},
    "objective": {"name": "simclr", "norm": "none", "hidden": UNITS, "out": 2},
    "views": "none",
    "local": {"epochs": 1, "batch": 1024, "lr": 0.05, "momentum": 0.0},
    "clients": 3,
    "rounds": 5,
}


def crafted(model: Weights) -> Weights:
    """Weights for the plan's model that write single images into its first step."""
    made = {key: torch.zeros_like(value) for key, value in model.items()}
    made["encoder.0.weight"][0, 0, 1, 1] = 1.0
    made["encoder.0.bias"][0] = 1.0  # pixels are at least -1, and ReLU follows
    wide = 1
    for layer in ("encoder.3", "encoder.6", "encoder.9"):  # each packs 2 x 2 pixels into channels
        for place in range(4):
            for channel in range(wide):
                row, column = divmod(place, 2)
                made[f"{layer}.weight"][4 * channel + place, channel, 1 + row, 1 + column] = 1.0
        wide *= 4
    made["encoder.14.weight"] = torch.eye(SIDE * SIDE)
    row = torch.randn(SIDE * SIDE, generator=torch.Generator().manual_seed(0)) * SCALE / SIDE**2
    made["projector.0.weight"] = row.repeat(UNITS, 1)
    made["projector.0.bias"] = -SCALE * torch.linspace(0.0, 0.4, UNITS)
    made["projector.2.weight"][0] = 20.0 / (SCALE * UNITS)
    made["projector.2.bias"][1] = 1.0  # else every projection has one direction, and no gradient
    return made


def read(sent: Weights, answer: Weights) -> Tensor:
    """Whatever may be an image in an answer to the crafted model, (n, SIDE, SIDE) in [-1, 1]."""
    moved = {key: answer[key].double() - sent[key].double() for key in sent}
    rows = moved["projector.0.weight"].diff(dim=0)
    over = moved["projector.0.bias"].diff()
    known = over.abs() > 1e-9
    found = rows[known] / over[known, None] - 1.0
    # Undo the packing: a feature's number says in base 4 which pixel of each 2 x 2 it is.
    places = torch.arange(SIDE * SIDE)
    digits = [places // 16, places // 4 % 4, places % 4]  # the first layer's place comes first
    down = sum(digit // 2 * 2**depth for depth, digit in enumerate(digits))
    across = sum(digit % 2 * 2**depth for depth, digit in enumerate(digits))
    images = torch.zeros(len(found), SIDE, SIDE, dtype=torch.float64)
    images[:, down, across] = found
    return images


def share_read(images: Tensor, found: Tensor, within: float = 0.01) -> float:
    """Share of the images, (n, SIDE, SIDE), of which one of those found has every pixel."""
    if not len(found):
        return 0.0
    far = (images.double()[:, None] - found[None]).abs().amax((2, 3)).amin(1)
    return float((far <= 2 * within).double().mean())


# ---- a site ----------------------------------------------------------------------------------

SERVER, OWN = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
COUNT = 216
LOOSE = Policy(steps=1, lr=None, views=())  # as a policy was before it knew these keys


@cache
def images() -> Images:
    found = Recipe.from_tree({"data": {"name": "digits"}}).data.load()
    return found.train.subset(np.arange(COUNT)).without_labels()


def pixels() -> Tensor:
    held = torch.from_numpy(images().batch(np.arange(COUNT)).copy())
    return held[..., 0].double() / 255 * 2 - 1


class Attack:
    """The server's side, and the site that it asks."""

    def __init__(self, folder: Path, policy: Policy, **plan: Any) -> None:
        self.recipe = Recipe.from_tree({**PLAN, **plan})
        self.method = method_of(self.recipe)
        identity = Identity("f" * 32, 7, OWN, SERVER.public_key())
        self.site = Site(identity, folder, self._open, policy)

    def _open(self, recipe: Recipe, folder: Path, client: int) -> ClientRuntime:
        rows = {client: np.arange(COUNT)}
        return ClientRuntime(
            method_of(recipe), images(), rows, folder / "clients", recipe.privacy.noise
        )

    @property
    def seeded(self) -> Weights:
        return self.method.blueprint.shared()

    def ask(self, model: Weights, round: int = 1, step: str = "train", **more: Any) -> Any:
        header = {"federation": "f" * 32, "site": 7, "run": "0" * 32, "plan": self.recipe.digest}
        header |= {"round": round, "ask": 0, "step": step, "client": 1, "nonce": nonce()}
        name = "encoder" if step == "calibrate" else "model"
        down = {name: model, **more}
        bodies = [
            json.dumps(self.recipe.tree()).encode(),
            codec.encode(down),
            codec.encode({"down": {}, "state": None, "keep": []}),
        ]
        digests = [files.digest_of(body) for body in bodies]
        _, (body,) = self.site.answer(seal("ask", header, digests, SERVER), bodies)
        return codec.decode(body)

    def reads(self, **about: Any) -> float:
        """The share of the images that an answer to the crafted model gives away."""
        model = crafted(self.seeded)
        got = self.ask(model, **about)
        if got["up"] is None:
            self.why: str = got["why"]
            return 0.0
        return share_read(pixels(), read(model, got["up"]["model"]))


def test_without_the_checks_one_answer_gives_most_images_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Site, "_check_received", lambda *_: None)
    assert Attack(tmp_path, LOOSE).reads() > 0.5


def test_a_crafted_first_model_is_refused(tmp_path: Path) -> None:
    for number, policy in enumerate((LOOSE, Policy(views=(), steps=1), Policy())):
        attack = Attack(tmp_path / str(number), policy)
        for round in (0, 1, 2, 5):  # a server may call a round what it likes
            assert attack.reads(round=round) == 0
            assert "refuses this " in attack.why and "\n" not in attack.why
        assert [entry["outcome"] for entry in attack.site.log.entries()] == ["refused"] * 4


def test_the_plan_s_own_model_is_trained_and_gives_nothing_away(tmp_path: Path) -> None:
    attack = Attack(tmp_path, LOOSE)
    seeded = attack.seeded
    answer = attack.ask(seeded)["up"]["model"]
    assert share_read(pixels(), read(seeded, answer)) == 0
    for key in (k for k, v in seeded.items() if v.is_floating_point()):  # no part of it may differ
        other = Attack(tmp_path / key, LOOSE)
        changed = {**seeded, key: seeded[key] + 0.001 * seeded[key].abs().max()}
        assert f"differs from it in `{key}`" in other.ask(changed)["why"]


def test_rounding_of_another_machine_is_no_other_model(tmp_path: Path) -> None:
    attack = Attack(tmp_path, LOOSE)
    near = {key: value * (1 + 1e-7) for key, value in attack.seeded.items()}
    assert attack.ask(near)["up"]


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Policy(steps=1), "no change in view 1, but `views` asks for crop"),
        (Policy(views=()), "sends weights of 1 step by the exchange train, but `steps` is 2"),
        (Policy(views=(), steps=1, lr=0.01), "local.lr=0.05, but `lr` is 0.01"),
        (Policy(views=(), steps=1, batch=217), "steps of 216 images, but `batch` is 217"),
        (
            Policy(views=(), steps=1, guarded=("weights",)),
            "`model` of the kind weights by the exchange train without noise, but `guarded`",
        ),
    ],
)
def test_each_other_key_refuses_the_plan_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, match: str
) -> None:
    monkeypatch.setattr(Site, "_check_received", lambda *_: None)
    attack = Attack(tmp_path, policy)
    assert attack.reads() == 0 and match in attack.why


def test_what_a_site_cannot_know_is_as_the_page_says(tmp_path: Path) -> None:
    """A later model may be crafted: this is why the other keys are there."""
    attack = Attack(tmp_path / "later", LOOSE)
    assert attack.ask(attack.seeded)["up"]
    assert attack.reads(round=2) > 0.5
    late = Attack(tmp_path / "late", Policy(steps=1, lr=None, views=(), join_late=True))
    assert late.reads(round=1) == 0 and late.reads(round=2) > 0.5
    views = {"name": "none", "crop_min": 0.5, "flip": 0.5}
    cropped = Attack(tmp_path / "cropped", Policy(steps=1), views=views)
    assert cropped.ask(cropped.seeded)["up"]
    assert cropped.reads(round=2) < 0.1  # of whole images: it gets crops
    with_noise = {"update_clip": 1.0, "update_noise": 1.0}
    policy = Policy(steps=1, views=(), guarded=("weights",), epsilon=None)
    noisy = Attack(tmp_path / "noisy", policy, privacy=with_noise)
    assert noisy.ask(noisy.seeded)["up"]
    assert noisy.reads(round=2) == 0


def test_a_gradient_is_one_step(tmp_path: Path) -> None:
    plan = {"objective": {"name": "spectral"}, "views": "simclr", "evaluate": {"objective": True}}
    attack = Attack(tmp_path, Policy(), **plan)
    got = attack.ask(attack.seeded, round=0, step="measure_objective")
    assert "of 1 step by the exchange measure_gradient, but `steps` is 2" in got["why"]


@pytest.mark.parametrize("round", [1, 2])
def test_numbers_beyond_belief_are_refused_in_every_round(tmp_path: Path, round: int) -> None:
    attack = Attack(tmp_path, LOOSE)
    model = attack.seeded
    if round > 1:
        assert attack.ask(model)["up"]
    key = "projector.0.weight"
    for value, match in ((float("nan"), "not finite"), (float("inf"), "finite"), (1e30, "1e+06 ")):
        model[key][0, 0] = value
        assert match in attack.ask(model, round)["why"]
    assert "not sent to clients" in attack.ask({**attack.seeded, "more": model[key]}, round)["why"]
